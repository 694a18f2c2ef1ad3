"""The four configs, one per question; each refuses the impossible where it is written.

::

    Packing   how samples share packs        Mixing   how many of each stream, and in which batches
    Order     which sample comes next        Buffers  how much may be resident at once

All are frozen and build nothing. The command line reads the same classes from YAML. A count may
be written as anything that is a whole number (10_000, 1e4, np.int64(10_000)); it is kept as an int.

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

__all__ = [
    "BUFFER_PACKS",
    "MAX_ID",
    "OPTION_METHODS",
    "SHUFFLE_BLOCK_SIZE",
    "Buffers",
    "Mixing",
    "Order",
    "Overflow",
    "Packing",
    "check_choice",
    "check_positive",
    "is_weight",
    "parse_bytes",
    "parse_count",
    "read_count",
    "read_integer",
]

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
MAX_ID = 2**31 - 1  # of tokens: they are handed on as int32
WRITE_COUNT = "write a whole number of at least 1, such as 1024"
MIN_BUFFER_TOKENS = 65_536  # below this, packs of 2,048 leave 1 % empty on web text
BUFFER_PACKS = 8  # what a packer buffers by default, in packs ...
WINDOW_PACKS = 128  # ... and one that empties its buffer whole, or every eighth pack is half empty
OPEN_PACKS = 8
MIN_FRAGMENT_TOKENS = 64
SHUFFLE_BLOCK_SIZE = 262_144
# Options of some methods only; all are None where they are not set.
OPTION_METHODS = {
    "split_gap": ("exact_fit", "next_fit", "first_fit", "best_fit"),
    "min_fragment": ("exact_fit", "next_fit", "first_fit", "best_fit"),
    "guard": ("exact_fit", "first_fit", "best_fit"),
    "max_samples_per_pack": ("exact_fit", "next_fit", "first_fit", "best_fit", "knapsack"),
    "open_packs": ("first_fit", "best_fit"),
    "short_seq_len": ("two_tiers",),
}


def check_choice(name: str, value: str, literal: object) -> None:
    """Refuse a `value` that is not one of a Literal's words.

    Raises:
        ConfigError: Naming the words, and the nearest one.
    """
    words = get_args(literal)
    if value not in words:
        raise ConfigError(
            f"{name}={value!r} is not one of {'|'.join(words)}{suggest(value, words)}"
        )


def read_integer(name: str, value: Any, way_out: str) -> int:
    """Return a whole number as an int: an int, a numpy integer, 1e4; no bool, no text, no 10.5.

    Raises:
        ConfigError: If it is none; `way_out` says what to write.

    >>> read_integer("max_seq_len", 2048.0, "write 2048")
    2048
    """
    # Bools of numpy and torch have an index too.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    is_real = isinstance(value, Real)
    if not is_bool:
        with suppress(TypeError):
            return index(value)
        if is_real and value % 1 == 0:  # the rest of inf and of nan is nan
            return int(value)
    raise ConfigError(f"{name}={value!r} is no integer; {way_out}")


def is_weight(value: Any) -> bool:
    """Whether a value is a number of 0 or more, and not infinite; a bool is none.

    >>> is_weight(0.5), is_weight("0.5"), is_weight(float("nan")), is_weight(True)
    (True, False, False, False)
    """
    if isinstance(value, Decimal):
        return value.is_finite() and value >= 0  # one that is no number cannot be compared
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(0 <= value < float("inf"))


def read_count(name: str, value: object, way_out: str = WRITE_COUNT) -> int:
    """Return a count as an int, and refuse what is no integer, None among them, or below 1.

    Raises:
        ConfigError: Naming it.

    >>> read_count("num_ranks", 8.0)
    8
    """
    count = read_integer(name, value, WRITE_COUNT)
    if count < 1:
        raise ConfigError(f"{name}={count} must be at least 1; {way_out}")
    return count


def check_positive(name: str, value: object) -> int | None:
    """Return a count as an int, as `read_count`; None stays None.

    Raises:
        ConfigError: Naming it.
    """
    return None if value is None else read_count(name, value, "leave it out for the default")


def _keep_counts(config: object, *names: str) -> None:
    """Check counts of a config and keep them as ints."""
    for name in names:
        object.__setattr__(config, name, check_positive(name, getattr(config, name)))


def parse_count(name: str, value: object) -> int | None:
    """Read a count as MosaicML Streaming does: a number, or text such as "10k" or "1.5b".

    Raises:
        ConfigError: If it is no such number, or the number is below 1.

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
    """Read a number of bytes as MosaicML Streaming does: a number, or text such as "50gb".

    A kb is 1,024 bytes, a gb 1,073,741,824.

    Raises:
        ConfigError: If it is no such number, or the number is below 1.

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
        ConfigError: If the values cannot work together.

    >>> Packing(max_seq_len=2048).buffer_limit
    65536
    """

    max_seq_len: int
    """Tokens in a pack."""
    method: Method = "exact_fit"
    """Which packer: exact_fit fills packs to the brim, next_fit keeps strict arrival order; for
    first_fit, best_fit, knapsack, concat and two_tiers see docs/packers.md."""
    overflow: Overflow = "split"
    """What becomes of a sample longer than a pack: split, truncate, drop or error."""
    buffer_tokens: int | None = None
    """Hard bound on the tokens a packer buffers; None: max(8 * max_seq_len, 65,536), for knapsack
    128 * max_seq_len."""
    buffer_samples: int = 4096
    """Hard bound on buffered samples per packer."""
    split_gap: float | None = None
    """Cut a sample where more than this fraction of a pack would stay empty; None: never."""
    min_fragment: int | None = None
    """Tokens that such a cut leaves on either side at least; None: 64, or an eighth of a pack where
    that is less."""
    guard: int | None = None
    """Packs that a sample may see leave before it goes first; None: the packer's own order."""
    max_samples_per_pack: int | None = None
    """Most segments in a pack; None: as many as fit."""
    pad_to_multiple: int | None = None
    """Round the room of each sample up to a multiple of this, with padding (context parallelism
    over n ranks: 2 * n); None: no padding between samples."""
    open_packs: int | None = None
    """Packs that first_fit and best_fit keep open; None: 8."""
    short_seq_len: int | None = None
    """Tokens of two_tiers' short packs, which hold all samples that fit them."""
    bos_id: int | None = None
    """Put before each sample that does not begin with it, counted in its length."""
    eos_id: int | None = None
    """Put after each sample that does not end with it, counted in its length."""
    padding_id: int = 0
    """Token id of empty slots."""
    positions: Positions = "restart"
    """input_pos of a split sample's later pieces: restart at 0, or continue where the cut was."""

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "buffer_samples"):  # None means nothing here
            object.__setattr__(self, name, read_count(name, getattr(self, name)))
        _keep_counts(self, "buffer_tokens", "pad_to_multiple")
        _keep_counts(self, *(name for name in OPTION_METHODS if name != "split_gap"))
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
        """Refuse options that the method cannot honour."""
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
                "method='two_tiers'; set it to what short packs hold, such as 4096"
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
                f"split_gap={gap!r} is a fraction of a pack: 0 <= split_gap < 1, e.g. 0.01"
            )
        object.__setattr__(self, "split_gap", float(gap))

    def _keep_ids(self) -> None:
        """Check the token ids and keep them as ints."""
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
        """Tokens that one packer may hold."""
        packs = WINDOW_PACKS if self.method == "knapsack" else BUFFER_PACKS
        return self.buffer_tokens or max(packs * self.max_seq_len, MIN_BUFFER_TOKENS)

    @property
    def least_fragment(self) -> int:
        """Tokens that a cut by `split_gap` leaves on either side at least."""
        return self.min_fragment or min(MIN_FRAGMENT_TOKENS, max(1, self.max_seq_len // 8))

    @property
    def num_open_packs(self) -> int:
        """Packs that first_fit and best_fit keep open."""
        return self.open_packs or OPEN_PACKS

    def room_of(self, length: int) -> int:
        """Return the slots that a segment of `length` tokens takes in a pack.

        >>> Packing(max_seq_len=64, pad_to_multiple=8).room_of(13)
        16
        """
        multiple = self.pad_to_multiple or 1
        return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How many samples of each stream an epoch takes, and which packs they share.

    Raises:
        ConfigError: If a word is not known or a number is below 1.
    """

    batching_method: BatchingMethod = "random"
    """For how long a choice of stream holds: one sample, pack, global batch or device batch."""
    weight_unit: WeightUnit = "samples"
    """What proportion, choose and epoch_size count."""
    epoch_size: int | str | None = None
    """Samples (or tokens) in an epoch; None: as many as the streams hold. "10k" is understood; what
    is kept is an int."""
    sampling_method: SamplingMethod = "balanced"
    """balanced: an epoch goes on where the last one stopped; fixed: each takes the same samples."""
    global_batch_size: int | None = None
    """Packs in one optimizer step over all ranks; None: batch_size x devices of the first run."""
    epoch_end: EpochEnd = "pad"
    """pad: every chosen token, the last batch filled up; drop: whole batches; carry: roll on."""
    arithmetic: Arithmetic = "exact"
    """exact: largest remainders; mosaicml: MosaicML Streaming's rounding, bit for bit."""
    stop: Stop = "all_exhausted"
    """Of iterables: an epoch ends with all of them, with the first_exhausted, or they repeat."""

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
        ConfigError: If the seed is no integer of at least 0, shuffle no bool, a number below 1.
    """

    seed: int = 9176
    """All randomness is a function of it, 0 or more; the default is MosaicML Streaming's."""
    shuffle: bool = True
    """False: stored order, and streams are still mixed."""
    shuffle_block_size: int | None = None
    """Samples shuffled together, which bounds the shards in flight; None: 262,144."""
    num_lanes: int | None = None
    """Independent paths through the shards, fixed for the run; None: the nodes of the first run."""

    def __post_init__(self) -> None:
        self._keep_seed()
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle={self.shuffle!r} is no bool; write True or False")
        _keep_counts(self, "shuffle_block_size", "num_lanes")

    @property
    def block_size(self) -> int:
        """Samples that are shuffled together."""
        return self.shuffle_block_size or SHUFFLE_BLOCK_SIZE

    def _keep_seed(self) -> None:
        remedy = "a seed is an integer of at least 0, such as 17; shuffle=False keeps stored order"
        # A float would pass as its whole number, but no two seeds should look alike by rounding.
        if isinstance(self.seed, Real) and not hasattr(self.seed, "__index__"):
            raise ConfigError(f"seed={self.seed!r} is no integer; {remedy}")
        seed = read_integer("seed", self.seed, remedy)
        if seed < 0:
            raise ConfigError(f"seed={seed} is negative; {remedy}")
        object.__setattr__(self, "seed", seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """How much may be resident at once: samples in the packers, packs not yet delivered, shards.

    Raises:
        ConfigError: If a number is below 1; one that is too small for the packing is refused later,
            with the least that works.
    """

    worker_tokens: int | None = None
    """Tokens per worker (with num_workers=0: per process)."""
    worker_bytes: int | None = None
    """Bytes of finished batches per worker; of iterables, also of payloads that wait, and of what
    the format adds to a batch."""
    rank_tokens: int | None = None
    """Tokens per rank: the packers' buffers and the batches of all its workers."""
    cache_limit: int | str | None = None
    """Bytes per node of shards that were fetched or decompressed, all streams together; None: no
    limit. "50gb" is understood (gb = 2**30); what is kept is an int."""

    def __post_init__(self) -> None:
        _keep_counts(self, "worker_tokens", "worker_bytes", "rank_tokens")
        object.__setattr__(self, "cache_limit", parse_bytes("cache_limit", self.cache_limit))

    @property
    def cache_bytes(self) -> int | None:
        """The cache limit as a number."""
        return parse_bytes("cache_limit", self.cache_limit)
