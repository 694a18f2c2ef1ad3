"""Count the Python calls between `next(iter(loader))` and a tensor, and how often they change room.

::

    python benchmarks/count_calls.py [--modules "planned: first batch"]

Only calls of streampack's functions count. A room is a folder of the package, or a module outside
of any folder. Unlike times, these counts are the same in every run and on every machine, but for a
few calls in steady batches that take longer than 10 ms. There are two streams of int32 samples, in
packs of 2,048 and batches of 8, read in the loop itself (no threads, no workers). Each kind of
dataset makes a batch first, so that loading kernels is not counted.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import streampack
from streampack import (
    Chapter,
    IterableStream,
    Mixing,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
)
from streampack.types import State
from streampack.write import write_stream

PACKAGE = str(Path(streampack.__file__).parent) + "/"
PACKING = Packing(max_seq_len=2048)
STEADY = 20


class Counts:
    """Calls, the files and functions they are in, and changes of file and room between them."""

    def __init__(self) -> None:
        self.calls = self.file_changes = self.room_changes = 0
        self.functions: set[tuple[str, int]] = set()
        self.modules: Counter[str] = Counter()
        self._last = ("", "")

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE):
            return
        file = path.removeprefix(PACKAGE)
        room = file.partition("/")[0]
        self.calls += 1
        self.modules[file] += 1
        self.functions.add((file, frame.f_code.co_firstlineno))
        self.file_changes += file != self._last[0]
        self.room_changes += room != self._last[1]
        self._last = (file, room)

    def row(self, name: str, batches: int = 1) -> str:
        """Return a line of the table, with means over so many batches."""
        files = len({file for file, _ in self.functions})
        means = [self.calls, self.file_changes, self.room_changes]
        numbers = "".join(f"{mean / batches:>14,.0f}" for mean in means)
        return f"{name:24}{files:>8}{len(self.functions):>12}{numbers}"


def count(call: Callable[[], Any]) -> Counts:
    """Return the counts of one call."""
    counts = Counts()
    gc.collect()
    gc.disable()  # otherwise, finalizers of earlier objects would be counted
    sys.setprofile(counts)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def samples(seed: int) -> list[np.ndarray]:
    """Return int32 samples with the lengths of web text."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6, 1, 4000), 8, 20_000).astype(int)
    return [rng.integers(0, 50_000, n, dtype=np.int32) for n in lengths]


def written(folder: Path) -> list[Stream]:
    """Write two streams to a folder, and return them."""
    for seed in range(2):
        write_stream(samples(seed), folder / str(seed), compression=None)
    return [Stream(local=folder / str(seed)) for seed in range(2)]


def iterables() -> list[IterableStream]:
    """Return two streams of samples in memory."""
    return [IterableStream(samples(seed), name=str(seed)) for seed in range(2)]


def run_of_chapters(streams: list[Stream]) -> PackedStreamingDataset:
    """Return a run of two chapters."""
    chapters = [Chapter(weights={"0": share, "1": 1}, steps=20) for share in (1, 3)]
    mixing = Mixing(weight_unit="tokens", global_batch_size=8)
    return PackedStreamingDataset(
        streams, packing=PACKING, mixing=mixing, batch_size=8, chapters=chapters
    )


def load_kernels(folder: Path) -> None:
    """Make a batch with each kind of dataset, from other streams than those that are counted."""
    planned = PackedStreamingDataset(written(folder / "first"), packing=PACKING, batch_size=8)
    online = PackedIterableDataset(iterables(), packing=PACKING, batch_size=8)
    for dataset in (planned, online):
        next(iter(PackedDataLoader(dataset, prefetch_threads=0)))


def measured(folder: Path) -> Iterator[tuple[str, Counts, int]]:
    """Yield each phase's name, counts and number of batches."""
    load_kernels(folder)
    streams = written(folder / "counted")
    planned: dict[str, Any] = {}

    def make_dataset() -> None:
        planned["dataset"] = PackedStreamingDataset(streams, packing=PACKING, batch_size=8)

    def make_loader() -> None:
        planned["loader"] = PackedDataLoader(planned["dataset"], prefetch_threads=0)

    yield "planned: dataset", count(make_dataset), 1
    yield "planned: loader", count(make_loader), 1
    iteration: list[Iterator[Any]] = []
    first = count(lambda: (iteration.append(iter(planned["loader"])), next(iteration[0])))
    yield "planned: first batch", first, 1
    yield (
        "planned: steady batch",
        count(lambda: [next(iteration[0]) for _ in range(STEADY)]),
        STEADY,
    )

    chapters = run_of_chapters(streams)
    list(zip(range(25), PackedDataLoader(chapters, prefetch_threads=0), strict=False))
    state, resumed = chapters.state_dict(), run_of_chapters(streams)
    yield "planned: load chapters", count(lambda: resumed.load_state_dict(state)), 1

    online = PackedIterableDataset(iterables(), packing=PACKING, batch_size=8)
    loader = PackedDataLoader(online, prefetch_threads=0)
    iteration = []
    first = count(lambda: (iteration.append(iter(loader)), next(iteration[0])))
    yield "online: first batch", first, 1
    for _ in range(5):
        next(iteration[0])
    yield "online: steady batch", count(lambda: [next(iteration[0]) for _ in range(STEADY)]), STEADY
    states: list[State] = []
    yield "online: state_dict", count(lambda: states.append(loader.state_dict())), 1
    again = PackedDataLoader(
        PackedIterableDataset(iterables(), packing=PACKING, batch_size=8), prefetch_threads=0
    )
    yield "online: load_state_dict", count(lambda: again.load_state_dict(states[0])), 1


def main() -> None:
    """Print the table, or the modules of one of its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", help="a row of the table: print its calls by module")
    wanted = parser.parse_args().modules
    heads = ("files", "functions", "calls", "file changes", "room changes")
    print(f"{'':24}{heads[0]:>8}{heads[1]:>12}" + "".join(f"{head:>14}" for head in heads[2:]))
    with tempfile.TemporaryDirectory() as name:
        for phase, counts, batches in measured(Path(name)):
            print(counts.row(phase, batches))
            for file, calls in counts.modules.most_common() if phase == wanted else ():
                print(f"{calls / batches:14,.1f}  {file}")


if __name__ == "__main__":
    main()
