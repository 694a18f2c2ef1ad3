"""Batches of a planned dataset without a `PackedDataLoader`: in this loop, or in a torch worker.

::

    step      0  1  2  3  4  5        every worker plans all steps,
    worker    0  1  2  0  1  2        and reads every num_workers-th

Cost: planning in every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from streampack.batch.batch import Batch
from streampack.plan import DevicePlan, EpochSequence, Progress
from streampack.planned.cache_budget import ReadAhead
from streampack.runtime.torch_transfer import transferable


def plain_batches(
    sequence: EpochSequence,
    ahead: ReadAhead,
    read: Callable[[DevicePlan], Any],
    share: tuple[int, int],
    window: int,
    note: Callable[[Progress], None],
) -> Generator[Batch, None, int]:
    """Yield the batches of a sequence, or a worker's share of them; return the steps planned.

    `share` is this worker's index and the number of workers; (0, 0): there are none. All devices
    take `window` packs in a step. `note` gets the progress after a batch, before it is yielded.
    """
    worker, num_workers = share
    step, turns, base = 0, max(num_workers, 1), sequence.position
    with closing(sequence), closing(ahead):
        ahead.look()
        while (plan := sequence.next(fetch=step % turns == worker)) is not None:
            step += 1
            finished = ahead.look()
            if (step - 1) % turns == worker:
                # A worker knows only its own progress: assume that its round is complete.
                rounds = -(-step // turns) * turns
                position = base + rounds * window if num_workers else plan.position
                ahead.need_for(plan)
                batch = transferable(read(plan))
                note(Progress(epoch=plan.epoch, position=position))
                yield batch
                del batch
            ahead.finish(finished)
    return step
