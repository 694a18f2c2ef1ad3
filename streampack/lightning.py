"""`PackedData`: packed datasets as a DataModule of Lightning, with exact state.

::

    Trainer --> ranks, accumulation --> datasets --> PackedDataLoader --> training_step
    checkpoint <-- the states of all ranks --> after the batch last delivered

Lightning ends epochs where it likes: at a limit of batches, or at the length of the first epoch. So
every iteration over the training loader begins after the batch last delivered.

Cost: importing this imports Lightning, about 5 s; one gather of the ranks' states per checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule

from streampack.batch.formats.registry import BatchFormat
from streampack.errors import ConfigError
from streampack.loader.loader import PackedDataLoader, gather_states, held_out_set, state_of_rank
from streampack.planned.dataset import PackedStreamingDataset
from streampack.types import IGNORED, State
from streampack.world import World

__all__ = ["PackedData"]


class PackedData(LightningDataModule):
    """Training and held-out sets for Lightning's Trainer.

    Args:
        train: The training set; what a `PackedStreamingDataset` leaves open is filled in: ranks
            from the Trainer, the global batch from them and `accumulate_grad_batches`.
        held_out: The validation set: every sample once, in the same packs every time.
        batch_size: Packs in a device batch, where the datasets leave it open, or None for 1.
        batch_format: The format of batches, where the datasets leave it open.
        num_workers: Workers of each `PackedDataLoader`.

    Raises:
        ConfigError: At setup, if a dataset and the Trainer contradict each other.

    Each batch has `num_targets`, the number of its targets as a float. A loss that is a mean over
    them is logged with it as weight, and is then a mean over all targets of all ranks::

        targets = batch["num_targets"]
        losses = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
        self.log("val_loss", losses / max(targets, 1), batch_size=targets, sync_dist=True)
    """

    def __init__(
        self,
        train: Any = None,
        held_out: Any = None,
        *,
        batch_size: int | None = None,
        batch_format: BatchFormat = "native",
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out
        self.batch_size, self.batch_format = batch_size, batch_format
        self.num_workers = num_workers
        self.loader: PackedDataLoader | None = None
        """The loader of the training set, once Lightning has set up."""
        self.validation: PackedDataLoader | None = None
        """The same for the held-out set."""
        if held_out is not None:  # Lightning warns of a method that has nothing to return
            self.val_dataloader = self._val_dataloader  # type: ignore[method-assign]

    def setup(self, stage: str) -> None:  # noqa: ARG002 - Lightning names it
        """Make this rank's loaders; which rank it is, Lightning says."""
        trainer: Any = self.trainer
        world = World(
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            ranks_per_node=trainer.world_size // trainer.num_nodes,
        )
        train, held_out, size = self.train, self.held_out, self.batch_size or 1
        if isinstance(train, PackedStreamingDataset):
            train = train.with_batches(
                batch_size=self.batch_size,
                batch_format=None if train.arguments["batch_format"] else self.batch_format,
                world=None if train.arguments["world"] else world,
            )
            group = trainer.accumulate_grad_batches * train.world.num_devices
            train = train.with_batches(global_batch_size=train.batch_size * group)
        if isinstance(held_out, PackedStreamingDataset):
            defaults = {"batch_size": size, "batch_format": self.batch_format, "world": world}
            held_out = held_out_set(held_out, defaults)
        self.loader, self.validation = self._loader(train), self._loader(held_out)

    def _loader(self, dataset: Any) -> PackedDataLoader | None:
        if dataset is None:
            return None
        num_ranks = self.trainer.world_size  # type: ignore[union-attr]
        if dataset.world.num_ranks != num_ranks:
            raise ConfigError(
                f"the dataset delivers to num_ranks={dataset.world.num_ranks}, but Lightning "
                f"trains on {num_ranks}; pass World(rank=..., num_ranks={num_ranks}) to the "
                "dataset, or omit world"
            )
        return PackedDataLoader(dataset, num_workers=self.num_workers)

    def train_dataloader(self) -> Any:
        """Return this rank's training batches, after the one last delivered."""
        return _Batches(self.loader, begins_anew=False)

    def _val_dataloader(self) -> Any:
        return _Batches(self.validation, begins_anew=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks; Lightning asks every rank and saves one answer."""
        return {} if self.loader is None else {"ranks": gather_states(self.loader)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was taken.

        Raises:
            ResumeError: If it is of another dataset, or of other ranks of iterables.
        """
        if self.loader is not None:
            states: list[State] = state_dict["ranks"]
            state = state_of_rank(states, self.loader.dataset.world, "the checkpoint")
            self.loader.load_state_dict(state)


class _Batches:
    """An iteration over a loader: of epoch 0 each time, or after the batch last delivered."""

    def __init__(self, loader: Any, *, begins_anew: bool) -> None:
        self.loader = loader
        self._begins_anew = begins_anew

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._begins_anew:
            self.loader.dataset.set_epoch(0)
        else:
            self.loader.load_state_dict(self.loader.state_dict())
        for batch in self.loader:
            if isinstance(batch, dict) and "labels" in batch:
                # Lightning takes the mean of weights over ranks, and truncates that of integers.
                batch["num_targets"] = float((batch["labels"] != IGNORED).sum())
            yield batch

    # Lightning begins an epoch that it resumes at its end, unless the loader seems to resume.

    def state_dict(self) -> State:
        return {"saved by": "PackedData"}

    def load_state_dict(self, state: State) -> None:
        """Do nothing: `PackedData` has loaded it."""
