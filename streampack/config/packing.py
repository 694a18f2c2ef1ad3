"""`Packing`: how samples share packs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal

from streampack._checks import (
    check_at_most,
    check_choice,
    convert_fields,
    read_count,
    read_optional_count,
    read_token_id,
    show_number,
)
from streampack.config.combination_table import COST_OPTIONS, OPTION_METHODS
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError

Method = Literal[
    "exact_fit",
    "next_fit",
    "first_fit",
    "best_fit",
    "best_fit_decreasing",
    "knapsack",
    "concat",
    "two_tiers",
]
Overflow = Literal["split", "truncate", "drop", "error"]
Positions = Literal["restart", "continue"]

MAX_BATCH_TOKENS = 2**31 - 1  # cu_seqlens is int32
MAX_OPEN_PACKS = 2**16
MIN_BUFFER_TOKENS = 65_536  # below this, packs of 2,048 leave 1 % empty on web text
BUFFER_PACKS = 8  # default buffer of a packer, in packs
WINDOW_PACKS = 128  # knapsack empties its whole buffer; with 8, every eighth pack is half empty
OPEN_PACKS = 8
MIN_FRAGMENT_TOKENS = 64
DEFAULT_METHOD: Method = "exact_fit"
SHUFFLED_METHOD: Method = "best_fit_decreasing"  # default where windows of packs are shuffled


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How samples share packs.

    Raises:
        ConfigError: If a value is invalid, or two options contradict each other.

    >>> Packing(max_seq_len=2048).buffer_limit
    65536
    """

    max_seq_len: int
    """Tokens per pack."""
    method: Method | None = None
    """Packing algorithm. best_fit_decreasing packs a window of samples as a whole; exact_fit fills
    packs nearly in order of arrival. docs/packers.md describes the others. None: for MDS streams,
    if it supports all options given here, best_fit_decreasing; otherwise exact_fit. A run that
    resumes keeps its method."""
    overflow: Overflow = "split"
    """Handling of samples longer than a pack. split: cut into pieces of at most a pack. truncate:
    keep the first max_seq_len tokens. drop: skip the sample. error: raise a DataError."""
    buffer_tokens: int | None = None
    """Hard limit on the tokens buffered by one packer; for best_fit_decreasing, on the tokens that
    wait for the next window. None: max(8 * max_seq_len, 65,536), or for knapsack
    max(128 * max_seq_len, 65,536)."""
    buffer_samples: int = 4096
    """Hard limit on the samples buffered by one packer, or waiting for the next window."""
    split_gap: float | None = None
    """Split a sample to fill a pack if more than this fraction of the pack would stay empty.
    None: never split for this reason."""
    min_fragment: int | None = None
    """Minimum tokens on either side of a cut made by split_gap. None: 64, or an eighth of a pack if
    that is less."""
    guard: int | None = None
    """Maximum number of packs emitted while a sample waits. After that, the sample is packed next.
    None: no limit."""
    max_samples_per_pack: int | None = None
    """Maximum number of segments in a pack. None: no limit."""
    pad_to_multiple: int | None = None
    """Pad each sample to a multiple of this many tokens. Context parallelism over n ranks needs
    2 * n. None: no padding between samples."""
    open_packs: int | None = None
    """Number of packs that first_fit and best_fit keep open. None: 8."""
    short_seq_len: int | None = None
    """Tokens per short pack of two_tiers, which requires it. Samples of at most this length go into
    short packs."""
    max_cost: int | None = None
    """Maximum cost of a pack, as `AttentionCost` counts it. It must be at least the cost of one
    sample of max_seq_len. Packs then hold up to `capacity` tokens and cost nearly the same. For
    batch formats of varlen attention, with their `pad_to`. None: no limit."""
    capacity: int | None = None
    """With max_cost: tokens per pack, from max_seq_len to 1.5 times that. None: 1.5 times."""
    cost_hidden_size: int | None = None
    """With max_cost: width of the model. None: 4,096."""
    cost_window: int | None = None
    """With max_cost: tokens that a token attends to, itself included. None: all before it in its
    sample."""
    bos_id: int | None = None
    """Token inserted before each sample that does not start with it. It counts as part of the
    sample's length. None: no token."""
    eos_id: int | None = None
    """Token appended to each sample that does not end with it. It counts as part of the sample's
    length. None: no token."""
    padding_id: int = 0
    """Token id used for padding."""
    positions: Positions = "restart"
    """Positions (input_pos) in the later pieces of a split sample. restart: from 0. continue: from
    the end of the previous piece."""

    def __post_init__(self) -> None:
        convert_fields(self, read_count, "max_seq_len", "buffer_samples")
        convert_fields(self, read_optional_count, "buffer_tokens", "pad_to_multiple")
        counts = (name for name in OPTION_METHODS if name != "split_gap")
        convert_fields(self, read_optional_count, *counts)
        check_at_most("max_seq_len", self.max_seq_len, MAX_BATCH_TOKENS)
        check_at_most("open_packs", self.open_packs or 0, MAX_OPEN_PACKS)
        if self.method is not None:
            check_choice("method", self.method, Method)
        check_choice("overflow", self.overflow, Overflow)
        check_choice("positions", self.positions, Positions)
        if self.buffer_tokens is not None and self.buffer_tokens < self.max_seq_len:
            raise ConfigError(
                f"buffer_tokens={self.buffer_tokens} cannot hold one pack; "
                f"set it to at least max_seq_len={self.max_seq_len}"
            )
        default = DEFAULT_METHOD if self.max_cost is None else SHUFFLED_METHOD
        check_combination({**asdict(self), "method": self.method or default})
        self._check_sizes()
        convert_fields(self, _read_fraction, "split_gap")
        convert_fields(self, read_token_id, "bos_id", "eos_id", "padding_id")

    def _check_sizes(self) -> None:
        size, short = self.max_seq_len, self.short_seq_len
        if self.min_fragment is not None and 2 * self.min_fragment > size:
            raise ConfigError(
                f"min_fragment={self.min_fragment} leaves nothing to cut in packs of "
                f"max_seq_len={size}; set it to {size // 2} at most"
            )
        if self.capacity is not None and not size <= self.capacity <= size * 3 // 2:
            raise ConfigError(
                f"capacity={self.capacity} must be from max_seq_len={size} to 1.5 times that, "
                f"{size * 3 // 2}; omit it to allow the most"
            )
        if short is not None and short >= size:
            raise ConfigError(
                f"short_seq_len={short} must be less than max_seq_len={size}; set it to what short "
                f"packs hold, such as {self.room_of(max(size // 4, 1))}"
            )

    def resolved(self, *, is_windowed: bool) -> Packing:
        """Return this packing with a method, chosen by default if there is none.

        If packs are shuffled in windows (`is_windowed`), a window can be packed as a whole.

        >>> Packing(max_seq_len=8).resolved(is_windowed=True).method
        'best_fit_decreasing'
        >>> Packing(max_seq_len=8, split_gap=0.01).resolved(is_windowed=True).method
        'exact_fit'
        """
        if self.method is not None:
            return self
        is_supported = all(
            getattr(self, name) is None or SHUFFLED_METHOD in methods
            for name, methods in OPTION_METHODS.items()
        )
        is_whole = self.max_cost is not None or (is_windowed and is_supported)
        return replace(self, method=SHUFFLED_METHOD if is_whole else DEFAULT_METHOD)

    def in_sequence(self) -> dict[str, Any]:
        """Return the options that decide the packs, by name."""
        unused = COST_OPTIONS if self.max_cost is None else ()
        return {name: value for name, value in asdict(self).items() if name not in unused}

    @property
    def size(self) -> str:
        """The length of its packs, as messages name it."""
        return f"max_seq_len={self.max_seq_len}"

    @cached_property
    def row_tokens(self) -> int:
        """Token slots of a pack: its capacity with max_cost, otherwise max_seq_len.

        >>> Packing(max_seq_len=1000, max_cost=2000).row_tokens
        1500
        """
        if self.max_cost is None:
            return self.max_seq_len
        multiple = self.pad_to_multiple or 1
        return self.capacity or self.max_seq_len * 3 // 2 // multiple * multiple

    @cached_property
    def packs_windows(self) -> bool:
        """Whether the packer needs the samples of a window together."""
        return self.method in ("best_fit_decreasing", "two_tiers")

    @cached_property
    def buffer_limit(self) -> int:
        """Maximum number of tokens that one packer may buffer."""
        packs = WINDOW_PACKS if self.method == "knapsack" else BUFFER_PACKS
        return self.buffer_tokens or max(packs * self.max_seq_len, MIN_BUFFER_TOKENS)

    @cached_property
    def least_fragment(self) -> int:
        """Minimum tokens on either side of a cut made by `split_gap`."""
        return self.min_fragment or min(MIN_FRAGMENT_TOKENS, max(1, self.max_seq_len // 8))

    @property
    def num_open_packs(self) -> int:
        """Number of packs that first_fit and best_fit keep open."""
        return self.open_packs or OPEN_PACKS

    def room_of(self, length: int) -> int:
        """Return the slots that a segment of `length` tokens takes in a pack, with its padding.

        >>> Packing(max_seq_len=64, pad_to_multiple=8).room_of(13)
        16
        """
        multiple = self.pad_to_multiple or 1
        return -(-length // multiple) * multiple


def _read_fraction(name: str, value: Any) -> float | None:
    if value is None:
        return None
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_real and 0 <= value < 1):
        raise ConfigError(
            f"{name}={show_number(value)} is not a fraction of a pack: 0 <= {name} < 1; "
            "write e.g. 0.01",
            option=name,
        )
    return float(value)
