"""First fit and best fit: which pack a sample joins, and which pack closes."""

from __future__ import annotations

import pytest

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.types import LENGTH, SAMPLE, START, Packs
from tests.helpers.oracles import rows_of


def samples_of(packs: Packs) -> list[list[int]]:
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "closed", "left"),
    [("first_fit", [[0, 2]], [[1], [3]]), ("best_fit", [[1, 2], [0, 3]], [])],
)
def test_first_fit_takes_the_oldest_pack_with_room_and_best_fit_the_fullest(method, closed, left):
    packer = make_packer(Packing(max_seq_len=8, method=method, open_packs=2))

    assert samples_of(packer.add(rows_of([4, 5, 3, 4]))) == closed
    assert samples_of(packer.flush()) == left


@pytest.mark.parametrize("method", ["first_fit", "best_fit"])
def test_a_pack_that_closes_with_a_large_gap_takes_the_head_of_who_fits_nowhere(method):
    packing = Packing(max_seq_len=100, method=method, open_packs=1, split_gap=0.2, min_fragment=10)
    packer = make_packer(packing)

    packs = packer.add(rows_of([70, 60, 75]))

    # Sample 2 is cut before its last 10 tokens, not at the gap of 70: no shorter piece is left.
    rows = packs.segments[:, [SAMPLE, START, LENGTH]].tolist()
    assert rows == [[0, 0, 70], [1, 0, 30], [1, 30, 30], [2, 0, 65]]
    assert packer.held[0] == 10


@pytest.mark.parametrize("method", ["first_fit", "best_fit"])
def test_a_guard_lets_out_what_nobody_joins(method):
    lengths = [60] + [50] * 20

    def place(**options):
        packing = Packing(max_seq_len=100, method=method, open_packs=3, **options)
        packer = make_packer(packing)
        packs = samples_of(Packs.join([packer.add(rows_of(lengths)), packer.flush()]))
        return [0 in pack for pack in packs].index(True)

    assert place() == 10
    assert place(guard=4) == 4
