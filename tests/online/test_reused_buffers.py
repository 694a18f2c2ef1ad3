"""Sources that fill the same buffer for every item give the batches of fresh items."""

from __future__ import annotations

from functools import partial
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
    Payloads,
)
from streampack.compat.torchdata import MaxTokenBucketizer
from streampack.compat.torchtune import PackedDataset
from streampack.write import write_stream
from tests.helpers.examples import examples

PACKING = Packing(max_seq_len=16, buffer_tokens=256)
KINDS = ("list", "array", "tensor")
SAMPLES = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=20)


class Source:
    """Gives new objects for every item, or fills the memory of the one before it."""

    def __init__(
        self, samples: list[list[int]], kind: str, fields: tuple[str, ...], *, reuses: bool
    ) -> None:
        # The first one tells that the targets are not shifted.
        self.samples, self.kind, self.fields = [[5, 6, 7, 8], *samples], kind, fields
        self.buffers: dict[str, Any] | None = {} if reuses else None

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
        item: Any = {field: self.values(sample, field) for field in self.fields}
        item = item or self.values(sample, "")
        return item if self.buffers is None else refilled(self.buffers, "item", item)

    def __iter__(self) -> Any:
        return map(self.item, self.samples)


class Indexed(Source):
    """The same as a map-style dataset."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.item(self.samples[number])


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
    "payloads": (("tokens", "images"), {"payloads": Payloads({"images": None})}),
    "text": (("text",), {"tokenizer": Words()}),
    "text, mask": (("text", "loss_mask"), {"tokenizer": Words(), "loss_mask": "loss_mask"}),
    "text, payloads": (
        ("text", "images"),
        {"tokenizer": Words(), "payloads": Payloads({"images": None})},
    ),
}


def seen(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as text that only equal batches have."""
    return {key: repr(value) for key, value in batch.items()}


def packs_of(source: Source, options: dict[str, Any], **others: Any) -> Any:
    return PackedIterableDataset(
        [IterableStream(source, **options)], packing=PACKING, batch_size=2, **others
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", [Source, Indexed])
@examples(4, many=6)
@given(samples=SAMPLES, kind=st.sampled_from(KINDS), order=st.sampled_from([None, Order(seed=3)]))
def test_packs_are_those_of_fresh_items(way, name, kind, samples, order):
    fields, options = OPTIONS[name]
    fresh, reused = (
        list(map(seen, packs_of(way(samples, kind, fields, reuses=reuses), options, order=order)))
        for reuses in (False, True)
    )
    assert reused == fresh


def buckets(source: Source) -> Any:
    bucketing = Bucketing(max_tokens=64, buffer_samples=5)
    return BucketedIterableDataset([IterableStream(source)], bucketing=bucketing)


def torchtune(source: Source, split: bool) -> Any:
    return PackedDataset(source, max_seq_len=12, split_across_pack=split)


def torchdata(source: Source) -> Any:
    len_fn = (lambda item: len(item["tokens"])) if source.fields else len
    return MaxTokenBucketizer(source, 24, len_fn, buffer_size=4)


@pytest.mark.parametrize(
    ("collect", "fields"),
    [
        (buckets, ("tokens",)),
        (partial(torchtune, split=True), ("tokens", "labels")),
        (partial(torchtune, split=False), ("tokens", "labels")),
        *((torchdata, fields) for fields in [(), ("tokens",), ("tokens", "images")]),
    ],
)
@examples(10, many=15)
@given(samples=SAMPLES, kind=st.sampled_from(KINDS))
def test_batches_of_all_kinds_are_those_of_fresh_items(collect, fields, kind, samples):
    # Each batch is kept until the end, as a loop that collects them would.
    fresh, reused = (
        repr(list(collect(Source(samples, kind, fields, reuses=reuses))))
        for reuses in (False, True)
    )
    assert reused == fresh


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize("fields", [(), ("tokens", "loss_mask")])
def test_a_stream_is_written_as_from_fresh_items(fields, kind, tmp_path):
    samples = [[(7 * n + k) % 90 + 1 for k in range(n % 11 + 1)] for n in range(60)]
    for reuses in (False, True):
        source = Source(samples, kind, fields, reuses=reuses)
        write_stream(source, tmp_path / str(reuses), size_limit=600)

    for path in sorted((tmp_path / "False").iterdir()):
        assert path.read_bytes() == (tmp_path / "True" / path.name).read_bytes()
