"""A loop is left while its source stalls: the thread that waits for the item reads no further."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from streampack import IterableStream, PackedDataLoader, PackedIterableDataset, Packing
from streampack import _threads as threads
from tests.helpers.batches import same
from tests.helpers.iterables import rows_of

ROWS = rows_of(0, [7, 12, 30, 2, 9, 11, 70, 3, 5, 21] * 40)
STALLS_AT, MEETS_AT = 150, 300


class Stalls:
    """Stalls once, at an item; a later iteration that gets further releases it."""

    def __init__(self, *, stalls: bool) -> None:
        self.is_to_stall = stalls
        self.has_stalled, self.comes = threading.Event(), threading.Event()

    def item(self, index: int) -> list[int]:
        if index == STALLS_AT and self.is_to_stall:
            self.is_to_stall = False
            self.has_stalled.set()
            assert self.comes.wait(30)
        elif index == MEETS_AT and not self.comes.is_set():
            self.comes.set()
            time.sleep(0.1)  # the thread that was left continues meanwhile, if nothing stops it
        return ROWS[index]


class Independent(Stalls):
    def __iter__(self):
        for index in range(len(ROWS)):
            yield self.item(index)


class Shared(Stalls):
    """Its iterators share one position, as a file that is open once would be."""

    at, is_loaded = 0, False

    def __iter__(self):
        if not self.is_loaded:
            self.at = 0
        self.is_loaded = False
        return self.items()

    def items(self):
        while self.at < len(ROWS):
            self.at += 1
            yield self.item(self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.is_loaded = state["at"], True


class Indexed(Stalls):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return self.item(index)


def loader_of(source: Any) -> PackedDataLoader:
    dataset = PackedIterableDataset([IterableStream(source)], packing=Packing(max_seq_len=128))
    return PackedDataLoader(dataset, prefetch_factor=64)


@pytest.mark.parametrize("kind", [Independent, Shared, Indexed])
def test_what_a_stalled_source_gives_late_belongs_to_no_later_iteration(kind, monkeypatch):
    monkeypatch.setattr(threads, "LEAVE_S", 0.1)
    unbroken, source = list(loader_of(kind(stalls=False))), kind(stalls=True)
    loader, batches = loader_of(source), []
    for batch in loader:
        batches.append(batch)
        time.sleep(0.001)  # a training step, in which the thread reads ahead
        if len(batches) == 4:
            assert source.has_stalled.wait(30)
            break

    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    threading.Timer(0.5, source.comes.set).start()
    batches += list(loader)

    assert same(batches, unbroken)
