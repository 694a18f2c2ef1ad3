"""Sources that fill the same buffer for every item give the batches of fresh items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    IterableStream,
    Order,
    PackedIterableDataset,
    Packing,
)
from streampack.compat.torchdata import MaxTokenBucketizer
from streampack.compat.torchtune import PackedDataset
from streampack.write import write_stream
from tests.helpers.examples import examples

PACKING = Packing(max_seq_len=16, buffer_tokens=256)
KINDS = ("list", "array", "tensor")
SAMPLES = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=20)


class Fresh:
    """Gives new objects for every item."""

    def __init__(self, samples: list[list[int]], kind: str, fields: tuple[str, ...]) -> None:
        # The first one tells that the targets are not shifted.
        self.samples, self.kind, self.fields = [[5, 6, 7, 8], *samples], kind, fields

    def values(self, sample: list[int], field: str) -> Any:
        if field == "text":
            return " ".join(map(str, sample))
        if field == "loss_mask":
            sample = [token % 2 for token in sample]
        if field == "targets":
            sample = [-100] * (len(sample) // 2) + sample[len(sample) // 2 :]
        if field == "images":
            return [np.array(sample), torch.tensor(sample), {"a": [sample[:1]]}]
        return {"list": list, "array": np.array, "tensor": torch.tensor}[self.kind](sample)

    def item(self, sample: list[int]) -> Any:
        if not self.fields:
            return self.values(sample, "")
        return {field: self.values(sample, field) for field in self.fields}

    def __iter__(self) -> Any:
        return map(self.item, self.samples)


class Reuses(Fresh):
    """Gives one dict, and lists, arrays and tensors that share the memory of one buffer each."""

    def __iter__(self) -> Any:
        given: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for sample in self.samples:
            if not self.fields:
                yield refilled(buffers, "", self.values(sample, ""))
                continue
            for field in self.fields:
                given[field] = refilled(buffers, field, self.values(sample, field))
            yield given


def refilled(buffers: dict[str, Any], key: str, value: Any) -> Any:
    """Return `value` in the memory that had the one before it under this key."""
    if isinstance(value, list):
        kept = buffers.setdefault(key, [])
        kept[:] = [refilled(buffers, f"{key}.{n}", each) for n, each in enumerate(value)]
        return kept
    if isinstance(value, dict):
        kept = buffers.setdefault(key, {})
        kept.update({k: refilled(buffers, f"{key}.{k}", each) for k, each in value.items()})
        return kept
    if isinstance(value, np.ndarray | torch.Tensor):
        if key not in buffers:
            like = np.zeros(100, np.int64)
            buffers[key] = like if isinstance(value, np.ndarray) else torch.from_numpy(like)
        buffers[key][: len(value)] = value
        return buffers[key][: len(value)]
    return value


class Indexed(Reuses):
    """A map-style dataset that fills the same buffers for every index."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffers: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        item = self.item(self.samples[number])
        return refilled(self.buffers, "item", item)


class FreshIndexed(Indexed):
    def __getitem__(self, number: int) -> Any:
        return self.item(self.samples[number])


PAIRS = [(Fresh, Reuses), (FreshIndexed, Indexed)]


class Words:
    """A tokenizer of numbers."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bare": ((), {}),
    "tokens": (("tokens",), {}),
    "labels": (("tokens", "labels"), {"labels": "labels", "labels_shifted": False}),
    "looked at": (("tokens", "targets"), {"labels": "targets"}),
    "mask": (("tokens", "loss_mask"), {"loss_mask": "loss_mask"}),
    "fields": (("tokens", "weight"), {"token_fields": {"weight": "float32"}}),
    "payloads": (("tokens", "images"), {"payloads": {"images": None}}),
    "text": (("text",), {"tokenizer": Words()}),
    "text, mask": (("text", "loss_mask"), {"tokenizer": Words(), "loss_mask": "loss_mask"}),
    "text, payloads": (("text", "images"), {"tokenizer": Words(), "payloads": {"images": None}}),
}


def seen(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as text that only equal batches have."""
    return {key: repr(value) for key, value in batch.items()}


def batches_of(source: Any, options: dict[str, Any], **others: Any) -> list[dict[str, Any]]:
    dataset = PackedIterableDataset(
        [IterableStream(source, **options)], packing=PACKING, batch_size=2, **others
    )
    return list(map(seen, dataset))


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("pair", PAIRS, ids=["iterable", "indexed"])
@examples(6)
@given(samples=SAMPLES, kind=st.sampled_from(KINDS))
def test_packs_are_those_of_fresh_items(pair, name, kind, samples):
    fields, options = OPTIONS[name]
    fresh, reuses = (each(samples, kind, fields) for each in pair)
    order = Order(seed=3)

    assert batches_of(reuses, options) == batches_of(fresh, options)
    assert batches_of(reuses, options, order=order) == batches_of(fresh, options, order=order)


@examples(15)
@given(samples=SAMPLES, kind=st.sampled_from(KINDS))
def test_buckets_are_those_of_fresh_items(kind, samples):
    bucketing = Bucketing(max_tokens=64, buffer_samples=5)

    def batches(source):
        streams = [IterableStream(source(samples, kind, ("tokens",)))]
        return list(map(seen, BucketedIterableDataset(streams, bucketing=bucketing)))

    assert batches(Reuses) == batches(Fresh)


@pytest.mark.parametrize("split", [True, False])
@examples(15)
@given(samples=SAMPLES, kind=st.sampled_from(KINDS))
def test_torchtunes_packs_are_those_of_fresh_items(split, kind, samples):
    def packs(source):
        made = source(samples, kind, ("tokens", "labels"))
        return list(map(seen, PackedDataset(made, max_seq_len=12, split_across_pack=split)))

    assert packs(Reuses) == packs(Fresh)


@pytest.mark.parametrize("fields", [(), ("tokens",), ("tokens", "images")])
@examples(15)
@given(samples=SAMPLES, kind=st.sampled_from(KINDS))
def test_torchdatas_batches_are_those_of_fresh_items(fields, kind, samples):
    def batches(source):
        made = source(samples, kind, fields)
        len_fn = (lambda item: len(item["tokens"])) if fields else len
        # Each is kept until the end, as a loop that collects them would.
        return repr(list(MaxTokenBucketizer(made, 24, len_fn, buffer_size=4)))

    assert batches(Reuses) == batches(Fresh)


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize("fields", [(), ("tokens", "loss_mask")])
def test_a_stream_is_written_as_from_fresh_items(fields, kind, tmp_path):
    samples = [[(7 * n + k) % 90 + 1 for k in range(n % 11 + 1)] for n in range(60)]
    for source in (Fresh, Reuses):
        write_stream(source(samples, kind, fields), tmp_path / source.__name__, size_limit=600)

    for path in sorted((tmp_path / "Fresh").iterdir()):
        assert path.read_bytes() == (tmp_path / "Reuses" / path.name).read_bytes()
