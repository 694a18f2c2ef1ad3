"""States of online datasets: their format, and the checks when one is loaded.

::

    {"version": 8, "kind": "iterable", "epoch": 0,
     "worker": [0, 2], "device": [0, 8],              number and count of this worker and rank
     "fingerprint": {"seed": 17, "streams": [...], ...},          every field must match
     "flow": {"num_batches": 7, ...,                  or None at the start
              "delivered": [3],                       packs of the window of each queue
              "queues": [{...}]},                     what is read again for it, and what waits
     "sources": [...],                                the sources' own states, of each queue
     "digest": "9f..."}                               of all but these

Nothing else checks the numbers in a state: the digest refuses one that was damaged or edited. A
loader's state contains one for each of its workers. Workers send what has changed with a batch: a
queue once per window, and a few integers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from streampack._checks import MAX_EPOCH
from streampack.errors import ResumeError, short_text
from streampack.online.plan import FlowPlan, Steps
from streampack.online.source_slice import WorkerSlice
from streampack.plan.comparison import check_same
from streampack.runtime.rank_digest import digest_of_values
from streampack.types import State

STATE_VERSION = 8
KIND = "iterable"
UNCHANGED = "load what state_dict() returned, unchanged"
MAX_STEP = 2**63 - 1


def flow_fingerprint(plan: FlowPlan) -> dict[str, Any]:
    """Return the options that determine the batches of given sources, as JSON.

    For a tokenizer or another function, it records only whether there is one.
    """
    streams, amounts = plan.streams, plan.amounts
    return {
        **plan.packing.in_sequence(),
        **{key: value for key, value in asdict(plan.mixing).items() if key != "max_repeats"},
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "shuffle_block_size": plan.shuffle_block_size,
        "streams": list(plan.names),
        "amounts": list(amounts.amounts),
        "repeats": [None if each is None else float(each) for each in amounts.repeats],
        "are_quotas": amounts.are_quotas,
        "bucketing": None if plan.bucketing is None else asdict(plan.bucketing),
        "tokenizers": [stream.tokenizer is not None for stream in streams],
        "text": [None if stream.tokenizer is None else stream.text for stream in streams],
        "tokens": [stream.tokens if stream.tokenizer is None else None for stream in streams],
        "labels": [stream.labels for stream in streams],
        "labels_shifted": [stream.labels_shifted for stream in streams],
        "loss_mask": [stream.loss_mask for stream in streams],
        "sharded": [bool(stream.sharded) for stream in streams],
        "token_fields": [
            {name: np.dtype(dtype).name for name, dtype in stream.token_fields.items()}
            for stream in streams
        ],
        "split_payloads": [stream.payloads.split for stream in streams],
        "on_bad_sample": ["raise" if stream.most_bad is None else "skip" for stream in streams],
        "payloads": [dict(stream.payloads.payloads) for stream in streams],
        "length_fns": [stream.payloads.cost is not None for stream in streams],
    }


def worker_state(fingerprint: dict[str, Any], worker_slice: WorkerSlice, epoch: int) -> State:
    """Return a worker's state at an epoch's start; `merged` adds that of its packing loop."""
    return {
        "version": STATE_VERSION,
        "kind": KIND,
        "epoch": epoch,
        "worker": [worker_slice.worker, worker_slice.num_workers],
        "device": [worker_slice.device, worker_slice.num_devices],
        "fingerprint": fingerprint,
        "flow": None,
        "sources": [],
    }


def merged(state: State, change: State) -> State:
    """Return a worker's state after a batch, from that before and from what has changed."""
    flow, sources = change["flow"], change["sources"]
    before = state["flow"] or flow
    queues = zip(flow["queues"], before["queues"], strict=True)
    own = zip(sources, state["sources"] or sources, strict=True)
    return {
        **state,
        "flow": flow | {"queues": [old if new is None else new for new, old in queues]},
        "sources": [old if new is None else new for new, old in own],
    }


def saved_state(state: State) -> State:
    """Return a copy of a worker's state as it is handed over: JSON, with a digest.

    The states of sources are theirs, and may be any objects.
    """
    text = json.dumps({**state, "sources": None, "digest": None}, sort_keys=True)
    copied: State = json.loads(text)
    sources = copy.deepcopy(state["sources"])
    return copied | {"sources": sources, "digest": digest_of_values(text)}


def check_state(state: State, fingerprint: dict[str, Any], worker_slice: WorkerSlice) -> None:
    """Refuse a state of another kind, rank, worker or dataset, naming the value that differs."""
    if not isinstance(state, dict) or state.get("kind") != KIND:
        found = state.get("kind") if isinstance(state, dict) else type(state).__name__
        raise ResumeError(
            f"the state is of kind {found!r}, not of a PackedIterableDataset; load what its "
            "state_dict() returned, unchanged"
        )
    if state.get("version") != STATE_VERSION:
        raise ResumeError(
            f"the state has version {state.get('version')!r}, this release reads {STATE_VERSION}; "
            "load it with the release that saved it"
        )
    is_whole, bare = False, {**state, "sources": None, "digest": None}
    with suppress(TypeError, ValueError, RecursionError):
        is_whole = state.get("digest") == digest_of_values(json.dumps(bare, sort_keys=True))
    if not is_whole:
        raise ResumeError(f"the state is damaged, or was edited; {UNCHANGED}")
    check_slice(state, worker_slice)
    saved, own = state["fingerprint"], json.loads(json.dumps(fingerprint))
    check_same({(key,): saved[key] for key in saved}, {(key,): own[key] for key in own})


def check_slice(state: State, worker_slice: WorkerSlice) -> None:
    """Refuse a state of another rank or worker."""
    rank = "rank (of those with batches of their own)"
    for key, name, own in (
        ("device", rank, [worker_slice.device, worker_slice.num_devices]),
        ("worker", "worker", [worker_slice.worker, worker_slice.num_workers]),
    ):
        saved = state[key]
        if saved != own:
            raise ResumeError(
                f"the state is of {name} {saved[0]} of {saved[1]}, but is loaded in {own[0]} of "
                f"{own[1]}; samples in buffers belong to their worker, so resume with as many "
                "ranks and workers, each with its own state"
            )


class LoopPosition(NamedTuple):
    """A position in the loops of a rank with `steps`."""

    epoch: int
    """Number of the loop; what the sources are at may lag behind."""
    step: int
    """Batches of the loop that were delivered."""
    is_begun: bool = False
    """Whether this process delivered the last of them, so that its next loop is another."""

    @property
    def next(self) -> LoopPosition:
        """Where the next loop begins."""
        return LoopPosition(self.epoch + 1, 0) if self.is_begun else self


def read_loop(whole: State, states: Sequence[State], steps: Steps | None) -> LoopPosition:
    """Return the position in loops of a whole state, which has these states of workers.

    A state that was saved without `steps` is in the loop of its epoch. A ResumeError refuses
    loops that ended by another rule.
    """
    loop = whole.get("loop")
    if loop is None:
        epoch = max(int(state["epoch"]) for state in states)
        flows = [each["flow"] for each in states if each["flow"] and each["epoch"] == epoch]
        return LoopPosition(epoch, sum(int(flow["num_batches"]) for flow in flows))
    if not isinstance(loop, dict):
        raise _wrong_value("loop", loop, "a dict")
    saved = loop.get("steps")
    if steps is not None and (saved == "equal") != (steps == "equal"):
        raise ResumeError(
            f"the state was saved with steps={saved!r:.80}, but this dataset has steps={steps!r}; "
            "ranks would be in different epochs, so resume with "
            f"{'steps=' + repr('equal') if saved == 'equal' else 'a number of steps'}"
        )
    return LoopPosition(
        _count("loop.epoch", loop.get("epoch"), MAX_EPOCH),
        _count("loop.step", loop.get("step"), MAX_STEP),
    )


def _count(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _wrong_value(name, value, f"an integer of at least 0 and at most {most}")
    return value


def _wrong_value(name: str, value: Any, wanted: str) -> ResumeError:
    return ResumeError(f"the state's {name} is {value!r:.80}, not {wanted}; {UNCHANGED}")


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A position in an epoch: the state of each worker, and the worker of the next batch."""

    epoch: int
    states: Sequence[State] = ()
    """One state without workers; none at the epoch's start, whatever the number of workers."""
    next_worker: int = 0

    def after(self, worker: int, change: State) -> Position:
        state = merged(self.states[worker], change)
        states = [*self.states[:worker], state, *self.states[worker + 1 :]]
        return Position(self.epoch, states, (worker + 1) % len(states))

    @property
    def flows(self) -> list[State]:
        """The states of the packing loops of workers that are not at an epoch's start."""
        return [state["flow"] for state in self.states if state["flow"]]

    def saved(self) -> Position:
        """Return a copy to be loaded later, with the states as they are handed over."""
        if not self.flows:
            return Position(self.epoch)
        return replace(self, states=list(map(saved_state, self.states)))

    def state_dict(self, num_workers: int) -> State:
        """Return the state of a loader; without workers, `states` is that of the process."""
        workers = list(map(saved_state, self.states))
        return {
            "version": workers[0]["version"],
            "kind": KIND,
            "num_workers": num_workers,
            "next_worker": self.next_worker,
            "workers": workers,
        }


class Standing(NamedTuple):
    """The positions of a dataset's iterations; see `ResumableRun`."""

    start: Position | None = None
    """A loaded position, until an iteration begins there."""
    at: Position | None = None
    current: Position | None = None
    epoch_after: int = 0
    moves: int = 0
    last: Position = Position(0)
    """The position of the batch last delivered, or loaded, for statistics."""
    loop: LoopPosition = LoopPosition(0, 0)
    """This rank's position in loops of `steps`."""


def read_workers(state: State, num_workers: int) -> tuple[list[State], int]:
    """Return the states of a loader's workers, which are checked elsewhere, and the next worker."""
    if not isinstance(state, dict) or state.get("kind") != KIND or "workers" not in state:
        raise ResumeError(
            f"the state, {short_text(state)}, is not of a PackedDataLoader over a "
            "PackedIterableDataset or BucketedIterableDataset; load what its state_dict() "
            "returned, unchanged"
        )
    saved = state.get("num_workers")
    if saved != num_workers:
        raise ResumeError(
            f"the state was saved with num_workers={saved}, but this loader has num_workers="
            f"{num_workers}; samples in buffers belong to their worker, so resume with "
            f"num_workers={saved}"
        )
    num = max(num_workers, 1)
    workers = state["workers"]
    if not isinstance(workers, list) or len(workers) != num:
        raise _wrong_value("workers", workers, f"a list of {num}")
    return workers, _count("next_worker", state.get("next_worker"), num - 1)
