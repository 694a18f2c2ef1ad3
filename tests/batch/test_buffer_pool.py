"""Pooled memory is reused quickly, but never while a tensor still refers to it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack.batch.buffer_pool import BufferPool

SHAPES: list[Any] = [(np.int64, (3, 5)), (np.int32, (3, 5)), (np.uint16, (7,))]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=60))
def test_no_two_batches_that_are_held_share_a_byte(steps):
    blocks = BufferPool()
    held: dict[int, tuple[int, list[torch.Tensor]]] = {}
    for number, (place, kind) in enumerate(steps):
        held.pop(place, None)
        arrays, [tensors] = blocks.take(*SHAPES[: kind + 1])
        for array in arrays:
            array[...] = number
        # A caller may keep a whole tensor, a view of one, or the storage of a view.
        keep = [list(tensors), [tensors[-1][1:]], [tensors[0].flatten()[2:4]]]
        held[place] = number, keep[number % 3]
        del array, arrays, tensors, keep
        for written, kept in held.values():
            assert all(bool((tensor.to(torch.int64) == written).all()) for tensor in kept)


def test_a_block_is_used_again_once_its_last_tensor_is_gone():
    blocks = BufferPool()
    arrays, [tensors] = blocks.take(*SHAPES)
    first = arrays[0].ctypes.data
    del arrays
    view = tensors[1][0, 2:]
    del tensors
    others = blocks.take(*SHAPES)
    assert others[0][0].ctypes.data != first
    del view
    assert blocks.take(*SHAPES)[0][0].ctypes.data == first


def test_a_copy_for_another_process_has_no_blocks_of_this_one():
    blocks = BufferPool()
    blocks.take((np.int64, (1 << 16,)))
    assert len(pickle.dumps(blocks)) < 500
    assert pickle.loads(pickle.dumps(blocks)).take((np.int64, (2,)))[1][0][0].shape == (2,)


@given(num_parts=st.integers(1, 4), num_rows=st.integers(1, 3))
def test_parts_are_the_arrays_cut_and_any_of_them_keeps_all(num_parts, num_rows):
    blocks = BufferPool()
    size = num_parts * num_rows
    shapes: list[Any] = [(np.int64, (size, 5)), (np.int32, (size,))]
    arrays, parts = blocks.take(*shapes, num_parts=num_parts)
    for array in arrays:
        array[...] = np.arange(array.size).reshape(array.shape)
    for array, tensors in zip(arrays, zip(*parts, strict=True), strict=True):
        assert torch.cat(tensors).tolist() == array.tolist()
    first, last = arrays[0].ctypes.data, parts[-1][-1]
    del array, arrays, tensors, parts
    assert blocks.take(*shapes)[0][0].ctypes.data != first
    del last
    assert blocks.take(*shapes)[0][0].ctypes.data == first
