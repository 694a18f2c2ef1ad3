"""The slots of a stream that has ended go to the stream that is owed most."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from streampack import IterableStream, Mixing, Order, PackedIterableDataset, Packing
from streampack.mix.schedule import Schedule


def with_substitutes(wanted: list[int], amounts: tuple[int, ...], left: list[int]) -> list[int]:
    """The streams that serve slots, by the definition; `left` are the packs of each."""
    served = [0] * len(amounts)
    for number, stream in enumerate(wanted):
        live = [other for other in range(len(amounts)) if left[other]]
        owed = {s: amounts[s] * (number + 1) - served[s] * sum(amounts) for s in live}
        chosen = stream if left[stream] else max(live, key=owed.__getitem__)
        served[chosen] += 1
        left[chosen] -= 1
        wanted[number] = chosen
    return wanted


@pytest.mark.parametrize("weights", [(8, 5, 1), (4, 1, 6)])
def test_a_slot_whose_stream_has_ended_goes_to_the_one_owed_most(weights):
    sizes = [3, 40, 40]  # samples, each of which fills a pack
    dataset = PackedIterableDataset(
        [
            IterableStream([[number] * 4] * size, name=str(number), proportion=weight)
            for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        ],
        packing=Packing(max_seq_len=4),
        mixing=Mixing(batching_method="stratified"),
        order=Order(seed=1),
    )
    got = [int(batch["tokens"][0, 0]) for batch in dataset]

    path = ("buffered", 0, 0)  # epoch, rank
    slots = Schedule(weights, block=1, seed=1, seed_path=path).blocks()
    wanted = np.concatenate(list(islice(slots, sum(sizes)))).tolist()
    assert got == with_substitutes(wanted, weights, sizes)
