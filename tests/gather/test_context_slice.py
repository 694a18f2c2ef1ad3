"""The slice of a context-parallel rank has the right slots, and nothing else is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming import MDSWriter

from streampack.config import Packing
from streampack.errors import DataError
from streampack.gather.context_slice import ContextSlice, Pieces
from streampack.gather.gather import Gatherer
from streampack.streams import open_stream
from streampack.streams.stream import Stream
from streampack.types import LENGTH, Packs
from tests.helpers.slices import LAYOUTS, slots


@st.composite
def planned(draw: st.DrawFn) -> tuple[ContextSlice, Packs, dict[str, int]]:
    """A slice, and packs with rows that it can divide."""
    num_ranks, layout = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from(LAYOUTS))
    frame_rows = 1 if layout.endswith("per_document") else draw(st.integers(1, 3))
    context = ContextSlice(
        rank=draw(st.integers(0, num_ranks - 1)),
        num_ranks=num_ranks,
        layout=layout,
    )
    multiple = context.num_parts if context.is_per_document else draw(st.sampled_from([1, 2]))
    row_tokens = 2 * context.num_parts * draw(st.integers(1, 4))
    if frame_rows > 1:
        context = replace(context, frame_tokens=frame_rows * row_tokens)
    num_rows = frame_rows * draw(st.integers(1, 3))
    segments, ends = [], []
    for _ in range(draw(st.integers(0, num_rows))):
        room = row_tokens // multiple
        while room and draw(st.booleans()):
            taken = draw(st.integers(1, room))
            length = taken * multiple - draw(st.integers(0, multiple - 1))
            segments.append([0, 0, len(segments), start := draw(st.integers(0, 5)), length, 0])
            segments[-1][-1] = start + length + draw(st.integers(0, 1))
            room -= taken
        ends.append(len(segments))
    packs = Packs(
        segments=np.array(segments, np.int64).reshape(-1, 6), ends=np.array(ends, np.int64)
    )
    return context, packs, {"num_rows": num_rows, "row_tokens": row_tokens, "multiple": multiple}


def shape_of(context: ContextSlice, sizes: dict[str, int]) -> tuple[int, int]:
    """The shape of the slices of whole rows."""
    return sizes["num_rows"], sizes["row_tokens"] // context.num_ranks


def pieces_of(context: ContextSlice, packs: Packs, sizes: dict[str, int]) -> Pieces:
    """The pieces of the slices of whole rows."""
    return context.pieces(packs, shape_of(context, sizes), sizes["multiple"])


def named_slots(packs: Packs, num_rows: int, row_tokens: int, multiple: int) -> tuple[Any, Any]:
    """The (segment, offset) of each slot, and all edges; padding has segment -1."""
    named, edges, k = [], [0], 0
    for row in range(num_rows):
        begin = len(named)
        for segment in packs[row] if row < len(packs) else ():
            room = -(-int(segment[LENGTH]) // multiple) * multiple
            named += [(k, i) for i in range(room)]
            edges.append(len(named))
            k += 1
        rest = row_tokens - (len(named) - begin)
        named += [(-1, i) for i in range(rest)]
        edges += [len(named)] if rest else []
    return named, edges


@given(case=planned())
def test_pieces_are_the_slots_that_trainers_give_the_rank(case):
    context, packs, sizes = case
    named, edges = named_slots(packs, **sizes)
    frame = context.frame_tokens or sizes["row_tokens"]
    wanted = slots(context.layout, context.num_ranks, context.rank, edges, frame)

    pieces = pieces_of(context, packs, sizes)
    found: list[Any] = []
    for at, length, tokens, segment, skipped, document in pieces.rows.tolist():
        assert at == len(found) % (frame // context.num_ranks)
        assert (document > 0) == (segment >= 0)
        own = packs.segments[segment, LENGTH] if segment >= 0 else 0
        assert tokens == max(min(own - skipped, length), 0)
        found += [(segment, skipped + i) for i in range(length)]
    assert found == [named[slot] for slot in wanted]

    chunks = context.chunks(np.array(edges, np.int32), sizes["num_rows"])
    assert [slot for begin, end in chunks.tolist() for slot in range(begin, end)] == wanted


def write(folder: Path, samples: list[list[int]]) -> Any:
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}) as writer:
        for tokens in samples:
            writer.write({"tokens": np.array(tokens, np.int32)})
    return open_stream(Stream(local=str(folder)), 0)


def whole_packs(lengths: list[int]) -> Packs:
    """Packs of one sample each."""
    segments = [[0, 0, number, 0, length, length] for number, length in enumerate(lengths)]
    return Packs(segments=np.array(segments), ends=np.arange(1, len(lengths) + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_touches_its_own_tokens_and_the_ones_behind_only(tmp_path, layout, rank):
    num_ranks, lengths, packing = 4, [64, 40], Packing(max_seq_len=64, pad_to_multiple=8)
    context = ContextSlice(rank=rank, num_ranks=num_ranks, layout=layout)
    packs = whole_packs(lengths)
    own = slots(layout, num_ranks, rank, [0, 64, 104, 128], 64)
    samples = [list(range(1, length + 1)) for length in lengths]
    # The gather refuses any negative id that it reads.
    poisoned = [[-7] * length for length in lengths]
    for slot in own:
        row, token = divmod(slot, 64)
        for i in (token, token + 1):
            if i < lengths[row]:
                poisoned[row][i] = samples[row][i]
    stream = write(tmp_path / "poisoned", poisoned)

    rows = Gatherer([stream], packing, context).gather(packs, 2)
    expected = [samples[slot // 64][slot % 64] if slot < 104 else 0 for slot in own]
    assert rows.tokens.reshape(-1).tolist() == expected
    assert (rows.next_tokens != -7).all()
    with pytest.raises(DataError, match="one of its token ids is negative"):
        Gatherer([stream], packing).gather(packs, 2)


def test_the_bytes_of_a_slice_are_an_nth_and_one_token_for_each_piece():
    packs, packing = whole_packs([64] * 10), Packing(max_seq_len=64)
    sizes = {"num_rows": 10, "row_tokens": packing.max_seq_len, "multiple": 1}
    for num_ranks in (2, 4, 8):
        for rank in range(num_ranks):
            context = ContextSlice(rank=rank, num_ranks=num_ranks)
            read, _ = pieces_of(context, packs, sizes).to_read(packs)
            assert read.segments[:, LENGTH].sum() == 640 // num_ranks
            assert len(read.segments) == 20
