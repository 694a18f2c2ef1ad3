"""Held-out samples one by one, in the order in which they were given.

::

    packs of one sample each  -->  rows, sorted by stream and number  -->  padded batches
                                   {"input_ids", "labels"}                 attention_mask

A model's predictions are as many as its tokens times its vocabulary, so they are made and kept row
by row anyway. Trainer distributes these rows over ranks, and puts them in order, as for any dataset
with an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from streampack.config import Mixing, Packing
from streampack.errors import ConfigError
from streampack.planned.dataset import PackedStreamingDataset
from streampack.types import IGNORED
from streampack.world import World

HeldOutRow = dict[str, torch.Tensor]


def held_out_rows(dataset: Any) -> list[HeldOutRow]:
    """Return each sample of an epoch as `input_ids` and unshifted `labels`, int64, shape (n,).

    Raises:
        ConfigError: If its samples have no order.
    """
    if not isinstance(dataset, PackedStreamingDataset):
        raise ConfigError(
            f"predictions need samples that have an order, which a {type(dataset).__name__} "
            "does not have; pass a PackedStreamingDataset, or set prediction_loss_only=True"
        )
    packing: Packing = dataset.arguments["packing"]
    one_each = Packing(
        max_seq_len=packing.max_seq_len,
        overflow=packing.overflow,
        bos_id=packing.bos_id,
        eos_id=packing.eos_id,
        padding_id=packing.padding_id,
        max_samples_per_pack=1,
    )
    pieces: dict[tuple[int, ...], HeldOutRow] = {}
    for batch in dataset.with_arguments(
        packing=one_each,
        mixing=Mixing(epoch_end="pad"),
        batch_size=8,
        batch_format="native",
        balance=None,
        world=World(),  # every rank needs all rows: Trainer deals them
    ):
        for row, *place, length in batch["segments"].tolist():
            piece = {key: batch[key][row, :length].clone() for key in ("tokens", "labels")}
            pieces[tuple(place)] = piece  # stream, pass, sample, start
    samples: dict[tuple[int, ...], list[HeldOutRow]] = {}
    for place in sorted(pieces):
        samples.setdefault(place[:-1], []).append(pieces[place])
    return [_joined(each) for each in samples.values()]


def _joined(pieces: Sequence[HeldOutRow]) -> HeldOutRow:
    """Return a sample whole; its shifted labels know the target at a cut."""
    tokens, labels = (torch.cat([piece[key] for piece in pieces]) for key in ("tokens", "labels"))
    return {"input_ids": tokens, "labels": torch.cat([labels.new_tensor([IGNORED]), labels[:-1]])}


def padded(rows: Sequence[HeldOutRow]) -> dict[str, Any]:
    """Return a batch of samples, padded on the right."""
    ids, labels = ([row[key] for row in rows] for key in ("input_ids", "labels"))
    ones = [torch.ones_like(each) for each in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence(ones, batch_first=True),
    }
