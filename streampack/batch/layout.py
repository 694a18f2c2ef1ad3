"""Views of a native batch's layout for formats and loss weights.

One row of 8 with two segments and padding at the end. The second segment includes a padding token,
as `pad_to_multiple` adds::

    tokens         a0   a1   a2 | b0   b1    0 |  0    0
    labels         a1   a2 -100 | b1 -100 -100 |-100 -100      shifted: the target of token i
    begins          x    .    . |  x    .    . |  x    .
    real            x    x    x |  x    x    . |  .    .
    unshifted    -100   a1   a2 |-100   b1 -100|-100 -100      the target that is token i

`begins` and `unshifted` follow the edges in cu_seqlens, which include padding. `real` follows the
lengths in `segments`, which do not.

Cost: one or two passes over the batch each; pure functions, computed on the batch's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from streampack.batch.batch import Batch
from streampack.batch.kernels import ROW_LENGTH
from streampack.errors import ConfigError
from streampack.types import IGNORED

CARRIED = ("epoch", "position")  # read by `dataset.state_after(batch)`
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


def check_keys(batch: object, kind: str, keys: Sequence[str], taker: str) -> None:
    """Refuse a batch that is not of a kind: it lacks one of the keys that `taker` needs."""
    present: list[Any] = list(batch) if isinstance(batch, Mapping) else []
    missing = [key for key in keys if key not in present]
    if missing:
        shown = sorted(map(str, present)) if present else f"a {type(batch).__name__}"
        raise ConfigError(
            f"{taker} takes a {kind} batch, but this one lacks {missing[0]!r} (it is {shown}); "
            f"iterate the dataset with batch_format={kind!r} and pass one of its batches"
        )


def check_native(batch: object, taker: str) -> None:
    """Refuse a batch that is not native."""
    check_keys(batch, "native", NATIVE, taker)


def check_carried(batch: Batch, name: str) -> None:
    """Refuse a batch that is not native, or has a field that a format cannot carry."""
    check_native(batch, f"batch_format={name!r}")
    others = [key for key in batch if key not in NATIVE]
    if others:
        raise ConfigError(
            f"batch_format={name!r} cannot carry the field {others[0]!r}: its trainer takes fixed "
            "keys; use 'native', 'hf' or 'llama_factory', which pass other fields through, "
            "or convert a batch without it"
        )


def check_restarts(batch: Batch, name: str) -> None:
    """Refuse positions that continue from another pack: they would hide an edge."""
    check_native(batch, f"batch_format={name!r}")
    first = batch["input_pos"][begins(batch)]
    if bool(first.any()):
        raise ConfigError(
            f"batch_format={name!r} shows edges by positions that restart at 0, but a segment "
            f"begins at position {int(first[first > 0][0])}; set Packing(positions='restart')"
        )


def begins(batch: Batch) -> torch.Tensor:
    """Return the mask of first tokens of segments, including padding's; bool, shape (B, S).

    >>> batch = {"tokens": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 2, 3, 6])}
    >>> begins(batch).int().tolist()
    [[1, 0, 1], [1, 0, 0]]
    """
    tokens = batch["tokens"]
    is_edge = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
    is_edge[batch["cu_seqlens"].long()] = True  # one more, for the final edge
    return is_edge[:-1].view(tokens.shape)


def segment_starts(batch: Batch) -> torch.Tensor:
    """Return the index of each segment's first token in the B * S, int64, shape (n,)."""
    edges = batch["cu_seqlens"].long()[:-1]
    edges = edges[edges < batch["tokens"].numel()]
    # cu_seqlens also has edges of padding, which `segments` leaves out.
    is_sample = batch["document_ids"].flatten()[edges] > 0
    starts: torch.Tensor = edges[is_sample]
    return starts


def real_tokens(batch: Batch) -> torch.Tensor:
    """Return the mask of tokens that belong to samples, not padding; bool, shape (B, S).

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
    """Return unshifted labels, each at the token that it names; int64, shape (B, S).

    The first token of a segment gets -100: no token of its segment predicts it. Where a sample was
    cut, the last label names a token of another pack, so it cannot be kept.

    >>> batch = {"tokens": torch.tensor([[5, 6, 7, 8]]), "cu_seqlens": torch.tensor([0, 2, 4]),
    ...     "labels": torch.tensor([[6, 7, 8, -100]])}
    >>> unshifted_labels(batch).tolist()
    [[-100, 6, -100, 8]]
    """
    labels: torch.Tensor = batch["labels"].roll(1, dims=1)
    return labels.masked_fill_(begins(batch), IGNORED)


def row_edges(batch: Batch) -> list[torch.Tensor]:
    """Return the segment edges of each row, including padding's, and S; int64, shape (n + 1,).

    >>> batch = {"tokens": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 2, 3, 6])}
    >>> [edges.tolist() for edges in row_edges(batch)]
    [[0, 2, 3], [0, 3]]
    """
    end = torch.tensor([batch["tokens"].shape[1]], device=batch["tokens"].device)
    return [torch.cat([row.nonzero().flatten(), end]) for row in begins(batch)]


def unpad(batch: Batch) -> Batch:
    """Return the tokens of a batch in one row without padding, for varlen attention.

    Args:
        batch: A native batch.

    Returns:
        tokens, labels, input_pos: int64, shape (T,).
        indices: int64, shape (T,); index of each token in the B * S, so that
            ``out.new_zeros(B * S, ...).index_copy(0, indices, out)`` restores the layout.
        cu_seqlens: int32, shape (n + 1,).
        max_seqlen: int, the longest segment; 0 if there is none.
        segments, epoch, position: unchanged.

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
    return {
        **{key: batch[key].flatten()[indices] for key in ("tokens", "labels", "input_pos")},
        "indices": indices,
        "cu_seqlens": edges,
        "max_seqlen": int(lengths.max()) if len(lengths) else 0,
        "segments": batch["segments"],
        **{key: batch[key] for key in CARRIED},
    }
