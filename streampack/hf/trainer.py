"""`PackedTrainer`: transformers' Trainer on packed datasets, as short to write as Trainer itself.

::

    TrainingArguments --> batch size, global batch, world, steps --.
    model             --> format, leak check                       +--> PackedDataLoader --> Trainer
    checkpoint        --> the loader's state of every rank --------'

Trainer shards, skips and counts what it is given, and would do each a second time. So it iterates
over the loader unchanged, one epoch of the plan at a time, and told where an epoch ends.

Cost: the leak check, a few forward passes at each start; the lengths of all epochs are planned.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from streampack.batch.formats.registry import BatchFormat
from streampack.batch.layout import CARRIED, WEIGHTS
from streampack.config import Order
from streampack.errors import ConfigError, DataError
from streampack.hf.batches import (
    SHIFTED,
    RankBatches,
    TrueEpochs,
    changed,
    format_for,
    held_out_rows,
    num_steps,
    padded,
    tokenizer_of,
    weighted_loss,
)
from streampack.hf.checkpoints import find_checkpoint, load_state, save_state, steps_done
from streampack.hf.checks import check_leaks, vocabulary_of, warn_of_unused
from streampack.loader.loader import PackedDataLoader, held_out_set, is_packed, over_ranks
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.provenance import RECENT, Provenance, RecentBatches
from streampack.runtime.resumable import engine_of
from streampack.types import IGNORED
from streampack.world import World

_Mixed: Any = object  # the Trainer that a subclass adds, which super() finds


class PackedTrainerMixin(_Mixed):  # type: ignore[misc]
    """Adds what `PackedTrainer` does to your own subclass of transformers' Trainer.

    Put it first: ``class MyPackedTrainer(PackedTrainerMixin, MyTrainer)``. It takes Trainer's
    arguments and `check_leaks`; see `PackedTrainer`.
    """

    def __init__(self, *args: Any, check_leaks: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check_leaks = check_leaks
        self._sums: list[float] | None = None  # losses and targets, while packs are evaluated
        self._is_finished = False  # the run of the checkpoint to resume from
        self._leaves_padding = False  # out of the tokens that Trainer counts
        if is_packed(self.train_dataset):
            warn_of_unused(self.args)
        self._epochs = TrueEpochs()
        self.add_callback(self._epochs)
        # Trainer fetches the batches of a whole optimizer step before it trains on the first one.
        self._recent = RecentBatches(RECENT + 2 * self.args.gradient_accumulation_steps)

    def provenance(self, inputs: Any) -> Provenance:
        """Return where the tokens of a batch come from, in `compute_loss` and its callers.

        It is what `PackedDataLoader.provenance` returns, in the layout of the model's inputs, even
        after Trainer has copied them to a GPU.

        Raises:
            ConfigError: If the inputs are not a recent batch of a packed dataset.
        """
        return self._recent.find(inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        with suppress(ConfigError):  # of a dataset that is not packed
            self._recent.add(prepared, self._recent.find(inputs))
        return prepared

    # Training.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kw: Any) -> Any:
        """Train, from the start or from a complete checkpoint.

        Args:
            resume_from_checkpoint: A checkpoint's folder; or a folder of checkpoints, to use the
                newest complete one; or True, to look for it in `output_dir`. None or False: begin
                at step 0.
            args: Further arguments of Trainer.
            kw: The same by name.

        Raises:
            ConfigError: If the dataset and the arguments contradict each other, or the model
                attends across samples.
            ResumeError: If the checkpoint is incomplete or of another dataset.
        """
        if not is_packed(self.train_dataset):
            return super().train(resume_from_checkpoint, *args, **kw)
        if self.args.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True changes the batch size while packs are planned for "
                f"per_device_train_batch_size={self.args.per_device_train_batch_size}; omit it"
            )
        folder = find_checkpoint(self.args.output_dir, resume_from_checkpoint)
        dataset = self._filled(self.train_dataset)
        if self.check_leaks:
            check_leaks(self, dataset, self._format)
        self._epochs.batches = self._batches_of(dataset)
        max_steps = self.args.max_steps
        if max_steps <= 0:
            max_steps = num_steps(dataset, self.args)
        self._is_finished = folder is not None and steps_done(folder) >= max_steps
        if folder is not None:
            load_state(folder, self._epochs.batches.loader)
        counts = self.args.include_num_input_tokens_seen
        self._leaves_padding = counts == "non_padding"
        counts = "all" if self._leaves_padding else counts
        own = {"max_steps": max_steps, "include_num_input_tokens_seen": counts}
        try:
            with changed(self.args, ignore_data_skip=True, **own):
                return super().train(folder, *args, **kw)
        finally:
            self._epochs.batches = None
            self._is_finished = self._leaves_padding = False

    def set_initial_training_values(self, *args: Any, **kw: Any) -> Any:
        """Return Trainer's values; no epoch where the run is finished."""
        num_epochs, *rest = super().set_initial_training_values(*args, **kw)
        return 0 if self._is_finished else num_epochs, *rest

    def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        """Make Trainer's step; without the padding where tokens other than it are counted."""
        if self._leaves_padding:
            ids = self._recent.find(inputs).stream_ids
            padding = torch.tensor(int((ids < 0).sum()), device=self.args.device)
            self.state.num_input_tokens_seen -= int(self.accelerator.gather(padding).sum())
        return super().training_step(model, inputs, *args, **kw)

    def get_train_dataloader(self) -> Any:
        """Return the loader of the run unchanged: accelerate would shard it a second time."""
        if not is_packed(self.train_dataset):
            return super().get_train_dataloader()
        if self._epochs.batches is None:
            return self._batches_of(self._filled(self.train_dataset))
        return self._epochs.batches

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Weigh the losses of streams with a `loss_weight`; else Trainer's own."""
        compute = super().compute_loss
        if WEIGHTS not in inputs:
            return compute(model, inputs, *args, **kw)
        inputs = dict(inputs)
        targets, weights = inputs.pop(SHIFTED), inputs.pop(WEIGHTS)
        weigh = partial(weighted_loss, targets=targets, weights=weights)
        with changed(self, compute_loss_func=weigh):
            return compute(model, inputs, *args, **kw)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kw: Any) -> None:
        # Trainer ends by deleting older checkpoints, and calls on_save only after that.
        if self._epochs.batches is not None:
            save_state(
                self._get_output_dir(trial=trial),
                self.state.global_step,
                self._epochs.batches.loader,
                writes=self.args.should_save,
            )
        super()._save_checkpoint(model, trial, *args, **kw)

    def _save(self, *args: Any, **kw: Any) -> None:
        # A tokenizer in `processing_class` would also change the model's special tokens.
        own = tokenizer_of(self.train_dataset) if self.processing_class is None else None
        with changed(self, processing_class=self.processing_class or own):
            super()._save(*args, **kw)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # Trainer's last file says that all of them are there, so it waits for every rank's.
        self.accelerator.wait_for_everyone()

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader that delivers each held-out sample once, on all ranks together."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if is_packed(dataset):
            return self._held_out(dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of `get_eval_dataloader`."""
        if is_packed(test_dataset):
            return self._held_out(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate packs for the loss, and samples one by one where predictions are wanted."""
        only = self.args.prediction_loss_only
        only = only if prediction_loss_only is None else prediction_loss_only
        rest = (ignore_keys, metric_key_prefix)
        evaluate = super().evaluation_loop
        if not isinstance(dataloader, RankBatches):
            return evaluate(dataloader, description, only, *rest)
        self._sums = [0.0, 0.0]
        try:
            output = evaluate(dataloader, description, True, *rest)
            streams = dataloader.loader.stats()["streams"].values()
            samples = sum(stream["samples"] for stream in streams)
            each = over_ranks([*self._sums, samples])
            loss, targets, samples = (sum(column) for column in zip(*each, strict=True))
        finally:
            self._sums = None
        if not targets:
            raise DataError(
                f"none of the {int(samples)} held-out samples has a target, which a loss needs; "
                "check the loss mask, or whether overflow='truncate' cut off the responses"
            )
        output = output._replace(num_samples=int(samples))
        if not only:
            size = self.args.per_device_eval_batch_size
            rows: Any = held_out_rows(dataloader.dataset)
            loader = self.accelerator.prepare(DataLoader(rows, size, collate_fn=padded))
            output = evaluate(loader, description, only, *rest)
        output.metrics[f"{metric_key_prefix}_loss"] = loss / targets
        return output

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Add a batch's loss and targets to the sums, or make Trainer's own step."""
        if self._sums is None:
            step = super().prediction_step
            return step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        targets = (inputs.get("shift_labels", inputs["labels"]) != IGNORED).sum()
        count = targets.clamp(min=1)
        with (
            torch.no_grad(),
            # Trainer would scale it by the number of ranks.
            changed(self.args, average_tokens_across_devices=False),
            self.compute_loss_context_manager(),
        ):
            loss = self.compute_loss(model, inputs, num_items_in_batch=count)  # the batch's mean
        if targets:  # else the mean is NaN
            self._sums[0] += loss.double().item() * targets.item()
            self._sums[1] += targets.item()
        return None, None, None

    def _held_out(self, dataset: Any) -> RankBatches:
        if isinstance(dataset, PackedStreamingDataset):
            size = self.args.per_device_eval_batch_size
            own_format = format_for(dataset, self._format)
            dataset = held_out_set(dataset, {"batch_size": size, "batch_format": own_format})
            self._check_world(dataset.world)
            return self._batches_of(dataset, len(dataset))
        dataset.set_epoch(0)
        return self._batches_of(dataset)

    # What the dataset left open.

    @property
    def _format(self) -> BatchFormat:
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        return "hf_flash" if "flash" in str(attention) else "hf"

    def _batches_of(self, dataset: Any, num_batches: int | None = None) -> RankBatches:
        loader = PackedDataLoader(
            dataset,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        names = inspect.signature(model.forward).parameters
        # Bloom, MPT and Mamba take none; the leak check refuses packs of several samples for them.
        unknown = {"position_ids"} - set(names) if "input_ids" in names else set()
        unknown = {*CARRIED, *unknown}
        vocabulary = vocabulary_of(model)
        return RankBatches(loader, self._format, unknown, self._recent, num_batches, vocabulary)

    def _filled(self, dataset: Any) -> Any:
        """Return the training set with what its maker left open."""
        args = self.args
        size = args.per_device_train_batch_size
        if isinstance(dataset, PackedStreamingDataset):
            devices, own_format = dataset.world.num_devices, format_for(dataset, self._format)
            self._check_weights(own_format)
            if dataset.arguments["order"] is None:
                seed = args.seed if args.data_seed is None else args.data_seed
                dataset = dataset.with_arguments(order=Order(seed=seed))
            try:
                dataset = dataset.with_batches(
                    batch_size=size,
                    global_batch_size=size * args.gradient_accumulation_steps * devices,
                    batch_format=None if dataset.arguments["batch_format"] else own_format,
                )
            except ConfigError as error:
                raise ConfigError(
                    f"{error}; or set it in TrainingArguments, which has "
                    f"per_device_train_batch_size={size}, "
                    f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and "
                    f"{devices} ranks take different batches"
                ) from error
        elif engine_of(dataset).plan.batch_size != size:
            raise ConfigError(
                f"the dataset's batch_size={engine_of(dataset).plan.batch_size} is not "
                f"per_device_train_batch_size={size} of TrainingArguments; make both the same"
            )
        self._check_world(dataset.world)
        return dataset

    def _check_weights(self, batch_format: BatchFormat) -> None:
        given = {"compute_loss_func": self.compute_loss_func, "label_smoother": self.label_smoother}
        own = [name for name, value in given.items() if value is not None]
        if batch_format == "native" and own:
            raise ConfigError(
                f"Stream(loss_weight=...) is weighed by PackedTrainer's own loss, but {own[0]} is "
                "set; omit one of them"
            )

    def _check_world(self, world: World) -> None:
        if world.num_ranks != self.args.world_size:
            raise ConfigError(
                f"the dataset delivers to num_ranks={world.num_ranks}, but Trainer trains on "
                f"{self.args.world_size}; on CPUs, set use_cpu=True so that it sees the others"
            )
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"Trainer would divide each batch among {self.args.n_gpu} GPUs, which cuts packs "
                f"apart; start a process for each: torchrun --nproc-per-node {self.args.n_gpu} ..."
            )


class PackedTrainer(PackedTrainerMixin, Trainer):
    """transformers' Trainer for packed datasets; Trainer itself handles other datasets.

    Args:
        args: Trainer's arguments, by position or by name. `train_dataset` and `eval_dataset` may be
            a `PackedStreamingDataset` or an iterable one. What a `PackedStreamingDataset` leaves
            open is filled in: batch size, global batch and ranks from `TrainingArguments`, the
            format from the model's attention. `num_train_epochs` counts its epochs, each of which
            takes all samples.
        check_leaks: Check before training that the model keeps the samples of a pack apart.
        kwargs: The same by name.

    `eval_loss` is a mean over all held-out targets. Checkpoints contain the loader's state of every
    rank, and ``train(resume_from_checkpoint=True)`` continues with the next batch.
    """
