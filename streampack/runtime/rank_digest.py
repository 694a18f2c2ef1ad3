"""Check that all ranks plan from the same data, and that peers get the same first batch.

::

    rank 0   index.json, lengths, recipe --> digest --.
    rank 1   index.json, lengths, recipe --> digest --+--> equal: continue
    rank 2   index.json, lengths, recipe --> digest --'    else: gather the inputs, and name
                                                           the ranks and the stream

    first batch, by digest: that of ranks with the same dp_rank, or in the same pp or tp group

Cost: two gathers of a short digest per rank, once per loader, over a CPU backend.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from torch import distributed

from streampack._layout import process_group
from streampack.errors import ConfigError, DataError, StreampackError
from streampack.plan.comparison import flat, name_of
from streampack.world import World

logger = logging.getLogger(__name__)

RankView = dict[str, Any]
"""A rank's inputs, as JSON: `streams`, each with `name`, `folder`, `index` and `lengths`; and by
field, `recipe` and, online, `sources`."""
UNKNOWN = "others each time"  # a value that is equal to any
MINUTES = 30
"""How long a rank waits for the others, as torch's other gloo groups do."""
PEERS = ("mesh_pp", "mesh_cp", "mesh_tp", "MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP")
"""What torch's meshes and Megatron-LM call the groups whose ranks share batches."""
_groups: dict[str, Any] = {}  # torch's default group, and the group made for it
WAY_OUT = "PackedDataLoader(check_ranks=False) leaves this comparison out"


def digest_of_values(values: Any) -> str:
    """Return a 32-character digest of a JSON value.

    >>> digest_of_values({"seed": 1}) == digest_of_values({"seed": 2})
    False
    """
    text = json.dumps(values, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def check_ranks(get_view: Callable[[], RankView], world: World) -> bool:
    """Compare the inputs to planning over all ranks of torch's process group; all must call it.

    Return whether some ranks share batches: then all have to call `check_first_batch`.

    Nothing is compared if torch.distributed is not initialised, if `world` differs from the process
    group (as in an evaluation on one rank), or outside the main thread. `get_view` is called only
    where views are compared.
    """
    if other_ranks(world) < 1 or threading.current_thread() is not threading.main_thread():
        return False
    view = get_view()
    compared = view | {"streams": [[each["index"], each["lengths"]] for each in view["streams"]]}
    group = group_of(world)
    has_peers = world.num_devices < world.num_ranks or len(_peers()) > 1
    found = gather_values((digest_of_values(compared), has_peers), group)
    digests = [digest for digest, _ in found]
    if len(set(digests)) > 1:
        _refuse(gather_values(view, group), world)
    logger.info("all %d ranks plan from the same data, digest %s", len(digests), digests[0])
    return any(has_some for _, has_some in found)  # a mesh may have a part of the ranks


def check_first_batch(segments: Any, world: World) -> None:
    """Compare the first batch of ranks with the same device, and, whatever `world` says, of those
    that torch's meshes and Megatron-LM's groups make one model. All ranks that load must call it.
    """
    own = (world.device, _peers(), digest_of_values(segments))
    found = dict(zip(world.loading, gather_values(own, group_of(world)), strict=True))
    first: dict[int, int] = {}
    for rank, (device, peers, digest) in found.items():
        for peer in {first.setdefault(device, rank), *peers} & found.keys():
            if found[peer][2] != digest:
                raise ConfigError(
                    f"ranks {min(rank, peer)} and {max(rank, peer)} work on one model, but get "
                    "different batches: they would train on labels of the wrong rows (here, "
                    f"replication={world.replication}, dp_size={world.num_devices}). Pass "
                    "world=World.from_mesh(mesh) or World.from_megatron(), which know the ranks "
                    f"that share a batch; {WAY_OUT}"
                )


def _peers() -> tuple[int, ...]:
    groups = distributed.distributed_c10d._world.pg_group_ranks.items()
    named = [own for group, own in groups if getattr(group, "group_desc", None) in PEERS]
    return tuple({rank for own in named for rank in own})


def compare_values(values: Mapping[str, Any], world: World) -> None:
    """Compare what the ranks of torch's process group ask for; all must call it."""
    if other_ranks(world) < 1:
        return
    way_out = "call it with the same values, after the same batch, on every rank"
    _check_equal(gather_values(dict(values), group_of(world)), way_out, world)


def other_ranks(world: World) -> int:
    """Return how many other ranks of torch's process group share a world's data; 0: none."""
    is_own = process_group() == (world.rank, world.num_ranks)
    return len(world.loading) - 1 if is_own else 0


def group_of(world: World) -> Any:
    """Return a group of the ranks that load, on the CPU; None for torch's default group."""
    # A GPU backend would need each rank to have selected its device already.
    is_default = world.group is None and "cpu:" in str(distributed.get_backend_config())
    return None if is_default else cpu_group(world)


def cpu_group(world: World) -> Any:
    """Return a gloo group of the ranks that load. Collective at the first call of all ranks."""
    if world.group is not None:
        for known, ranks in distributed.distributed_c10d._world.pg_group_ranks.items():
            # Not made here: the ranks of a group may know different numbers of other groups, and
            # torch would then give it a different name on each.
            if (*ranks,) == world.group and "cpu:" in str(distributed.get_backend_config(known)):
                return known
        raise ConfigError(
            f"group={world.group!r:.200} is not a process group on the CPU; make one on all "
            "ranks with torch.distributed.new_group(ranks, backend='gloo')"
        )
    default = distributed.group.WORLD
    if not _groups or _groups["default"] is not default:
        own = distributed.new_group(backend="gloo", timeout=timedelta(minutes=MINUTES))
        _groups.update(default=default, own=own)
    return _groups["own"]


def gather_values(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a process group, torch's default group if None."""
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def _refuse(views: Sequence[RankView], world: World) -> None:
    first = views[0]
    if any(len(view["streams"]) != len(first["streams"]) for view in views):
        counts = _by_value([len(view["streams"]) for view in views], world.loading)
        raise ConfigError(f"ranks have different numbers of streams: {counts}; {WAY_OUT}")
    for number, stream in enumerate(first["streams"]):
        own = [view["streams"][number] for view in views]
        for key, what in (("index", "index.json, or other columns"), ("lengths", "lengths.bin")):
            differ = [index for index, each in enumerate(own) if each[key] != stream[key]]
            if differ:
                ranks = [world.loading[index] for index in differ]
                raise DataError(
                    f"{_name(ranks)} another {what} of "
                    f"stream {stream['name']!r} (streams[{number}]) than rank {world.loading[0]}: "
                    f"it is in {own[differ[0]]['folder']} there, and in {stream['folder']} on rank "
                    f"{world.loading[0]}. These ranks "
                    "would plan different packs, and miss and repeat samples; delete the copy that "
                    f"is out of date, or set check_remote=True; {WAY_OUT}"
                )
    way_out = (
        "they would miss and repeat samples; give every rank the same ones in the same order, with "
        f"a seed for each shuffle, or shard them yourself and set sharded=True; {WAY_OUT}"
    )
    _check_equal([view.get("sources", {}) for view in views], way_out, world, DataError)
    way_out = f"they would plan different packs, so give every rank the same; {WAY_OUT}"
    _check_equal([view["recipe"] for view in views], way_out, world)


def _check_equal(
    views: Sequence[Mapping[str, Any]],
    way_out: str,
    world: World,
    error: type[StreampackError] = ConfigError,
) -> None:
    records = [flat(view) for view in views]
    for path in dict.fromkeys(path for record in records for path in record):
        values = [record.get(path) for record in records]
        known = [value for value in values if value != UNKNOWN]
        if any(value != known[0] for value in known):
            counts = _by_value(values, world.loading)
            raise error(f"ranks have different {name_of(path)}: {counts}; {way_out}")


def _by_value(values: Sequence[Any], loading: Sequence[int]) -> str:
    """List the ranks that have each value.

    >>> _by_value([1, 2, 1], [0, 1, 4])
    'ranks 0 and 4 have 1, rank 1 has 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in zip(loading, values, strict=True):
        ranks.setdefault(f"{value!r:.200}", []).append(rank)
    return ", ".join(f"{_name(own)} {value}" for value, own in ranks.items())


def _name(ranks: Sequence[int]) -> str:
    """Say that some ranks have something, and which, eight at most.

    >>> _name([3]), _name([0, 2, 5])
    ('rank 3 has', 'ranks 0, 2 and 5 have')
    """
    *others, last = map(str, ranks)
    if len(others) > 8:
        others, last = others[:8], f"{len(ranks) - 8} others"
    return f"ranks {', '.join(others)} and {last} have" if others else f"rank {last} has"
