"""What Trainer iterates over: a rank's batches, an epoch of the plan at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, TrainerCallback

from streampack.batch.formats.registry import BatchFormat, get_format
from streampack.batch.layout import WEIGHTS, token_weights
from streampack.config import Mixing, Packing
from streampack.errors import ConfigError
from streampack.hf.checks import check_ids
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.provenance import RecentBatches
from streampack.runtime.resumable import engine_of
from streampack.types import IGNORED
from streampack.world import World

SHIFTED = "shift_labels"


def weighted_loss(
    outputs: Any, _labels: Any, num_items_in_batch: Any = None, *, targets: Tensor, weights: Tensor
) -> Tensor:
    """Return the weighted sum of the losses, divided as Trainer divides it."""
    losses = cross_entropy(
        outputs["logits"].float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    loss: Tensor = (losses * weights.flatten()).sum() / count
    return loss


def format_for(dataset: Any, model_format: BatchFormat) -> BatchFormat:
    """Return the format of a dataset's batches for a model: native, where losses have weights."""
    streams = dataset.streams if isinstance(dataset, PackedStreamingDataset) else ()
    weights = {getattr(stream, "loss_weight", None) for stream in streams}
    return "native" if weights - {None, 1} else model_format


def tokenizer_of(dataset: Any) -> Any:
    """Return the tokenizer of transformers that made all rows of a dataset, or None."""
    streams = getattr(dataset, "streams", ())
    sources = [getattr(stream, "source", None) for stream in streams]
    found = [getattr(source, "tokenizer", None) for source in sources]
    if not found or any(each is not found[0] and each != found[0] for each in found):
        return None
    if isinstance(found[0], str | os.PathLike):
        return AutoTokenizer.from_pretrained(found[0])
    return found[0] if hasattr(found[0], "save_pretrained") else None


class RankBatches:
    """A rank's batches as the model takes them, an epoch in each iteration.

    It has a length only for evaluation: Trainer would cut off epochs longer than the first.
    """

    def __init__(
        self,
        loader: PackedDataLoader,
        batch_format: BatchFormat,
        unknown: Collection[str],
        recent: RecentBatches,
        num_batches: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.loader = loader
        self.dataset: Any = loader.dataset
        self._convert: Callable[[Any], Any] = get_format(batch_format)
        self._unknown = unknown
        self._recent = recent
        self._num_batches = num_batches
        self.at: tuple[int, int] | None = None
        """Epoch and position of the last batch, if it has them."""

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("the lengths of epochs differ")
        return self._num_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            if "position" in batch:
                self.at = batch["epoch"], batch["position"]
            origin, inputs = self.loader.provenance(batch), batch
            if "segments" in batch:
                inputs = self._inputs(batch)
                origin = replace(origin, convert=self._convert)
            inputs = {key: value for key, value in inputs.items() if key not in self._unknown}
            check_ids(inputs, self._vocabulary)
            self._recent.add(inputs, origin)
            yield inputs

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """Return a native batch in the model's format; while training, with weights of losses."""
        weights = token_weights(batch)
        inputs: dict[str, Any] = self._convert({key: batch[key] for key in batch if key != WEIGHTS})
        if weights is not None and self._num_batches is None:
            shape = inputs["labels"].shape
            inputs |= {SHIFTED: batch["labels"].view(shape), WEIGHTS: weights.view(shape)}
        return inputs

    def progress(self) -> tuple[float, bool] | None:
        """Return how many epochs are done, and whether one has just ended, or None if not known."""
        planned = self.dataset
        if self.at is None or not has_epochs(planned):
            return None
        epoch, position = self.at
        done = -(-position // engine_of(planned).spec.view().stride)
        total = len(self.loader)
        return epoch + done / total, done >= total


class TrueEpochs(TrainerCallback):
    """Tells Trainer where epochs end, and how many there are: it saw no length."""

    batches: RankBatches | None = None
    """Those of the run, while it trains."""

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.batches is not None:
            state.num_train_epochs = math.ceil(args.num_train_epochs)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.batches is not None and (progress := self.batches.progress()) is not None:
            state.epoch, control.should_epoch_stop = progress


def has_epochs(dataset: Any) -> bool:
    """Whether a dataset plans epochs: iterables do not plan, and a run of chapters has none."""
    return isinstance(dataset, PackedStreamingDataset) and dataset.arguments["chapters"] is None


def num_steps(dataset: PackedStreamingDataset, args: Any) -> int:
    """Return the optimizer steps of `num_train_epochs`; a run of chapters has its own end.

    Raises:
        TypeError: If the dataset has no length; Trainer refuses these before.
    """
    group: int = args.gradient_accumulation_steps
    if not has_epochs(dataset):
        return len(dataset) // group
    steps: list[int] = []
    for epoch in range(math.ceil(args.num_train_epochs)):
        dataset.set_epoch(epoch)
        steps.append(len(dataset) // group)
    dataset.set_epoch(0)
    part: float = args.num_train_epochs % 1 or 1.0
    return sum(steps[:-1]) + math.ceil(part * steps[-1])


@contextmanager
def changed(arguments: Any, **values: Any) -> Iterator[None]:
    """Give attributes of Trainer's arguments other values for a while."""
    before = {name: getattr(arguments, name) for name in values}
    try:
        for name, value in values.items():
            setattr(arguments, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(arguments, name, value)


# Held-out samples one by one, for predictions and metrics.

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
