"""Batch formats: a native batch with the names, shapes and conventions of a trainer.

Labels in the wrong convention silently train a model to predict the token after next. So each
function states which one it returns. All are pure functions of the native batch; docs/formats.md
compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from streampack.batch.batch import Batch
from streampack.batch.compact import to_compact
from streampack.batch.formats.huggingface import to_hf, to_hf_flash, to_llama_factory
from streampack.batch.formats.others import to_llm_foundry, to_megatron, to_olmo_core
from streampack.batch.formats.pytorch import to_torchtitan, to_torchtitan_flat, to_torchtune
from streampack.config import Packing
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError, suggest

Formatter: TypeAlias = Callable[[Batch], Any]
BatchFormat: TypeAlias = str | Formatter


def to_native(batch: Batch) -> Batch:
    """Return the batch unchanged. Labels are shifted."""
    return batch


FORMATS: Mapping[str, Formatter] = MappingProxyType(
    {
        "native": to_native,
        "compact": to_compact,
        "hf": to_hf,
        "hf_flash": to_hf_flash,
        "torchtune": to_torchtune,
        "torchtitan": to_torchtitan,
        "torchtitan_flat": to_torchtitan_flat,
        "megatron": to_megatron,
        "olmo_core": to_olmo_core,
        "llm_foundry": to_llm_foundry,
        "llama_factory": to_llama_factory,
    }
)
"""Function of each name of a `batch_format`."""


def get_format(batch_format: BatchFormat) -> Formatter:
    """Return the function of a batch format.

    Args:
        batch_format: One of `FORMATS`, or a function of the native batch. To set a format's
            options, use ``functools.partial(to_megatron, pad_to=64)``.

    Raises:
        ConfigError: If the name is unknown. The message suggests the nearest.

    >>> get_format("hf") is to_hf
    True
    """
    if callable(batch_format):
        return batch_format
    if not isinstance(batch_format, str) or batch_format not in FORMATS:
        raise ConfigError(
            f"batch_format={batch_format!r} is not one of {'|'.join(FORMATS)}, nor a function of "
            f"the native batch{suggest(str(batch_format), FORMATS)}"
        )
    return FORMATS[batch_format]


def unwrapped(convert: Formatter) -> tuple[Formatter, dict[str, Any]]:
    """Return a format's function and the options that ``functools.partial`` gives it."""
    return (convert.func, convert.keywords) if isinstance(convert, partial) else (convert, {})


def is_builtin(convert: Formatter) -> bool:
    """Whether a function is one of `FORMATS`.

    >>> is_builtin(to_hf), is_builtin(lambda batch: batch)
    (True, False)
    """
    # By identity: a user's function may be unhashable or have an unusual __eq__.
    return any(convert is formatter for formatter in FORMATS.values())


def is_cheap(convert: Formatter) -> bool:
    """Whether a format is built in and cheap. to_torchtune is not: its mask has B * S * S bools.

    >>> is_cheap(to_hf), is_cheap(to_torchtune), is_cheap(lambda batch: batch)
    (True, False, False)
    """
    return is_builtin(convert) and convert is not to_torchtune


def options_of(convert: Formatter) -> dict[str, Any]:
    """Return the name and the options of a built-in format, for the table of combinations.

    >>> options_of(partial(to_hf, dense=True))
    {'batch_format': 'hf', 'dense': True}
    """
    bare, options = unwrapped(convert)
    if not is_builtin(bare):
        return {}
    return {"batch_format": bare.__name__.removeprefix("to_"), "dense": options.get("dense")}


def check_format(batch_format: BatchFormat, packing: Packing, batch_size: int = 1) -> Formatter:
    """Return the function of a format, checked against `packing` and `batch_size`."""
    convert = get_format(batch_format)
    given = {"cost": packing.cost, "batch_size": batch_size, **options_of(convert)}
    if packing.overflow == "split":
        given["positions"] = packing.positions
    check_combination(given)
    return convert
