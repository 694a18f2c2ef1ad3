"""Pooled memory is reused quickly, but never while a tensor still refers to it."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack.batch.buffer_pool import KEPT, KEPT_LAYOUTS, BufferPool, _lay_out

SHAPES: list[Any] = [(np.int64, (3, 5)), (np.int32, (3, 5)), (np.uint16, (7,))]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=60))
def test_no_two_batches_that_are_held_share_a_byte(steps: list[tuple[int, int]]) -> None:
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


def test_a_block_is_used_again_once_its_last_tensor_is_gone() -> None:
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


def test_batches_of_many_sizes_leave_a_bounded_number_of_layouts() -> None:
    blocks = BufferPool()
    for size in range(1, 2 * KEPT_LAYOUTS):
        [array], [[tensor]] = blocks.take((np.int64, (2, size)))
        assert array.shape == tuple(tensor.shape) == (2, size)
    assert _lay_out.cache_info().currsize <= KEPT_LAYOUTS


def test_a_tensor_that_autograd_keeps_keeps_its_memory() -> None:
    blocks = BufferPool()
    [array], [[tensor]] = blocks.take((np.int64, (4,)))
    array[:] = [1, 2, 3, 4]
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * tensor.float().view(4)).sum() + weight[tensor - 1].sum()
    del array, tensor
    [other], _ = blocks.take((np.int64, (4,)))
    other[:] = 0
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 3, 4, 5]


def test_blocks_that_die_in_other_threads_come_back() -> None:
    blocks = BufferPool()
    held = [blocks.take(*SHAPES) for _ in range(KEPT)]
    places = {arrays[0].ctypes.data for arrays, _ in held}
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    again = [blocks.take(*SHAPES) for _ in range(KEPT)]
    assert {arrays[0].ctypes.data for arrays, _ in again} == places


def test_a_copy_for_another_process_has_no_blocks_of_this_one() -> None:
    blocks = BufferPool()
    blocks.take((np.int64, (1 << 16,)))
    assert len(pickle.dumps(blocks)) < 500
    assert pickle.loads(pickle.dumps(blocks)).take((np.int64, (2,)))[1][0][0].shape == (2,)


@given(num_parts=st.integers(1, 4), num_rows=st.integers(1, 3))
def test_parts_are_the_arrays_cut_and_any_of_them_keeps_all(num_parts: int, num_rows: int) -> None:
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
