"""The four configuration classes, one per question. Each validates its values on construction.

::

    Packing   how samples share packs        Mixing   how many of each stream, and in which batches
    Order     which sample comes next        Buffers  how much may be in memory or in the cache

All four are frozen and allocate nothing. The command line reads the same classes from YAML. A count
may be any integral value (10_000, 1e4, np.int64(10_000)) and is stored as an int.

Cost: none.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from operator import index
from typing import Any, Literal, get_args

from streampack.errors import ConfigError, suggest

Method = Literal[
    "exact_fit", "next_fit", "first_fit", "best_fit", "knapsack", "concat", "two_tiers"
]
Overflow = Literal["split", "truncate", "drop", "error"]
Positions = Literal["restart", "continue"]
BatchingMethod = Literal["random", "stratified", "per_stream", "device_per_stream"]
WeightUnit = Literal["samples", "tokens"]
SamplingMethod = Literal["balanced", "fixed"]
EpochEnd = Literal["pad", "drop", "carry"]
Arithmetic = Literal["exact", "mosaicml"]
Stop = Literal["all_exhausted", "first_exhausted", "repeat"]

BYTE_SUFFIXES = {"kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "pb": 2**50, "b": 1}
COUNT_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MAX_ID = 2**31 - 1  # largest token id: batches hold int32
MAX_COUNT = 2**57  # of samples, tokens or bytes: sums and small multiples still fit in 64 bits
MAX_BATCH_TOKENS = 2**31 - 1  # cu_seqlens is int32
MAX_OPEN_PACKS = 2**16
MAX_INTEGER_BITS = 1024  # as in the largest float
MAX_SHOWN_BITS = 256  # Python refuses to print an integer of more than 4,300 digits
WRITE_COUNT = "write a whole number of at least 1, such as 1024"
MIN_BUFFER_TOKENS = 65_536  # below this, packs of 2,048 leave 1 % empty on web text
BUFFER_PACKS = 8  # default buffer of a packer, in packs
WINDOW_PACKS = 128  # knapsack empties its whole buffer; with 8, every eighth pack is half empty
OPEN_PACKS = 8
MIN_FRAGMENT_TOKENS = 64
SHUFFLE_BLOCK_SIZE = 262_144
# Options that only some methods support. They default to None.
OPTION_METHODS = {
    "split_gap": ("exact_fit", "next_fit", "first_fit", "best_fit"),
    "min_fragment": ("exact_fit", "next_fit", "first_fit", "best_fit"),
    "guard": ("exact_fit", "first_fit", "best_fit"),
    "max_samples_per_pack": ("exact_fit", "next_fit", "first_fit", "best_fit", "knapsack"),
    "open_packs": ("first_fit", "best_fit"),
    "short_seq_len": ("two_tiers",),
}


def check_choice(name: str, value: str, literal: object) -> None:
    """Check that `value` is one of the strings of a Literal.

    Raises:
        ConfigError: If it is not. Lists the choices and suggests the nearest one.
    """
    words = get_args(literal)
    if value not in words:
        raise ConfigError(
            f"{name}={value!r} is not one of {'|'.join(words)}{suggest(value, words)}"
        )


def read_integer(name: str, value: Any, way_out: str) -> int:
    """Convert an integral value to an int.

    Ints, numpy integers and floats such as 1e4 are integral. Bools, text and 10.5 are not.

    Raises:
        ConfigError: If `value` is not integral. The message ends with `way_out`.

    >>> read_integer("max_seq_len", 2048.0, "write 2048")
    2048
    """
    # Bools of numpy and torch also have __index__.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    is_real = isinstance(value, Real)
    if not is_bool:
        number = None
        with suppress(TypeError):
            number = index(value)
        if number is None and is_real and value % 1 == 0:  # inf % 1 and nan % 1 are nan
            number = int(value)
        if number is not None and number.bit_length() > MAX_INTEGER_BITS:
            raise ConfigError(f"{name} is {show_number(number)}, too large for any use; {way_out}")
        if number is not None:
            return number
    raise ConfigError(f"{name}={value!r} is no integer; {way_out}")


def is_weight(value: Any) -> bool:
    """Whether a value is a finite number of at least 0, and not a bool.

    >>> is_weight(0.5), is_weight("0.5"), is_weight(float("nan")), is_weight(True)
    (True, False, False, False)
    """
    if isinstance(value, Decimal):
        return value.is_finite() and value >= 0  # comparing a NaN Decimal raises
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(0 <= value < float("inf"))


def read_count(name: str, value: object, way_out: str = WRITE_COUNT) -> int:
    """Convert a count to an int. None is not a count.

    Raises:
        ConfigError: If the value is not integral, below 1, or above MAX_COUNT.

    >>> read_count("num_ranks", 8.0)
    8
    """
    count = read_integer(name, value, WRITE_COUNT)
    if count < 1:
        raise ConfigError(f"{name}={show_number(count)} must be at least 1; {way_out}")
    check_at_most(name, count, MAX_COUNT)
    return count


def check_at_most(name: str, number: int, most: int) -> None:
    """Check that a number is not larger than the arithmetic here, or any machine, can handle.

    Raises:
        ConfigError: If it is. Names the limit.
    """
    if number > most:
        raise ConfigError(f"{name}={show_number(number)} is more than {most}, the most; lower it")


def show_number(number: Any) -> str:
    """Return the repr of a number, or only its size in bits if it has too many digits.

    >>> show_number(12), show_number(10**400)
    ('12', 'an integer of 1329 bits')
    """
    if isinstance(number, int) and number.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {number.bit_length()} bits"
    return repr(number)


def check_positive(name: str, value: object) -> int | None:
    """Convert a count to an int as `read_count` does, but keep None.

    Raises:
        ConfigError: If the value is neither None nor a count.
    """
    return None if value is None else read_count(name, value, "leave it out for the default")


def _keep_counts(config: object, *names: str) -> None:
    """Validate count fields of a frozen config, and store them as ints."""
    for name in names:
        object.__setattr__(config, name, check_positive(name, getattr(config, name)))


def parse_count(name: str, value: object) -> int | None:
    """Parse a count in MosaicML Streaming's notation: a number, or text such as "10k" or "1.5b".

    Raises:
        ConfigError: If the value cannot be parsed, or is below 1.

    >>> parse_count("epoch_size", "10k")
    10000
    """
    if isinstance(value, str):
        text = value.strip().lower()
        factor = COUNT_SUFFIXES.get(text[-1:], 1)
        digits = text[:-1] if text[-1:] in COUNT_SUFFIXES else text
        try:
            value = int(digits) * factor if digits.isdigit() else round(float(digits) * factor)
        except (OverflowError, ValueError):
            raise ConfigError(
                f"{name}={value!r} is no number; write 10000, '10k', '1.5m' or '2b'"
            ) from None
    return check_positive(name, value)


def parse_bytes(name: str, value: object) -> int | None:
    """Parse a size in MosaicML Streaming's notation: a number, or text such as "50gb".

    Units are binary: 1 kb is 1,024 bytes, 1 gb is 1,073,741,824 bytes.

    Raises:
        ConfigError: If the value cannot be parsed, or is below 1.

    >>> parse_bytes("cache_limit", "1.5kb")
    1536
    """
    if isinstance(value, str):
        text = value.strip().lower()
        suffix = next((suffix for suffix in BYTE_SUFFIXES if text.endswith(suffix)), "")
        digits, factor = text.removesuffix(suffix), BYTE_SUFFIXES.get(suffix, 1)
        try:
            value = int(digits) * factor if digits.isdigit() else int(float(digits) * factor)
        except (OverflowError, ValueError):
            raise ConfigError(
                f"{name}={value!r} is no number of bytes; write 500000000, '500mb' or '1.5gb'"
            ) from None
    return check_positive(name, value)


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
    method: Method = "exact_fit"
    """Packing algorithm. exact_fit leaves almost no padding; next_fit keeps strict arrival order.
    For first_fit, best_fit, knapsack, concat and two_tiers see docs/packers.md."""
    overflow: Overflow = "split"
    """Handling of samples longer than a pack. split: cut into pieces of at most a pack. truncate:
    keep the first max_seq_len tokens. drop: skip the sample. error: raise a DataError."""
    buffer_tokens: int | None = None
    """Hard limit on the tokens buffered by one packer. None: max(8 * max_seq_len, 65,536), and
    128 * max_seq_len for knapsack."""
    buffer_samples: int = 4096
    """Hard limit on the samples buffered by one packer."""
    split_gap: float | None = None
    """Split a sample to fill a pack if more than this fraction of the pack would stay empty.
    None: never split for this reason."""
    min_fragment: int | None = None
    """Minimum tokens on either side of a cut made by split_gap. None: 64, or an eighth of a pack if
    that is less."""
    guard: int | None = None
    """Maximum number of packs emitted while a sample waits; then the sample is packed next. None:
    no limit."""
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
        for name in ("max_seq_len", "buffer_samples"):  # None is not allowed for these two
            object.__setattr__(self, name, read_count(name, getattr(self, name)))
        _keep_counts(self, "buffer_tokens", "pad_to_multiple")
        _keep_counts(self, *(name for name in OPTION_METHODS if name != "split_gap"))
        check_at_most("max_seq_len", self.max_seq_len, MAX_BATCH_TOKENS)
        check_at_most("open_packs", self.open_packs or 0, MAX_OPEN_PACKS)
        check_choice("method", self.method, Method)
        check_choice("overflow", self.overflow, Overflow)
        check_choice("positions", self.positions, Positions)
        if self.buffer_tokens is not None and self.buffer_tokens < self.max_seq_len:
            raise ConfigError(
                f"buffer_tokens={self.buffer_tokens} cannot hold one pack; "
                f"set it to at least max_seq_len={self.max_seq_len}"
            )
        self._check_options()
        self._check_multiple()
        self._check_tiers()
        self._keep_split_gap()
        self._keep_ids()

    def _check_options(self) -> None:
        """Reject options that the method does not support."""
        for name, methods in OPTION_METHODS.items():
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                raise ConfigError(
                    f"{name}={value} is nothing that method={self.method!r} can do; leave it out, "
                    f"or set method to {' or '.join(map(repr, methods))}"
                )
        if self.min_fragment is None:
            return
        if self.split_gap is None:
            raise ConfigError(
                f"min_fragment={self.min_fragment} bounds cuts, and there are none without "
                "split_gap; set split_gap, e.g. to 0.01, or leave min_fragment out"
            )
        if 2 * self.min_fragment > self.max_seq_len:
            raise ConfigError(
                f"min_fragment={self.min_fragment} leaves nothing to cut in packs of "
                f"max_seq_len={self.max_seq_len}; set it to {self.max_seq_len // 2} at most"
            )

    def _check_multiple(self) -> None:
        multiple = self.pad_to_multiple or 1
        for name in ("max_seq_len", "short_seq_len"):
            value = getattr(self, name)
            if value is not None and value % multiple:
                raise ConfigError(
                    f"{name}={value} is no multiple of pad_to_multiple={multiple}; "
                    f"set it to {self.room_of(value)}, for example"
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

    def _keep_split_gap(self) -> None:
        gap = self.split_gap
        if gap is None:
            return
        if isinstance(gap, bool) or not isinstance(gap, Real) or not 0 <= gap < 1:
            raise ConfigError(
                f"split_gap={show_number(gap)} is not a fraction of a pack: 0 <= split_gap < 1, "
                "e.g. 0.01"
            )
        object.__setattr__(self, "split_gap", float(gap))

    def _keep_ids(self) -> None:
        """Validate the token ids, and store them as ints."""
        remedies = {
            "bos_id": "None adds none",
            "eos_id": "None adds none",
            "padding_id": "leave it out for 0",
        }
        for name, remedy in remedies.items():
            value = getattr(self, name)
            if value is None and name != "padding_id":
                continue
            token = read_integer(name, value, f"token ids go from 0 to {MAX_ID}, {remedy}")
            if not 0 <= token <= MAX_ID:
                raise ConfigError(
                    f"{name}={token} is no token id; they go from 0 to {MAX_ID}, {remedy}"
                )
            object.__setattr__(self, name, token)

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
    an int. None: the total of what the streams hold, or of their repeat and choose."""
    sampling_method: SamplingMethod = "balanced"
    """balanced: each epoch continues where the previous one stopped. fixed: every epoch takes the
    same samples."""
    global_batch_size: int | None = None
    """Packs per optimizer step, over all ranks. None: batch_size times the number of devices of the
    first run."""
    epoch_end: EpochEnd = "pad"
    """End of an epoch. pad: deliver every chosen token and fill the last batch with padding. drop:
    omit an incomplete last batch. carry: continue into the next epoch without a break."""
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
        _keep_counts(self, "global_batch_size")
        object.__setattr__(self, "epoch_size", parse_count("epoch_size", self.epoch_size))


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

    def __post_init__(self) -> None:
        self._keep_seed()
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle={self.shuffle!r} is no bool; write True or False")
        _keep_counts(self, "shuffle_block_size", "num_lanes")

    @property
    def block_size(self) -> int:
        """Number of samples shuffled together."""
        return self.shuffle_block_size or SHUFFLE_BLOCK_SIZE

    def _keep_seed(self) -> None:
        remedy = "a seed is an integer of at least 0, such as 17; shuffle=False keeps stored order"
        # read_integer accepts 17.0, but two large float seeds could round to the same integer.
        if isinstance(self.seed, Real) and not hasattr(self.seed, "__index__"):
            raise ConfigError(f"seed={self.seed!r} is no integer; {remedy}")
        seed = read_integer("seed", self.seed, remedy)
        if seed < 0:
            raise ConfigError(f"seed={seed} is negative; {remedy}")
        object.__setattr__(self, "seed", seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Limits on memory and cache: buffered samples, undelivered packs, and shards.

    Raises:
        ConfigError: If a number is below 1. A limit too small for the packing is rejected later,
            with an error that names the minimum.
    """

    worker_tokens: int | None = None
    """Maximum tokens per worker: its prefetched batches, and the packers' buffers if it does the
    packing (always with num_workers=0). None: no limit."""
    worker_bytes: int | None = None
    """Maximum bytes of finished batches per worker. For iterable sources it also covers waiting
    payloads, and the data that the format adds to a batch. None: no limit."""
    rank_tokens: int | None = None
    """Maximum tokens per rank: the packers' buffers, and the prefetched batches of all workers.
    None: no limit."""
    cache_limit: int | str | None = None
    """Maximum bytes of fetched or decompressed shards per node, over all streams. Text such as
    "50gb" is accepted (1 gb = 2**30 bytes) and stored as an int. None: no limit."""

    def __post_init__(self) -> None:
        _keep_counts(self, "worker_tokens", "worker_bytes", "rank_tokens")
        object.__setattr__(self, "cache_limit", parse_bytes("cache_limit", self.cache_limit))

    @property
    def cache_bytes(self) -> int | None:
        """The cache limit in bytes."""
        return parse_bytes("cache_limit", self.cache_limit)
