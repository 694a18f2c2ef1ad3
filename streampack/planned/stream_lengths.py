"""Lengths of a stream's samples as they are planned, with BOS, EOS and an overflow rule of its own.

::

    length file, or the shard's header --> + BOS, EOS --> the stream's own rule --> plan

Cost: the lengths of 64 shards of each stream in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from streampack.config import Packing
from streampack.errors import ConfigError, DataError
from streampack.gather.shard_prefetch import fetch_all
from streampack.pack import fit_samples
from streampack.pack.cost import sizes_in_pack
from streampack.pack.overflow import kept_tokens
from streampack.special_ids import adds_ids, num_added
from streampack.streams import TokenStream
from streampack.streams.flat_shards import FlatShards
from streampack.streams.sources.texts import Texts
from streampack.types import LENGTH, TOKENS, Int64Array

KEPT_SHARDS = 64  # shards with lengths that are cached, per stream
LEAST_ROWS = 20  # fewer samples of one length say little

logger = logging.getLogger(__name__)


class StreamLengths:
    """Tokens per sample of a stream's shards, including those that bos_id and eos_id add.

    The overflow rule is applied to them where a stream has its own.
    """

    def __init__(self, stream: TokenStream, packing: Packing, fetched: list[int]) -> None:
        self._stream = stream
        packing = stream.ends.packing_of(packing)
        self._packing = packing
        self._size = stream.max_seq_len or packing.max_seq_len
        self._fetched = fetched
        self._adds_ids = adds_ids(packing)
        shards, ids = stream.shards, (packing.bos_id, packing.eos_id)
        if isinstance(shards, FlatShards) and not shards.knows_edges(*ids):
            raise ConfigError(
                f"stream {stream.name!r}: bos_id={packing.bos_id} and eos_id={packing.eos_id} are "
                "added to samples without them, and token files do not say which those are; set "
                "TokenFiles(files, has=...) to what they have of ('bos', 'eos'), or leave the ids "
                "out"
            )
        is_lazy = stream.cache.needs_fetch and not shards.has_lengths
        self.prepare: Callable[[Int64Array], None] | None = self._fetch if is_lazy else None
        """Fetches several shards together for their lengths; None if no fetch is needed."""
        self.whole: Callable[[int], Int64Array] = lru_cache(KEPT_SHARDS)(self._read)
        """Returns the tokens per sample of a shard before the overflow rule."""

    def __reduce__(self) -> tuple[type[StreamLengths], tuple[TokenStream, Packing, list[int]]]:
        return StreamLengths, (self._stream, self._packing, self._fetched)

    def __call__(self, shard: int) -> Int64Array:
        lengths, overflow = self.whole(shard), self._stream.ends.overflow
        if overflow == "error" and (lengths > self._size).any():
            sample = int((lengths > self._size).argmax())
            raise DataError(
                f"stream {self._stream.name!r}, sample {self._stream.first_sample[shard] + sample} "
                f"of {lengths[sample]} tokens does not fit max_seq_len={self._size}; set "
                "Stream(overflow=) to split, truncate or drop, or raise max_seq_len"
            )
        return lengths if overflow is None else kept_tokens(lengths, self._size, overflow)

    def num_slots(self, num_tokens: int) -> int | None:
        """Return the slots that so many tokens are expected to take; None without `cost`.

        The lengths of up to `KEPT_SHARDS` shards decide, 0.1 us a sample.
        """
        packing, stream = self._packing, self._stream
        if packing.cost is None:
            return None
        shards = np.unique(np.linspace(0, stream.num_shards - 1, KEPT_SHARDS).astype(np.int64))
        lengths = np.concatenate([self(shard) for shard in shards.tolist()])
        samples = np.zeros((len(lengths), 4), np.int64)
        samples[:, TOKENS] = lengths
        overflow = "split" if packing.overflow == "error" else packing.overflow
        pieces = fit_samples(samples, packing.max_seq_len, overflow, [stream.name])[:, LENGTH]
        sizes = sizes_in_pack(pieces, packing)
        return num_tokens * int(sizes.sum()) // max(int(pieces.sum()), 1)

    def _fetch(self, shards: Int64Array) -> None:
        # In one step, because the thread that looks for lane ends calls this too.
        self._fetched.extend(fetch_all(self._stream, shards))

    def shard_tokens(self) -> Int64Array | None:
        """Return the tokens of each shard, where they are known, shape (num_shards,).

        If samples are used whole and without additions, the length file has these totals.
        """
        is_changed = self._adds_ids or self._packing.overflow in ("truncate", "drop")
        return None if is_changed else self._stream.shard_tokens()

    def _read(self, shard: int) -> Int64Array:
        if self.prepare is not None:
            self._fetch(np.array([shard]))
        lengths = np.asarray(self._stream.shard_lengths(shard), np.int64)
        is_split = self._stream.split_at is not None
        if not is_split and len(lengths) >= LEAST_ROWS and np.mean(lengths == self._size) > 0.95:
            _warn_of_joined_rows(self._stream.name, self._size)
        packing, num_before = self._packing, np.zeros(len(lengths), np.int64)
        if self._adds_ids:
            edges = self._stream.shard_edges(shard, packing.bos_id, packing.eos_id)
            added = num_added(edges[:, 0], edges[:, 1], packing)
            lengths = np.where(lengths > 0, lengths + added, 0)  # an empty sample stays one
            num_before = num_added(edges[:, 0], edges[:, 1], replace(packing, eos_id=None))
        if packing.overflow == "truncate":
            targets = self._stream.shard_targets(shard)
            if targets is not None:  # a conversation without one in what is left of it is omitted
                lengths = np.where(num_before + targets < self._size, lengths, 0)
        return lengths


def warn_of_open_texts(
    streams: Iterable[Any], opened: Iterable[TokenStream], packing: Packing
) -> None:
    """Warn of each stream of texts that no token ends, once."""
    for stream, own in zip(streams, opened, strict=True):
        is_text = isinstance(getattr(stream, "source", None), Texts)
        if is_text and stream.eos_id is None and packing.eos_id is None:
            _warn_of_open_text(own.name)


@cache
def _warn_of_open_text(name: str) -> None:
    logger.warning(
        "stream %r: no token ends its texts, so a model does not learn where one ends; set "
        "Stream(eos_id=tokenizer.eos_token_id), which is appended to texts that do not end with it",
        name,
    )


@cache
def _warn_of_joined_rows(name: str, size: int) -> None:
    logger.warning(
        "stream %r: nearly all samples have %d tokens, as many as a pack, as rows of joined "
        "documents do: the documents of a row then attend to each other, and eos_id= or bos_id= "
        "mark each cut between rows as the end of a document; write each document as a sample, or "
        "omit eos_id and bos_id; if each sample is one document, silence the logger %r",
        name,
        size,
        __name__,
    )


def with_own_overflow(
    streams: tuple[TokenStream, ...], packing: Packing
) -> tuple[tuple[TokenStream, ...], Packing]:
    """Return streams that apply the overflow rule to their lengths, if any has a rule of its own.

    Nothing is then left to the packing but to cut what is to be split.
    """
    if all(stream.ends.overflow is None for stream in streams):
        return streams, packing
    own = tuple(
        replace(each, ends=replace(each.ends, overflow=each.ends.overflow or packing.overflow))
        for each in streams
    )
    return own, replace(packing, overflow="split")
