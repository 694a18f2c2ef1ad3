"""Samples without tokens in MDS streams: skipped by the plan, counted, and never part of a pack."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain

import pytest

from streampack import (
    DataError,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from tests.helpers import builders
from tests.helpers.examples import crossed

LENGTHS = [0, 7, 0, 0, 3, 20, 0, 5, 0] * 30
FULL = [20, 9, 4] * 40
NUM_EMPTY = LENGTHS.count(0)
BOS, EOS = 99_991, 99_989


@pytest.fixture
def folders(tmp_path):
    """A stream with empty samples, and one without."""
    for name, lengths in (("some", LENGTHS), ("full", FULL)):
        builders.write_stream_files(tmp_path / name, lengths, encoding="bytes")
    return [tmp_path / "some", tmp_path / "full"]


def loader_of(folders, *, packing=None, mixing=None, num_lanes=1, world=None, **options):
    streams = [Stream(local=str(folder), tokens="tokens:int32") for folder in folders]
    return PackedDataLoader(
        PackedStreamingDataset(
            streams,
            packing=Packing(max_seq_len=32, **(packing or {})),
            mixing=Mixing(global_batch_size=4, **(mixing or {})),
            order=Order(num_lanes=num_lanes),
            batch_size=2,
            world=world or World(),
            **options,
        )
    )


def delivered(batches) -> Counter:
    """Return how often each token of each sample was delivered, by stream and sample."""
    counts: Counter = Counter()
    for batch in batches:
        for _, stream, _, sample, start, length in batch["segments"].tolist():
            counts.update((stream, sample, token) for token in range(start, start + length))
    return counts


def expected(lengths_of_streams) -> Counter:
    return Counter(
        (stream, sample, token)
        for stream, lengths in enumerate(lengths_of_streams)
        for sample, length in enumerate(lengths)
        for token in range(length)
    )


@pytest.mark.parametrize("method", ["random", "stratified", "device_per_stream", "per_stream"])
@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize(("num_lanes", "has_lengths"), crossed([2, 1], [False, True]))
def test_every_other_sample_is_delivered_once_and_the_empty_ones_are_counted(
    folders, method, unit, num_lanes, has_lengths
):
    if not has_lengths:
        for folder in folders:
            (folder / "lengths.bin").unlink()
    mixing = {"batching_method": method, "weight_unit": unit}
    if unit == "tokens":
        mixing["epoch_size"] = sum(LENGTHS) + sum(FULL)
    loader = loader_of(folders, mixing=mixing, num_lanes=num_lanes)

    found = delivered(loader)

    if unit == "samples":
        assert found == expected([LENGTHS, FULL])
        stats = loader.stats()["streams"]
        assert [stats[name]["dropped"] for name in ("some", "full")] == [NUM_EMPTY, 0]
        assert stats["some"]["samples"] == len(LENGTHS) - NUM_EMPTY
    else:
        assert found.keys() <= expected([LENGTHS, FULL]).keys()
        assert loader.stats()["streams"]["some"]["dropped"] > 0


@pytest.mark.parametrize("has_lengths", [False, True])
def test_an_empty_sample_gets_neither_bos_nor_eos(folders, has_lengths):
    if not has_lengths:
        (folders[0] / "lengths.bin").unlink()

    batches = list(loader_of(folders[:1], packing={"bos_id": BOS, "eos_id": EOS}))

    num_ids = sum(int((batch["tokens"] == EOS).sum()) for batch in batches)
    samples = {row[3] for batch in batches for row in batch["segments"].tolist()}
    assert num_ids == len(LENGTHS) - NUM_EMPTY
    assert samples == {sample for sample, length in enumerate(LENGTHS) if length}


@pytest.mark.parametrize("mixing", [{}, {"epoch_end": "carry"}, {"epoch_size": 5}])
def test_a_stream_of_empty_samples_alone_is_refused(tmp_path, mixing):
    builders.write_stream_files(tmp_path / "none", [0] * 400, encoding="bytes", lengths_file=False)
    with pytest.raises(DataError, match=r"none of its|have no tokens"):
        list(loader_of([tmp_path / "none"], mixing=mixing))


@pytest.mark.parametrize("end", ["pad", "carry"])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_a_run_among_empty_samples_resumes_exactly(folders, end, has_lengths):
    for folder in folders:
        if not has_lengths:
            (folder / "lengths.bin").unlink()
    loader, whole = loader_of(folders, mixing={"epoch_end": end}), []
    for batch in loader:
        whole.append(batch["tokens"].tolist())
        if len(whole) == 9:
            state = json.dumps(loader.state_dict())
    again = loader_of(folders, mixing={"epoch_end": end})
    again.load_state_dict(json.loads(state))

    assert [batch["tokens"].tolist() for batch in again] == whole[9:]


@pytest.mark.parametrize("lengths", [LENGTHS, ([0] * 19 + [3]) * 60], ids=["some", "most"])
@pytest.mark.parametrize(
    ("method", "lengths_file"), crossed(["random", "device_per_stream"], [False, True])
)
def test_ranks_agree_on_lanes_that_hold_empty_samples(tmp_path, lengths, method, lengths_file):
    """A rank learns from lengths alone how many packs the lanes of the others have at least."""
    options = {"encoding": "bytes", "lengths_file": lengths_file}
    for name, own in (("some", lengths), ("full", FULL)):
        builders.write_stream_files(tmp_path / name, own, **options)
    worlds = [World(rank=rank, num_ranks=2, ranks_per_node=1) for rank in range(2)]
    options = {"num_lanes": 2, "mixing": {"batching_method": method}}
    ranks = [
        loader_of([tmp_path / "some", tmp_path / "full"], world=world, **options)
        for world in worlds
    ]

    batches = [list(rank) for rank in ranks]

    assert len(batches[0]) == len(batches[1])
    assert delivered(chain(*batches)) == expected([lengths, FULL])
