"""What a native batch says about its tokens, in the forms that formats and loss weights need.

One row of 8 with two segments, whose second ends in a padding token of its own (that is what
padding to a multiple does), and padding at the end::

    tokens         a0   a1   a2 | b0   b1    0 |  0    0
    labels         a1   a2 -100 | b1 -100 -100 |-100 -100      shifted: what token i predicts
    begins          x    .    . |  x    .    . |  x    .
    real            x    x    x |  x    x    . |  .    .
    unshifted    -100   a1   a2 |-100   b1 -100|-100 -100      what predicted token i

`begins` and `unshifted` follow the edges in cu_seqlens, padding included; `real` follows the
lengths in `segments`, which count no padding.

Cost: a pass or two over the batch each; pure functions, made on the batch's device.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from streampack.assemble.batch import Batch
from streampack.assemble.fill import ROW_LENGTH
from streampack.errors import ConfigError
from streampack.types import IGNORED

__all__ = [
    "CARRIED",
    "NATIVE",
    "begins",
    "check_carried",
    "check_native",
    "check_restarts",
    "real_tokens",
    "row_edges",
    "segment_starts",
    "unpad",
    "unshifted_labels",
]

AnyBatch: TypeAlias = dict[str, Any]

CARRIED = ("epoch", "position")  # what `dataset.state_after(batch)` reads
NATIVE = (
    "tokens",
    "labels",
    "input_pos",
    "document_ids",
    "cu_seqlens",
    "max_seqlen",
    "segments",
    *CARRIED,
)


def check_native(batch: object, taker: str) -> None:
    """Refuse what is no native batch.

    Raises:
        ConfigError: Naming the first key that it lacks, and `taker`, which wants it.
    """
    keys: list[Any] = list(batch) if isinstance(batch, dict) else []
    missing = [key for key in NATIVE if key not in keys]
    if missing:
        shown = sorted(map(str, keys)) if keys else f"a {type(batch).__name__}"
        raise ConfigError(
            f"{taker} takes a native batch, but this one lacks {missing[0]!r} (it is {shown}); "
            "iterate the dataset with batch_format='native' and convert its batches"
        )


def check_carried(batch: Batch, name: str) -> None:
    """Refuse a batch with a field that a format has no place for.

    Raises:
        ConfigError: Naming the field and the format.
    """
    check_native(batch, f"batch_format={name!r}")
    others = [key for key in batch if key not in NATIVE]
    if others:
        raise ConfigError(
            f"batch_format={name!r} cannot carry the field {others[0]!r}, its trainer takes fixed "
            "keys; use 'native', 'hf' or 'llama_factory', which hand other fields on, or convert "
            "a batch without it"
        )


def check_restarts(batch: Batch, name: str) -> None:
    """Refuse positions that go on from another pack, for trainers that find edges by them.

    Raises:
        ConfigError: Naming the first position that is not 0 where a segment begins.
    """
    check_native(batch, f"batch_format={name!r}")
    first = batch["input_pos"][begins(batch)]
    if bool(first.any()):
        raise ConfigError(
            f"batch_format={name!r} shows edges by positions that restart at 0, but a segment "
            f"begins at position {int(first[first > 0][0])}; set Packing(positions='restart')"
        )


def begins(batch: Batch) -> torch.Tensor:
    """Return where segments begin, padding's included; bool, shape (B, S).

    >>> batch = {"tokens": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 2, 3, 6])}
    >>> begins(batch).int().tolist()
    [[1, 0, 1], [1, 0, 0]]
    """
    tokens = batch["tokens"]
    found = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
    found[batch["cu_seqlens"].long()] = True  # with room for the end, which begins nothing
    return found[:-1].view(tokens.shape)


def segment_starts(batch: Batch) -> torch.Tensor:
    """Return where each of `segments` begins in the B * S tokens, int64, shape (n,)."""
    edges = batch["cu_seqlens"].long()[:-1]
    edges = edges[edges < batch["tokens"].numel()]
    # Padding is cut off by cu_seqlens too, but is no segment of the plan.
    is_sample = batch["document_ids"].flatten()[edges] > 0
    starts: torch.Tensor = edges[is_sample]
    return starts


def real_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens are a sample's and no padding; bool, shape (B, S).

    >>> batch = {"tokens": torch.zeros(1, 4), "document_ids": torch.tensor([[1, 1, 1, 0]]),
    ...     "cu_seqlens": torch.tensor([0, 3, 4]), "segments": torch.tensor([[0, 0, 0, 0, 0, 2]])}
    >>> real_tokens(batch).int().tolist()
    [[1, 1, 0, 0]]
    """
    tokens = batch["tokens"]
    starts = segment_starts(batch)
    steps = torch.zeros(tokens.numel() + 1, dtype=torch.int64, device=tokens.device)
    ones = torch.ones_like(starts)
    steps.index_add_(0, starts, ones)
    steps.index_add_(0, starts + batch["segments"][:, ROW_LENGTH].to(starts), -ones)
    return (steps.cumsum(0) > 0)[:-1].view(tokens.shape)


def unshifted_labels(batch: Batch) -> torch.Tensor:
    """Return labels that stand on the token they name; int64, shape (B, S).

    The first token of a segment is -100: nobody predicts it. Where a sample was cut, its last
    label names a token that lies in another pack. No place of this row can say so, and that one
    label is left out.

    >>> batch = {"tokens": torch.tensor([[5, 6, 7, 8]]), "cu_seqlens": torch.tensor([0, 2, 4]),
    ...     "labels": torch.tensor([[6, 7, 8, -100]])}
    >>> unshifted_labels(batch).tolist()
    [[-100, 6, -100, 8]]
    """
    labels: torch.Tensor = batch["labels"].roll(1, dims=1)
    return labels.masked_fill_(begins(batch), IGNORED)


def row_edges(batch: Batch) -> list[torch.Tensor]:
    """Return for each row where segments begin, padding's included, and S; int64, shape (n + 1,).

    >>> batch = {"tokens": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 2, 3, 6])}
    >>> [edges.tolist() for edges in row_edges(batch)]
    [[0, 2, 3], [0, 3]]
    """
    end = torch.tensor([batch["tokens"].shape[1]], device=batch["tokens"].device)
    return [torch.cat([row.nonzero().flatten(), end]) for row in begins(batch)]


def unpad(batch: Batch) -> AnyBatch:
    """Return the tokens of a batch in one line without padding, for varlen attention.

    Args:
        batch: A native batch.

    Returns:
        tokens, labels, input_pos: int64, shape (T,).
        indices: int64, shape (T,); where each stands in the B * S tokens, so that
            ``out.new_zeros(B * S, ...).index_copy(0, indices, out)`` puts results back.
        cu_seqlens: int32, shape (n + 1,).
        max_seqlen: int, the longest segment; 0 if there is none.
        segments, epoch, position: as they were.

    >>> batch = {"tokens": torch.tensor([[5, 6, 0]]), "labels": torch.tensor([[6, -100, -100]]),
    ...     "input_pos": torch.tensor([[0, 1, 0]]), "document_ids": torch.tensor([[1, 1, 0]]),
    ...     "cu_seqlens": torch.tensor([0, 2, 3]), "max_seqlen": 2, "epoch": 0, "position": 1,
    ...     "segments": torch.tensor([[0, 0, 0, 0, 0, 2]])}
    >>> unpad(batch)["tokens"].tolist(), unpad(batch)["cu_seqlens"].tolist()
    ([5, 6], [0, 2])
    """
    check_native(batch, "unpad")
    indices = real_tokens(batch).flatten().nonzero().flatten()
    lengths = batch["segments"][:, ROW_LENGTH]
    edges = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=indices.device)
    edges[1:] = lengths.cumsum(0)
    flat = {key: batch[key].flatten()[indices] for key in ("tokens", "labels", "input_pos")}
    return {
        **flat,
        "indices": indices,
        "cu_seqlens": edges,
        "max_seqlen": int(lengths.max()) if len(lengths) else 0,
        "segments": batch["segments"],
        **{key: batch[key] for key in CARRIED},
    }
