"""Streams whose lengths are learnt while they are read, as those of texts are.

The same samples in streams with lengths must give the same packs.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    Balance,
    Chapter,
    ConfigError,
    HeldOut,
    Mixing,
    Order,
    PackCost,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Shards,
    Stream,
    World,
)
from streampack.lookback import difference, where
from streampack.report import describe_run, simulate, write_report
from streampack.testing import assert_exactly_once, assert_resumes
from streampack.testing.shown import all_rows, worlds
from tests.helpers import builders
from tests.helpers.examples import crossed
from tests.helpers.lazy_source import Untokenized
from tests.helpers.texts import source_of, write_files
from tests.helpers.verbs import call_verb

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
RUNS = ["carry", "chapters"]
NUM_SAMPLES = (350, 180)  # with 2 lanes the first is dealt, the second shared
CHAPTERS = (
    Chapter(weights={"web": 3, "code": 1}, steps=3),
    Chapter(weights={"web": 1, "code": 1}, steps=4),
)


def lengths_of(number: int, longest: int) -> list[int]:
    """Return lengths of which every seventh is 0."""
    lengths = np.random.default_rng(number).integers(1, longest, NUM_SAMPLES[number])
    lengths[number::7] = 0
    return lengths.tolist()


LENGTHS = [lengths_of(0, 60), lengths_of(1, 150)]


@pytest.fixture(scope="module")
def remote(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    for name, lengths in zip(("web", "code"), LENGTHS, strict=True):
        builders.write_stream_files(folder / name, lengths, encoding="bytes", size_limit=2048)
    return folder


@pytest.fixture
def make(remote, tmp_path):
    """Return a function that makes a dataset of both streams, of texts or with lengths."""

    def dataset(
        *,
        has_lengths: bool = False,
        block_shards: int | None = None,
        names: tuple[str, ...] = ("web", "code"),
        mixing: dict[str, Any] | None = None,
        num_lanes: int = 2,
        stream: dict[str, Any] | None = None,
        **options: Any,
    ) -> PackedStreamingDataset:
        streams = []
        for name in names:
            folder = {"remote": str(remote / name), "local": str(tmp_path / "cache" / name)}
            shards = Shards(**folder, tokens="tokens:int32")
            source = Untokenized(shards, block_shards, has_lengths)
            streams.append(Stream(source, name=name, **(stream or {})))
        mixed = {"global_batch_size": 8, "epoch_end": "carry", **(mixing or {})}
        if "chapters" in options:
            del mixed["epoch_end"]
        defaults = {"packing": Packing(max_seq_len=64), "batch_size": 2, "world": World()}
        return PackedStreamingDataset(
            streams,
            mixing=Mixing(**mixed),
            order=Order(seed=5, num_lanes=num_lanes),
            **defaults | options,
        )

    return dataset


def tokens_of(dataset: PackedStreamingDataset) -> list[bytes]:
    return [batch["tokens"].numpy().tobytes() for batch in dataset]


def shards_opened(dataset: PackedStreamingDataset) -> int:
    return sum(len(stream.shards.opened) for stream in dataset.streams.opened)


@pytest.mark.parametrize(
    ("method", "unit_and_run"), crossed(METHODS, list(product(("samples", "tokens"), RUNS)))
)
def test_packs_are_those_of_streams_with_lengths_in_every_world(make, method, unit_and_run):
    unit, run = unit_and_run
    mixing = {"batching_method": method, "weight_unit": unit}
    options = {"mixing": mixing, "block_shards": 4}
    if run == "chapters":
        options["chapters"] = CHAPTERS
    elif unit == "tokens":
        mixing["epoch_size"] = sum(map(sum, LENGTHS))

    wanted = all_rows([make(has_lengths=True, **options)])
    for num_ranks, num_nodes in [(1, 1), (4, 2)]:
        ranks = [make(world=world, **options) for world in worlds(num_ranks, num_nodes)]
        assert all_rows(ranks) == wanted


@pytest.mark.parametrize(
    ("method", "num_lanes", "block_shards"), crossed(["random", "per_stream"], [2, 3], [None, 4])
)
def test_each_pass_has_each_sample_once_and_empty_ones_are_counted(
    make, method, num_lanes, block_shards
):
    mixing = {"batching_method": method, "global_batch_size": 12}
    dataset = make(num_lanes=num_lanes, block_shards=block_shards, mixing=mixing)
    loader = PackedDataLoader(dataset, num_workers=0)
    batches = [batch for _ in range(3) for batch in loader]

    segments = np.concatenate([batch["segments"][:, 1:] for batch in batches])
    for number, lengths in enumerate(LENGTHS):
        own = segments[(segments[:, :2] == [number, 0]).all(axis=1)]
        assert np.bincount(own[:, 2], own[:, 4], len(lengths)).tolist() == lengths
    assert all(own["dropped"] > 0 for own in loader.stats()["streams"].values())


@pytest.mark.parametrize("method", ["random", "per_stream"])
def test_one_lane_may_end_and_pad(make, method):
    mixing = {"batching_method": method, "epoch_end": "pad"}
    loader = PackedDataLoader(make(num_lanes=1, mixing=mixing, block_shards=4), num_workers=0)
    counts = [len(own) - own.count(0) for own in LENGTHS]
    assert_exactly_once(loader, LENGTHS, counts)
    stats = loader.stats()["streams"]
    assert [stats[name]["dropped"] for name in ("web", "code")] == [own.count(0) for own in LENGTHS]


# An epoch has 190 batches, 4 to a step; the chapters have 28 in all.
@pytest.mark.parametrize(
    ("options", "every"), [({}, 27), ({"chapters": CHAPTERS}, 3)], ids=["carry", "chapters"]
)
def test_a_run_with_empty_samples_resumes_anywhere(make, options, every):
    def loader() -> PackedDataLoader:
        return PackedDataLoader(make(block_shards=4, **options), num_workers=0)

    assert assert_resumes(loader, every=every) > 5


@pytest.mark.parametrize("side", ["train", "held_out"])
def test_an_empty_sample_gets_neither_bos_nor_eos_on_either_side(make, side):
    own = {"held_out": HeldOut(side, 0.25, by="row"), "bos_id": 99_991, "eos_id": 99_989}
    options = {"names": ("web",), "num_lanes": 1, "mixing": {"epoch_end": "pad"}, "stream": own}
    loader = PackedDataLoader(make(block_shards=4, **options), num_workers=0)
    batches = list(loader)
    samples = {row[3] for batch in batches for row in batch["segments"].tolist()}
    stats = loader.stats()["streams"]["web"]
    assert sum(int((batch["tokens"] == 99_989).sum()) for batch in batches) == len(samples)
    assert (stats["samples"], stats["dropped"] > 0) == (len(samples), True)
    assert tokens_of(make(has_lengths=True, block_shards=4, **options)) == [
        batch["tokens"].numpy().tobytes() for batch in batches
    ]


@pytest.mark.parametrize("method", ["random", "stratified"])
def test_the_first_batch_needs_the_shards_of_a_block_of_each_stream(make, method):
    options = {"num_lanes": 1, "mixing": {"batching_method": method, "global_batch_size": 2}}
    opened = []
    for block_shards in (4, None):
        dataset = make(block_shards=block_shards, **options)
        next(iter(dataset))
        opened.append(shards_opened(dataset))
    assert opened[0] <= 2 * (4 + 1) < opened[1]


# What needs the lengths of all samples.

NODES = World(num_ranks=2, ranks_per_node=1)
REFUSED: dict[str, dict[str, Any]] = {
    "epoch_end='pad'": {"mixing": {"epoch_end": "pad"}},
    "epoch_end='drop'": {"mixing": {"epoch_end": "drop"}},
    "cost": {"packing": Packing(max_seq_len=64, cost=PackCost(1000)), "batch_format": "compact"},
    "max_repeats=4": {"chapters": CHAPTERS, "mixing": {"max_repeats": 4}},
    "Chapter(passes)=1": {"chapters": (Chapter(weights={"web": 1}, passes=1),)},
    "Balance(within='batch')": {"balance": Balance(within="batch"), "world": NODES},
}
TRIED = {
    "simulate": simulate,
    "where": lambda dataset: where(dataset, "web", 1, upto=3),
    "diff": lambda dataset: difference(dataset, dataset.with_arguments(order=Order(seed=1))),
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_plans_with_all_lengths_is_refused_and_works_with_them(make, option):
    wanted = (
        rf"stream 'web': {re.escape(option)} needs the lengths of all samples: .*lengths='eager'"
    )
    with pytest.raises(ConfigError, match=wanted):
        make(**REFUSED[option])
    make(has_lengths=True, **REFUSED[option])


@pytest.fixture(scope="module")
def indexed(tmp_path_factory) -> Path:
    """Return a folder of texts, and an index of them in another."""
    folder = write_files(tmp_path_factory.mktemp("indexed"))
    tokenizer = ("--tokenizer", folder / "tokenizer")
    call_verb("index", folder / "rows.jsonl", "--out", folder / "index", *tokenizer)
    return folder


def of_texts(folder: Path, local: Path, **options: Any) -> PackedStreamingDataset:
    """Return a dataset of lazy texts; `index` is an option of them."""
    given = {"lengths": "lazy", "index": options.pop("index", None)}
    streams = [
        Stream(source_of(folder, "rows.jsonl", local, **given), name=name)
        for name in ("web", "code")
    ]
    mixing = {"global_batch_size": 8} | ({} if "chapters" in options else {"epoch_end": "carry"})
    return PackedStreamingDataset(
        streams,
        mixing=Mixing(**mixing | options.pop("mixing", {})),
        order=Order(num_lanes=2),
        **{"packing": Packing(max_seq_len=64), "batch_size": 2, "world": World()} | options,
    )


@pytest.mark.parametrize("option", REFUSED)
def test_lazy_texts_work_with_the_index_that_their_refusal_names(indexed, option, tmp_path):
    with pytest.raises(ConfigError, match=r"streampack index --tokenizer`.* set index="):
        of_texts(indexed, tmp_path, **REFUSED[option])
    dataset = of_texts(indexed, tmp_path, index=indexed / "index", **REFUSED[option])
    assert len(dataset) > 0
    assert not list((tmp_path / "tokens").rglob("*.*"))


def test_what_plans_an_epoch_of_texts_works_with_an_index(indexed, tmp_path):
    dataset = of_texts(indexed, tmp_path, index=indexed / "index", mixing={"epoch_end": "pad"})
    for what in TRIED.values():
        what(dataset)
    write_report(dataset, tmp_path / "report.html")
    assert describe_run(of_texts(indexed, tmp_path, index=indexed / "index", chapters=CHAPTERS))
    assert len(dataset) > 0
    assert not list((tmp_path / "tokens").rglob("*.*"))


@pytest.mark.parametrize("what", TRIED)
def test_what_would_tokenize_an_epoch_is_refused(make, what):
    dataset = make()
    with pytest.raises(ConfigError, match=f"'web': {what} needs the lengths .*lengths='eager'"):
        TRIED[what](dataset)
    assert not shards_opened(dataset)


def test_an_epoch_that_ends_has_no_length_and_others_have(make):
    padded = make(num_lanes=1, mixing={"epoch_end": "pad"})
    with pytest.raises(TypeError, match=r"len\(dataset\) needs the lengths .*lengths='eager'"):
        len(padded)
    assert len(list(padded)) > 0
    carried, chapters = make(), make(chapters=CHAPTERS)
    assert (len(carried), len(chapters)) == (len(make(has_lengths=True)), 7 * 4)
    assert sum(each["steps"] for each in describe_run(chapters)["chapters"]) == 7
    assert not shards_opened(carried) + shards_opened(chapters)


@pytest.mark.parametrize("within", ["rank", "node"])
def test_a_node_deals_its_own_packs(make, within):
    options = {
        "balance": Balance(within=within),
        "world": NODES,
        "mixing": {"global_batch_size": 8},
    }
    assert tokens_of(make(**options)) == tokens_of(make(has_lengths=True, **options))
