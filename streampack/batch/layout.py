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

from streampack._checks import read_count
from streampack.batch.batch import FILLED, Batch
from streampack.batch.kernels import ROW, ROW_LENGTH
from streampack.errors import ConfigError
from streampack.types import IGNORED

CARRIED = ("epoch", "position")  # read by `dataset.state_after(batch)`
CHUNKS = "chunks"  # begin and end of each chunk of a slice; whole rows lack it
WEIGHTS = "loss_weight"  # of each segment, float32, shape (n,), if a stream has one
NATIVE = (*FILLED, "cu_seqlens", "max_seqlen", "segments", *CARRIED)


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


def check_native(batch: object, taker: str, *, takes_slices: bool = False) -> None:
    """Refuse a batch that is not native, and a slice unless it can be taken."""
    check_keys(batch, "native", NATIVE, taker)
    if not takes_slices and isinstance(batch, Mapping) and CHUNKS in batch:
        raise ConfigError(
            f"{taker} takes whole rows, but the batch with {CHUNKS!r} is the slice of a "
            "context-parallel rank; put the slices of all ranks together with "
            "streampack.merge_slices, or omit context_parallel from World: ranks that share "
            "rows then get whole ones"
        )


def check_carried(batch: Batch, name: str, *, takes_slices: bool = False) -> None:
    """Refuse a batch that is not native, or has a field that a format cannot carry."""
    check_native(batch, f"batch_format={name!r}", takes_slices=takes_slices)
    weighs = name in ("compact", "megatron")
    others = [key for key in batch if key not in (*NATIVE, CHUNKS, *[WEIGHTS][:weighs])]
    if others:
        raise ConfigError(
            f"batch_format={name!r} cannot carry the field {others[0]!r}: its trainer takes fixed "
            "keys; use 'native', 'hf' or 'llama_factory', which pass other fields through, "
            "or convert a batch without it"
        )


def check_restarts(batch: Batch, name: str) -> None:
    """Refuse a native batch with positions that continue from another pack and hide an edge."""
    first = batch["input_pos"][begins(batch)]
    if bool(first.any()):
        raise ConfigError(
            f"batch_format={name!r} shows edges by positions that restart at 0, but a segment "
            f"begins at position {int(first[first > 0][0])}; set Packing(positions='restart')"
        )


def places(batch: Batch) -> torch.Tensor:
    """Return the index of each token of a slice in the slots of the whole batch, int64, shape (t,).

    >>> places({"chunks": torch.tensor([[0, 2], [6, 8]])}).tolist()
    [0, 1, 6, 7]
    """
    begin, end = batch[CHUNKS].T
    lengths = end - begin
    before = lengths.cumsum(0) - lengths
    offsets = torch.repeat_interleave(begin - before, lengths)
    return offsets + torch.arange(len(offsets), device=offsets.device)


def token_weights(batch: Batch) -> torch.Tensor | None:
    """Return the weight of each token's stream, float32, of the shape of the tokens, or None.

    Those of padding mean nothing.

    >>> token_weights({"document_ids": torch.tensor([[1, 1, 2]]), "loss_weight": torch.ones(2),
    ...     "segments": torch.zeros(2, 6, dtype=torch.int64)}).tolist()
    [[1.0, 1.0, 1.0]]
    """
    if WEIGHTS not in batch:
        return None
    documents = batch["document_ids"].long()
    weights, rows = (batch[key].to(documents.device) for key in (WEIGHTS, "segments"))
    numbers = torch.arange(len(documents), device=documents.device)
    firsts = torch.searchsorted(rows[:, ROW].contiguous(), numbers)
    of = (firsts[:, None] + documents - 1).clamp(0, max(len(weights) - 1, 0))
    return weights[of] if len(weights) else torch.ones_like(documents, dtype=torch.float32)


def begins(batch: Batch) -> torch.Tensor:
    """Return the mask of first tokens of segments, including padding's; bool, shape (B, S).

    In a slice of shape (B, S / n), they are those of its own tokens.

    >>> batch = {"tokens": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 2, 3, 6])}
    >>> begins(batch).int().tolist()
    [[1, 0, 1], [1, 0, 0]]
    """
    tokens, edges = batch["tokens"], batch["cu_seqlens"].long()
    size = int(edges[-1]) if CHUNKS in batch else tokens.numel()
    is_edge = torch.zeros(size + 1, dtype=torch.bool, device=tokens.device)
    is_edge[edges] = True  # one more, for the final edge
    is_begin = is_edge[places(batch)] if CHUNKS in batch else is_edge[:-1]
    return is_begin.view(tokens.shape)


def real_tokens(batch: Batch) -> torch.Tensor:
    """Return the mask of tokens that belong to samples, not padding; bool, shape (B, S).

    >>> batch = {"tokens": torch.zeros(1, 4), "document_ids": torch.tensor([[1, 1, 1, 0]]),
    ...     "cu_seqlens": torch.tensor([0, 3, 4]), "segments": torch.tensor([[0, 0, 0, 0, 0, 2]])}
    >>> real_tokens(batch).int().tolist()
    [[1, 1, 0, 0]]
    """
    tokens, edges = batch["tokens"], batch["cu_seqlens"].long()[:-1]
    edges = edges[edges < tokens.numel()]
    # cu_seqlens also has edges of padding, which `segments` omits.
    starts = edges[batch["document_ids"].flatten()[edges] > 0]
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
    edges, num_rows = batch["cu_seqlens"].long(), len(batch["tokens"])
    # Not the length of a row here, which may be a slice's.
    row_tokens = int(edges[-1]) // num_rows
    starts = torch.arange(num_rows, device=edges.device) * row_tokens
    firsts = torch.searchsorted(edges, starts).tolist()
    lasts = [*firsts[1:], len(edges) - 1]
    return [
        edges[first : last + 1] - row * row_tokens
        for row, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]


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


def in_one_row(batch: Batch, pad_to: int | None) -> Batch:
    """Return a native batch with all samples in one row, padded to a multiple of `pad_to`, B = 1.

    The row has at least one slot, and never more than B * S. None: the batch as it is.

    >>> batch = {"tokens": torch.tensor([[5, 0], [6, 0]]), "labels": torch.full((2, 2), -100),
    ...     "input_pos": torch.zeros(2, 2), "document_ids": torch.tensor([[1, 0], [1, 0]]),
    ...     "cu_seqlens": torch.tensor([0, 1, 2, 3, 4]), "max_seqlen": 1, "epoch": 0,
    ...     "position": 2, "segments": torch.tensor([[0, 0, 0, 0, 0, 1], [1, 0, 1, 0, 0, 1]])}
    >>> row = in_one_row(batch, 3)
    >>> row["tokens"].tolist(), row["document_ids"].tolist(), row["cu_seqlens"].tolist()
    ([[5, 6, 0]], [[1, 2, 0]], [0, 1, 2, 3])
    """
    if pad_to is None:
        return batch
    multiple, own = read_count("pad_to", pad_to), unpad(batch)
    used, total, edges = len(own["indices"]), batch["tokens"].numel(), own["cu_seqlens"]
    size = min(-(-max(used, 1) // multiple) * multiple, total)
    padding = (~real_tokens(batch)).flatten().nonzero().flatten()[: size - used]
    taken = torch.cat([own["indices"], padding])
    row: Batch = {key: batch[key].flatten()[taken][None] for key in FILLED}
    row["input_pos"][0, used:] = torch.arange(size - used)
    row["document_ids"].zero_()[0, edges[:-1].long()] = 1
    row["document_ids"].cumsum_(1)[0, used:] = 0
    row["segments"] = batch["segments"].clone()
    row["segments"][:, ROW] = 0
    row["cu_seqlens"] = torch.cat([edges, edges.new_tensor([size] if size > used else [])])
    return batch | row | {"max_seqlen": max(own["max_seqlen"], size - used)}
