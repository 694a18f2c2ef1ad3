"""Plans that are read as a group give the same batches and fail in the same places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming import MDSWriter

from streampack import Buffers, Mixing, Packing, Stream
from streampack.errors import DataError
from streampack.loader.loader import PackedDataLoader
from streampack.plan.device_plan import DevicePlan
from streampack.planned.batch_groups import (
    GROUP_BYTES,
    MOST_AT_ONCE,
    ReadGroup,
    in_groups,
    read_group,
)
from streampack.planned.cache_budget import ReadAhead
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.loading import PlannedLoading
from streampack.runtime.resumable import engine_of
from streampack.types import Packs
from streampack.world import World
from tests.helpers.batches import same
from tests.helpers.builders import stream_of, write_stream_files

LENGTHS = np.random.default_rng(7).integers(1, 200, 300).tolist()


def dataset_of(streams: list[Stream], **options: Any) -> PackedStreamingDataset:
    packing = Packing(**{"max_seq_len": 64, **options.pop("packing", {})})
    return PackedStreamingDataset(streams, packing=packing, **{"batch_size": 3, **options})


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[Stream]:
    """Two streams, one without labels and one with a loss mask."""
    folder = tmp_path_factory.mktemp("streams")
    masks = [(np.arange(length) % 3 > 0).astype(np.uint8) for length in LENGTHS]
    masked, _ = write_stream_files(
        folder / "masked",
        LENGTHS,
        seed=1,
        columns={"loss_mask": "ndarray:uint8"},
        values={"loss_mask": masks},
    )
    plain = stream_of(folder / "plain", LENGTHS, weights={"repeat": 2})
    return [plain, Stream(local=str(masked), loss_mask="loss_mask")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batch_format", "packing"),
    [
        ("native", {}),
        ("native", {"pad_to_multiple": 4, "positions": "continue"}),
        ("compact", {}),
        ("compact", {"pad_to_multiple": 4, "positions": "continue"}),
        ("hf", {"pad_to_multiple": 4}),
    ],
)
@pytest.mark.parametrize("which", ["plain", "masked", "both"])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_batches_that_are_read_at_once_are_those_that_are_read_alone(
    streams: list[Stream], packing: dict[str, Any], batch_format: str, which: str, most: int
) -> None:
    chosen = {"plain": streams[:1], "masked": streams[1:], "both": streams}[which]
    # With four steps of four packs in a global batch, an epoch ends with steps of only padding.
    dataset = dataset_of(
        chosen,
        packing=packing,
        batch_format=batch_format,
        batch_size=2,
        mixing=Mixing(global_batch_size=16, batching_method="per_stream"),
        world=World(rank=1, num_ranks=2),
    )
    expected = list(dataset)
    dataset.set_epoch(0)
    engine = engine_of(dataset)
    read, sequence = engine.reader(), engine.begin()
    has_labels = which != "plain" and batch_format == "compact"
    groups = in_groups(sequence.next, 1 if has_labels else most, ReadAhead(None, sequence))
    found = list(chain.from_iterable(read_group(read, group) for group in groups))
    assert len(found) == len(expected) > 50
    assert all(map(same, found, expected))


@pytest.mark.thorough
@pytest.mark.parametrize("batch_format", ["native", "compact"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_loader_reads_groups_and_delivers_the_batches_of_the_dataset(
    streams: list[Stream], batch_format: str, num_threads: int
) -> None:
    expected = list(dataset_of(streams[:1], batch_format=batch_format))
    loader = PackedDataLoader(
        dataset_of(streams[:1], batch_format=batch_format), prefetch_threads=num_threads
    )
    assert group_of(loader) == MOST_AT_ONCE
    # All are kept, so no two batches may share memory.
    found = list(loader)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    half = len(expected) // 2 + 3
    list(islice(loader, half))
    state = loader.state_dict()
    again = PackedDataLoader(dataset_of(streams[:1], batch_format=batch_format))
    again.load_state_dict(state)
    whole = dataset_of(streams[:1], batch_format=batch_format)
    whole.set_epoch(1)
    rest, gone_on = list(whole)[half:], list(again)
    assert len(gone_on) == len(rest) > 10
    assert all(map(same, gone_on, rest))


def group_of(loader: PackedDataLoader) -> int:
    assert isinstance(loader._loading, PlannedLoading)
    return loader._loading._group


def test_groups_are_no_larger_than_there_is_room_for(streams: list[Stream]) -> None:
    plain, batch_tokens = streams[:1], 3 * 64
    packers = engine_of(dataset_of(plain)).footprint().packer_tokens
    for num_batches, group in ((4, 1), (8, 2), (23, 5), (200, MOST_AT_ONCE)):
        limit = packers + num_batches * batch_tokens
        loader = PackedDataLoader(dataset_of(plain, buffers=Buffers(rank_tokens=limit)))
        assert group_of(loader) == group
        for _ in loader:
            pass
        assert loader.stats()["buffers"]["rank_tokens"] <= limit
    large = PackedDataLoader(dataset_of(plain, batch_size=2048))
    assert group_of(large) == GROUP_BYTES // (28 * 2048 * 64) == 2
    # These plan little ahead, or only know for all streams together whether there are labels.
    limited = dataset_of(plain, buffers=Buffers(cache_limit="1gb"))
    assert group_of(PackedDataLoader(limited)) == 1
    masked = dataset_of(streams[1:], batch_format="compact")
    assert group_of(PackedDataLoader(masked)) == 1


def test_a_bad_sample_fails_its_own_batch_and_none_before_it(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "s"), columns={"tokens": "ndarray:int64"}) as writer:
        for number in range(400):
            writer.write({"tokens": np.full(40, 2**40 if number == 300 else number)})

    def delivered(batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        got = []
        with pytest.raises(DataError, match="sample 300: one of its token ids"):  # noqa: PT012 - a loop
            for batch in batches:
                got.append(batch)
        return got

    stream = Stream(local=str(tmp_path / "s"))
    alone = delivered(iter(dataset_of([stream])))
    loader = PackedDataLoader(dataset_of([stream]))
    assert group_of(loader) == MOST_AT_ONCE
    together = delivered(iter(loader))
    assert len(together) == len(alone) > 3
    assert all(map(same, together, alone))


def test_a_format_of_ones_own_is_asked_for_a_batch_at_a_time(streams: list[Stream]) -> None:
    asked = []

    def picky(batch: dict[str, Any]) -> dict[str, Any]:
        asked.append(batch["position"])
        if batch["position"] == 60:
            raise ValueError("the 20th is not to my taste")
        return batch

    loader = PackedDataLoader(dataset_of(streams[:1], batch_format=picky))
    assert group_of(loader) == 1
    positions = []
    with pytest.raises(ValueError, match="the 20th"):  # noqa: PT012 - a loop
        for batch in loader:
            positions.append(batch["position"])
    assert positions == list(range(3, 60, 3))
    assert len(set(asked)) == len(asked)


# Grouping of plans.


class Ahead(ReadAhead):
    """Shards that are present, or arrive once waited for; batch n ends at position n + 1."""

    def __init__(self, late: set[int], lost: int | None = None) -> None:
        self.late, self.lost = set(late), lost
        self.waited: list[int] = []

    def has(self, plan: DevicePlan) -> bool:
        return not self.late.union({self.lost}).intersection(numbers_of(plan))

    def need_for(self, plan: DevicePlan) -> None:
        [number] = numbers_of(plan)
        if number == self.lost:
            raise DataError("the shard is lost")
        if number in self.late:
            self.late.remove(number)
            self.waited.append(number)


class Planner:
    """Plans for `num` batches, at most as many at a time as are requested or left before a stop."""

    def __init__(self, num: int, stops: set[int]) -> None:
        self.at, self.num = 0, num
        self.stops = stops | {num - 1}  # the very last batch has padding

    def next(self, most: int) -> DevicePlan | None:
        if self.at == self.num:
            return None
        first = self.at
        self.at = min([first + most, self.num, *(stop for stop in self.stops if stop > first)])
        size = self.at - first
        num_packs = 2 * size - (self.at == self.num)
        segments = np.zeros((num_packs, 6), np.int64)
        packs = Packs(segments=segments, ends=np.arange(1, num_packs + 1))
        positions = list(range(first + 1, self.at + 1))
        return DevicePlan(packs=packs, num_rows=2, epoch=0, positions=positions)


def numbers_of(plan: DevicePlan) -> list[int]:
    assert len(plan.packs) == 2 * plan.num_batches or plan.num_batches == 1
    return [position - 1 for position in plan.positions]


def test_groups_grow_so_that_the_first_batch_comes_as_soon_as_alone() -> None:
    groups = list(map(numbers_of, in_groups(Planner(20, set()).next, 8, Ahead(set()))))
    assert [len(group) for group in groups] == [1, 2, 4, 8, 4, 1]
    assert list(chain.from_iterable(groups)) == list(range(20))


def test_batches_before_a_late_shard_come_together() -> None:
    ahead = Ahead({13, 14})
    groups = list(map(numbers_of, in_groups(Planner(23, set()).next, 8, ahead)))
    #       planned 1, 2, 4, 8 (of which the 7th and 8th are late) and 8
    assert [len(group) for group in groups] == [1, 2, 4, 4, 2, 1, 1, 7, 1]
    assert list(chain.from_iterable(groups)) == list(range(23))
    assert ahead.waited == [13, 14]


@given(
    num=st.integers(0, 40),
    most=st.integers(1, 9),
    stops=st.sets(st.integers(0, 39)),
    late=st.sets(st.integers(0, 39)),
    lost=st.none() | st.integers(0, 39),
)
def test_plans_stay_in_order_and_none_waits_for_what_only_a_later_one_needs(
    num: int, most: int, stops: set[int], late: set[int], lost: int | None
) -> None:
    ahead, groups, is_lost = Ahead(late, lost), [], lost is not None and lost < num
    try:
        for plan in in_groups(Planner(num, stops).next, most, ahead):
            groups.append(numbers_of(plan))
            assert 1 <= plan.num_batches <= most
            # There was no waiting for later shards, and none at all for a group of several batches.
            assert max(ahead.waited, default=0) <= groups[-1][-1]
            assert plan.num_batches == 1 or not ahead.late.intersection(groups[-1])
    except DataError:
        assert is_lost
    else:
        assert not is_lost
    end = lost if is_lost else num
    assert list(chain.from_iterable(groups)) == list(range(end))
    assert ahead.waited == sorted(number for number in late if number < end)


def test_batches_of_a_group_are_let_go_one_by_one() -> None:
    group = ReadGroup(failure=ValueError("the third"))
    group.batches.extend(["first", "second"])
    delivered = iter(group)
    assert next(delivered) == "first"
    assert list(group.batches) == ["second"]
    assert next(delivered) == "second"
    with pytest.raises(ValueError, match="the third"):
        next(delivered)
