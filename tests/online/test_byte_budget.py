"""`Buffers(worker_bytes=...)` of iterables, compared with the memory really used."""

from __future__ import annotations

import gc
import re
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    Buffers,
    ConfigError,
    IterableStream,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    Payloads,
)
from streampack.batch.formats.others import to_megatron
from streampack.batch.formats.registry import FORMATS
from streampack.online.byte_budget import (
    HeldMemory,
    added_bytes,
    batch_bytes,
    format_bytes,
    num_bytes,
    tensor_bytes,
)
from streampack.runtime.resumable import engine_of
from tests.helpers.examples import examples
from tests.helpers.iterables import ByChar

SIZE = 64
IMAGE = 1 << 16  # bytes of a payload
LEAST = re.compile(r"worker_bytes to at least (\d+)")


def real_bytes(*batches) -> int:
    """The bytes of all memory that the tensors of some batches are in."""
    storages = {}
    waiting = list(batches)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple):
            waiting.extend(thing)
    return sum(storages.values())


@examples(12, many=40)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=60),
    batch_size=st.integers(1, 3),
    batch_format=st.sampled_from(sorted(FORMATS)),
)
def test_no_batch_in_any_format_takes_more_than_was_reckoned(lengths, batch_size, batch_format):
    assume(batch_format != "llama_factory" or batch_size == 1)  # which takes no more
    dataset = PackedIterableDataset(
        [IterableStream([[1] * n for n in lengths])],
        packing=Packing(max_seq_len=SIZE),
        batch_size=batch_size,
    )
    make, plan = FORMATS[batch_format], engine_of(dataset).plan
    for batch in dataset:
        assert real_bytes(batch) <= tensor_bytes(batch) + 4096 <= batch_bytes(plan) + 4096
        made = make(batch)
        assert real_bytes(made, batch) - real_bytes(batch) == added_bytes(made, batch)
        assert added_bytes(made, batch) <= format_bytes(make, plan)


@examples(15, many=30)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=80),
    include_padding=st.booleans(),
    max_samples=st.none() | st.integers(1, 5),
)
def test_no_bucketed_batch_takes_more_than_was_reckoned(lengths, include_padding, max_samples):
    rows = [{"tokens": [1] * n, "weight": [0.5] * n} for n in lengths]
    dataset = BucketedIterableDataset(
        [IterableStream(rows, token_fields={"weight": "float64"})],
        bucketing=Bucketing(
            max_tokens=SIZE,
            include_padding=include_padding,
            max_samples=max_samples,
            buffer_samples=20,
        ),
    )
    for batch in dataset:
        assert tensor_bytes(batch) <= batch_bytes(engine_of(dataset).plan)


@pytest.mark.parametrize("batch_format", sorted(FORMATS))
def test_a_format_counts_and_the_least_that_is_named_works(batch_format):
    def make(limit):
        return PackedIterableDataset(
            [IterableStream([[1] * 9] * 90)],
            packing=Packing(max_seq_len=SIZE),
            buffers=Buffers(worker_bytes=limit),
            batch_size=1 if batch_format == "llama_factory" else 2,
            batch_format=batch_format,
        )

    with pytest.raises(ConfigError, match=r"Buffers\(worker_bytes=1\) cannot hold .*") as refused:
        make(1)
    least = int(LEAST.search(str(refused.value))[1])
    with pytest.raises(ConfigError, match=f"at least {least}"):
        make(least - 1)
    seen = [real_bytes(batch) for batch in make(least)]
    assert max(seen) <= least
    if batch_format == "torchtune":
        assert least >= 2 * SIZE * SIZE


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_function_of_ones_own_is_measured_at_each_batch(num_workers):
    def masks(batch):
        return {"mask": torch.ones(2, SIZE, SIZE, dtype=torch.float64), "tokens": batch["tokens"]}

    def loader(limit, batch_format=masks):
        dataset = PackedIterableDataset(
            [IterableStream([[1] * 9] * 90)],
            packing=Packing(max_seq_len=SIZE),
            buffers=Buffers(worker_bytes=limit),
            batch_size=2,
            batch_format=batch_format,
        )
        return PackedDataLoader(dataset, num_workers=num_workers)

    with pytest.raises(ConfigError, match="65536 bytes that batch_format adds") as refused:
        list(loader(40_000))
    least = int(LEAST.search(str(refused.value))[1])
    assert sum(1 for _ in loader(least)) > 3
    assert sum(1 for _ in loader(40_000, partial(to_megatron, pad_to=4))) > 3


class Images:
    """Can be iterated again, and makes its samples again each time."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self):
        for number, size in enumerate(self.sizes):
            yield {"tokens": [number + 1] * 8, "image": np.zeros(size, np.uint8)}


def image_loader(limit, sizes, prefetch_factor):
    """Packs of 8 samples, and 32 samples that wait at most."""
    dataset = PackedIterableDataset(
        [IterableStream(Images(sizes), payloads=Payloads({"image": None}), name="pictures")],
        packing=Packing(max_seq_len=SIZE, buffer_samples=32),
        buffers=Buffers(worker_bytes=limit),
    )
    return PackedDataLoader(dataset, prefetch_factor=prefetch_factor)


@pytest.mark.processes
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_memory_that_payloads_really_take_stays_below_the_bound(ahead):
    limit = (ahead * 8 + 40) * IMAGE
    sizes = [IMAGE * (1 + n % 2) // 2 for n in range(2000)]
    loader = image_loader(limit, sizes, ahead)
    batches = iter(loader)
    next(batches)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(60):
            next(batches)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        batches.close()
    # What was there before counts as nothing here, so the peak is that of what came.
    assert peak <= limit + IMAGE, "the sample that is being sliced comes on top"
    # Of 60 batches, the loader also knows the provenance, about a kilobyte each.
    assert peak <= loader.stats()["buffers"]["worker_bytes"] + 5 * IMAGE


@pytest.mark.processes
@examples(8, many=15)
@given(
    sizes=st.lists(st.integers(1, 50_000), min_size=20, max_size=60),
    ahead=st.integers(1, 4),
    limit=st.integers(20_000, 900_000),
)
def test_the_mark_is_what_there_was_and_never_passes_the_bound(sizes, ahead, limit):
    for _ in range(len(sizes) + 1):
        try:
            loader = image_loader(limit, sizes, ahead)
            batches = list(loader)
            break
        except ConfigError as error:
            refused, limit = limit, int(LEAST.search(str(error))[1])
        assert limit > refused
    mark = loader.stats()["buffers"]["worker_bytes"]
    most = max(
        tensor_bytes(batch) + sum(image.nbytes for image in batch["image"]) for batch in batches
    )
    assert most <= mark <= limit


def test_values_for_each_token_count_in_batches_and_are_known_before():
    rows = [{"tokens": [1] * 8, "weight": [0.5] * 8}] * 200

    def loader(limit):
        dataset = PackedIterableDataset(
            [IterableStream(rows, token_fields={"weight": "float64"})],
            packing=Packing(max_seq_len=SIZE),
            buffers=Buffers(worker_bytes=limit),
        )
        return PackedDataLoader(dataset)

    with pytest.raises(ConfigError, match=r"worker_bytes=99\) cannot hold") as refused:
        loader(99)
    least = int(LEAST.search(str(refused.value))[1])
    made = loader(least)
    most = max(map(tensor_bytes, made))
    assert SIZE * (28 + 8) < most <= made.stats()["buffers"]["worker_bytes"] <= least


def test_few_payloads_are_packed_together():
    drawn = []

    def source():
        for number in range(100):
            drawn.append(number)
            yield {"text": "abcdefgh", "image": np.zeros(9, np.uint8)}

    stream = IterableStream(source(), tokenizer=ByChar(), payloads=Payloads({"image": None}))
    packing = Packing(max_seq_len=SIZE)
    next(iter(PackedIterableDataset([stream], packing=packing)))
    assert len(drawn) == 64


class Picture:
    """As PIL's images: it says its size and bands, and no bytes."""

    size = (30, 20)

    def getbands(self):
        return ("R", "G", "B")


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (np.zeros((3, 4), np.float32), 48),
        (torch.zeros(3, 4), 48),
        (memoryview(bytes(70)), 70),
        ({"a": np.zeros(5), "b": [np.zeros(2), np.zeros(1)]}, 64),
        (Picture(), 1800),
    ],
)
def test_a_payloads_bytes_are_those_of_its_values(thing, expected):
    assert num_bytes((thing, thing)) == 2 * num_bytes(thing) == 2 * expected


def test_a_format_of_ones_own_needs_no_bound():
    dataset = PackedIterableDataset(
        [IterableStream([[1] * 8, [2] * 8])],
        packing=Packing(max_seq_len=8),
        batch_format=lambda batch: batch["tokens"].tolist(),
    )
    assert list(dataset) == [[[1] * 8], [[2] * 8]]


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_finished_batches_count_until_they_are_delivered(ahead):
    held = HeldMemory(1000, 100, ahead)
    for _ in range(6):
        held.finish(tensors=10, payloads=50)
    held.payloads = 1000 - 100 - 50 * (ahead - 1)

    held.check("sample 7")
    held.payloads += 1
    with pytest.raises(ConfigError, match=f"{ahead - 1} finished batches .* at least 1001"):
        held.check("sample 7")
    assert held.high_water_bytes == 60 * ahead
