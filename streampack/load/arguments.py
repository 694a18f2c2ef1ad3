"""The arguments of the datasets, checked for their kind before anything is opened.

::

    PackedStreamingDataset([IterableStream(...)], packing={...}, batch_size=2.5)
                                  |                   |              |
                           another dataset's     not a Packing   no integer      -> ConfigError

What the values mean is checked where they are used; here it is only what they are, so that a
mistake is named at once and not as an AttributeError in a worker.

Cost: none. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import signature
from reprlib import repr as short_repr
from typing import ParamSpec

from streampack.config import Buffers, Mixing, Order, Packing, read_count, read_integer
from streampack.errors import ConfigError, suggest
from streampack.plan.state import MAX_EPOCH
from streampack.world import World

__all__ = [
    "check_batch_size",
    "check_configs",
    "check_epoch",
    "check_streams",
    "show_dataset",
    "with_hints",
]

P = ParamSpec("P")

CONFIGS = {
    "packing": Packing,
    "mixing": Mixing,
    "order": Order,
    "buffers": Buffers,
    "world": World,
}
# Where arguments of MosaicML's dataset and torch's loader are set here, but for those that a config
# has under the same name. The README's table says more.
PLACES = {
    "batch_format": "the dataset's batch_format",
    "batch_size": "the dataset's batch_size",
    "collate_fn": "the dataset's batch_format",
    "drop_last": "Mixing(epoch_end='drop')",
    "num_canonical_nodes": "Order(num_lanes=...)",
    "predownload": "PackedDataLoader(prefetch_factor=...) and Buffers(...)",
    "shuffle_seed": "Order(seed=...)",
    **dict.fromkeys(
        ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout"),
        "PackedDataLoader",
    ),
    **dict.fromkeys(("proportion", "repeat", "choose"), "each stream"),
    **dict.fromkeys(
        ("download_retry", "download_timeout", "validate_hash", "keep_zip"), "each Stream"
    ),
}
DATASETS = {"Stream": "PackedStreamingDataset", "IterableStream": "PackedIterableDataset"}


def with_hints(init: Callable[P, None]) -> Callable[P, None]:
    """Return an `__init__` that refuses arguments it does not have with where they are set here.

    Raises:
        ConfigError: Naming the argument, its value and the place.
    """
    known = list(signature(init).parameters)[1:]
    class_name = init.__qualname__.partition(".")[0]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name, value in kwargs.items():
            if name not in known:
                raise ConfigError(
                    f"{name}={_short(value)}: no argument of {class_name}{_place(name, known)}; "
                    f"it takes {', '.join(known)}"
                )
        init(*args, **kwargs)

    return checked


def _place(name: str, known: list[str]) -> str:
    place = PLACES.get(name)
    for config in CONFIGS.values():
        if name in (field.name for field in fields(config)):
            place = f"{config.__name__}({name}=...)"
    return f", set it with {place}" if place else suggest(name, known)


def check_streams(streams: object, stream_type: type) -> None:
    """Refuse `streams` that are no list or tuple of at least one `stream_type`.

    Args:
        streams: The argument of that name.
        stream_type: What each must be: IterableStream, or MosaicML's Stream (ours is one too).

    Raises:
        ConfigError: Naming which stream it is, what it is, and which dataset takes it.

    >>> check_streams((1, 2), int)
    """
    kind = stream_type.__name__
    if not isinstance(streams, list | tuple):
        if isinstance(streams, stream_type):
            way_out = f"pass a list: [{kind}(...)]"
        elif isinstance(streams, str):
            way_out = _from_path(kind)
        else:
            way_out = f"pass a list of {kind}: [{kind}(...), ...]"
        raise ConfigError(f"streams={_short(streams)} is no list of streams; {way_out}")
    if not streams:
        raise ConfigError("streams=[] is empty; pass at least one Stream")
    for number, stream in enumerate(streams):
        if not isinstance(stream, stream_type):
            raise ConfigError(
                f"streams[{number}]={_short(stream)} is no {kind}; {_way_out(stream, kind)}"
            )


def check_configs(**configs: object) -> None:
    """Refuse a config of another type; None stands for the default, but packing has none.

    Args:
        **configs: Any of packing, mixing, order, buffers and world.

    Raises:
        ConfigError: Naming the argument, its value and the class it takes.

    >>> check_configs(packing=Packing(max_seq_len=8), mixing=None)
    """
    for key, value in configs.items():
        wanted = CONFIGS[key]
        if isinstance(value, wanted) or (value is None and wanted is not Packing):
            continue
        example = "Packing(max_seq_len=2048)" if wanted is Packing else f"{wanted.__name__}(...)"
        raise ConfigError(
            f"{key}={_short(value)} is no {wanted.__name__}; pass {key}=streampack.{example}"
        )


def check_batch_size(batch_size: object) -> int:
    """Return `batch_size` as an int.

    Raises:
        ConfigError: If it is no whole number of at least 1.

    >>> check_batch_size(4)
    4
    """
    if batch_size is None:
        raise ConfigError("batch_size=None says no number of packs; leave it out for 1")
    return read_count("batch_size", batch_size, "leave it out for the default")


def check_epoch(epoch: object) -> int:
    """Return an epoch's number as an int.

    Raises:
        ConfigError: If it is no integer of at least 0, or more than a state can hold.

    >>> check_epoch(2)
    2
    """
    number = read_integer("epoch", epoch, "epochs are counted 0, 1, 2, ...")
    if not 0 <= number <= MAX_EPOCH:
        raise ConfigError(f"epoch={number} must be at least 0 and at most {MAX_EPOCH}")
    return number


def show_dataset(
    dataset: object, names: list[str], size: str, batch_size: int, world: World
) -> str:
    """Return a dataset's repr: one line, with six of its streams at most.

    >>> show_dataset(set(), ["code", "docs"], "max_seq_len=2048", 4, World())
    "set(streams=['code', 'docs'], max_seq_len=2048, batch_size=4, rank=0, num_ranks=1)"
    """
    return (
        f"{type(dataset).__name__}(streams={short_repr(names)}, {size}, batch_size={batch_size}, "
        f"rank={world.rank}, num_ranks={world.num_ranks})"
    )


def _short(value: object) -> str:
    """Show a value that may be large: text and numbers as they are, others by their type."""
    if isinstance(value, str | int | float | dict | None):
        return short_repr(value)
    return value.__name__ if isinstance(value, type) else f"<{type(value).__name__}>"


def _from_path(kind: str) -> str:
    """Say how a path becomes a stream."""
    if kind == "Stream":
        return "pass a path as remote= or local=, or [Stream(local=...)]"
    return (
        "IterableStream takes samples; for a path, PackedStreamingDataset takes remote= or local="
    )


def _way_out(stream: object, kind: str) -> str:
    """Say what to do with a stream of another kind."""
    if isinstance(stream, str):
        return _from_path(kind)
    for base in type(stream).__mro__:
        if base.__name__ in DATASETS and base.__name__ != kind:
            return f"{DATASETS[base.__name__]} takes it, {DATASETS.get(kind)} takes {kind} objects"
    return f"wrap it: {kind}(...)"
