"""Compact batches: int32 or uint16 tokens and edges, expanded to native batches on the GPU.

::

    tokens, edges  --to the device: 4 or 2 bytes a token-->  expand  -->  a native batch, 28 bytes
                                                             there        a token

The transfer from worker to training process, and from there to a GPU, is a seventh or a fourteenth
of a native batch. On the device, the rest takes a few passes at memory bandwidth.

Cost: `expand` on a CPU about 0.6 ns per token; on another device about ten small kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streampack._checks import MAX_ID
from streampack.batch.batch import Batch, fill_compact
from streampack.batch.kernels import ROW, ROW_LENGTH, ROW_START
from streampack.batch.layout import CARRIED, check_carried, check_keys, segment_starts
from streampack.errors import DataError
from streampack.types import IGNORED

KEYS = ("tokens", "next_tokens", "cu_seqlens", "segments", "positions")


def to_compact(batch: Batch) -> Batch:
    """Return the compact form of a native batch, with int32 tokens; `expand` reverses it.

    The keys are those of `make_compacts`; ``labels`` only if they do not follow from the tokens.

    Raises:
        ConfigError: If the batch is not native, or has a field that cannot be carried.
        DataError: If a token id does not fit in int32.
    """
    check_carried(batch, "compact")
    tokens = batch["tokens"]
    if bool((tokens.abs() > MAX_ID).any()):
        raise DataError(
            f"token id {int(tokens.abs().max())} does not fit in a compact batch, whose largest is "
            f"{MAX_ID}; use batch_format='native'"
        )
    firsts = segment_starts(batch)
    lasts = firsts + batch["segments"][:, ROW_LENGTH].to(firsts) - 1
    starts = batch["input_pos"].flatten()[firsts]
    compact = {
        "tokens": tokens.to(torch.int32),
        "next_tokens": batch["labels"].flatten()[lasts],
        **{key: batch[key] for key in ("cu_seqlens", "max_seqlen", "segments")},
        "positions": "continue" if bool(starts.any()) else "restart",
        **{key: batch[key] for key in CARRIED},
    }
    if not torch.equal(expand(compact, tokens.device)["labels"], batch["labels"]):
        compact["labels"] = batch["labels"].to(torch.int32)
    return compact


def expand(batch: Mapping[str, Any], device: torch.device | str | None = None) -> Batch:
    """Return the native batch of a compact one, bit for bit, made on a device.

    Args:
        batch: A compact batch, from ``batch_format="compact"``. Leave it on the CPU: only the
            needed parts are copied, asynchronously if its memory is pinned.
        device: Device of the result; None: that of the tokens.

    Raises:
        ConfigError: If the batch is not compact.

    >>> compact = {"tokens": torch.tensor([[5, 6, 0]], dtype=torch.int32),
    ...     "epoch": 0, "position": 1, "max_seqlen": 2, "positions": "restart",
    ...     "next_tokens": torch.tensor([-100]),
    ...     "cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32),
    ...     "segments": torch.tensor([[0, 0, 7, 0, 0, 2]])}
    >>> batch = expand(compact)
    >>> batch["labels"].tolist(), batch["document_ids"].tolist()
    ([[6, -100, -100]], [[1, 1, 0]])
    """
    check_keys(batch, "compact", KEYS, "expand")
    target = torch.device(device) if device is not None else batch["tokens"].device
    tensors = [value for value in batch.values() if torch.is_tensor(value)]
    if target.type == "cpu" and all(tensor.device.type == "cpu" for tensor in tensors):
        return fill_compact(dict(batch))
    return expand_on(batch, target)


def expand_on(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """Implement `expand` with torch operations only."""
    tokens = _widened(batch["tokens"].to(device, non_blocking=True))
    num_rows, row_tokens = tokens.shape
    size = tokens.numel()
    # There are few segments: compute their values here and copy them in one piece.
    edges = batch["cu_seqlens"].cpu().long()
    values = _segment_values(batch, edges, num_rows, row_tokens).to(device, non_blocking=True)
    lengths = edges.diff().to(device, non_blocking=True)
    segment = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), lengths, output_size=size
    )
    at = torch.arange(size, device=device)
    offset, document, last, next_token = values[:, segment]
    if "labels" in batch:
        labels = batch["labels"].to(device, non_blocking=True).long()
    else:
        labels = tokens.flatten().roll(-1)
        labels = torch.where(at < last, labels, torch.where(at == last, next_token, IGNORED))
    return {
        "tokens": tokens,
        "labels": labels.view(tokens.shape),
        "input_pos": (at + offset).view(tokens.shape),
        "document_ids": document.to(torch.int32).view(tokens.shape),
        "cu_seqlens": batch["cu_seqlens"].to(device, non_blocking=True),
        "max_seqlen": batch["max_seqlen"],
        "segments": batch["segments"].to(device, non_blocking=True),
        **{key: batch[key] for key in CARRIED},
    }


def _widened(tokens: Tensor) -> Tensor:
    """Return tokens as int64."""
    if tokens.dtype == torch.uint16:
        # Few torch operations support uint16, on any device.
        return tokens.view(torch.int16).long() & 0xFFFF
    return tokens.long()


def _segment_values(
    batch: Mapping[str, Any], edges: Tensor, num_rows: int, row_tokens: int
) -> Tensor:
    """Return four values of each segment, including those of padding; shape (4, n).

    The offset from batch index to position, the document, the index of its last real token, and the
    token after that.
    """
    segments, next_tokens = batch["segments"].cpu(), batch["next_tokens"].cpu()
    begin = edges[:-1]
    row = begin // row_tokens
    first = torch.searchsorted(begin, torch.arange(num_rows) * row_tokens)
    number = torch.arange(len(begin)) - first[row]
    # A row's segments come first; the rest of the row is one segment of padding.
    is_padding = number >= torch.bincount(segments[:, ROW], minlength=num_rows)[row]
    values = torch.zeros(4, len(begin), dtype=torch.int64)
    values[0] = -begin
    values[1] = torch.where(is_padding, 0, number + 1)
    values[2], values[3] = -1, IGNORED
    values[2, ~is_padding] = begin[~is_padding] + segments[:, ROW_LENGTH] - 1
    values[3, ~is_padding] = next_tokens
    if batch["positions"] == "continue":
        values[0, ~is_padding] += segments[:, ROW_START]
    return values
