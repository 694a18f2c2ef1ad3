"""The state of a run: a position in the canonical sequence, and a fingerprint of that sequence.

::

    {"version": 6, "epoch": 0, "position": 4096,
     "num_lanes": 1, "lane_run": 4, "global_batch_size": 32,
     "fingerprint": {"seed": 17, "streams": ["5f2c...", "91aa..."], ...},   every field must match
     "snapshots": "[...]"}                                                  optional, for speed

The state is plain JSON. The position counts packs over all ranks, so the state is the same on every
rank and does not depend on ranks, nodes or workers. Snapshots are one JSON string because torch's
distributed checkpoints can only load structures with as many entries as were saved, and the number
of planned lanes varies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast, get_args

from streampack._state import MAX_EPOCH, FieldChecks, as_text, field_difference, saved_fingerprint
from streampack.balance import Balance
from streampack.config import Order, Packing
from streampack.config.packing import Method
from streampack.config.rules import OPTION_METHODS
from streampack.errors import ResumeError
from streampack.pack.cost import cost_of
from streampack.plan.recipe import MAX_LANES, MAX_PACKS, Recipe
from streampack.plan.snapshots import MAX_INTEGER, snapshots_in, with_snapshots
from streampack.types import State

STATE_VERSION = 6  # incremented when the same config gives different packs
MAX_WALKED_EPOCHS = 50_000  # each takes up to 1 ms
PACK_LENGTHS = "max_seq_len_of_streams"
RETURNED = "load what state_dict() or state_after(batch) returned"
CHECKS = FieldChecks("the state's ", f"{RETURNED}, unchanged")
# Fields that do not change which segments lie in which pack. They are not in the fingerprint.
NOT_IN_SEQUENCE = {"buffer_tokens", "epoch_size", "global_batch_size", "stop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The position of a run."""

    epoch: int = 0
    position: int = 0
    """Packs of the epoch delivered so far, over all ranks."""
    snapshots: list[State] = field(default_factory=list)
    """Snapshots from which this process can plan; may be empty."""


class RunShape(NamedTuple):
    """What a run keeps when it resumes."""

    num_lanes: int
    lane_run: int
    global_batch_size: int
    method: Method | None = None
    """Its packing method, used if the dataset asks for none; None: its state names none."""


def plan_fingerprint(recipe: Recipe, digests: Sequence[str]) -> dict[str, Any]:
    """Return everything that determines the sequence, as JSON: no paths, ranks or workers.

    `digests` are of each stream's contents, followed by a colon and a digest of its lengths if
    there is a length file.
    """
    values = recipe.packing.in_sequence() | asdict(recipe.mixing) | asdict(recipe.order)
    del values["num_lanes"], values["arithmetic"]
    # Of each stream's packs. They are left out where they are the packing's.
    lengths = [packing.max_seq_len for packing in recipe.shapes.packings]
    return {
        "streams": list(digests),
        "weights": [[stream.quota.amount, stream.quota.unit] for stream in recipe.streams],
        "buffer_limit": recipe.packing.buffer_limit,
        **{key: value for key, value in values.items() if key not in NOT_IN_SEQUENCE},
        **_defaults(recipe.packing, recipe.order),
        **({} if recipe.shapes.is_uniform else {PACK_LENGTHS: lengths}),
        **_cost(recipe.packing, recipe.order),
        "shares": _shares(recipe),
    }


def _defaults(packing: Packing, order: Order) -> dict[str, int | list[int] | None]:
    """Return the effective values of optional settings, whose defaults a release may change."""
    keeps_open = packing.method in OPTION_METHODS["open_packs"]
    return {
        "min_fragment": None if packing.split_gap is None else packing.least_fragment,
        "open_packs": packing.num_open_packs if keeps_open else None,
        "shuffle_block_size": order.block_size,
        "pack_shuffle": list(order.pack_window),
    }


def _cost(packing: Packing, order: Order) -> dict[str, int | str]:
    """Return the capacity and order of packs of equal cost, and a digest of the cost function."""
    if packing.max_cost is None:
        return {}
    fields: dict[str, int | str] = {
        "capacity": packing.row_tokens,
        "cost": Balance(cost=cost_of(packing)).digest(),
    }
    if order.pack_window[0]:
        fields["pack_order"] = "even"
    return fields


def _shares(recipe: Recipe) -> list[int] | None:
    """Return the expected tokens of each stream if they influence the order, or else None."""
    by_samples = recipe.is_mixed and recipe.mixing.weight_unit == "samples"
    if by_samples and recipe.mixing.epoch_end != "carry":
        return None
    return [stream.chosen_tokens for stream in recipe.streams]


def encode_state(recipe: Recipe, digests: Sequence[str], progress: Progress) -> State:
    """Return the state of a run at this position."""
    state = {
        "version": STATE_VERSION,
        "epoch": progress.epoch,
        "position": progress.position,
        "num_lanes": recipe.num_lanes,
        "lane_run": recipe.lane_run,
        "global_batch_size": recipe.global_batch_size,
        "fingerprint": plan_fingerprint(recipe, digests),
    }
    return with_snapshots(state, progress.snapshots)


def decode_state(state: State, recipe: Recipe, digests: Sequence[str]) -> Progress:
    """Check that a state belongs to this recipe, and return its position.

    The recipe must be made with the state's num_lanes, lane_run and global_batch_size. The
    ResumeError names the first field that differs.
    """
    saved = saved_fingerprint(state)
    own = plan_fingerprint(recipe, digests)
    if PACK_LENGTHS in saved:
        own.setdefault(PACK_LENGTHS, None)  # compare it, although no stream has a length of its own
    for key, value in own.items():
        if key == "streams" and _are_same_streams(saved.get(key), value):
            continue
        if as_text(saved.get(key)) != as_text(value):
            raise ResumeError(_difference(key, saved.get(key), value, recipe))
    is_walked = recipe.mixing.epoch_end == "carry" and not recipe.is_mixed
    most = MAX_WALKED_EPOCHS if is_walked else MAX_EPOCH
    epoch = CHECKS.integer("epoch", state.get("epoch"), 0, most)
    position = CHECKS.integer("position", state.get("position"), 0, MAX_INTEGER)
    return Progress(epoch=epoch, position=position, snapshots=snapshots_in(state))


def _are_same_streams(saved: Any, own: list[str]) -> bool:
    """Whether streams have the same contents, and the same lengths where both digests have them."""
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        return False
    return all(is_same_stream(*pair) for pair in zip(saved, own, strict=True))


def is_same_stream(saved: Any, own: str) -> bool:
    """Compare two digests.

    >>> is_same_stream("a", "a:1"), is_same_stream("a:2", "a:1"), is_same_stream("b", "a:1")
    (True, False, False)
    """
    contents, _, lengths = str(saved).partition(":")
    own_contents, _, own_lengths = own.partition(":")
    return contents == own_contents and (not lengths or not own_lengths or lengths == own_lengths)


def _difference(key: str, saved: Any, own: Any, recipe: Recipe) -> str:
    """Describe the difference in a fingerprint field, and a fix."""
    is_alike = isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own)
    if key == "streams" and is_alike:
        return _other_streams(saved, own, recipe.names)
    if key == "weights" and is_alike and all(map(_is_weight, saved)):
        return _other_weights(saved, own, recipe.names)
    if key == "streams" and isinstance(saved, list):
        return (
            f"the state was saved with {len(saved)} streams, but this dataset has {len(own)}, "
            f"{_quoted(recipe.names)}; resume with those of the run, or start again without the "
            "state"
        )
    if key == "pack_shuffle":
        size = saved[0] if isinstance(saved, list) and len(saved) == 2 else saved
        way_out = f"resume with Order(pack_shuffle={size!r:.40}), or start again without the state"
        return field_difference(key, saved, own, way_out)
    if key == PACK_LENGTHS:
        way_out = "resume with the max_seq_len of each Stream that the run began with"
        return field_difference(key, saved, own, way_out)
    if key != "shares":
        return field_difference(key, saved, own)
    way_out = (
        "they come from the streams' length files, or from their bytes where there is none: "
        "restore the length files of the run, or start again without the state"
    )
    return field_difference(key, saved, own, way_out)


def _other_streams(saved: list[Any], own: list[Any], names: list[str]) -> str:
    if sorted(map(as_text, saved)) == sorted(map(as_text, own)):
        order = [names[own.index(digest)] for digest in saved]
        return (
            f"the state was saved with this dataset's streams in another order: {_quoted(order)}; "
            "pass them in that order, as it decides which samples share a pack"
        )
    changed = [
        f"{name!r} (streams[{number}])"
        for number, name in enumerate(names)
        if not is_same_stream(saved[number], own[number])
    ]
    if all(
        str(a).partition(":")[0] == b.partition(":")[0] for a, b in zip(saved, own, strict=True)
    ):
        return (
            f"since the state was saved stream {' and '.join(changed)} has other lengths: its "
            "length file was written again; put back the file that the run began with, or start "
            "again without the state"
        )
    return (
        f"since the state was saved stream {' and '.join(changed)} holds other data, or another "
        "column of it: resume with what the run began with, or start again without the state"
    )


def _is_weight(saved: Any) -> bool:
    return isinstance(saved, list | tuple) and len(saved) == 2


def _other_weights(saved: list[Any], own: list[Any], names: list[str]) -> str:
    changed = [
        f"{before[0]!r:.20} {before[1]!s:.20} of stream {name!r} an epoch, but this dataset takes "
        f"{now[0]} {now[1]}"
        for name, before, now in zip(names, saved, own, strict=True)
        if as_text(before) != as_text(now)
    ]
    return (
        f"the state was saved with {'; '.join(changed)}: resume with the run's proportion, repeat "
        "or choose of each stream, epoch_size and weight_unit, or start again without the state"
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def check_version(state: State) -> None:
    """Check that a state has a kind and version that this release reads."""
    if not isinstance(state, dict) or "version" not in state:
        found = f"keys {list(state)}" if isinstance(state, dict) else type(state).__name__
        raise ResumeError(
            f"this is not a state of a PackedStreamingDataset: {found:.200}; {RETURNED}"
        )
    if state.get("kind"):
        raise ResumeError(
            f"the state is of a dataset of iterables (kind {state['kind']!r:.80}), not of a "
            "PackedStreamingDataset; load what its state_dict() or state_after(batch) returned"
        )
    version = state["version"]
    if type(version) is not int or version != STATE_VERSION:
        raise ResumeError(
            f"the state has version {version!r:.80}, this release reads {STATE_VERSION}; "
            f"{RETURNED}, with the release that saved it"
        )


def run_shape(state: State) -> RunShape:
    """Return what a state's run keeps, after a check."""
    check_version(state)
    num_lanes, lane_run, global_batch_size = (
        CHECKS.integer(key, state.get(key), 1, MAX_LANES if key == "num_lanes" else MAX_PACKS)
        for key in ("num_lanes", "lane_run", "global_batch_size")
    )
    method = saved_fingerprint(state).get("method")
    is_known = isinstance(method, str) and method in get_args(Method)
    return RunShape(
        num_lanes,
        lane_run,
        global_batch_size,
        method=cast(Method, method) if is_known else None,
    )


def nearest_divisors(position: int, size: int) -> str:
    """Return, as text, the batch sizes nearest to `size` that divide `position`.

    >>> nearest_divisors(60, 8), nearest_divisors(12, 24)
    ('6 or 10', '12')
    """
    least, most = min(size, position), min(position, MAX_PACKS)
    below = next(n for n in range(least, 0, -1) if position % n == 0)
    above = next((n for n in range(size, most + 1) if position % n == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


def check_resized(saved: Recipe, own: Recipe, progress: Progress) -> None:
    """Check that a change of the global batch size leaves the packs unchanged.

    `own` is the recipe of the state with the new size. The ResumeError names both sizes, and sizes
    that work.
    """
    size, before = own.global_batch_size, saved.global_batch_size
    if size == before:
        return
    asked = f"the state was saved with global_batch_size={before}, but this dataset asks for {size}"
    keep = f"leave it out to keep {before}"
    if progress.position and not own.is_mixed:
        raise ResumeError(
            f"{asked}: batching_method={own.mixing.batching_method!r} chooses the streams of a "
            f"whole global batch together, so another size gives other packs from position "
            f"{progress.position} on; {keep}, or change it at the start of an epoch"
        )
    is_same = own.is_mixed and own.packs_per_carry_epoch == saved.packs_per_carry_epoch
    if own.mixing.epoch_end == "carry" and progress.epoch and not is_same:
        raise ResumeError(
            f"{asked}: with epoch_end='carry' epochs are whole global batches, so the "
            f"{progress.epoch} before would have ended elsewhere; {keep}"
        )
    if progress.position % size:
        raise ResumeError(
            f"{asked}, and position {progress.position} is not a multiple of it; set it to "
            f"{nearest_divisors(progress.position, size)}, or {keep}"
        )


def saving_worker(state: State) -> list[int] | None:
    """Return [worker, workers] if a worker of another data loader saved the state, or else None."""
    saved_in = state.get("worker")
    if saved_in is None:
        return None
    is_pair = isinstance(saved_in, list | tuple) and len(saved_in) == 2
    if not is_pair or not all(type(number) is int for number in saved_in):
        raise FieldChecks("the state's ").error("worker", saved_in, wanted="[worker, workers]")
    return list(saved_in)
