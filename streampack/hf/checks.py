"""What `PackedTrainer` refuses or names before it trains: options, ids, checkpoints, leaks."""

from __future__ import annotations

import logging
from dataclasses import fields
from itertools import islice
from typing import Any

import torch
import transformers

from streampack.batch.formats.registry import BatchFormat, get_format
from streampack.batch.layout import WEIGHTS
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.planned.dataset import PackedStreamingDataset
from streampack.testing.leaks import InconclusiveError, LeakError, assert_no_leak
from streampack.types import State
from streampack.world import World

logger = logging.getLogger(__name__)

MAX_TRIED = 10  # batches in which the leak check looks for a row of two segments
# Of TrainingArguments: they are for the loader that Trainer would make.
UNUSED = (
    *("dataloader_drop_last", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_multiprocessing_context", "dataloader_in_order", "group_by_length"),
    *("train_sampling_strategy", "length_column_name", "accelerator_config", "ignore_data_skip"),
)


def warn_of_unused(args: Any) -> None:
    """Name the options of TrainingArguments that were set and change nothing."""
    usual = {field.name: field.default for field in fields(args)}
    usual["accelerator_config"] = type(args.accelerator_config)()  # of fields with defaults
    found = [name for name in UNUSED if name in usual and getattr(args, name) != usual[name]]
    if found:
        logger.warning(
            "TrainingArguments: %s without effect on a packed dataset, which packs, orders and "
            "prefetches its own batches; see Packing, Order and Buffers",
            ", ".join(f"{name}={getattr(args, name)!r}" for name in found)
            + (" is" if len(found) == 1 else " are"),
        )


def check_ids(inputs: Any, num_ids: int | None) -> None:
    """Refuse token ids that a model has no embedding for."""
    ids = inputs.get("input_ids", inputs.get("tokens"))
    if num_ids is None or ids is None or not ids.numel() or (largest := int(ids.max())) < num_ids:
        return
    raise DataError(
        f"a batch has token {largest}, but the model's vocabulary has {num_ids} ids, from 0 on; "
        "tokenize with the model's own tokenizer, or call model.resize_token_embeddings("
        f"{largest + 1}) or more before training"
    )


def vocabulary_of(model: Any) -> int | None:
    """Return how many token ids a model has embeddings for, if that can be told."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return None


def check_global_batch(state: State, dataset: Any) -> None:
    """Refuse a checkpoint of another global batch: the steps of its run would mean others.

    Raises:
        ResumeError: If it differs.
    """
    saved = state.get("global_batch_size")
    size = dataset.arguments["mixing"].global_batch_size if saved else None
    if size not in (saved, None):
        raise ResumeError(
            f"the checkpoint is of a run with {saved} packs in each step, but TrainingArguments "
            f"and the ranks give {size}, so max_steps, epochs and the learning rate would not fit; "
            "set per_device_train_batch_size and gradient_accumulation_steps so that their "
            f"product with the number of ranks is {saved}"
        )


def check_leaks(trainer: Any, dataset: Any, model_format: BatchFormat) -> None:
    """Refuse a model that attends across samples; warn if that cannot be checked."""
    unchecked = "was not checked for leaks between samples"
    if not isinstance(dataset, PackedStreamingDataset):
        logger.warning("the model %s: iterables are read only once", unchecked)
        return
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        logger.warning(
            "the model %s: its weights will be sharded; run assert_no_leak once on one GPU, "
            "with a small model of this architecture",
            unchecked,
        )
        return
    # The same batches on every rank, so that each makes the same number of forward passes.
    tried = dataset.with_arguments(
        batch_size=min(2, dataset.batch_size),
        batch_format="native",
        balance=None,
        world=World(),
    )
    batch_format = dataset.arguments["batch_format"]
    convert = get_format(model_format if batch_format == "native" else batch_format)
    was_training, device = trainer.model.training, next(trainer.model.parameters()).device
    trainer.model.eval()
    reason: object = "no batch"
    for batch in islice(tried, MAX_TRIED):
        check_ids(batch, vocabulary_of(trainer.model))
        on_device = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
            if key != WEIGHTS
        }
        try:
            with trainer.accelerator.autocast():
                assert_no_leak(trainer.model, on_device, batch_format=convert)
        except InconclusiveError as error:
            reason = error
            continue
        except LeakError as error:
            name = type(trainer.model).__name__
            raise ConfigError(
                f"{name} attends across samples in batch_format={batch_format!r} of "
                f"transformers {transformers.__version__}: {error}; or set check_leaks=False "
                "to train nevertheless"
            ) from error
        break
    else:
        logger.warning("the model %s in %d batches: %s", unchecked, MAX_TRIED, reason)
    trainer.model.train(was_training)
