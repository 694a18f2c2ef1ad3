"""Looking ahead, and taking several packs together, does not change any pack."""

from __future__ import annotations

import json

import numpy as np
import pytest

from streampack.config import Mixing, Order, Packing
from streampack.plan import sequence, span_slots
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress
from tests.helpers.examples import crossed
from tests.helpers.planning import epoch_sequence, recipe

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(5200, 60), (700, 90)]]


def make(method: str, epoch_end: str) -> Recipe:
    return recipe(
        LENGTHS,
        weights=[{}, {"repeat": 0.5}],
        mixing=Mixing(batching_method=method, epoch_end=epoch_end),
        packing=Packing(max_seq_len=64, buffer_tokens=512, overflow="drop"),
        order=Order(seed=3, shuffle_block_size=500),
        num_lanes=2,
        lane_turn=2,
        global_batch_size=12,
    )


def seen(r: Recipe, view: DeviceView) -> list:
    """Everything that a sequence reports after each batch, skipping every third batch."""
    own = epoch_sequence(r, view, Progress(epoch=1))
    told: list = []
    while (batch := own.next(fetch=len(told) % 3 != 1)) is not None:
        needs = own.shards_ahead()
        told.append(
            [
                batch.packs.segments.tolist(),
                batch.packs.ends.tolist(),
                batch.position,
                json.dumps(own.snapshots()),
                None if needs is None else [needs.ahead.tolist(), needs.finished.tolist()],
                [
                    own.totals.substituted,
                    own.totals.packer_tokens,
                    own.totals.dropped.tolist(),
                    own.num_slots,
                ],
            ]
        )
    own.close()
    return told


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "epoch_end", "view"),
    crossed(
        METHODS,
        ["carry", "pad", "drop"],
        [DeviceView(place=2, num_devices=3, batch_size=4), DeviceView(batch_size=2)],
    ),
)
def test_batches_planned_together_are_those_planned_one_by_one(
    method, epoch_end, view, monkeypatch
):
    r = make(method, epoch_end)
    together = seen(r, view)
    monkeypatch.setattr(span_slots, "AHEAD", 0)
    monkeypatch.setattr(sequence, "TOGETHER", 1)

    assert seen(r, view) == together
    assert len(together) > 50
