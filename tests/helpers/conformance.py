"""What every way of loading must hold to: one picture of a batch, one reference, and checks.

::

    show(batch)          a batch as bytes: equal where every tensor is equal
    rows(batch)          its packs as bytes: equal where tokens, labels, ... of a pack are equal
    all_rows(datasets)   the packs of a whole world in slot order, padding packs left out

A dataset made by `make` lies over the streams that `write_streams` wrote, whose every token says
where it stands (see `tests/helpers/builders.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream
from streampack.world import World
from tests.helpers import builders

PER_PACK = ("tokens", "labels", "input_pos", "document_ids")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Written:
    """Streams at rest: where they lie, and the tokens of each sample."""

    paths: tuple[Path, ...]
    tokens: tuple[list[np.ndarray], ...]

    def __repr__(self) -> str:
        return f"Written({self.paths[0].parent})"  # a red test need not print every token

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each sample, per stream."""
        return [[len(sample) for sample in stream] for stream in self.tokens]

    def streams(self, weights: Sequence[dict[str, Any]] | None = None) -> list[Stream]:
        """New `Stream` objects, with these weights."""
        weights = weights or [{}] * len(self.paths)
        return [Stream(local=str(p), **w) for p, w in zip(self.paths, weights, strict=True)]


def write_streams(folder: Path, all_lengths: Sequence[Sequence[int]], **options: Any) -> Written:
    """Write one stream for each list of lengths; `options` are those of the builders."""
    written = [
        builders.write_stream_files(folder / f"s{seed}", lengths, seed=seed, **options)
        for seed, lengths in enumerate(all_lengths)
    ]
    return Written(paths=tuple(p for p, _ in written), tokens=tuple(t for _, t in written))


def make(
    written: Written,
    *,
    weights: Sequence[dict[str, Any]] | None = None,
    max_seq_len: int = 64,
    packing: dict[str, Any] | None = None,
    mixing: dict[str, Any] | None = None,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> PackedStreamingDataset:
    """A dataset over written streams; a lone process unless `options` names a world."""
    return PackedStreamingDataset(
        streams=written.streams(weights),
        packing=Packing(max_seq_len=max_seq_len, **(packing or {})),
        mixing=Mixing(**(mixing or {})),
        order=Order(**{"seed": 3, **(order or {})}),
        **{"batch_size": 2, "world": World(), **options},
    )


def worlds(num_ranks: int, num_nodes: int = 1, replication: int = 1) -> list[World]:
    """All ranks of a world."""
    return [
        World(
            rank=rank,
            num_ranks=num_ranks,
            ranks_per_node=num_ranks // num_nodes,
            replication=replication,
        )
        for rank in range(num_ranks)
    ]


def show(batch: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A batch as plain values: every key, dtype, shape and byte."""
    shown = []
    for key, value in sorted(batch.items()):
        if isinstance(value, int):
            shown.append((key, value))
        else:
            array = value.numpy()
            shown.append((key, (str(array.dtype), array.shape, array.tobytes())))
    return tuple(shown)


def rows(batch: dict[str, Any]) -> list[tuple[bytes, ...]]:
    """The packs of a batch that hold anything, each as bytes, and which segments lie in it."""
    segments = batch["segments"].numpy()
    shown = []
    for row in range(len(batch["tokens"])):
        own = segments[segments[:, 0] == row, 1:]
        if len(own):
            shown.append((own.tobytes(), *(batch[key][row].numpy().tobytes() for key in PER_PACK)))
    return shown


def in_slot_order(
    ranks: Sequence[PackedStreamingDataset], position: int
) -> list[PackedStreamingDataset]:
    """One rank of each place, in the order of their batches in a step that begins at `position`.

    The device at place p takes the device batches k with k mod num_devices == p.
    """
    by_place = {rank.world.place: rank for rank in ranks}
    num_devices = ranks[0].world.num_devices
    first = position // ranks[0].batch_size
    return [by_place[k % num_devices] for k in range(first, first + num_devices)]


def steps(loaders: Sequence[Iterable[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """The batches of all ranks, step by step; all take as many."""
    yield from (list(step) for step in zip(*loaders, strict=True))


def all_rows(ranks: Sequence[PackedStreamingDataset], position: int = 0) -> list[tuple[bytes, ...]]:
    """The packs of a world from `position` on in slot order, each once whatever the replication."""
    found = []
    for step in steps(in_slot_order(ranks, position)):
        positions = {batch["position"] for batch in step}
        assert len(positions) == 1, f"ranks disagree on the position: {positions}"
        for batch in step:
            found += rows(batch)
    return found


def segments_of(shown: Iterable[tuple[bytes, ...]]) -> np.ndarray:
    """The segments of shown packs: stream, pass, sample, start, length; shape (n, 5)."""
    parts = [np.frombuffer(row[0], np.int64).reshape(-1, 5) for row in shown]
    return np.concatenate([np.zeros((0, 5), np.int64), *parts])


def check_exactly_once(
    shown: Sequence[tuple[bytes, ...]], written: Written, quotas: Sequence[int]
) -> None:
    """Check that the segments cover `quotas[s]` samples of stream s, each whole and once.

    With balanced sampling a sample is taken as often as any other of its stream, give or take one a
    pass and lane; with whole passes exactly as often.
    """
    segments = segments_of(shown)
    for stream, (quota, lengths) in enumerate(zip(quotas, written.lengths, strict=True)):
        own = segments[segments[:, 0] == stream, 1:]
        own = own[np.lexsort((own[:, 2], own[:, 1], own[:, 0]))]
        begins = own[:, 2] == 0
        assert begins.sum() == quota, f"stream {stream}: {begins.sum()} samples, not {quota}"
        taken = Counter(map(tuple, own[begins, :2].tolist()))
        assert set(taken.values()) <= {1}, f"stream {stream}: a sample twice in a pass"
        ends = own[:, 2] + own[:, 3]
        goes_on = ~np.append(begins[1:], True)
        assert (own[1:, 2][goes_on[:-1]] == ends[:-1][goes_on[:-1]]).all(), "pieces do not join"
        wholes = np.array(lengths, np.int64)[own[:, 1]]
        assert (ends[~goes_on] == wholes[~goes_on]).all(), "a sample's end is missing"
        per_sample = np.bincount(own[begins, 1], minlength=len(lengths))
        if quota % len(lengths) == 0:
            assert (per_sample == quota // len(lengths)).all(), f"stream {stream}: not even"


def check_tokens(batch: dict[str, Any], written: Written, padding_id: int = 0) -> None:
    """Check every token and label of a batch against what was written."""
    tokens, labels = batch["tokens"].numpy(), batch["labels"].numpy()
    want_tokens = np.full_like(tokens, padding_id)
    want_labels = np.full_like(labels, -100)
    at = [0] * len(tokens)
    for row, stream, _, sample, start, length in batch["segments"].tolist():
        own = written.tokens[stream][sample].astype(np.int64)
        here = slice(at[row], at[row] + length)
        want_tokens[row, here] = own[start : start + length]
        nexts = own[start + 1 : start + length + 1]
        want_labels[row, at[row] : at[row] + len(nexts)] = nexts
        at[row] += length
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_array_equal(labels, want_labels)


def check_resumes(
    make_loader: Callable[[], Any],
    resume: Callable[[dict[str, Any]], Iterable[Any]],
    every: int = 1,
) -> int:
    """Check that a loader can be resumed after every batch of an epoch, through JSON.

    Args:
        make_loader: Makes a new loader, with `state_dict`.
        resume: Takes a state and returns what is delivered from there to the epoch's end.
        every: After how many batches to resume; the first and the last are always among them.

    Returns:
        How many places were resumed from.
    """
    loader = make_loader()
    items, states = [], []
    for batch in loader:
        items.append(show(batch))
        states.append(json.dumps(loader.state_dict()))
    assert items == [show(batch) for batch in make_loader()], "asking for a state changed something"
    places = sorted({*range(0, len(states) - 1, every), len(states) - 2})
    for place in places:
        got = [show(batch) for batch in resume(json.loads(states[place]))]
        assert got == items[place + 1 :], f"differs after batch {place}"
    return len(places)
