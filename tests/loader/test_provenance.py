"""Provenance of batches in every format: the sample and stream of each token, and the step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    Chapter,
    ConfigError,
    HeldOut,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
    at,
    by_stream,
)
from streampack.formats import to_hf_flash, to_megatron, to_torchtitan_flat
from streampack.runtime.provenance import RECENT
from streampack.write import write_stream
from tests.helpers import builders
from tests.helpers.examples import crossed

FIRST = 10  # every token of stream n is FIRST + n, and padding is 0
NAMES = ["web", "code", "chat"]
FORMATS: list[Any] = [
    *("native", "compact", "hf", "hf_flash", "torchtune", "torchtitan", "torchtitan_flat"),
    *("megatron", "olmo_core", "llm_foundry", "llama_factory"),
    partial(to_hf_flash, pad_to=1),
    partial(to_torchtitan_flat, pad_to=8),
    partial(to_megatron, pad_to=8),
    lambda batch: [batch["labels"], batch["tokens"]],
]


def samples(number: int, num: int = 30) -> list[np.ndarray]:
    lengths = [1 + (i * 7 + number * 3) % 19 for i in range(num)]
    return [np.full(length, FIRST + number, np.int32) for length in lengths]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for number, name in enumerate(NAMES):
        tokens = samples(number)
        path = tmp_path_factory.mktemp(name) / "stream"
        builders.write_stream_files(
            path,
            [1] * len(tokens),
            column="other",
            columns={"tokens": "ndarray:int32"},
            values={"tokens": tokens},
            lengths_file=False,
        )
        builders.write_lengths(path, tokens="tokens")
        made[name] = path
    return made


def planned(folders: Mapping[str, Any], **options: Any) -> PackedStreamingDataset:
    streams = [Stream(local=path, name=name) for name, path in folders.items()]
    arguments = {
        "packing": Packing(max_seq_len=32, overflow="split"),
        "order": Order(seed=3),
        "world": World(),
    }
    return PackedStreamingDataset(streams, **{**arguments, **options})


def online(**options: Any) -> PackedIterableDataset:
    streams = [IterableStream(samples(n), name=name) for n, name in enumerate(NAMES)]
    packing = Packing(max_seq_len=32, pad_to_multiple=4)
    return PackedIterableDataset(streams, packing=packing, world=World(), **options)


def tokens_in(batch: Any) -> np.ndarray:
    batch = batch if isinstance(batch, Mapping) else batch[-1 if isinstance(batch, list) else 0]
    return (
        next(batch[n] for n in ("tokens", "input_ids", "input") if n in batch)
        if isinstance(batch, Mapping)
        else batch
    )


def check(loader: PackedDataLoader) -> list[Any]:
    """Check the streams and segments of all batches, and return them."""
    found = []
    for batch in loader:
        origin = loader.provenance(batch)
        tokens = tokens_in(batch).long().numpy()
        np.testing.assert_array_equal(origin.stream_ids, np.where(tokens, tokens - FIRST, -1))
        if isinstance(batch, Mapping) and "segments" in batch:
            np.testing.assert_array_equal(origin.segments, batch["segments"])
        counted = np.bincount(origin.segments[:, 1], origin.segments[:, 5], 3)
        if origin.context is None:
            np.testing.assert_array_equal(
                counted, np.bincount(origin.stream_ids[origin.stream_ids >= 0], minlength=3)
            )
        found.append(origin)
    assert found
    return found


@pytest.mark.parametrize("batch_format", FORMATS)
def test_each_format_has_the_stream_of_each_token_where_the_token_is(folders, batch_format):
    size = 1 if batch_format == "llama_factory" else 2
    check(PackedDataLoader(planned(folders, batch_format=batch_format, batch_size=size)))
    check(PackedDataLoader(online(batch_format=batch_format, batch_size=size)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("batch_format", "make"), crossed(["native", "torchtitan_flat", "torchtune"], [planned, online])
)
def test_workers_and_persistent_ones_change_nothing(folders, batch_format, make):
    options = {"batch_format": batch_format, "batch_size": 2}
    dataset = make(folders, **options) if make is planned else make(**options)
    loader = PackedDataLoader(dataset, num_workers=2)
    for _ in range(2):
        check(loader)


@pytest.mark.parametrize(
    "options",
    [
        {"packing": Packing(max_seq_len=32, pad_to_multiple=4)},
        {"packing": Packing(max_seq_len=32, overflow="split", positions="continue")},
        {
            "packing": Packing(max_seq_len=32),
            "world": World(rank=1, num_ranks=2, replication=2, context_parallel=2),
        },
        {
            "packing": Packing(max_seq_len=32),
            "world": World(rank=0, num_ranks=2, replication=2, context_parallel=2),
            "batch_format": "torchtitan_flat",
        },
        {"buffers": None, "mixing": Mixing(batching_method="per_stream")},
    ],
)
def test_padding_inside_rows_and_slices_of_rows_are_followed(folders, options):
    check(PackedDataLoader(planned(folders, batch_size=2, **options)))


def test_padded_samples_of_buckets_are_followed():
    streams = [IterableStream(samples(n), name=name) for n, name in enumerate(NAMES)]
    dataset = BucketedIterableDataset(streams, bucketing=Bucketing(max_tokens=64), world=World())
    check(PackedDataLoader(dataset))


def test_a_loop_may_be_ahead_and_move_a_batch_that_has_a_position(folders):
    for batch_format in ("native", "torchtitan"):
        dataset = planned(folders, batch_format=batch_format)
        loader = PackedDataLoader(dataset)
        batches = list(loader)
        for batch in batches[-RECENT:]:
            tokens = tokens_in(batch)
            ids = loader.provenance(batch).stream_ids
            np.testing.assert_array_equal(ids, np.where(tokens, tokens - FIRST, -1))
    copied = {key: value + 0 for key, value in batches[-1][0].items()}
    with pytest.raises(ConfigError, match=r"not one of the last .*before its tensors are copied"):
        loader.provenance((copied, batches[-1][1] + 0))
    dataset = planned(folders)
    loader = PackedDataLoader(dataset)
    for batch in loader:
        moved = {k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()}
        segments = loader.provenance(batch).segments
        np.testing.assert_array_equal(loader.provenance(moved).segments, segments)


@pytest.mark.parametrize("epoch_end", ["pad", "drop", "carry"])
def test_steps_are_global_batches_counted_over_epochs(folders, epoch_end):
    mixing = Mixing(global_batch_size=4, epoch_end=epoch_end)
    for rank in (0, 1):
        world = World(rank=rank, num_ranks=2)
        loader = PackedDataLoader(planned(folders, mixing=mixing, world=world))
        steps = []
        for _ in range(3):
            steps += [loader.provenance(batch).step for batch in loader]
        assert steps == [n // 2 for n in range(len(steps))]  # two micro-batches per step
        resumed = PackedDataLoader(planned(folders, mixing=mixing, world=world))
        resumed.load_state_dict(loader.state_dict())
        assert loader.provenance(next(iter(loader))).step == steps[-1] + 1
        assert resumed.provenance(next(iter(resumed))).step == steps[-1] + 1


def test_after_a_resume_inside_a_step_a_batch_has_the_step_in_which_at_has_its_rows(folders):
    def loaders(num_ranks):
        return [
            PackedDataLoader(
                planned(
                    folders,
                    mixing=Mixing(global_batch_size=12, epoch_end="carry"),
                    order=Order(num_lanes=1),
                    world=World(rank=rank, num_ranks=num_ranks),
                )
            )
            for rank in range(num_ranks)
        ]

    before, steps = loaders(3), []
    for loader in before:
        for batch in islice(loader, 3):  # 9 packs of 12
            last = batch
    state = before[0].dataset.state_after(last)
    after = loaders(2)
    for loader in after:
        loader.load_state_dict(json.loads(json.dumps(state)))
    for rank, loader in enumerate(after):
        for batch in islice(loader, 4):
            step, row = loader.provenance(batch).step, batch["segments"][0, 1:].tolist()
            rows = [
                row.segments[0, :5].tolist() for row in at(after[0].dataset, step, rank=rank).rows
            ]
            assert row in rows
            steps.append(step)
    assert len(set(steps)) > 1


def test_steps_of_chapters_count_those_that_are_skipped(folders):
    dataset = planned(
        folders,
        mixing=Mixing(global_batch_size=2, batching_method="stratified"),
        chapters=[
            Chapter(weights={"web": 1, "code": 1}, steps=3),
            Chapter(weights={"chat": 1}, steps=4, global_batch_size=4),
        ],
        skip=[(1, 1), (4, 5)],
    )
    loader = PackedDataLoader(dataset)
    assert [loader.provenance(b).step for b in loader] == [0] * 2 + [2] * 2 + [3] * 4 + [6] * 4


def test_steps_of_iterables_are_known_where_they_are_a_number():
    loader = PackedDataLoader(online(steps=5, mixing=Mixing(stop="repeat")))
    steps = [loader.provenance(batch).step for _ in range(3) for batch in loader]
    assert steps == list(range(15))
    loader = PackedDataLoader(online())
    origin = loader.provenance(next(iter(loader)))
    with pytest.raises(ConfigError, match=r"batch of iterables is not known, .* set steps to"):
        _ = origin.step


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("batch_format", ["native", "hf", "torchtitan_flat", "hf_flash"])
def test_sums_and_counts_by_stream_are_those_of_a_loop_over_tokens(folders, batch_format, kind):
    loader = PackedDataLoader(planned(folders, batch_format=batch_format, batch_size=2))
    for batch in loader:
        tokens = tokens_in(batch)
        labels = batch["labels"] if isinstance(batch, Mapping) else batch[1]
        loss = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1))
        sums, counts = [0.0] * 3, [0] * 3
        for token, label, each in zip(
            *(x.flatten().tolist() for x in (tokens, labels, loss)), strict=True
        ):
            if token and label != -100:
                sums[token - FIRST] += each
                counts[token - FIRST] += 1
        given = (loss, labels) if kind == "torch" else (loss.numpy(), labels.numpy())
        found = by_stream(loader.provenance(batch), *given)
        assert found.counts.tolist() == counts
        assert found.sums.tolist() == pytest.approx(sums)
        both = by_stream(loader.provenance(batch), given[0])
        assert int(both.counts.sum()) == int((tokens > 0).sum())
    with pytest.raises(
        ConfigError, match=r"loss_per_token has the shape \(2, 31\), .* tokens have"
    ):
        by_stream(loader.provenance(batch), np.zeros((2, 31)))


@pytest.mark.parametrize(
    ("batch_format", "by"), crossed(["torchtune", "torchtitan", "native"], ["shard", "row"])
)
def test_kept_columns_are_reached_from_a_segment_of_any_format(tmp_path, batch_format, by):
    tokens = [[FIRST + n % 7] * (1 + n % 9) for n in range(90)]
    rows = [{"tokens": t, "url": f"page/{n}", "id": n} for n, t in enumerate(tokens)]
    write_stream(rows, tmp_path / "a", size_limit=600)
    for part, wanted in (("train", range(40, 90)), ("held_out", range(5, 50))):
        side = Stream(local=tmp_path / "a", held_out=HeldOut(part, 0.3, by=by))
        dataset = PackedStreamingDataset(
            [side], packing=Packing(max_seq_len=32), batch_format=batch_format, world=World()
        )
        loader, urls = PackedDataLoader(dataset), {}
        for batch in loader:
            for segment in loader.provenance(batch).segments:
                document = dataset.document(segment[1:])
                urls[document["url"]] = document["tokens"].tolist()
                assert document["url"] == f"page/{document['id']}"
        assert len(urls) in wanted
        assert urls == {url: tokens[int(url.split("/")[1])] for url in urls}
