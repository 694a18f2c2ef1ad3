"""`PackedDataLoader`: one loader for all datasets, with exact state.

::

    PackedStreamingDataset  --> PlannedLoading    plans here; reads in threads or stateless workers
    PackedIterableDataset   --> OnlineLoading     reads and packs in a thread, or in workers
    BucketedIterableDataset --> OnlineLoading     the same, grouped by length

Prefetching never changes the batches. The state always refers to the batch last delivered.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing import get_all_start_methods
from typing import Any

from streampack._checks import read_integer
from streampack._layout import process_group
from streampack.batch.batch import Batch
from streampack.config import Mixing
from streampack.errors import ConfigError, ResumeError, suggest
from streampack.online.dataset import FlowDataset
from streampack.online.loading import OnlineLoading
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.loading import PlannedLoading
from streampack.runtime.arguments import check_timeout, with_hints
from streampack.runtime.loader_session import close_at_exit
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import check_first_batch, gather_values, group_of
from streampack.runtime.rank_digest import check_ranks as compare_ranks
from streampack.runtime.resumable import engine_of
from streampack.runtime.whole_batch import UNBATCHED
from streampack.runtime.worker_processes import WorkerOptions
from streampack.types import State
from streampack.world import World

logger = logging.getLogger(__name__)


class PackedDataLoader:
    """Iterates over a packed dataset, one epoch per iteration, with exact state.

    The state refers to the batch last delivered. If a loop is left early, the state still names
    that batch, but the next loop starts the next epoch. To continue inside the epoch, load the
    state. The dataset's own state_dict() returns the same state, or raises ResumeError if the
    dataset cannot know it. A start that fails or is interrupted before the first batch has no
    effect: the next loop begins at the same place. `dataset.set_epoch(n)` makes n the epoch of the
    next loop.

    Args:
        dataset: A `PackedStreamingDataset`, `PackedIterableDataset` or `BucketedIterableDataset`.
        num_workers: Worker processes. 0 plans and reads in threads of this process, which is
            fastest. Workers of a `PackedIterableDataset` also pack, so its state can only be
            resumed with the same number of workers.
        prefetch_factor: Batches to prefetch, per worker or by all threads together. Small batches
            are transferred in groups, if `Buffers` and shared memory allow it; a group counts as
            one batch. A worker's group has up to 8 batches (524,288 tokens in total), a thread's
            group up to 16 (8 MiB in total). Threads prefetch at least 4 batches, or 4 groups.
        prefetch_threads: Reading threads with num_workers=0. One of them at a time also plans. A
            loop that would wait also reads. A `PackedIterableDataset` uses at most one thread.
            0 reads in the training loop itself.
        pin_memory: Put tensors into pinned memory, for fast copies to a GPU, if there is one.
        persistent_workers: Keep workers from one epoch to the next.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".
        timeout: Seconds to wait for a worker, including its start, before raising WorkerError.
            0 or None: no limit, even for a suspended worker.
        check_ranks: Before the first batch, compare a digest of streams, lengths and recipe over
            all ranks of torch's process group, and raise if one differs. For a source that has an
            index, 16 samples are compared; iterators are not read. Ranks that share batches,
            according to `dataset.world`, torch's meshes or Megatron-LM, then compare their first
            batch. All ranks, or all those of `World(group=...)`, must iterate over the loader.
            Nothing is compared if the rank and size of `dataset.world` differ from the process
            group.

    Raises:
        ConfigError: If the arguments contradict each other, `dataset.buffers` cannot hold one
            batch per worker, or shared memory cannot hold the workers' output.
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - torch's arguments
        self,
        dataset: PackedStreamingDataset | FlowDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        prefetch_threads: int = 1,
        pin_memory: bool = False,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
        timeout: float | None = None,
        check_ranks: bool = True,
    ) -> None:
        # torch's DataLoader accepts None here; unchecked, None would fail only at the first batch.
        prefetch_factor = read_integer("prefetch_factor", prefetch_factor, "omit it to use 2", 1)
        prefetch_threads = read_integer(
            "prefetch_threads", prefetch_threads, "0 reads in the loop; omit it to use 1", 0
        )
        num_workers = read_integer("num_workers", num_workers, "0 reads in threads", 0)
        methods = get_all_start_methods()
        if isinstance(multiprocessing_context, str) and multiprocessing_context not in methods:
            raise ConfigError(
                f"multiprocessing_context={multiprocessing_context!r} is not one of "
                f"{'|'.join(methods)}{suggest(multiprocessing_context, methods)}"
            )
        self.dataset = dataset
        self.num_workers = num_workers
        options = WorkerOptions(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            prefetch_threads=prefetch_threads,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=check_timeout(timeout, num_workers),
        )
        self._loading = _loading(dataset, options)
        self._checks_ranks = check_ranks
        self._has_checked = False  # whether the digest was compared across ranks, or logged

    def __repr__(self) -> str:
        return f"PackedDataLoader({self.dataset!r}, num_workers={self.num_workers})"

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next.

        Raises:
            TypeError: If the dataset reads iterables, which have no known length.
        """
        return len(self._loading)

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or resume from a loaded state, at the first batch.

        Raises:
            DataError: At the first batch, if another rank has different streams.
            ConfigError: At the first batch, if another rank has a different recipe.
        """
        batches = iter(self._loading)
        return batches if self._has_checked else close_at_exit(self._after_check(batches))

    def _after_check(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        # Not in iter(): trainers may call it on a single rank and discard the iterator.
        if not self._has_checked:
            dataset = self.dataset
            if logger.isEnabledFor(logging.INFO):
                logger.info("%r: digest %s", dataset, dataset.digest)
            if self._checks_ranks and compare_ranks(self._loading.engine.rank_view, dataset.world):
                yield from self._compared(batches)
            self._has_checked = True
        yield from batches

    def _compared(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the first batch after all ranks that share it compared it."""
        state, first = self._loading.state_dict(), list(islice(batches, 1))
        try:
            segments = self._loading.recent.last().segments.tolist() if first else None
            check_first_batch(segments, self.dataset.world)
        except BaseException:
            self._loading.load_state_dict(state)  # the loop did not get the batch
            raise
        self._has_checked = True
        while first:
            yield first.pop()

    def state_dict(self) -> State:
        """Return the state after the batch last delivered, as JSON.

        Raises:
            ResumeError: If accelerate's `save_state` asks, which saves only rank 0's state, and
                each rank has its own.
        """
        is_own = isinstance(self._loading, OnlineLoading) and self.dataset.world.num_devices > 1
        # Only the caller's name shows it: accelerate asks all ranks, and saves one answer.
        if is_own and sys._getframe(1).f_globals.get("__name__") == "accelerate.checkpointing":
            raise ResumeError(
                "accelerate's save_state saves only rank 0's state, but each of "
                f"{self.dataset.world.num_ranks} ranks has its own; save loader.state_dict() of "
                "every rank under accelerator.process_index, and load it in the same rank"
            )
        return self._loading.state_dict()

    def gather_state(self, group: Any = None) -> State:
        """Return `state_dict()` with the snapshots of all ranks; every rank must call this method.

        Any rank's own state also resumes exactly. With the gathered state, no rank plans its lanes
        again. Without a process group, the snapshots are those of this rank alone.

        Args:
            group: A torch process group of all ranks, or None for those of `dataset.world`.

        Raises:
            ResumeError: If the ranks are not at the same step, or the dataset reads iterables.
        """
        state = self.state_dict()
        if group is None and self.dataset.world.group is not None:
            group = group_of(self.dataset.world)
        return _join([state] if process_group() is None else gather_values(state, group))

    def load_state_dict(self, state: State, *, replan: bool = False) -> None:
        """Resume from `state` at the next iteration.

        An iterator that is already running raises a ConfigError at its next batch.

        Args:
            state: What `state_dict` or `gather_state` returned.
            replan: As in `PackedStreamingDataset.load_state_dict`; iterables are never replanned.

        Raises:
            ResumeError: If the state belongs to another sequence; the message names the difference.
        """
        if isinstance(self._loading, PlannedLoading):
            self._loading.load_state_dict(state, replan=replan)
        else:
            self._loading.load_state_dict(state)

    def amend(self, *, weights: Mapping[str, float]) -> None:
        """Change the weights of a run of chapters from its next global batch on.

        The running chapter ends there, and a chapter with these weights takes the rest of it.
        Prefetched batches are discarded. The state records the change, and a resume repeats it.
        Every rank must call this method after the same batch.

        Raises:
            ConfigError: If the dataset has no chapters, or ranks differ in weights or position.
        """
        self._change_run("amend", weights)

    def skip(self, steps: int) -> None:
        """Skip the next global batches of a run of chapters, from the next one on.

        The skipped batches are planned and counted, and their samples count as used. The state
        records them. Every rank must call this method after the same batch.

        Raises:
            ConfigError: If the dataset has no chapters, or ranks differ in steps or position.
        """
        self._change_run("skip", steps)

    def _change_run(self, method: str, value: Any) -> None:
        loading = self._loading
        if not (isinstance(loading, PlannedLoading) and loading.engine.run.chapters):
            raise ConfigError(
                f"loader.{method}() is for a run of chapters; pass "
                "chapters=[Chapter(weights={...})] to the PackedStreamingDataset"
            )
        getattr(loading.engine, method)(value)

    def provenance(self, batch: Any) -> Provenance:
        """Return where the tokens of a batch come from: its segments, streams and step.

        It works in every format, with any number of workers. The batch is recognized by its
        tensors, or by `epoch` and `position` if the format has them, among the last 64 that were
        delivered. So a loop may have fetched later batches by then, as trainers do.

        Args:
            batch: A batch of this loader, as it was delivered.

        Raises:
            ConfigError: If the batch is not one of the last 64, or its tensors are copies.
        """
        return self._loading.recent.find(batch)

    def stats(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return statistics of this rank since the loader was made or a state was loaded.

        With `all_ranks`, they are those of all ranks of torch's process group, or of
        `World(group=...)`, which must all call this method: sums, and for high-water marks the
        highest. Ranks that share batches count once, except for the shards that each has fetched.

        Per stream: samples and tokens delivered; samples split, truncated and dropped; shares and
        targets. In a run of chapters, `target` is the mean of the chapters delivered, in tokens of
        full packs unless packs mix streams. In total: packs, tokens, fill, substituted slots, packs
        that `epoch_end="drop"` omitted (`omitted_packs`, over all ranks), packs of padding
        (`padding_packs`), and high-water marks of the buffers. For shards: how many this process
        prefetched, or fetched for lengths, and their bytes; how many it waited for, and how long;
        how many are planned and not here yet (`waiting`); peak bytes of shards fetched and not
        finished; and, since the dataset was made, the bytes of the index files and tables that it
        fetched (`index_bytes`), which the other numbers do not include, and the token shards that
        it made from texts (`tokenized`), repeats included.
        Dropped samples are counted when the planner meets them, up to a chunk of 4,096 samples
        ahead, each on one rank only. `digest` identifies everything that determines the packs.
        `straggler` is the time of a global batch divided by the ideal time, as `planned` and as
        `dealt`, for the ranks that share packs; None without `balance`. `skipped` counts the steps
        that a run of chapters skipped.

        Raises:
            ConfigError: With `all_ranks`, if the process group is not that of `dataset.world`.
        """
        world, group = self.dataset.world, process_group()
        if not all_ranks or (world.num_ranks == 1 and group is None):
            return self._loading.stats()
        if group != (world.rank, world.num_ranks):
            raise ConfigError(
                f"all_ranks=True sums over torch's process group, with rank and size {group}, "
                f"but the dataset has {(world.rank, world.num_ranks)}; initialize the group before "
                "making the dataset, or omit all_ranks"
            )
        ranks = group_of(world)

        def by_device(value: Any) -> list[Any]:
            return list(dict(gather_values((world.device, value), ranks)).values())

        report = self._loading.stats(by_device)
        reports, devices = gather_values(report, ranks), by_device(report)
        # Each rank of a planned dataset counts the substituted slots of all.
        is_planned = isinstance(self._loading, PlannedLoading)
        for key in {"padding_packs" if is_planned else "substituted"} & set(report):
            report[key] = sum(each[key] for each in devices)
        for key in {"shards", "buffers"} & set(report):
            for name in report[key]:
                join = sum if key == "shards" and name != "ahead_bytes" else max
                report[key][name] = join(each[key][name] for each in reports)
        return report


# What the trainers of `streampack.hf` and `streampack.lightning` share.


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
            f"{where} has the states of {len(states)} ranks of a dataset of iterables, but "
            f"there are {world.num_ranks} ranks; resume with {len(states)} ranks, or write the "
            "samples as a stream, which resumes with any number"
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


def _join(states: Sequence[State]) -> State:
    """Join the states of several ranks, which may differ only in their snapshots."""
    first = states[0]
    snapshots: dict[tuple[int, int], State] = {}
    for rank, state in enumerate(states):
        if "snapshots" not in state:
            raise ResumeError(
                f"the state of rank {rank} is of a dataset of iterables: each rank has its own, "
                "which cannot be joined; save loader.state_dict() of every rank, and load it in "
                "the same rank"
            )
        for key, value in first.items():
            if key != "snapshots" and state.get(key) != value:
                raise ResumeError(
                    f"rank 0 is at {key}={value!r:.80}, but rank {rank} at "
                    f"{state.get(key)!r:.80}; gather states after the same step on every rank"
                )
        for snapshot in json.loads(state["snapshots"]):
            latest = snapshots.setdefault((snapshot["lane"], snapshot["queue"]), snapshot)
            if latest["num_packs"] < snapshot["num_packs"]:
                snapshots[snapshot["lane"], snapshot["queue"]] = snapshot
    joined = [snapshots[key] for key in sorted(snapshots)]
    return first | {"snapshots": json.dumps(joined, separators=(",", ":"))}


def _loading(dataset: Any, options: WorkerOptions) -> PlannedLoading | OnlineLoading:
    if isinstance(dataset, PackedStreamingDataset):
        return PlannedLoading(engine_of(dataset), options)
    if isinstance(dataset, FlowDataset):
        return OnlineLoading(engine_of(dataset), options)
    raise ConfigError(
        "PackedDataLoader takes a PackedStreamingDataset, a PackedIterableDataset or a "
        f"BucketedIterableDataset, got {type(dataset).__name__}; iterate others with torch's "
        f"{UNBATCHED}"
    )
