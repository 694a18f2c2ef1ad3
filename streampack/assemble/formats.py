"""Formats: a native batch under the names, shapes and conventions that a trainer expects.

::

    native --+-- hf, hf_flash            transformers: edges from position_ids or cu_seq_lens
             +-- torchtune               model(**batch) with a mask
             +-- torchtitan(_flat)       (inputs, labels), edges from positions
             +-- megatron                thd: cu_seqlens of constant shape, loss_mask
             +-- olmo_core               doc_lens, label_mask
             +-- llm_foundry             sequence_id
             +-- llama_factory           an attention_mask that numbers the documents
             '-- compact                 int32 or uint16 tokens and edges, for `expand` on a GPU

    labels of  a0 a1 a2    shifted    a1 a2 -100     "what comes after this token"
                           unshifted  -100 a1 a2     "this token"; the model shifts them

Labels in the wrong convention train a model to predict the token after the next, without a sound;
so each function says which it returns. Pure functions; all of them take the native batch.

Cost: see each; none copies tokens, but `to_megatron(pad_segments_to=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from streampack.assemble.batch import Batch
from streampack.assemble.compact import to_compact
from streampack.assemble.formats_hf import to_hf, to_hf_flash, to_llama_factory
from streampack.assemble.formats_other import to_llm_foundry, to_megatron, to_olmo_core
from streampack.assemble.formats_torch import to_torchtitan, to_torchtitan_flat, to_torchtune
from streampack.config import Packing
from streampack.errors import ConfigError, suggest

__all__ = [
    "FORMATS",
    "BatchFormat",
    "Formatter",
    "check_format",
    "get_format",
    "has_name",
    "is_light",
    "to_native",
]

Formatter: TypeAlias = Callable[[Batch], Any]
BatchFormat: TypeAlias = str | Formatter


def to_native(batch: Batch) -> Batch:
    """Return the batch as it is. Labels are shifted."""
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
"""What each name of a `batch_format` does."""

EDGES_BY_POSITION = (to_hf, to_hf_flash, to_torchtitan, to_torchtitan_flat)


def get_format(batch_format: BatchFormat) -> Formatter:
    """Return the function of a format.

    Args:
        batch_format: One of `FORMATS`, or a function of the native batch: to set a format's
            options, ``functools.partial(to_megatron, pad_segments_to=4)``.

    Raises:
        ConfigError: If there is no such format; the nearest is named.

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


def has_name(convert: Formatter) -> bool:
    """Return whether a function is one of `FORMATS`.

    >>> has_name(to_hf), has_name(lambda batch: batch)
    (True, False)
    """
    # By identity: a caller's own function may have no hash, and an == that knows its like alone.
    return any(convert is each for each in FORMATS.values())


def is_light(convert: Formatter) -> bool:
    """Return whether a format of ours costs little beside the native batch.

    The one that does not makes a mask of B * S * S.

    >>> is_light(to_hf), is_light(to_torchtune), is_light(lambda batch: batch)
    (True, False, False)
    """
    return has_name(convert) and convert is not to_torchtune


def check_format(batch_format: BatchFormat, packing: Packing) -> Formatter:
    """Return the function of a format that works with `packing`.

    Raises:
        ConfigError: If there is no such format, or it finds edges by positions that restart and
            `packing` lets them go on.
    """
    made = get_format(batch_format)
    bare = made.func if isinstance(made, partial) else made
    goes_on = packing.positions == "continue" and packing.overflow == "split"
    if goes_on and any(bare is each for each in EDGES_BY_POSITION):
        raise ConfigError(
            f"batch_format={bare.__name__.removeprefix('to_')!r} shows edges by positions that "
            "restart at 0, but Packing(positions='continue') lets them go on where a sample was "
            "cut; set positions='restart'"
        )
    return made
