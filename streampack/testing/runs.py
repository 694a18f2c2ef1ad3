"""Checks of whole runs: exact resume, each sample exactly once, the same packs in every world."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from streampack.testing.shown import all_rows, show, worlds
from streampack.types import Int64Array

WORLD_SIZES = ((2, 1), (2, 2), (4, 2))
"""Worlds that are compared with a single process: (ranks, nodes)."""


def assert_resumes(make_loader: Callable[[], Any], *, every: int = 1) -> int:
    """Check that a loader can be resumed after every batch of an epoch.

    The states go through JSON, as in a checkpoint. Each is loaded into a new loader, and the
    batches of that loader are compared with the rest of the epoch, byte by byte.

    Args:
        make_loader: Returns a new loader: a `PackedDataLoader`, or anything with `state_dict` and
            `load_state_dict`. Its batches may have any format.
        every: Number of batches between two states; the last two batches are always tried.

    Returns:
        The number of states that were tried.

    Raises:
        AssertionError: If batches differ after a resume, if two new loaders differ, or if the
            epoch has fewer than two batches. It names the first batch that differs.

    >>> from streampack import IterableStream, PackedDataLoader, PackedIterableDataset, Packing
    >>> def make_loader():
    ...     streams = [IterableStream([[1, 2, 3], [4, 5], [6, 7, 8, 9]])]
    ...     return PackedDataLoader(PackedIterableDataset(streams, packing=Packing(max_seq_len=4)))
    >>> assert_resumes(make_loader)
    2
    """
    loader = make_loader()
    batches, states = [], []
    for batch in loader:
        batches.append(show(batch))
        states.append(json.dumps(loader.state_dict()))
    if len(batches) < 2:
        raise AssertionError(f"an epoch has {len(batches)} batches; the check needs at least 2")
    _compare(
        list(map(show, make_loader())), batches, 0, "a second loader, without asking for states"
    )
    places = sorted({*range(0, len(states) - 1, every), len(states) - 2})
    for place in places:
        resumed = make_loader()
        resumed.load_state_dict(json.loads(states[place]))
        rest = list(map(show, resumed))
        _compare(
            rest, batches[place + 1 :], place + 1, f"a loader with the state after {place + 1}"
        )
    return len(places)


def _compare(found: list[Any], wanted: list[Any], first: int, who: str) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=False), first):
        if one != other:
            raise AssertionError(f"{who}: batch {number} differs from that of the unbroken epoch")
    if len(found) != len(wanted):
        raise AssertionError(
            f"{who}: delivers {len(found)} more batches, but {len(wanted)} of the epoch were left"
        )


def assert_exactly_once(
    loader: Iterable[dict[str, Any]],
    lengths: Sequence[Sequence[int]] | None = None,
    num_samples: Sequence[int] | None = None,
) -> None:
    """Check that an epoch delivers each of its samples whole, and once per pass.

    Args:
        loader: Yields batches in a format with `segments`, such as native ones. For several ranks,
            chain their loaders.
        lengths: Tokens of each sample, for each stream. None: samples that are missing or lack
            their end go unnoticed.
        num_samples: Number of samples that the epoch takes from each stream. None: each sample
            once.

    Raises:
        AssertionError: If a sample is repeated, cut or missing. It names stream and sample.

    >>> from streampack import IterableStream, PackedIterableDataset, Packing
    >>> streams = [IterableStream([[1, 2, 3], [4, 5], [6, 7, 8, 9]])]
    >>> dataset = PackedIterableDataset(streams, packing=Packing(max_seq_len=4))
    >>> assert_exactly_once(dataset, lengths=[[3, 2, 4]])
    """
    parts = [np.asarray(batch["segments"], np.int64)[:, 1:] for batch in loader]
    segments = np.concatenate([np.zeros((0, 5), np.int64), *parts])
    streams = range(int(segments[:, 0].max(initial=-1)) + 1) if lengths is None else lengths
    for stream in range(len(streams)):
        own = segments[segments[:, 0] == stream, 1:]
        own = own[np.lexsort((own[:, 2], own[:, 1], own[:, 0]))]
        _check_pieces(own, stream)
        if lengths is not None:
            wanted = len(lengths[stream]) if num_samples is None else num_samples[stream]
            _check_whole(own, np.array(lengths[stream], np.int64), wanted, stream)


def _check_pieces(own: Int64Array, stream: int) -> None:
    is_same = (own[1:, :2] == own[:-1, :2]).all(1)
    joins = np.where(is_same, own[1:, 2] == own[:-1, 2] + own[:-1, 3], own[1:, 2] == 0)
    joins = np.append(own[:1, 2] == 0, joins)
    if not joins.all():
        pass_, sample, start, _ = own[joins.argmin()].tolist()
        raise AssertionError(
            f"stream {stream}, sample {sample}, pass {pass_}: its piece that begins at token "
            f"{start} does not follow the one before, so tokens are repeated or missing"
        )


def _check_whole(own: Int64Array, lengths: Int64Array, wanted: int, stream: int) -> None:
    is_last = np.append((own[1:, :2] != own[:-1, :2]).any(1), True)[: len(own)]
    samples, ends = own[is_last, 1], (own[:, 2] + own[:, 3])[is_last]
    is_cut = ends != lengths[samples]
    if is_cut.any():
        sample = int(samples[is_cut.argmax()])
        raise AssertionError(
            f"stream {stream}, sample {sample}: {ends[is_cut.argmax()]} of its {lengths[sample]} "
            "tokens were delivered"
        )
    if len(samples) != wanted:
        raise AssertionError(
            f"stream {stream}: {len(samples)} samples were delivered, not {wanted}"
        )
    per_sample = np.bincount(samples, minlength=len(lengths))
    if wanted % len(lengths) == 0 and (per_sample != wanted // len(lengths)).any():
        sample = int((per_sample != wanted // len(lengths)).argmax())
        raise AssertionError(
            f"stream {stream}, sample {sample}: delivered {per_sample[sample]} times, not "
            f"{wanted // len(lengths)}"
        )


def assert_same_in_every_world(
    make_dataset: Callable[[Any], Any], sizes: Sequence[tuple[int, int]] = WORLD_SIZES
) -> None:
    """Check that the ranks of every world deliver the packs of a single process, in its order.

    Args:
        make_dataset: Takes a `World`; returns a new `PackedStreamingDataset` of that rank, with
            native batches. Set `Mixing(global_batch_size=...)`: by default it depends on the world.
        sizes: The worlds, each as (number of ranks, number of nodes).

    Raises:
        AssertionError: If packs differ. It names the world and the first pack that differs.

    ::

        assert_same_in_every_world(
            lambda world: PackedStreamingDataset(
                [MyStream(...)], packing=Packing(max_seq_len=64), world=world,
                mixing=Mixing(global_batch_size=8),
            )
        )
    """
    [alone] = worlds(1)
    wanted = all_rows([make_dataset(alone)])
    for num_ranks, num_nodes in sizes:
        found = all_rows([make_dataset(world) for world in worlds(num_ranks, num_nodes)])
        if found != wanted:
            pairs = enumerate(zip(found, wanted, strict=False))
            first = next((n for n, (one, other) in pairs if one != other), len(wanted))
            raise AssertionError(
                f"{num_ranks} ranks on {num_nodes} nodes: pack {first} differs from that of a "
                f"single process ({len(found)} and {len(wanted)} packs)"
            )
