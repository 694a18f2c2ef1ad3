"""Plans that are read as a group give the same batches and fail in the same places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter

from streampack import Buffers, Mixing, Packing, Stream
from streampack.errors import DataError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.batch_groups import (
    GROUP_BYTES,
    MOST_AT_ONCE,
    in_groups,
    read_group,
)
from streampack.planned.cache_budget import ReadAhead
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.loading import PlannedLoading
from streampack.runtime.resumable import engine_of
from streampack.world import World
from tests.helpers.batches import LENGTHS, same, stream_with_targets
from tests.helpers.builders import stream_of
from tests.helpers.examples import crossed


def dataset_of(streams: list[Stream], **options: Any) -> PackedStreamingDataset:
    packing = Packing(**{"max_seq_len": 64, **options.pop("packing", {})})
    return PackedStreamingDataset(streams, packing=packing, **{"batch_size": 3, **options})


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Two streams, one without labels and one with a loss mask."""
    folder = tmp_path_factory.mktemp("streams")
    plain = stream_of(folder / "plain", LENGTHS, weights={"repeat": 2})
    return [plain, stream_with_targets(folder / "masked", "mask")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("format_and_packing", "which", "most"),
    [
        *crossed(
            [
                ("native", {}),
                ("compact", {}),
                ("hf", {"pad_to_multiple": 4}),
                ("native", {"pad_to_multiple": 4, "positions": "continue"}),
                ("compact", {"pad_to_multiple": 4, "positions": "continue"}),
            ],
            ["both", "plain", "masked"],
            [8, 3],
        ),
        (("compact", {}), "masked", 1),
        (("native", {}), "masked", 1),
    ],
)
def test_batches_that_are_read_at_once_are_those_that_are_read_alone(
    streams, format_and_packing, which, most
):
    batch_format, packing = format_and_packing
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


def group_of(loader: PackedDataLoader) -> int:
    assert isinstance(loader._loading, PlannedLoading)
    return loader._loading._group


def test_groups_are_no_larger_than_there_is_room_for(streams):
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


def test_a_bad_sample_fails_its_own_batch_and_none_before_it(tmp_path):
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


def test_a_format_of_ones_own_is_asked_for_a_batch_at_a_time(streams):
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
