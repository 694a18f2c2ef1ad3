"""What the trainers of `streampack.hf` and `streampack.lightning` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from streampack.config import Mixing
from streampack.errors import ResumeError
from streampack.loader.loader import PackedDataLoader
from streampack.online.dataset import FlowDataset
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.rank_digest import gather_values
from streampack.types import State
from streampack.world import World, process_group


def is_packed(dataset: Any) -> bool:
    """Whether a dataset is one of ours."""
    return isinstance(dataset, PackedStreamingDataset | FlowDataset)


def gather_states(loader: PackedDataLoader) -> list[State]:
    """Return the states of all ranks, or one that fits them all; every rank must call this."""
    if isinstance(loader.dataset, PackedStreamingDataset):
        return [loader.gather_state()]
    return over_ranks(loader.state_dict())


def over_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, or of this one alone, without a process group."""
    return [value] if process_group() is None else gather_values(value)


def state_of_rank(states: Sequence[State], world: World, where: str) -> State:
    """Return the state that a rank resumes from.

    Raises:
        ResumeError: If each rank has its own, and their number is another.
    """
    if "snapshots" not in states[0] and len(states) != world.num_ranks:
        raise ResumeError(
            f"{where} has the states of {len(states)} ranks of a dataset of iterables, which do "
            f"not fit {world.num_ranks}; resume with {len(states)} ranks, or write the samples as "
            "a stream, which resumes with any number"
        )
    return states[world.rank if len(states) > 1 else 0]


def held_out_set(
    dataset: PackedStreamingDataset, defaults: Mapping[str, Any]
) -> PackedStreamingDataset:
    """Return a dataset at epoch 0 that delivers each sample once, in whole batches of all ranks.

    `defaults` are arguments for what the dataset leaves open.
    """
    arguments = dataset.arguments
    mixing = replace(arguments["mixing"] or Mixing(), global_batch_size=None, epoch_end="pad")
    own = {name: arguments[name] or value for name, value in defaults.items()}
    return dataset.with_arguments(**own, mixing=mixing)
