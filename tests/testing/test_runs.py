"""The checks of whole runs accept correct loaders, and name the faults of others."""

from __future__ import annotations

import numpy as np
import pytest

from streampack import (
    IterableStream,
    Mixing,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.testing import assert_exactly_once, assert_resumes, assert_same_in_every_world
from tests.helpers import builders

SAMPLES = [list(range(1, 2 + 7 * n % 11)) for n in range(40)]
LENGTHS = [list(map(len, SAMPLES))]


def make_loader() -> PackedDataLoader:
    stream = IterableStream(SAMPLES)
    return PackedDataLoader(PackedIterableDataset([stream], packing=Packing(max_seq_len=16)))


class Forgets:
    """A loader that resumes one batch too late."""

    def __init__(self) -> None:
        self._batches = [{"n": n} for n in range(5)]
        self._next = 0

    def __iter__(self):
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"] + 1


def test_a_loader_that_resumes_is_tried_at_every_batch_but_the_last():
    num_batches = len(list(make_loader()))

    assert assert_resumes(make_loader) == num_batches - 1
    assert assert_resumes(make_loader, every=100) == 2


def test_a_loader_that_does_not_resume_is_refused_with_its_first_wrong_batch():
    with pytest.raises(AssertionError, match="the state after 1: batch 1 differs"):
        assert_resumes(Forgets)


def test_each_sample_once_is_accepted_with_and_without_lengths():
    assert_exactly_once(make_loader())
    assert_exactly_once(make_loader(), LENGTHS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: np.append(s, s[:1], 0), "sample 0, pass 0: its piece .* does not follow"),
        (lambda s: s[1:], "39 samples were delivered, not 40"),
        (lambda s: s - (np.arange(6) == 5) * (s[:, 3:4] == 1), "sample 1: 7 of its 8 tokens"),
    ],
)
def test_a_sample_that_is_repeated_missing_or_cut_is_named(change, message):
    segments = np.concatenate([batch["segments"].numpy() for batch in make_loader()])
    segments = segments[np.lexsort((segments[:, 4], segments[:, 3]))]

    with pytest.raises(AssertionError, match=message):
        assert_exactly_once([{"segments": change(segments)}], LENGTHS)


def test_a_dataset_that_depends_on_the_rank_is_refused_with_the_world(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "s", LENGTHS[0])

    def make(world: World, seed: int = 0) -> PackedStreamingDataset:
        return PackedStreamingDataset(
            [Stream(local=str(path))],
            packing=Packing(max_seq_len=16, eos_id=seed or None),
            mixing=Mixing(global_batch_size=4),
            world=world,
        )

    assert_same_in_every_world(make)
    with pytest.raises(AssertionError, match="2 ranks on 1 nodes: pack 0 differs from that of a"):
        assert_same_in_every_world(lambda world: make(world, seed=world.num_ranks - 1))
