"""Check the types of the datasets' arguments before anything is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import ParamSpec

from streampack._checks import MAX_EPOCH, is_weight, read_count, read_integer, show_number
from streampack.balance import Balance
from streampack.config import Bucketing, Buffers, Mixing, Order, Packing
from streampack.config.moved import check_options
from streampack.config.packing import MAX_BATCH_TOKENS
from streampack.errors import ConfigError, short_text
from streampack.world import World

P = ParamSpec("P")

MAX_WAIT_S = 10**6  # the system's waits accept at most 2**31 ms

CONFIGS = {
    "bucketing": Bucketing,
    "packing": Packing,  # behind it: most options of a Bucketing are options of a Packing, too
    "mixing": Mixing,
    "order": Order,
    "buffers": Buffers,
    "balance": Balance,
    "world": World,
}
REQUIRED = {Packing: "max_seq_len=2048", Bucketing: "max_tokens=8192"}
# The equivalents here of arguments of MosaicML's dataset and torch's loader. The README's table has
# more, and `streampack.config.moved` those of streams.
PLACES = {
    "batch_format": "batch_format=... of the dataset",
    "batch_size": "batch_size=... of the dataset",
    "collate_fn": "batch_format=... of the dataset",
    "drop_last": "Mixing(epoch_end='drop')",
    "num_canonical_nodes": "Order(num_lanes=...)",
    "predownload": "PackedDataLoader(prefetch_factor=...) and Buffers(...)",
    "shuffle_seed": "Order(seed=...)",
    **dict.fromkeys(
        ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout"),
        "PackedDataLoader(...)",
    ),
    **{
        field.name: f"{config.__name__}({field.name}=...)"
        for config in CONFIGS.values()
        for field in fields(config)
    },
}


def with_hints(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap an `__init__` so that unknown arguments raise a ConfigError with the equivalent here."""
    known = list(signature(init).parameters)[1:]
    class_name = init.__qualname__.partition(".")[0]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        """Refuse unknown keyword arguments, then call the `__init__`."""
        check_options(class_name, kwargs, known, **PLACES)
        init(*args, **kwargs)

    return checked


def check_configs(**configs: object) -> None:
    """Refuse a config of the wrong type; None means the default, except of those in REQUIRED."""
    for key, value in configs.items():
        wanted = CONFIGS[key]
        if isinstance(value, wanted) or (value is None and wanted not in REQUIRED):
            continue
        article = "an" if wanted is Order else "a"
        raise ConfigError(
            f"{key}={short_text(value)} is not {article} {wanted.__name__}; "
            f"pass {key}=streampack.{wanted.__name__}({REQUIRED.get(wanted, '...')})"
        )


def check_batch_size(batch_size: object, row_tokens: int = 1) -> int:
    """Return `batch_size` as an int; refuse more tokens than a batch's `cu_seqlens` can count."""
    if batch_size is None:
        raise ConfigError(f"batch_size={batch_size} is not a number of packs; omit it to use 1")
    count = read_count("batch_size", batch_size, "omit it to use the default")
    if count * row_tokens > MAX_BATCH_TOKENS:
        raise ConfigError(
            f"batch_size={count} packs of {row_tokens} tokens are more than "
            f"{MAX_BATCH_TOKENS} tokens, the most of a batch; set batch_size to "
            f"{MAX_BATCH_TOKENS // row_tokens} at most"
        )
    return count


def check_epoch(epoch: object) -> int:
    """Return an epoch's number as an int; refuse one that is too large for a state."""
    number = read_integer("epoch", epoch, "epochs are counted 0, 1, 2, ...")
    if not 0 <= number <= MAX_EPOCH:
        raise ConfigError(f"epoch={number} must be at least 0 and at most {MAX_EPOCH}")
    return number


def check_timeout(timeout: float | None, num_workers: int) -> float:
    """Return the seconds to wait for a worker; 0: no limit."""
    if timeout is not None and not (is_weight(timeout) and timeout <= MAX_WAIT_S):
        raise ConfigError(
            f"timeout={show_number(timeout)} must be a number of seconds, at least 0 and at most "
            f"{MAX_WAIT_S}; 0 or None waits for ever"
        )
    if timeout and not num_workers:
        raise ConfigError(
            f"timeout={timeout} is for worker processes, and num_workers=0 has none; omit it, "
            "or set num_workers: threads cannot be ended while they wait"
        )
    return float(timeout or 0)
