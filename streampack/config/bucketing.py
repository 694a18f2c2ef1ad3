"""`Bucketing`: how padded samples share batches."""

from __future__ import annotations

from dataclasses import dataclass

from streampack._checks import (
    check_at_most,
    convert_fields,
    read_bool,
    read_count,
    read_optional_count,
)
from streampack.config.packing import MAX_BATCH_TOKENS, Overflow, Packing
from streampack.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """How samples of similar length share batches.

    Raises:
        ConfigError: If a value is invalid, or two options contradict each other.
    """

    max_tokens: int
    """Maximum tokens per batch."""
    include_padding: bool = True
    """Whether max_tokens limits rows times the longest row. False: it limits the tokens without
    padding."""
    max_samples: int | None = None
    """Maximum samples per batch. None: as many as the tokens allow."""
    max_seq_len: int | None = None
    """Maximum tokens per row. None: max_tokens."""
    buffer_samples: int = 1000
    """Maximum number of buffered samples. No sample waits for more batches than this."""
    overflow: Overflow = "split"
    """Handling of samples longer than a row, as in Packing."""
    bos_id: int | None = None
    """As in Packing."""
    eos_id: int | None = None
    """As in Packing."""
    padding_id: int = 0
    """Token id used for padding."""

    def __post_init__(self) -> None:
        convert_fields(self, read_count, "max_tokens", "buffer_samples")
        convert_fields(self, read_optional_count, "max_samples", "max_seq_len")
        convert_fields(self, read_bool, "include_padding")
        if self.longest > self.max_tokens:
            raise ConfigError(
                f"max_seq_len={self.max_seq_len} is over max_tokens={self.max_tokens}, so its rows "
                "fit no batch; lower it, or omit it"
            )
        self.packing()  # checks the other options
        check_at_most("max_tokens", self.max_tokens, MAX_BATCH_TOKENS)
        check_at_most("the slots of a batch, including padding", self.most_slots, MAX_BATCH_TOKENS)

    @property
    def longest(self) -> int:
        """Maximum tokens per row."""
        return self.max_seq_len or self.max_tokens

    @property
    def most_slots(self) -> int:
        """Token slots of the largest possible batch, including padding.

        >>> Bucketing(max_tokens=9, include_padding=False).most_slots  # 5 tokens, and 1 1 1 1
        25
        """
        if self.include_padding:
            return self.max_tokens
        most = min(self.max_samples or self.buffer_samples, self.buffer_samples)
        # The worst case is one sample of n tokens and one-token samples. The slots grow with n
        # until rows are no longer the bound, and then until n is half of the tokens.
        values = (self.longest, self.max_tokens - most + 1, (self.max_tokens + 1) // 2)
        lengths = [min(max(value, 1), self.longest) for value in values]
        return max(n * min(self.max_tokens - n + 1, most) for n in lengths)

    def packing(self) -> Packing:
        """Return the equivalent packing options for single samples."""
        return Packing(
            max_seq_len=self.longest,
            overflow=self.overflow,
            buffer_samples=self.buffer_samples,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            padding_id=self.padding_id,
        )
