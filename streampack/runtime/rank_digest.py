"""Check that all ranks plan from the same data, by one digest per rank before the first batch.

::

    rank 0   index.json, lengths, recipe --> digest --.
    rank 1   index.json, lengths, recipe --> digest --+--> equal: continue
    rank 2   index.json, lengths, recipe --> digest --'    else: gather the inputs, and name
                                                           the ranks and the stream

Cost: one gather of 32 characters per rank, once per loader, over a CPU backend.
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

from streampack.errors import ConfigError, DataError, StreampackError
from streampack.world import World, process_group

logger = logging.getLogger(__name__)

RankView = dict[str, Any]
"""A rank's inputs, as JSON: `streams`, each with `name`, `folder`, `index` and `lengths`; and by
field, `recipe` and, online, `sources`."""
UNKNOWN = "others each time"  # a value that is equal to any
MINUTES = 30
"""How long a rank waits for the others, as torch's other gloo groups do."""
_groups: dict[str, Any] = {}  # torch's default group, and the group made for it
WAY_OUT = "PackedDataLoader(check_ranks=False) leaves this comparison out"


def digest_of_values(values: Any) -> str:
    """Return a 32-character digest of a JSON value.

    >>> digest_of_values({"seed": 1}) == digest_of_values({"seed": 2})
    False
    """
    text = json.dumps(values, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def check_ranks(get_view: Callable[[], RankView], world: World) -> None:
    """Compare the inputs to planning over all ranks of torch's process group; all must call it.

    Nothing is compared if torch.distributed is not initialised, if `world` differs from the process
    group (as in an evaluation on one rank), or outside the main thread. `get_view` is called only
    where views are compared.
    """
    others = other_ranks(world)
    if others < 1 or threading.current_thread() is not threading.main_thread():
        return
    view = get_view()
    compared = view | {"streams": [[each["index"], each["lengths"]] for each in view["streams"]]}
    # A GPU backend would need each rank to have selected its device already.
    has_cpu = "cpu:" in str(distributed.get_backend_config())
    group = None if has_cpu else cpu_group()
    digests = gather_values(digest_of_values(compared), group)
    if len(set(digests)) > 1:
        _refuse(gather_values(view, group))
    logger.info("all %d ranks plan from the same data, digest %s", len(digests), digests[0])


def compare_values(values: Mapping[str, Any], world: World) -> None:
    """Compare what the ranks of torch's process group ask for; all must call it."""
    if other_ranks(world) < 1:
        return
    way_out = "call it with the same values, after the same batch, on every rank"
    _check_equal(gather_values(dict(values)), way_out)


def other_ranks(world: World) -> int:
    """Return how many other ranks of torch's process group share a world's data; 0: none."""
    group = process_group()
    return group[1] - 1 if group == (world.rank, world.num_ranks) else 0


def cpu_group() -> Any:
    """Return a gloo group of all ranks. Collective at the first call: every rank must make it."""
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


def _refuse(views: Sequence[RankView]) -> None:
    first = views[0]
    if any(len(view["streams"]) != len(first["streams"]) for view in views):
        counts = _by_value([len(view["streams"]) for view in views])
        raise ConfigError(f"ranks have different numbers of streams: {counts}; {WAY_OUT}")
    for number, stream in enumerate(first["streams"]):
        own = [view["streams"][number] for view in views]
        for key, what in (("index", "index.json, or other columns"), ("lengths", "lengths.bin")):
            ranks = [rank for rank, each in enumerate(own) if each[key] != stream[key]]
            if ranks:
                raise DataError(
                    f"{_name(ranks)} another {what} of "
                    f"stream {stream['name']!r} (streams[{number}]) than rank 0: it lies in "
                    f"{own[ranks[0]]['folder']} there, in {stream['folder']} on rank 0. They "
                    "would plan other packs, and miss and repeat samples; delete the copy that is "
                    f"out of date, or set check_remote=True; {WAY_OUT}"
                )
    way_out = (
        "they would miss and repeat samples; give every rank the same ones in the same order, with "
        f"a seed for each shuffle, or shard them yourself and set sharded=True; {WAY_OUT}"
    )
    _check_equal([view.get("sources", {}) for view in views], way_out, DataError)
    way_out = f"they would plan other packs, so give every rank the same; {WAY_OUT}"
    _check_equal([view["recipe"] for view in views], way_out)


def _check_equal(
    views: Sequence[Mapping[str, Any]], way_out: str, error: type[StreampackError] = ConfigError
) -> None:
    for key in views[0]:
        values = [view.get(key) for view in views]
        known = [value for value in values if value != UNKNOWN]
        if any(value != known[0] for value in known):
            raise error(f"ranks have different {key}: {_by_value(values)}; {way_out}")


def _by_value(values: Sequence[Any]) -> str:
    """List the ranks that have each value.

    >>> _by_value([1, 2, 1])
    'ranks 0 and 2 have 1, rank 1 has 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
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
