"""A batch's way to torch's own loaders, and out of their workers: tokens, and how the rest is made.

::

    worker   dataset --> Parcel: a dict of tensors like any, and the rows that they were made of
                           |  whatever the user's code does with it
             torch       pickles it: 4 (or 2) bytes a token, and what is no longer as it was made
                           |  a pipe
    here     torch       unpickles a plain dict, all tensors made anew

torch hands every tensor of a dict over by itself, through shared memory and a connection for each,
some 0.3 ms on either side. It tells nobody when a dict leaves the worker, so this happens where
processes pickle what they send each other (`ForkingPickler`). Any other pickle, deep copy or
`torch.save` of a parcel is that of a plain dict.

Nothing tells either whether someone has written to a tensor, for instance through numpy. So the
batch is made once more before it is sent, and what differs is sent as it is.

Batches that were made of no rows, in a format of one's own or by `PackedIterableDataset`, go
through the pipe too if they are small, see handover.py, and torch's way if they are large: more
copies cost more than more connections. What is no dict, such as torchtitan's pairs, always does.

torch's `DataLoader` tells a dataset nothing of its batch_size, and with any but None, which is not
the default, it would stack whole batches. But its collating asks for the type of what it stacks.

Cost: for 64 K native tokens 0.3 ms in the worker and 0.1 ms here, some 0.3 ms for pipe and queues.
Memory: the rows, for as long as a batch waits in the worker; a few batches that wait to be used
again, for as long as the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from streampack.assemble import Batch, Blocks, Formatter, make_batch, to_native
from streampack.errors import ConfigError
from streampack.load.handover import LARGEST_IN_PIPE, Folded, fold, is_plain, one_thread, sendable
from streampack.load.reader import BatchReader
from streampack.plan import DevicePlan
from streampack.read import Rows
from streampack.types import IntArray, Packs

__all__ = ["Ingredients", "Parcel", "ParcelReader", "parcel"]

# Nobody here owns a loader, so one pool for the process: fresh memory takes longer than the rest.
_BLOCKS = Blocks()

NO_TOKENS = np.zeros((0, 0), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ingredients:
    """All that a batch is made of."""

    rows: Rows
    """Its tokens; nobody writes to them any more."""
    packs: Packs
    """The plan that they came from."""
    epoch: int
    position: int
    positions: str
    """"restart" or "continue"."""
    convert: Formatter
    """Gives the native batch its look; one that `is_light`."""

    def make(self) -> Any:
        """Make the batch."""
        native = make_batch(
            self.rows,
            self.packs,
            epoch=self.epoch,
            position=self.position,
            positions=self.positions,
            blocks=_BLOCKS,
        )
        if self.convert is to_native:
            return native
        with one_thread():
            return self.convert(native)


class Parcel(dict[str, Any]):
    """A batch as a dataset yields it, which other processes get as a plain dict.

    Args:
        batch: The batch.
        ingredients: What it was made of, if that is known.

    >>> import copy, pickle
    >>> made = Parcel({"epoch": 3})
    >>> made, type(copy.copy(made)).__name__, type(pickle.loads(pickle.dumps(made))).__name__
    ({'epoch': 3}, 'Parcel', 'dict')
    """

    __slots__ = ("ingredients",)

    def __init__(self, batch: Any = (), ingredients: Ingredients | None = None) -> None:
        super().__init__(batch)
        self.ingredients = ingredients

    def __copy__(self) -> Parcel:
        # torch's default_convert fills a copy, and that is what the worker sends.
        return Parcel(self, self.ingredients)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def parcel(batch: Any, ingredients: Ingredients | None = None) -> Any:
    """Return a batch such that it is not stacked, and sent in one piece, if it is a dict.

    Args:
        batch: In any format.
        ingredients: What it was made of, if that is known.
    """
    if type(batch) is not dict:
        return batch
    _make_known()
    return Parcel(batch, ingredients)


@cache
def _make_known() -> None:
    """Tell those who ask for a type: what sends, what stacks, what maps over trees of tensors."""
    ForkingPickler.register(Parcel, _send)
    default_collate_fn_map[Parcel] = _refuse_to_stack
    pytree.register_pytree_node(
        Parcel,
        lambda batch: (list(batch.values()), list(batch)),
        lambda values, names: dict(zip(names, values, strict=True)),
    )


def _refuse_to_stack(batches: list[Parcel], *, collate_fn_map: object = None) -> Parcel:  # noqa: ARG001
    raise ConfigError(
        f"torch's DataLoader has batch_size={len(batches)} and would stack whole batches; set "
        "DataLoader(dataset, batch_size=None), and how many packs a batch holds in the dataset"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParcelReader:
    """Reads plans in a worker that torch's own loader has started."""

    reader: BatchReader

    def __call__(self, plan: DevicePlan) -> Any:
        """Read the plan of one batch, in the dataset's `batch_format`."""
        read = self.reader
        if not read.is_light or read.keeps_rows:
            return parcel(read(plan))
        # This room is not used again while any array looks at it.
        room, tokens = read.room(plan.num_rows)
        rows = read.gatherer.gather(plan.packs, plan.num_rows, out=room)
        ingredients = Ingredients(
            rows=rows,
            packs=plan.packs,
            epoch=plan.epoch,
            position=plan.position,
            positions=read.packing.positions,
            convert=read.convert,
        )
        [batch] = read.finish(plan, rows, [tokens])
        return parcel(batch, ingredients)


Sent = tuple[list[str], Batch | Folded, Ingredients | None, Any, Any]


def _send(batch: Parcel) -> tuple[Callable[..., Batch], Sent]:
    """Return what makes the batch in another process, and its arguments."""
    ingredients = batch.ingredients
    made = {} if ingredients is None else ingredients.make()
    rest = {
        name: value
        for name, value in batch.items()
        if name not in made or not _is_same(value, made[name])
    }
    names, folded = list(batch), _folded(rest)
    if ingredients is None or len(rest) == len(batch):
        return _receive, (names, folded, None, None, None)
    rows = ingredients.rows
    bare = replace(ingredients, rows=replace(rows, tokens=NO_TOKENS, labels=None))
    labels = None if rows.labels is None else sendable(torch.from_numpy(rows.labels))
    return _receive, (names, folded, bare, sendable(torch.from_numpy(rows.tokens)), labels)


def _folded(rest: Batch) -> Batch | Folded:
    """Return it in one piece if that goes through a pipe."""
    num_bytes = sum(value.nbytes for value in rest.values() if is_plain(value))
    return fold(rest) if num_bytes <= LARGEST_IN_PIPE else rest


def _receive(
    names: list[str], folded: Batch | Folded, bare: Ingredients | None, tokens: Any, labels: Any
) -> Batch:
    """Return the batch; `tokens` and `labels` belong to the ingredients."""
    made = {}
    if bare is not None:
        labels = None if labels is None else np.asarray(labels)
        rows = replace(bare.rows, tokens=np.asarray(tokens), labels=labels)
        made = replace(bare, rows=rows).make()
    made |= folded.unfold() if isinstance(folded, Folded) else folded
    return {name: made[name] for name in names}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values cannot be told apart; False where that is not known."""
    if not is_plain(one) or not is_plain(other):
        return type(one) is type(other) and isinstance(one, int | str) and one == other
    return one.dtype == other.dtype and np.array_equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> IntArray:
    """Return integers of the same bits: -0.0 is not 0.0."""
    array: IntArray = tensor.numpy()
    return array.view(f"i{array.itemsize}")
