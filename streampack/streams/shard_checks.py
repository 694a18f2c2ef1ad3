"""Checks of an opened shard: one value per token, the stated lengths, the right types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.mds.columns import Column, Spans, find_column, sample_spans
from streampack.mds.dtype_check import LIKELY, MAX_SAMPLES, check_tokens_dtype, itemsize_of
from streampack.mds.index import Shard
from streampack.padding import PADDING_MASK
from streampack.streams.shard_pool import OpenShard
from streampack.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardChecker:
    """Compares one shard's columns with each other and with what its stream states."""

    stream_name: str
    columns: Mapping[str, Column]
    first_sample: int
    stated: Int64Array | None = None
    """The lengths in the length file, shape (num_samples,); None without one."""
    length_file: Path | None = None

    def check_dtypes(self, shard: OpenShard) -> None:
        """Check that untyped columns hold the types that the options state."""
        if self.columns["tokens"].is_untyped:
            where = f"stream {self.stream_name!r}, column of the tokens"
            of_tokens = shard.data, *_byte_ranges(shard.tokens), shard.tokens.dtype
            try:
                check_tokens_dtype(*of_tokens, where)
            except DataError as error:
                if self.stated is None or (self.stated != shard.tokens.counts).any():
                    raise
                raise DataError(
                    f"{error}. {self.length_file} was made with {shard.tokens.dtype} too; then "
                    "rewrite it with `streampack index`"
                ) from None

    def check_padding(self, shard: OpenShard, info: Shard) -> None:
        """Refuse samples with padding, which would be packed, by a column of attention masks."""
        if PADDING_MASK not in info.layout.names:
            return
        try:
            column = find_column(info.layout, (PADDING_MASK,), None, "", "loss_mask")
            masks = sample_spans(shard.data, info.num_samples, info.layout, column, "")
        except DataError:  # a column of something else
            return
        for sample in np.flatnonzero(masks.counts == shard.tokens.counts)[:MAX_SAMPLES].tolist():
            if not masks.read(shard.data, sample).all():
                raise DataError(
                    f"{self._sample(sample)}: its {PADDING_MASK!r} has zeros, so it is padded, and "
                    "padding would be packed and learned; rewrite the stream without it: "
                    "write_stream(streaming.StreamingDataset(...), out) leaves padding out"
                )

    def check_counts(self, shard: OpenShard) -> None:
        counts = shard.tokens.counts
        for option, spans in (("labels", shard.labels), ("loss_mask", shard.loss_mask)):
            if spans is not None and not np.array_equal(spans.counts, counts):
                sample = int((spans.counts != counts).argmax())
                raise DataError(
                    f"{self._sample(sample)}: {counts[sample]} tokens, but "
                    f"{spans.counts[sample]} values in its {option} column; write one for each "
                    f"token{self._dtype_hint(spans, counts, option)}"
                )

    def check_stated_lengths(self, shard: OpenShard) -> None:
        """Refuse a shard if its lengths differ from those in the length file."""
        counts, stated = shard.tokens.counts, self.stated
        if self.length_file is not None and stated is not None and (stated != counts).any():
            sample = int((stated != counts).argmax())
            hint = self._dtype_hint(shard.tokens, stated, "tokens")
            if LIKELY[itemsize_of(_byte_ranges(shard.tokens)[1])] == shard.tokens.dtype:
                hint = ""  # the file is wrong
            column = self.columns["tokens"]
            typed = f" --tokens {column.name}:{shard.tokens.dtype}" * column.is_untyped
            raise DataError(
                f"{self._sample(sample)}: {counts[sample]} tokens, but {self.length_file} says "
                f"{stated[sample]}; rewrite it: streampack index {self.length_file.parent}"
                f"{typed}{hint}"
            )

    def _sample(self, index: int) -> str:
        return f"stream {self.stream_name!r}, sample {self.first_sample + index}"

    def _dtype_hint(self, spans: Spans, counts: Int64Array, option: str) -> str:
        _, num_bytes = _byte_ranges(spans)
        for dtype in ("int32", "int64", "uint16", "uint8"):
            is_fit = np.array_equal(counts * np.dtype(dtype).itemsize, num_bytes)
            if is_fit and self.columns[option].is_untyped:
                # -100 does not fit in an unsigned type.
                likely = "int16" if (option, dtype) == ("labels", "uint16") else dtype
                column = f"{option}='{self.columns[option].name}:{likely}'"
                return f"; as {likely} the numbers agree: if so, write {column}"
        return ""


def _byte_ranges(spans: Spans) -> tuple[Int64Array, Int64Array]:
    return spans.begins, spans.counts * np.dtype(spans.dtype).itemsize
