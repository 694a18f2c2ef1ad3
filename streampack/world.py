"""Where this process stands among the others: rank, node, and the device it feeds.

With 2 nodes of 2 ranks and no replication::

    node           0        1
    rank         0   1    2   3
    place        0   2    1   3        place = local_rank * num_nodes + node

Places run over the nodes first, so that neighbouring device batches, which come from neighbouring
lanes, go to different nodes: a node touches only its own lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streampack.config import read_integer
from streampack.errors import ConfigError

__all__ = ["World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process among those that train together.

    Raises:
        ConfigError: If the numbers cannot belong to one job.

    >>> World(rank=1, num_ranks=4, ranks_per_node=2).place
    2
    """

    rank: int = 0
    """This process, from 0."""
    num_ranks: int = 1
    """All processes."""
    ranks_per_node: int | None = None
    """Processes on one node; None: all of them."""
    replication: int = 1
    """Neighbouring ranks that get the same batches (tensor, sequence or pipeline parallel)."""

    def __post_init__(self) -> None:
        if self.ranks_per_node is None:
            object.__setattr__(self, "ranks_per_node", self.num_ranks)
        for name in ("rank", "num_ranks", "ranks_per_node", "replication"):
            number = read_integer(name, getattr(self, name), "write a whole number, such as 1")
            object.__setattr__(self, name, number)
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise ConfigError(
                f"rank={self.rank} is not one of num_ranks={self.num_ranks}; ranks count from 0"
            )
        per_node = self.num_local_ranks
        if per_node < 1 or self.num_ranks % per_node:
            raise ConfigError(
                f"num_ranks={self.num_ranks} is no multiple of ranks_per_node={per_node}; "
                "every node must run the same number of ranks"
            )
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

    @classmethod
    def from_env(cls, env: Mapping[str, str], replication: int = 1) -> World:
        """Read what torchrun sets: RANK, WORLD_SIZE, LOCAL_WORLD_SIZE; a lone process without them.

        Raises:
            ConfigError: If one of them is no integer, RANK or WORLD_SIZE is missing, or they do
                not fit together (LOCAL_RANK, where it is set, too).

        >>> World.from_env({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).node
        0
        """
        for key, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if key in env and other not in env:
                raise ConfigError(
                    f"{key}={env[key]} is set without {other}: how many ranks there are, and which "
                    f"one this is, takes both; set {other}, unset {key}, or pass world=World(...)"
                )
        try:
            num_ranks = int(env.get("WORLD_SIZE", "1"))
            rank = int(env.get("RANK", "0"))
            per_node = int(env.get("LOCAL_WORLD_SIZE", str(num_ranks)))
            local_rank = int(env["LOCAL_RANK"]) if "LOCAL_RANK" in env else None
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and LOCAL_RANK must be integers: {error}"
            ) from error
        world = cls(
            rank=rank, num_ranks=num_ranks, ranks_per_node=per_node, replication=replication
        )
        # Without LOCAL_WORLD_SIZE nothing says where nodes begin, so nothing contradicts it.
        if local_rank not in (None, rank % per_node) and "LOCAL_WORLD_SIZE" in env:
            raise ConfigError(
                f"LOCAL_RANK={local_rank}, but RANK={rank} with LOCAL_WORLD_SIZE={per_node} is "
                f"local rank {rank % per_node}; number the ranks node by node as torchrun does, or "
                "pass world=World(...)"
            )
        return world

    @property
    def num_local_ranks(self) -> int:
        """Processes on this rank's node, as on every other."""
        return self.num_ranks if self.ranks_per_node is None else self.ranks_per_node

    @property
    def node(self) -> int:
        """The node that this rank runs on."""
        return self.rank // self.num_local_ranks

    @property
    def num_nodes(self) -> int:
        """All nodes."""
        return self.num_ranks // self.num_local_ranks

    @property
    def num_devices(self) -> int:
        """Groups of ranks that get batches of their own; num_ranks without replication."""
        return self.num_ranks // self.replication

    @property
    def place(self) -> int:
        """Which device batch of every `num_devices` this rank takes."""
        device = self.rank // self.replication
        devices_per_node = max(self.num_local_ranks // self.replication, 1)
        num_groups = self.num_devices // devices_per_node
        return (device % devices_per_node) * num_groups + device // devices_per_node
