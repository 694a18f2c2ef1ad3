"""The position of this process in the job: its rank, its node, and the device it feeds.

With 2 nodes of 2 ranks and no replication::

    node           0        1
    rank         0   1    2   3
    place        0   2    1   3        place = local_rank * num_nodes + node

Places are numbered across nodes first, so that each node reads only its own lanes.

With context parallelism, ranks that share a row also divide its tokens. 8 ranks, with
``replication=4, context_parallel=2``::

    rank           0 1 2 3     4 5 6 7
    row            a a a a     b b b b     replication: ranks of the same rows
    context_rank   0 0 1 1     0 0 1 1     context_parallel; tensor parallelism is innermost

The position comes from the first source available::

    world=World(...)            given to the dataset, as by World.from_mesh or from_megatron
    torch.distributed           if initialised; must agree with torchrun's variables
    RANK, WORLD_SIZE            set by torchrun and compatible launchers
    none of these               a job of one process
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

from streampack._checks import check_at_most, check_choice, read_integer
from streampack._layout import DP_DIMENSIONS, device_places, evenly_spaced, process_group, ranks_of
from streampack._layout import read_megatron as megatron_fields
from streampack._layout import read_mesh as mesh_fields
from streampack.errors import ConfigError

ContextLayout: TypeAlias = Literal[
    "zigzag", "contiguous", "zigzag_per_document", "contiguous_per_document"
]

logger = logging.getLogger(__name__)

LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # mpirun of MPICH and Intel MPI
)
"""Variables of a task's number, and of the number of tasks."""
NUMBERS = (
    *("rank", "num_ranks", "ranks_per_node", "replication", "context_parallel"),
    *("dp_rank", "dp_size", "cp_rank"),
)
MAX_RANKS = 2**20  # places are found from a list of all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process of a training job.

    Raises:
        ConfigError: If the numbers are inconsistent.

    >>> World(rank=1, num_ranks=4, ranks_per_node=2).place
    2
    """

    rank: int = 0
    """Rank of this process, from 0."""
    num_ranks: int = 1
    """Number of processes."""
    ranks_per_node: int | None = None
    """Processes per node. None: all run on one node."""
    replication: int = 1
    """Number of neighbouring ranks that receive the same rows (tensor, sequence or context
    parallelism; the ranks of a pipeline are seldom neighbours). dp_rank is rank // replication."""
    context_parallel: int = 1
    """Number of ranks that divide the tokens of a row; a divisor of `replication`. 1: rows stay
    whole."""
    context_layout: ContextLayout = "zigzag"
    """The tokens that each of these ranks gets. zigzag: chunks r and 2n - 1 - r of 2n equal ones,
    the same causal work for each. contiguous: chunk r of n. The layouts per document divide each
    segment of the row in this way, instead of the row itself. Only used with context_parallel."""
    dp_rank: int | None = None
    """Data-parallel rank: ranks with the same one get the same batches. None: see `device`."""
    dp_size: int | None = None
    """Number of data-parallel ranks, with `dp_rank`."""
    cp_rank: int | None = None
    """The slice of each row that this rank gets. None: see `context_rank`."""
    dp_ranks: Sequence[int] | None = None
    """The `dp_rank` of every rank, instead of only this rank's. It shows which of them share a
    node; by default, ranks are assumed to be numbered by it within each pipeline stage."""
    group: Any = None
    """The ranks that load, compare their data and add up statistics: a torch process group, or a
    list of ranks. None: all. If these are one rank of each `dp_rank`, evenly spaced, `dp_ranks` may
    be omitted."""

    def __post_init__(self) -> None:
        if self.ranks_per_node is None:
            object.__setattr__(self, "ranks_per_node", self.num_ranks)
        for name in NUMBERS:
            if (given := getattr(self, name)) is not None:
                number = read_integer(name, given, "write a whole number, such as 1")
                object.__setattr__(self, name, number)
        check_at_most("num_ranks", self.num_ranks, MAX_RANKS)
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise ConfigError(
                f"rank={self.rank} is not one of num_ranks={self.num_ranks}; ranks count from 0"
            )
        per_node = self.num_local_ranks
        if per_node < 1 or self.num_ranks % per_node:
            raise ConfigError(
                f"num_ranks={self.num_ranks} is not a multiple of ranks_per_node={per_node}; "
                "every node must run the same number of ranks"
            )
        check_choice("context_layout", self.context_layout, ContextLayout)
        if self.group is not None:
            object.__setattr__(self, "group", ranks_of(self.group))
            if not {self.rank} <= set(self.group) <= set(range(self.num_ranks)):
                raise ConfigError(
                    f"group={self.group!r:.200} must have this rank={self.rank}, and only ranks "
                    f"below num_ranks={self.num_ranks}; make the dataset on ranks of the group only"
                )
        if (self.dp_rank, self.dp_size, self.dp_ranks) == (None, None, None):
            self._check_replication()
        else:
            self._read_dp()

    def _read_dp(self) -> None:
        """Derive `dp_rank`, `dp_size` and `dp_ranks` from each other, and check them."""
        if self.dp_ranks is None and len(self.loading) == self.dp_size:
            dp_ranks = evenly_spaced(self.loading, self.num_ranks)
            if dp_ranks is not None and dp_ranks[self.rank] == self.dp_rank:
                object.__setattr__(self, "dp_ranks", dp_ranks)
        if self.dp_ranks is not None and len(self.dp_ranks) == self.num_ranks:
            object.__setattr__(self, "dp_ranks", tuple(map(int, self.dp_ranks)))
            object.__setattr__(self, "dp_rank", self.dp_ranks[self.rank])
            object.__setattr__(self, "dp_size", max(self.dp_ranks) + 1)
        devices = self.devices
        is_whole = len(devices) == self.num_ranks and len({*devices}) == self.dp_size
        if self.dp_rank not in devices or not is_whole or min(devices) < 0:
            raise ConfigError(
                f"dp_rank={self.dp_rank}, dp_size={self.dp_size}, dp_ranks={self.dp_ranks!r:.200} "
                f"do not divide num_ranks={self.num_ranks}; pass rank and num_ranks as in "
                "torch.distributed, with dp_rank and dp_size, or the dp_ranks of all ranks"
            )
        if self.replication != 1 or not 0 <= self.context_rank < self.context_parallel:
            raise ConfigError(
                f"replication={self.replication}, context_parallel={self.context_parallel} and "
                f"cp_rank={self.cp_rank} do not fit dp_rank, which already shows which ranks "
                "share a row; omit replication, and pass both others for slices of rows"
            )

    def _check_replication(self) -> None:
        per_node = self.num_local_ranks
        if self.replication < 1 or self.num_ranks % self.replication:
            raise ConfigError(
                f"replication={self.replication} does not divide num_ranks={self.num_ranks}; "
                "set it to the number of ranks that share a batch"
            )
        if per_node % self.replication and self.replication % per_node:
            raise ConfigError(
                f"replication={self.replication} and ranks_per_node={per_node}: "
                "one must be a multiple of the other, so that nodes can share batches evenly"
            )
        if self.context_parallel < 1 or self.replication % self.context_parallel:
            raise ConfigError(
                f"context_parallel={self.context_parallel} does not divide replication="
                f"{self.replication}; set replication to context_parallel times the ranks of "
                f"tensor parallelism, such as {max(self.context_parallel, 1)}"
            )

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str],
        replication: int = 1,
        context_parallel: int = 1,
        context_layout: ContextLayout = "zigzag",
    ) -> World:
        """Read the position from torch.distributed or torchrun's variables; default to one process.

        torchrun sets RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and LOCAL_RANK. Without LOCAL_WORLD_SIZE,
        all ranks are assumed to be on one node. The variables of SLURM and mpirun are ignored
        because the tasks of a job may be separate trainings. If only they are set, a warning is
        logged.

        Raises:
            ConfigError: If a variable is not an integer, only one of RANK and WORLD_SIZE is set,
                the values are inconsistent, or they contradict torch.distributed.

        >>> World.from_env({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).node
        0
        """
        group = process_group()
        if group is None:
            _check_both(env)
        rank, num_ranks = group or (0, 1)
        try:
            stated = int(env.get("RANK", rank)), int(env.get("WORLD_SIZE", num_ranks))
            per_node = int(env.get("LOCAL_WORLD_SIZE", stated[1]))
            local_rank = int(env["LOCAL_RANK"]) if "LOCAL_RANK" in env else None
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and LOCAL_RANK must be integers: {error}"
            ) from error
        if group is not None and group != stated:
            raise ConfigError(
                f"torch.distributed says rank {rank} of {num_ranks}, but the variables RANK and "
                f"WORLD_SIZE say rank {stated[0]} of {stated[1]}; unset them, or pass "
                "world=World(...)"
            )
        if group is None and "RANK" not in env:
            tasks = [pair for pair in LAUNCHERS if pair[0] in env and env.get(pair[1], "1") != "1"]
            if tasks:
                _warn_of_tasks(", ".join(f"{key}={env[key]}" for key in tasks[0]))
        rank, num_ranks = stated
        world = cls(
            rank=rank,
            num_ranks=num_ranks,
            ranks_per_node=per_node,
            replication=replication,
            context_parallel=context_parallel,
            context_layout=context_layout,
        )
        # Without LOCAL_WORLD_SIZE the node size is unknown, so LOCAL_RANK cannot be checked.
        if local_rank not in (None, rank % per_node) and "LOCAL_WORLD_SIZE" in env:
            raise ConfigError(
                f"LOCAL_RANK={local_rank}, but RANK={rank} with LOCAL_WORLD_SIZE={per_node} is "
                f"local rank {rank % per_node}; number the ranks node by node as torchrun does, or "
                "pass world=World(...)"
            )
        return world

    @classmethod
    def from_mesh(
        cls,
        mesh: Any,
        dp: str | Sequence[str] = DP_DIMENSIONS,
        cp: str | None = "cp",
        *,
        context_layout: ContextLayout = "zigzag",
        group: Any = None,
    ) -> World:
        """Read the position from a torch `DeviceMesh` of all ranks, in any order of dimensions.

        Ranks per node are torchrun's LOCAL_WORLD_SIZE; without it, all are on one node.

        Args:
            mesh: The mesh, with names.
            dp: The dimensions along which ranks get distinct batches, outermost first; along all
                others, ranks share them. One of the two default names may be missing.
            cp: The dimension along which ranks divide each row. None, or a mesh without "cp": rows
                stay whole.
            context_layout, group: As for `World`.

        Raises:
            ConfigError: If the mesh lacks ranks or a name, or has other names than torchtitan's
                and `dp` is omitted.
        """
        return cls(**mesh_fields(mesh, dp, cp), context_layout=context_layout, group=group)

    @classmethod
    def from_megatron(
        cls, *, cp: bool = True, context_layout: ContextLayout = "zigzag", group: Any = None
    ) -> World:
        """Read the position from Megatron-LM's `parallel_state`; otherwise like `from_mesh`.

        With `cp=False` rows stay whole, as for `get_batch_on_this_cp_rank`, which divides them.

        Raises:
            ConfigError: If `initialize_model_parallel` has not been called.
        """
        return cls(**megatron_fields(cp=cp), context_layout=context_layout, group=group)

    def check_group(self) -> None:
        """Check that torch.distributed still reports this rank and world size.

        Raises:
            ConfigError: If it was initialised after this World was made, with other values.
        """
        group = process_group()
        if group is not None and group != (self.rank, self.num_ranks):
            raise ConfigError(
                f"the dataset was made as rank {self.rank} of {self.num_ranks}, but now "
                f"torch.distributed says rank {group[0]} of {group[1]}; make the dataset after "
                "init_process_group, or pass world=World(...)"
            )

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks per node."""
        return self.num_ranks if self.ranks_per_node is None else self.ranks_per_node

    @property
    def node(self) -> int:
        """Node of this rank, from 0."""
        return self.rank // self.num_local_ranks

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.num_ranks // self.num_local_ranks

    @property
    def num_devices(self) -> int:
        """Number of groups of ranks that receive distinct batches: the data-parallel size."""
        return self.num_ranks // self.replication if self.dp_size is None else self.dp_size

    @property
    def device(self) -> int:
        """Data-parallel rank: `dp_rank`, or rank // replication."""
        return self.rank // self.replication if self.dp_rank is None else self.dp_rank

    @property
    def loading(self) -> Sequence[int]:
        """The ranks that load."""
        return range(self.num_ranks) if self.group is None else self.group

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of every rank: from what all ranks know, so that they agree on places."""
        if self.dp_ranks is not None:
            return tuple(self.dp_ranks)
        size = max(self.num_devices, 1)
        return tuple(rank // self.replication % size for rank in range(self.num_ranks))

    @property
    def places(self) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
        """The place of each device, and the devices that share nodes with it."""
        return device_places(self.devices, self.num_local_ranks)

    @property
    def context_rank(self) -> int:
        """Index of this rank's slice among the `context_parallel` slices of a row.

        Ranks of the same slice are neighbours, as in Megatron-LM's order ``tp-cp-ep-dp-pp`` and
        torchtitan's mesh ``(dp, cp, tp)``.

        >>> [World(rank=r, num_ranks=4, replication=4, context_parallel=2).context_rank
        ...     for r in range(4)]
        [0, 0, 1, 1]
        """
        if self.cp_rank is not None or self.dp_size is not None:
            return self.cp_rank or 0
        return self.rank % self.replication // (self.replication // self.context_parallel)

    @property
    def place(self) -> int:
        """Index of this rank's batch within each round of `num_devices` device batches."""
        return self.places[0][self.device]

    def at(self, rank: int) -> World:
        """Return the world of another rank, with whole rows."""
        own = None if self.dp_rank is None else self.devices[rank]
        return replace(self, rank=rank, dp_rank=own, cp_rank=None, context_parallel=1, group=None)


def _check_both(env: Mapping[str, str]) -> None:
    for key, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if key in env and other not in env:
            raise ConfigError(
                f"{key}={env[key]} is set without {other}, but a rank is known only from both; "
                f"set {other}, unset {key}, or pass world=World(...)"
            )


@cache
def _warn_of_tasks(variables: str) -> None:
    logger.warning(
        "%s, but RANK is not set and torch.distributed is not initialised: each task runs as a job "
        "of one process and reads all of the data; if they train together, call "
        "init_process_group before making the dataset, set RANK and WORLD_SIZE, or pass "
        "world=World(...)",
        variables,
    )
