"""Custom sources: planned, split, resumed and refused as any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from streampack import (
    ConfigError,
    DataError,
    HeldOut,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    ResumeError,
    Shards,
    Stream,
    from_config,
    register_source,
)
from streampack.streams.registry import SOURCES_OF_OTHERS
from streampack.testing import assert_resumes

SAMPLES = [[[10 * shard + n + 1] * (n % 4 + 1) for n in range(9)] for shard in range(6)]


@dataclass(frozen=True)
class Numbers:
    dtype: str = "uint16"
    lost: int = 0
    name: str = "numbers"
    digest: str = "1"

    @property
    def shards(self) -> list[int]:
        return [len(samples) for samples in SAMPLES]

    def open(self, opening: Any) -> Numbers:  # noqa: ARG002
        return self

    def lengths(self, shard: int) -> list[int]:
        return [len(sample) for sample in SAMPLES[shard]]

    def read(self, shard: int) -> np.ndarray:
        ids = np.concatenate(SAMPLES[shard]).astype(self.dtype)
        return ids[: len(ids) - self.lost]


def dataset_of(source: Any, **options: Any) -> PackedStreamingDataset:
    return PackedStreamingDataset([Stream(source, **options)], packing=Packing(max_seq_len=8))


def tokens_of(dataset: PackedStreamingDataset) -> list[int]:
    batches = list(PackedDataLoader(dataset, num_workers=0))
    return sorted(
        t for batch in batches for t in batch["tokens"][batch["document_ids"] > 0].tolist()
    )


def test_each_token_is_delivered_once_or_held_out():
    everything = sorted(token for samples in SAMPLES for sample in samples for token in sample)
    for dtype in ("uint16", ">i4", "int64"):
        assert tokens_of(dataset_of(Numbers(dtype, digest=dtype))) == everything
    for by in ("row", "shard"):
        sides = [HeldOut(side, 0.25, by=by) for side in ("train", "held_out")]
        train, held = (tokens_of(dataset_of(Numbers(), held_out=side)) for side in sides)
        assert held
        assert sorted(train + held) == everything


def test_a_run_resumes_with_worker_processes():
    assert_resumes(
        lambda: PackedDataLoader(dataset_of(Numbers(), repeat=2), num_workers=2), every=12
    )


def test_other_contents_are_another_stream():
    state = PackedDataLoader(dataset_of(Numbers())).state_dict()
    with pytest.raises(ResumeError, match="numbers"):
        PackedDataLoader(dataset_of(Numbers(digest="2"))).load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"lost": 1}, {"dtype": "float32"}])
def test_what_is_read_must_be_as_many_ids_as_the_lengths_say(wrong):
    with pytest.raises(
        DataError, match=r"stream 'numbers', shard \d: its source reads .* says len"
    ):
        tokens_of(dataset_of(Numbers(**wrong, digest=str(wrong))))


def test_a_registered_source_is_written_as_yaml_and_read_again(tmp_path, monkeypatch):
    for name in ("more_shards", "numbers"):
        monkeypatch.setitem(SOURCES_OF_OTHERS, name, None)  # so that they are gone afterwards
    path = tmp_path / "run.yaml"
    dataset = dataset_of(Numbers(digest="3"))
    with pytest.raises(ConfigError, match=r"source is a Numbers, .* streampack\.register_source"):
        dataset.to_config(path)
    register_source("more_shards", Shards)
    register_source("numbers", Numbers)
    dataset.to_config(path)
    assert "- source:\n    numbers:\n      digest: '3'" in path.read_text()
    assert tokens_of(from_config(path)) == tokens_of(dataset)
