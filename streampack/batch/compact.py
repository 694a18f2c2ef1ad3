"""Compact batches: int32 or uint16 tokens and edges, expanded to native batches on the GPU.

::

    tokens, edges  --to the device: 4 or 2 bytes a token-->  expand  -->  a native batch, 28 bytes
                                                             there        a token

The transfer from worker to training process, and from there to a GPU, is about a seventh or a
fourteenth of a native batch. On the device, the rest takes a few passes at memory bandwidth.

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
from streampack.batch.layout import CARRIED, CHUNKS, WEIGHTS, check_carried, check_keys
from streampack.errors import DataError
from streampack.types import IGNORED

LAYOUT = ("cu_seqlens", "max_seqlen", "segments", CHUNKS, WEIGHTS)
KEYS = ("tokens", "next_tokens", "cu_seqlens", "segments", "positions")


def to_compact(batch: Batch) -> Batch:
    """Return the compact form of a native batch, with int32 tokens; `expand` reverses it.

    The keys are those of `make_compacts`; ``labels`` only if they do not follow from the tokens.

    Raises:
        ConfigError: If the batch is not native, or has a field that cannot be carried.
        DataError: If a token id does not fit in int32.
    """
    check_carried(batch, "compact", takes_slices=True)
    tokens = batch["tokens"]
    if bool((tokens.abs() > MAX_ID).any()):
        raise DataError(
            f"token id {int(tokens.abs().max())} does not fit in a compact batch; the largest is "
            f"{MAX_ID}; use batch_format='native'"
        )
    lengths, (offsets, documents, lasts) = _pieces(batch, continues=False)
    ends = lasts[lasts >= 0].to(tokens.device)
    firsts, restarting = lengths.cumsum(0) - lengths, documents > 0
    starts = batch["input_pos"].flatten().cpu()[firsts]
    compact = {
        "tokens": tokens.to(torch.int32),
        "next_tokens": batch["labels"].flatten()[ends],
        **{key: batch[key] for key in LAYOUT if key in batch},
        "positions": "continue"
        if bool((starts != firsts + offsets)[restarting].any())
        else "restart",
        **{key: batch[key] for key in CARRIED},
    }
    if not torch.equal(expand(compact, tokens.device)["labels"], batch["labels"]):
        compact["labels"] = batch["labels"].to(torch.int32)
    return compact


def expand(batch: Mapping[str, Any], device: torch.device | str | None = None) -> Batch:
    """Expand a compact batch on a device, into exactly the native batch that it was made from.

    Args:
        batch: A compact batch, from ``batch_format="compact"``. Leave it on the CPU: only the
            needed parts are copied, asynchronously if its memory is pinned.
        device: Device of the result; by default that of the tokens.

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
    is_on_cpu = target.type == "cpu" and all(tensor.device.type == "cpu" for tensor in tensors)
    if is_on_cpu and CHUNKS not in batch:
        return fill_compact(dict(batch))
    return expand_on(batch, target)


def expand_on(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """Implement `expand` with torch operations only."""
    tokens = _widened(batch["tokens"].to(device, non_blocking=True))
    # There are few pieces: compute their values here and copy them in one block.
    lengths, values = _pieces(batch, continues=batch["positions"] == "continue")
    next_tokens = torch.full((1, len(lengths)), IGNORED)
    next_tokens[0, values[2] >= 0] = batch["next_tokens"].cpu()
    values = torch.cat([values, next_tokens]).to(device, non_blocking=True)
    piece = torch.repeat_interleave(
        torch.arange(len(lengths), device=device),
        lengths.to(device, non_blocking=True),
        output_size=tokens.numel(),
    )
    at = torch.arange(tokens.numel(), device=device)
    offset, document, last, next_token = values[:, piece]
    if "labels" in batch:
        labels = batch["labels"].to(device, non_blocking=True).long()
    else:
        labels = tokens.flatten().roll(-1)
        labels = torch.where(at < last, labels, torch.where(at == last, next_token, IGNORED))
    native = {
        "tokens": tokens,
        "labels": labels.view(tokens.shape),
        "input_pos": (at + offset).view(tokens.shape),
        "document_ids": document.to(torch.int32).view(tokens.shape),
    }
    for key in LAYOUT:
        if key in batch:
            value = batch[key]
            native[key] = value.to(device, non_blocking=True) if torch.is_tensor(value) else value
    return native | {key: batch[key] for key in CARRIED}


def _widened(tokens: Tensor) -> Tensor:
    if tokens.dtype == torch.uint16:
        # Few torch operations support uint16, on any device.
        return tokens.view(torch.int16).long() & 0xFFFF
    return tokens.long()


def _pieces(batch: Mapping[str, Any], *, continues: bool) -> tuple[Tensor, Tensor]:
    """Return the slots of each piece, shape (p,), and three values of each, shape (3, p).

    A piece is a segment or the padding of a row, or the part of it that one chunk of a slice takes.
    The values are the offset from batch index to position, the document, and the index of the
    piece's last real token, or -1.
    """
    edges, segments = batch["cu_seqlens"].cpu().long(), batch["segments"].cpu()
    num_rows = len(batch["tokens"])
    row_tokens = int(edges[-1]) // num_rows
    begins = edges[:-1]
    row = begins // row_tokens
    number = (
        torch.arange(len(begins))
        - torch.searchsorted(begins, torch.arange(num_rows) * row_tokens)[row]
    )
    # A row's segments come first; the rest of the row is one segment of padding.
    is_real = number < torch.bincount(segments[:, ROW], minlength=num_rows)[row]
    start, length, document = torch.zeros(3, len(begins), dtype=torch.int64)
    start[is_real], length[is_real] = segments[:, ROW_START], segments[:, ROW_LENGTH]
    document[is_real] = number[is_real] + 1

    chunks = batch[CHUNKS].cpu() if CHUNKS in batch else torch.tensor([[0, int(edges[-1])]])
    low, high = chunks.T.contiguous()
    first = torch.searchsorted(edges, low, right=True) - 1
    counts = torch.searchsorted(edges, high) - first
    chunk = torch.repeat_interleave(torch.arange(len(chunks)), counts)
    unit = first[chunk] + torch.arange(len(chunk)) - (counts.cumsum(0) - counts)[chunk]
    begin, end = begins[unit].maximum(low[chunk]), edges[unit + 1].minimum(high[chunk])

    slots = end - begin
    at = slots.cumsum(0) - slots
    skipped = begin - begins[unit]
    num_real = (length[unit] - skipped).clamp(min=0).minimum(slots)
    position = skipped + start[unit] if continues else skipped
    last = torch.where(num_real > 0, at + num_real - 1, -1)
    return slots, torch.stack([position - at, document[unit], last])
