"""`Packing`: how samples share packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, wraps
from typing import Any, Literal

from streampack._checks import (
    check_at_most,
    check_choice,
    convert_fields,
    read_count,
    read_optional_count,
    read_token_id,
)
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError

Method = Literal["best_fit_decreasing", "next_fit", "concat", "knapsack", "two_tiers"]
Overflow = Literal["split", "truncate", "drop", "error"]
Positions = Literal["restart", "continue"]

MAX_BATCH_TOKENS = 2**31 - 1  # cu_seqlens is int32
MIN_BUFFER_TOKENS = 65_536  # below this, packs of 2,048 leave 1 % empty on web text
BUFFER_PACKS = 8  # default buffer of a packer, in packs
BUFFER_SAMPLES = 4096
DEFAULT_METHOD: Method = "best_fit_decreasing"
WHOLE = "windows are packed whole, and a sample leaves with its window or the next; omit it"
CUT = "windows are full without cuts; omit it, or write method='concat' to cut where a pack is full"
COSTS = "write cost=PackCost({}=...) in Python, or cost: {{{}: ...}} in YAML"
GONE = {
    "split_gap": CUT,
    "min_fragment": CUT,
    "guard": WHOLE,
    "open_packs": WHOLE,
    "max_cost": COSTS.format("max_cost", "max_cost"),
    "capacity": COSTS.format("max_cost=..., capacity", "max_cost: ..., capacity"),
    "cost_hidden_size": COSTS.format("max_cost=..., hidden_size", "max_cost: ..., hidden_size"),
    "cost_window": COSTS.format("max_cost=..., window", "max_cost: ..., window"),
    **dict.fromkeys(
        ("best_fit", "exact_fit", "first_fit"),
        "best_fit_decreasing fills packs better; write method='best_fit_decreasing', or omit it",
    ),
}
"""Options and methods of Packing that are refused, and what to write instead."""


def refuse_gone(options: Mapping[str, Any]) -> None:
    """Refuse options and methods of `GONE`.

    >>> refuse_gone({"guard": 8})
    Traceback (most recent call last):
    streampack.errors.ConfigError: guard=8 is not an option any more: windows are packed whole, ...
    """
    for name, value in options.items():
        if name in GONE:
            raise ConfigError(f"{name}={value!r:.80} is not an option any more: {GONE[name]}")
        if name == "method" and value in GONE:
            raise ConfigError(f"method={value!r} is not a method any more: {GONE[value]}")


def _refusing(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def checked(self: Packing, /, **options: Any) -> None:
        refuse_gone(options)
        init(self, **options)

    return checked


@dataclass(frozen=True)
class PackCost:
    """A limit on each pack's `streampack.AttentionCost`, so that packs cost nearly the same.

    Raises:
        ConfigError: If a value is not a whole number of at least 1.

    >>> Packing(max_seq_len=1000, cost=PackCost(2000)).row_tokens
    1500
    """

    max_cost: int
    """Maximum cost of a pack. It must be at least the cost of one sample of max_seq_len."""
    capacity: int | None = None
    """Tokens per pack, from max_seq_len to 1.5 times that. None: 1.5 times."""
    hidden_size: int = 4096
    """Width of the model."""
    window: int | None = None
    """Tokens that a token attends to, itself included. None: all before it in its sample."""

    def __post_init__(self) -> None:
        convert_fields(self, read_count, "max_cost", "hidden_size")
        convert_fields(self, read_optional_count, "capacity", "window")


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
    """Packing algorithm. best_fit_decreasing packs a window of samples as a whole. docs/packers.md
    describes the others. None: best_fit_decreasing, or on resume, the method of the run."""
    overflow: Overflow = "split"
    """Handling of samples longer than a pack. split: cut into pieces of at most a pack. truncate:
    keep the first max_seq_len tokens. drop: skip the sample. error: raise a DataError."""
    buffer_tokens: int | None = None
    """Hard limit on the tokens that one packer carries from window to window. With knapsack, it
    carries none. None: max(8 * max_seq_len, 65,536)."""
    buffer_samples: int | None = None
    """Hard limit on the samples that one packer carries from window to window. None: 4,096, and
    1,024 for iterables."""
    max_samples_per_pack: int | None = None
    """Maximum number of segments in a pack. None: no limit."""
    pad_to_multiple: int | None = None
    """Pad each sample to a multiple of this many tokens. Context parallelism over n ranks needs
    2 * n. None: no padding between samples."""
    short_seq_len: int | None = None
    """Tokens per block of two_tiers, which requires this option. Samples of at most this length are
    packed into blocks."""
    cost: PackCost | None = None
    """Limit on the cost of a pack. Packs then have up to `PackCost.capacity` tokens and cost nearly
    the same. Use it with batch formats for varlen attention, and set their `pad_to`. None: no
    limit."""
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
        convert_fields(self, read_count, "max_seq_len")
        counts = (
            "buffer_tokens",
            "buffer_samples",
            "max_samples_per_pack",
            "pad_to_multiple",
            "short_seq_len",
        )
        convert_fields(self, read_optional_count, *counts)
        check_at_most("max_seq_len", self.max_seq_len, MAX_BATCH_TOKENS)
        if self.cost is not None and not isinstance(self.cost, PackCost):
            raise ConfigError(f"cost={self.cost!r:.80} is not a PackCost; write PackCost(max_cost)")
        if self.method is not None:
            check_choice("method", self.method, Method)
        check_choice("overflow", self.overflow, Overflow)
        check_choice("positions", self.positions, Positions)
        if self.buffer_tokens is not None and self.buffer_tokens < self.max_seq_len:
            raise ConfigError(
                f"buffer_tokens={self.buffer_tokens} cannot hold one pack; "
                f"set it to at least max_seq_len={self.max_seq_len}"
            )
        capacity = self.cost.capacity if self.cost else None
        check_combination(
            vars(self) | {"method": self.method or DEFAULT_METHOD, "capacity": capacity}
        )
        self._check_sizes(capacity)
        convert_fields(self, read_token_id, "bos_id", "eos_id", "padding_id")

    def _check_sizes(self, capacity: int | None) -> None:
        size, short = self.max_seq_len, self.short_seq_len
        if capacity is not None and not size <= capacity <= size * 3 // 2:
            raise ConfigError(
                f"capacity={capacity} must be from max_seq_len={size} to 1.5 times that, "
                f"{size * 3 // 2}; omit it to allow the most"
            )
        if short is not None and short >= size:
            multiple = self.pad_to_multiple or 1
            smaller = -(-max(size // 4, 1) // multiple) * multiple
            raise ConfigError(
                f"short_seq_len={short} must be less than max_seq_len={size}; "
                + (
                    f"set it to what short packs hold, such as {smaller}"
                    if smaller < size
                    else "raise max_seq_len, or choose another method"
                )
            )

    def resolved(self) -> Packing:
        """Return this packing with a method, the default if there is none."""
        return self if self.method is not None else replace(self, method=DEFAULT_METHOD)

    def in_sequence(self) -> dict[str, Any]:
        """Return the options that decide the packs, by name, as states have them."""
        limits = {"buffer_tokens": self.buffer_limit, "buffer_samples": self.sample_limit}
        values = asdict(self) | limits
        if self.cost is not None:
            values["cost"]["capacity"] = self.row_tokens
        return {name: value for name, value in values.items() if value is not None}

    @property
    def size(self) -> str:
        """The length of its packs, as messages name it."""
        return f"max_seq_len={self.max_seq_len}"

    @cached_property
    def row_tokens(self) -> int:
        """Token slots of a pack: its capacity with `cost`, otherwise max_seq_len."""
        if self.cost is None:
            return self.max_seq_len
        multiple = self.pad_to_multiple or 1
        return self.cost.capacity or self.max_seq_len * 3 // 2 // multiple * multiple

    @cached_property
    def packs_windows(self) -> bool:
        """Whether the packer needs the samples of a window together."""
        return self.method not in ("concat", "next_fit")

    @cached_property
    def buffer_limit(self) -> int:
        """Maximum number of tokens that one packer may buffer; 0 if none wait."""
        if self.method == "knapsack":
            return 0
        return self.buffer_tokens or max(BUFFER_PACKS * self.max_seq_len, MIN_BUFFER_TOKENS)

    @property
    def sample_limit(self) -> int:
        """Maximum number of samples that one packer may buffer."""
        return self.buffer_samples or BUFFER_SAMPLES


# Before pydantic and `inspect` see the class.
Packing.__init__ = _refusing(Packing.__init__)  # type: ignore[method-assign]
