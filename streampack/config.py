"""The configuration classes, one per question. Each validates its values on construction.

::

    Packing     how samples share packs           Bucketing   how padded samples share batches
    Mixing      how many of each stream, and in   Order       which sample comes next
                which batches                     Buffers     how much may be in memory or cached

All classes are frozen and allocate nothing. The command line reads the same classes from YAML. A
count may be any integral value (10_000, 1e4, np.int64(10_000)) and is stored as an int.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from streampack._checks import (
    check_at_most,
    check_choice,
    parse_bytes,
    parse_count,
    read_bool,
    read_count,
    read_optional_count,
    read_optional_fraction,
    read_seed,
    read_token_id,
)
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
BatchingMethod = Literal["random", "stratified", "per_stream", "device_per_stream"]
WeightUnit = Literal["samples", "tokens"]
SamplingMethod = Literal["balanced", "fixed"]
EpochEnd = Literal["pad", "drop", "carry"]
Arithmetic = Literal["exact", "mosaicml"]
Stop = Literal["all_exhausted", "first_exhausted", "repeat"]

MAX_BATCH_TOKENS = 2**31 - 1  # cu_seqlens is int32
MAX_OPEN_PACKS = 2**16
MIN_BUFFER_TOKENS = 65_536  # below this, packs of 2,048 leave 1 % empty on web text
BUFFER_PACKS = 8  # default buffer of a packer, in packs
WINDOW_PACKS = 128  # knapsack empties its whole buffer; with 8, every eighth pack is half empty
OPEN_PACKS = 8
MIN_FRAGMENT_TOKENS = 64
SHUFFLE_BLOCK_SIZE = 262_144
PACK_SHUFFLE = 32_768
SAMPLES_PER_PACK = 4  # limits a window of shuffled packs of short samples
# Options that only some methods support. They default to None.
OPTION_METHODS = {
    "split_gap": ("exact_fit", "next_fit", "first_fit", "best_fit"),
    "min_fragment": ("exact_fit", "next_fit", "first_fit", "best_fit"),
    "guard": ("exact_fit", "first_fit", "best_fit"),
    "max_samples_per_pack": (
        "exact_fit",
        "next_fit",
        "first_fit",
        "best_fit",
        "best_fit_decreasing",
        "knapsack",
    ),
    "open_packs": ("first_fit", "best_fit"),
    "short_seq_len": ("two_tiers",),
    "max_cost": ("best_fit_decreasing",),
    "capacity": ("best_fit_decreasing",),
    "cost_hidden_size": ("best_fit_decreasing",),
    "cost_window": ("best_fit_decreasing",),
}
COST_OPTIONS = ("max_cost", "capacity", "cost_hidden_size", "cost_window")
DEFAULT_METHOD: Method = "exact_fit"
SHUFFLED_METHOD: Method = "best_fit_decreasing"  # default where windows of packs are shuffled


def _convert(config: object, read: Callable[[str, Any], object], *names: str) -> None:
    """Replace fields of a frozen config by `read(name, value)`."""
    for name in names:
        object.__setattr__(config, name, read(name, getattr(config, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
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
    packs nearly in order of arrival. docs/packers.md describes the others. None: if packs of MDS
    streams are shuffled and it supports all options given here, best_fit_decreasing; otherwise
    exact_fit. A run that resumes keeps its method."""
    overflow: Overflow = "split"
    """Handling of samples longer than a pack. split: cut into pieces of at most a pack. truncate:
    keep the first max_seq_len tokens. drop: skip the sample. error: raise a DataError."""
    buffer_tokens: int | None = None
    """Hard limit on the tokens buffered by one packer; for best_fit_decreasing, on the tokens that
    pass from one window to the next. None: max(8 * max_seq_len, 65,536), or for knapsack
    max(128 * max_seq_len, 65,536)."""
    buffer_samples: int = 4096
    """Hard limit on the samples buffered by one packer, or passing from one window to the next."""
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
    batch formats of varlen attention. None: no limit."""
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
        _convert(self, read_count, "max_seq_len", "buffer_samples")
        _convert(self, read_optional_count, "buffer_tokens", "pad_to_multiple")
        counts = (name for name in OPTION_METHODS if name != "split_gap")
        _convert(self, read_optional_count, *counts)
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
        self._check_cost()
        self._check_options()
        self._check_multiple()
        self._check_tiers()
        _convert(self, read_optional_fraction, "split_gap")
        _convert(self, read_token_id, "bos_id", "eos_id", "padding_id")

    def _check_options(self) -> None:
        """Reject options that the method does not support."""
        method = self.method or (DEFAULT_METHOD if self.max_cost is None else SHUFFLED_METHOD)
        for name, methods in OPTION_METHODS.items():
            value = getattr(self, name)
            if value is not None and method not in methods:
                raise ConfigError(
                    f"{name}={value} is not supported by method={method!r}; leave it out, or "
                    f"set method to {' or '.join(map(repr, methods))}"
                )
        if self.min_fragment is None:
            return
        if self.split_gap is None:
            raise ConfigError(
                f"min_fragment={self.min_fragment} bounds cuts, and without split_gap there are "
                "none; set split_gap, e.g. to 0.01, or leave min_fragment out"
            )
        if 2 * self.min_fragment > self.max_seq_len:
            raise ConfigError(
                f"min_fragment={self.min_fragment} leaves nothing to cut in packs of "
                f"max_seq_len={self.max_seq_len}; set it to {self.max_seq_len // 2} at most"
            )

    def _check_multiple(self) -> None:
        multiple = self.pad_to_multiple or 1
        for name in ("max_seq_len", "short_seq_len", "capacity"):
            value = getattr(self, name)
            if value is not None and value % multiple:
                raise ConfigError(
                    f"{name}={value} is not a multiple of pad_to_multiple={multiple}; "
                    f"set it to {self.room_of(value)}, for example"
                )

    def _check_cost(self) -> None:
        for name in COST_OPTIONS[1:]:
            value = getattr(self, name)
            if value is not None and self.max_cost is None:
                raise ConfigError(
                    f"{name}={value} has no effect without max_cost; set max_cost, or leave "
                    f"{name} out"
                )
        least, most = self.max_seq_len, self.max_seq_len * 3 // 2
        if self.capacity is not None and not least <= self.capacity <= most:
            raise ConfigError(
                f"capacity={self.capacity} must be from max_seq_len={least} to 1.5 times that, "
                f"{most}; leave it out for the most"
            )

    def _check_tiers(self) -> None:
        if self.method != "two_tiers":
            return
        short = self.short_seq_len
        if short is None or short >= self.max_seq_len:
            raise ConfigError(
                f"short_seq_len={short} must be less than max_seq_len={self.max_seq_len} for "
                "method='two_tiers'; set it to what short packs hold, such as "
                f"{self.room_of(max(self.max_seq_len // 4, 1))}"
            )
        if self.buffer_tokens is not None and self.buffer_tokens < self.max_seq_len + short:
            raise ConfigError(
                f"buffer_tokens={self.buffer_tokens} cannot hold a pack of each tier; set it to "
                f"at least max_seq_len + short_seq_len = {self.max_seq_len + short}"
            )

    def resolved(self, *, is_shuffled: bool) -> Packing:
        """Return this packing with a method, chosen by default if there is none.

        Args:
            is_shuffled: Whether packs are shuffled in windows, so that a window can be packed as a
                whole.

        >>> Packing(max_seq_len=8).resolved(is_shuffled=True).method
        'best_fit_decreasing'
        >>> Packing(max_seq_len=8, split_gap=0.01).resolved(is_shuffled=True).method
        'exact_fit'
        """
        if self.method is not None:
            return self
        is_supported = all(
            getattr(self, name) is None or SHUFFLED_METHOD in methods
            for name, methods in OPTION_METHODS.items()
        )
        is_windowed = self.max_cost is not None or (is_shuffled and is_supported)
        return replace(self, method=SHUFFLED_METHOD if is_windowed else DEFAULT_METHOD)

    def in_sequence(self) -> dict[str, Any]:
        """Return the options that decide the packs, by name."""
        unused = COST_OPTIONS if self.max_cost is None else ()
        return {name: value for name, value in asdict(self).items() if name not in unused}

    @property
    def row_tokens(self) -> int:
        """Token slots of a pack: its capacity with max_cost, otherwise max_seq_len.

        >>> Packing(max_seq_len=1000, max_cost=2000).row_tokens
        1500
        """
        if self.max_cost is None:
            return self.max_seq_len
        multiple = self.pad_to_multiple or 1
        return self.capacity or self.max_seq_len * 3 // 2 // multiple * multiple

    @property
    def packs_windows(self) -> bool:
        """Whether the packer needs the samples of a window together."""
        return self.method == "best_fit_decreasing"

    @property
    def buffer_limit(self) -> int:
        """Maximum number of tokens that one packer may buffer."""
        packs = WINDOW_PACKS if self.method == "knapsack" else BUFFER_PACKS
        return self.buffer_tokens or max(packs * self.max_seq_len, MIN_BUFFER_TOKENS)

    @property
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
        _convert(self, read_count, "max_tokens", "buffer_samples")
        _convert(self, read_optional_count, "max_samples", "max_seq_len")
        _convert(self, read_bool, "include_padding")
        if self.longest > self.max_tokens:
            raise ConfigError(
                f"max_seq_len={self.max_seq_len} is over max_tokens={self.max_tokens}, so its rows "
                "fit no batch; lower it, or leave it out"
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
        turns = (self.longest, self.max_tokens - most + 1, (self.max_tokens + 1) // 2)
        lengths = [min(max(turn, 1), self.longest) for turn in turns]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How many samples an epoch takes from each stream, and how streams share batches.

    Raises:
        ConfigError: If a choice is unknown, or a number is below 1.
    """

    batching_method: BatchingMethod = "random"
    """How often a stream is chosen. random: for each sample. stratified: for each pack. per_stream:
    for each global batch. device_per_stream: for each device batch."""
    weight_unit: WeightUnit = "samples"
    """Unit of proportion, choose and epoch_size."""
    epoch_size: int | str | None = None
    """Samples (or tokens, see weight_unit) per epoch. Text such as "10k" is accepted and stored as
    an int. None: all that the streams hold, or the total of their repeat and choose."""
    sampling_method: SamplingMethod = "balanced"
    """balanced: each epoch continues where the previous one stopped. fixed: every epoch takes the
    same samples."""
    global_batch_size: int | None = None
    """Packs per optimizer step, over all ranks. None: batch_size times the number of devices of the
    first run."""
    epoch_end: EpochEnd = "pad"
    """End of an epoch. pad: deliver every chosen token and fill the last batch with padding. drop:
    omit an incomplete last batch; with per_stream and device_per_stream, also omit the incomplete
    last batches of each stream. carry: continue into the next epoch without a break."""
    arithmetic: Arithmetic = "exact"
    """Rounding of shares to whole samples. exact: largest remainders. mosaicml: bit-for-bit as in
    MosaicML Streaming."""
    stop: Stop = "all_exhausted"
    """End of an epoch of iterable sources. all_exhausted: when every source has ended.
    first_exhausted: when one of them has. repeat: never; sources that end are restarted."""

    def __post_init__(self) -> None:
        check_choice("batching_method", self.batching_method, BatchingMethod)
        check_choice("weight_unit", self.weight_unit, WeightUnit)
        check_choice("sampling_method", self.sampling_method, SamplingMethod)
        check_choice("epoch_end", self.epoch_end, EpochEnd)
        check_choice("arithmetic", self.arithmetic, Arithmetic)
        check_choice("stop", self.stop, Stop)
        _convert(self, read_optional_count, "global_batch_size")
        _convert(self, parse_count, "epoch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which sample comes next.

    Raises:
        ConfigError: If seed is not an integer of at least 0, shuffle is not a bool, or a count is
            below 1.
    """

    seed: int = 9176
    """Seed of all randomness, at least 0. The default is that of MosaicML Streaming."""
    shuffle: bool = True
    """False: read samples in stored order. Streams are still mixed."""
    shuffle_block_size: int | None = None
    """Number of samples shuffled together. It bounds the number of shards in use at a time. None:
    262,144."""
    num_lanes: int | None = None
    """Number of independent read positions per stream, each over its own part of the shards. It
    stays fixed for the whole run. None: the number of nodes of the first run."""
    pack_shuffle: int | None = None
    """Number of packs shuffled together, over all lanes and streams, so that a batch holds pieces
    of many samples. 0: packs keep the order in which they are packed. None: 32,768 with `shuffle`,
    otherwise 0. A window of packs also ends at 4 times as many samples as packs, at half a shuffle
    block, and at one pass over its streams. For iterables: packs that each worker shuffles
    together, or fewer if `Buffers` do not hold as many; None means 0."""

    def __post_init__(self) -> None:
        _convert(self, read_seed, "seed")
        _convert(self, read_bool, "shuffle")
        _convert(self, read_optional_count, "shuffle_block_size", "num_lanes")
        if isinstance(self.pack_shuffle, bool) or self.pack_shuffle != 0:
            _convert(self, read_optional_count, "pack_shuffle")
        elif not isinstance(self.pack_shuffle, int):
            object.__setattr__(self, "pack_shuffle", 0)
        if self.pack_shuffle and not self.shuffle:
            raise ConfigError(
                f"pack_shuffle={self.pack_shuffle} shuffles packs, but shuffle=False keeps the "
                "stored order; leave out one of them"
            )

    @property
    def pack_window(self) -> tuple[int, int]:
        """Packs and samples after which a window ends, whichever comes first; (0, 0): no shuffle.

        >>> Order().pack_window, Order(shuffle_block_size=1000).pack_window
        ((32768, 131072), (32768, 500))
        """
        num_packs = self.pack_shuffle
        if num_packs is None:
            num_packs = PACK_SHUFFLE if self.shuffle else 0
        return num_packs, min(SAMPLES_PER_PACK * num_packs, -(-self.block_size // 2))

    @property
    def block_size(self) -> int:
        """Number of samples shuffled together."""
        return self.shuffle_block_size or SHUFFLE_BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Limits on memory and cache: buffered samples, undelivered packs, and shards.

    Raises:
        ConfigError: If a number is below 1. A limit too small for the packing is rejected later,
            with an error that names the minimum.
    """

    worker_tokens: int | None = None
    """Maximum tokens per worker: its prefetched batches, and the packers' buffers if the worker
    packs (always with num_workers=0). None: no limit."""
    worker_bytes: int | None = None
    """Maximum bytes of finished batches per worker. For iterable sources, the limit also covers
    waiting payloads, and the data that the format adds to a batch. None: no limit."""
    rank_tokens: int | None = None
    """Maximum tokens per rank: the packers' buffers, and the prefetched batches of all workers.
    None: no limit."""
    cache_limit: int | str | None = None
    """Maximum bytes of fetched or decompressed shards per node, over all streams. Text such as
    "50gb" is accepted (1 gb = 2**30 bytes) and stored as an int. None: no limit."""

    def __post_init__(self) -> None:
        _convert(self, read_optional_count, "worker_tokens", "worker_bytes", "rank_tokens")
        _convert(self, parse_bytes, "cache_limit")

    @property
    def cache_bytes(self) -> int | None:
        """The cache limit in bytes."""
        return parse_bytes("cache_limit", self.cache_limit)
