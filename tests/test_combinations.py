"""Every rule of the table of combinations is reached from the public classes.

::

    the mistakes below --refused--> messages == the rules of the table, each at least once
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streampack import (
    Balance,
    BucketedIterableDataset,
    Bucketing,
    Buffers,
    Chapter,
    Chats,
    ConfigError,
    IterableStream,
    Mixing,
    Order,
    PackCost,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Payloads,
    Shards,
    Stream,
    Texts,
    TokenFiles,
    World,
)
from streampack.config.combinations import PAIRS, check_combination
from streampack.formats import FORMATS, to_hf_flash, to_llama_factory
from streampack.lookback import difference, where
from streampack.mds.length_file import LENGTH_FILE
from streampack.report import simulate
from streampack.write import write_stream
from tests.helpers.lazy_source import Untokenized

SIZE = 64
PACKING = Packing(max_seq_len=SIZE)
COST = Packing(max_seq_len=SIZE, cost=PackCost(1000))
SHARED = World(num_ranks=2, replication=2, context_parallel=2)
PER_DOCUMENT = replace(SHARED, context_layout="zigzag_per_document")
RUN = (Chapter(weights={"a": 1}, steps=2),)
PASS = (Chapter(weights={"a": 1}, passes=1),)
ROWS = [{"tokens": [1, 2]}]
GLOBAL = Mixing(global_batch_size=8)


def planned(folder: Path, *, stream: dict[str, Any] | None = None, **options: Any) -> None:
    """Make a dataset of one local stream, `a`."""
    out = folder / "local"
    if not out.exists():
        write_stream([[1, 2, 3]] * 9, out)
    source = Stream(local=str(out), name="a", **stream or {})
    PackedStreamingDataset([source], **{"packing": PACKING, "world": World(), **options})


def remote(folder: Path, *, stream: dict[str, Any] | None = None, **options: Any) -> None:
    """Make a dataset of one remote stream, `a`, without a length file."""
    out = folder / "remote"
    if not out.exists():
        (write_stream([[1, 2, 3]] * 9, out).path / LENGTH_FILE).unlink()
    source = Stream(remote=str(out), local=str(folder / "cache"), name="a", **stream or {})
    PackedStreamingDataset([source], **{"packing": PACKING, "world": World(), **options})


def texts(folder: Path, use: Callable[[Any], Any] = str, **options: Any) -> None:
    """Make a dataset of one stream, `a`, that stands for texts, and use it."""
    out = folder / "texts"
    if not out.exists():
        write_stream([[1, 2, 3]] * 9, out)
    source = Untokenized(Shards(remote=str(out), local=str(folder / "text-cache")))
    defaults = {"packing": PACKING, "world": World(), "mixing": GLOBAL}
    use(PackedStreamingDataset([Stream(source, name="a")], **{**defaults, **options}))


def length_of(dataset: PackedStreamingDataset) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise error.__cause__ or error from None


def online(_: Path, *, stream: dict[str, Any] | None = None, **options: Any) -> None:
    source = IterableStream([{"tokens": [1, 2]}], **stream or {})
    PackedIterableDataset([source], **{"packing": PACKING, "world": World(), **options})


def bucketed(_: Path, **options: Any) -> None:
    source, bucketing = IterableStream([[1, 2]]), Bucketing(max_tokens=SIZE)
    BucketedIterableDataset([source], **{"bucketing": bucketing, "world": World(), **options})


def one_source(_: Path, kind: Any, **options: Any) -> None:
    kind(**options)


def packing(_: Path, **options: Any) -> None:
    Packing(**{"max_seq_len": SIZE, **options})


def per(method: str, **options: Any) -> Mixing:
    return Mixing(batching_method=f"{method}", **options)


MISTAKES: list[Callable[[Path], Any]] = [
    *(
        partial(packing, method="concat", **options)
        for options in (
            {"max_samples_per_pack": 2},
            {"short_seq_len": 2},
            {"cost": PackCost(1000)},
        )
    ),
    partial(packing, method="two_tiers"),
    partial(packing, pad_to_multiple=5),
    partial(packing, method="two_tiers", short_seq_len=12, pad_to_multiple=8),
    partial(packing, cost=PackCost(1000, capacity=70), pad_to_multiple=8),
    lambda _: Order(shuffle=False, pack_shuffle=5),
    *(
        partial(dataset, packing=replace(PACKING, positions="continue"), batch_format=name)
        for dataset in (planned, online)
        for name in ("hf", "torchtitan", "torchtitan_flat", "llama_factory")
    ),
    partial(
        planned,
        packing=replace(PACKING, positions="continue"),
        batch_format=partial(to_hf_flash, capacity=4),
    ),
    *(
        partial(planned, packing=COST, batch_format=name)
        for name in set(FORMATS) - {"compact", "hf_flash", "megatron", "torchtitan_flat"}
    ),
    partial(planned, batch_format="llama_factory", batch_size=2),
    *(
        partial(dataset, world=SHARED, batch_format=name)
        for dataset in (planned, online)
        for name in set(FORMATS)
        - {"native", "compact", "megatron", "torchtitan", "torchtitan_flat"}
    ),
    partial(online, world=SHARED, batch_format=partial(to_llama_factory, dense=True)),
    partial(online, world=SHARED, batch_format="megatron"),
    partial(online, world=SHARED, packing=Packing(max_seq_len=6)),
    partial(online, world=SHARED, packing=Packing(max_seq_len=6), batch_format="torchtitan_flat"),
    partial(online, world=PER_DOCUMENT),
    partial(planned, world=SHARED, packing=COST, batch_format="compact"),
    partial(bucketed, world=SHARED),
    partial(planned, mixing=Mixing(global_batch_size=10), batch_size=4),
    partial(planned, mixing=GLOBAL, batch_size=3, chapters=RUN),
    partial(
        planned,
        mixing=per("per_stream", global_batch_size=8),
        order=Order(num_lanes=3),
        batch_size=4,
    ),
    partial(planned, mixing=GLOBAL, batch_size=4, world=World(num_ranks=3), balance=Balance()),
    partial(remote, packing=COST, batch_format="compact"),
    partial(planned, stream={"max_seq_len": 2 * SIZE}, batch_size=2),
    partial(planned, stream={"max_seq_len": 100}, mixing=per("per_stream")),
    partial(planned, stream={"max_seq_len": 2 * SIZE}, mixing=per("per_stream"), batch_size=3),
    partial(
        planned,
        packing=COST,
        batch_format="compact",
        stream={"max_seq_len": 2 * SIZE},
        batch_size=2,
    ),
    partial(remote, order=Order(num_lanes=2)),
    partial(texts, balance=Balance(within="batch"), world=World(num_ranks=2, ranks_per_node=1)),
    partial(texts, use=length_of),
    partial(texts, use=simulate),
    partial(texts, use=lambda dataset: where(dataset, "a", 0, upto=1)),
    partial(texts, use=lambda own: difference(own, own.with_arguments(order=Order(seed=1)))),
    partial(planned, chapters=RUN),
    partial(planned, chapters=RUN, mixing=GLOBAL, world=World(num_ranks=3)),
    *(
        partial(planned, chapters=RUN, mixing=replace(GLOBAL, **options))
        for options in ({"epoch_size": 5}, {"epoch_end": "drop"}, {"sampling_method": "fixed"})
    ),
    *(
        partial(planned, chapters=RUN, mixing=GLOBAL, stream=stream)
        for stream in ({"proportion": 1}, {"repeat": 1}, {"choose": 1}, {"max_seq_len": 2 * SIZE})
    ),
    partial(planned, chapters=RUN, mixing=GLOBAL, packing=COST, batch_format="compact"),
    partial(planned, skip=[(1, 2)]),
    partial(remote, chapters=PASS, mixing=GLOBAL),
    partial(planned, mixing=Mixing(max_repeats=2)),
    partial(remote, chapters=RUN, mixing=replace(GLOBAL, max_repeats={"a": 2})),
    partial(
        planned,
        chapters=(replace(RUN[0], packing=PACKING),),
        mixing=GLOBAL,
        stream={"overflow": "truncate"},
    ),
    *(
        partial(planned, stream={"loss_weight": 2}, batch_format=name, batch_size=1)
        for name in sorted(set(FORMATS) - {"native", "compact", "megatron"})
    ),
    *(
        partial(one_source, kind=Shards, local="x", **options)
        for options in (
            {"split_at": 0},
            {"split_at": 0, "index": "y", "labels": "labels"},
            {"split_at": 0, "index": "y", "loss_mask": "mask"},
        )
    ),
    partial(one_source, kind=TokenFiles, files="x", index="y", unit="sequence"),
    partial(online, mixing=GLOBAL),
    partial(online, mixing=Mixing(max_repeats=2)),
    partial(online, order=Order(num_lanes=2)),
    partial(online, buffers=Buffers(cache_limit="1gb")),
    partial(online, mixing=Mixing(epoch_end="carry")),
    partial(bucketed, mixing=Mixing(epoch_end="drop")),
    partial(bucketed, order=Order(pack_shuffle=4)),
    partial(planned, mixing=Mixing(stop="repeat")),
    *(
        partial(
            online, packing=replace(PACKING, **options), stream={"payloads": Payloads({"id": None})}
        )
        for options in ({"method": "next_fit"}, {"method": "concat"})
    ),
    partial(online, steps="equal", mixing=Mixing(stop="repeat")),
    partial(online, steps=5, mixing=per("per_stream")),
]
# Sizes of a run that begins with valid ones reach these: see tests/planned/test_pack_lengths.py.
OF_RESUMED_RUNS = {
    "Stream(max_seq_len)": ("batch_size", "global_batch_size", "the packs of one stream"),
    "batching_method": ("global_batch_size",),
}


def pairs_in(message: str) -> set[tuple[Any, ...]]:
    """Return the pairs of options that a message may be of, by the reason and both names."""
    return {
        pair
        for pair in PAIRS
        if f": {pair[3].partition('; ')[0]}; " in message
        and all(option.name in message or option.name == "dataset" for option in pair[1:3])
    }


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> tuple[list[str], set[str]]:
    """Make the mistakes: the messages, and the names that callers of the table pass."""
    folder, messages, passed = tmp_path_factory.mktemp("mistakes"), [], set()

    def recorded(given: Mapping[str, Any], where: str = "") -> None:
        passed.update(given)
        check_combination(given, where)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("streampack.") and hasattr(module, "check_combination"):
                patch.setattr(module, "check_combination", recorded)
        for mistake in MISTAKES:
            with pytest.raises(ConfigError) as caught:
                mistake(folder)
            messages.append(str(caught.value))
    return messages, passed


def test_every_rule_is_reached_from_the_public_classes(refused):
    reached = set()
    for message in refused[0]:
        found = pairs_in(message)
        assert found, message
        reached |= found

    missed = [pair[1:3] for pair in PAIRS if pair not in reached]
    assert [m for m in missed if m[1].name not in OF_RESUMED_RUNS.get(m[0].name, ())] == []


def test_callers_spell_the_names_as_the_table_does(refused):
    whole = (Packing, Shards, TokenFiles, Texts, Chats)
    known = {field.name for kind in whole for field in fields(kind)}
    for rule, option, other, reason in PAIRS:
        known |= {option.name, other.name, rule.by, rule.unless.name}
        known |= set(re.findall(r"{(\w+)}", reason))
    assert refused[1] - known == set()
