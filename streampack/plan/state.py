"""The state of a run: a position in the canonical sequence, and a fingerprint of that sequence.

::

    {"version": 6, "epoch": 0, "position": 4096, "num_lanes": 1,
     "lane_run": 4, "global_batch_size": 32,                                without chapters
     "kind": "chapters", "streams": ["web"], "chapters": [...],             with chapters:
     "chain": "5c1f...", "walk": "91aa...:eJx...",                          what each of them was
     "fingerprint": {"seed": 17, "streams": ["5f2c...", "91aa..."], ...},   every field must match
     "snapshots": "[...]"}                                                  optional, for speed

The position counts packs over all ranks, so the state does not depend on ranks, nodes or workers.
A dataset adds the "worlds" of the run, which nothing here reads: see planned/run_worlds.py.
docs/adr/0011 says why snapshots are one string, and docs/chapters.md what may be edited.

Cost: O(streams x lanes): 10 KB for 100 streams and 64 lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, cast, get_args

from streampack._state import MAX_EPOCH, canonical_json, saved_fingerprint
from streampack.balance import Balance
from streampack.chapters import SHAPES
from streampack.config import Order, Packing
from streampack.config.combination_table import OPTION_METHODS
from streampack.config.packing import Method
from streampack.errors import ResumeError
from streampack.pack.cost import cost_of
from streampack.plan.chapter_recipes import chain, chapter_record
from streampack.plan.pass_limits import limits_at
from streampack.plan.recipe import MAX_LANES, MAX_PACKS, Recipe
from streampack.plan.slots import WalkState
from streampack.plan.snapshots import (
    MAX_INTEGER,
    Renumbering,
    snapshots_in,
    text_as_walk,
    walk_as_text,
    walk_in,
    with_snapshots,
    with_walk,
)
from streampack.plan.spans import RunPlan
from streampack.plan.state_differences import (
    CHECKS,
    PACK_LENGTHS,
    RETURNED,
    are_same_streams,
    check_streams_by_name,
    difference,
)
from streampack.types import State

STATE_VERSION = 6  # incremented when the same config gives different packs
KIND = "chapters"  # of states of runs of chapters; others have no kind
MAX_WALKED_EPOCHS = 50_000  # each takes up to 1 ms
MAX_CHAPTERS = 10_000
MAX_STREAMS = 1_000_000
# Fields that do not change which segments are in which pack. They are not in the fingerprint.
NOT_IN_SEQUENCE = {
    "arithmetic",
    "buffer_tokens",
    "epoch_size",
    "global_batch_size",
    "num_lanes",
    "stop",
}
# Those that a chapter may change, or that a run of chapters does not have.
NOT_IN_CHAPTERS = {*SHAPES, "buffer_limit", "epoch_end", "sampling_method"}


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
    lane_turn: int
    global_batch_size: int
    method: Method | None = None
    """Its packing method, used if the dataset asks for none."""


def plan_fingerprint(
    run: RunPlan, digests: Sequence[str], last: int | None = None
) -> dict[str, Any]:
    """Return everything that determines the sequence, as JSON: no paths, ranks or workers.

    `digests` are of each stream's contents, followed by a colon and a digest of its lengths if
    there is a length file. In a run of chapters, it is what they have in common, and the streams
    with a share in a chapter up to `last`; None: in any.
    """
    recipe = run.recipes[0]
    packing, order = recipe.packing, recipe.order
    values = packing.in_sequence() | asdict(recipe.mixing) | asdict(order)
    values = {key: value for key, value in values.items() if key not in NOT_IN_SEQUENCE}
    values |= {"buffer_limit": packing.buffer_limit}
    values |= _defaults(packing, order) | _cost(packing, order)
    if run.chapters:
        unused = NOT_IN_CHAPTERS if recipe.is_mixed else {*NOT_IN_CHAPTERS, "weight_unit"}
        values = {key: value for key, value in values.items() if key not in unused}
        return _streams_by_name(run, digests, last) | values
    # Each stream's packs, unless they are the packing's.
    return {
        "streams": list(digests),
        "weights": [[stream.quota.amount, stream.quota.unit] for stream in recipe.streams],
        **values,
        **({} if recipe.shapes.is_uniform else {PACK_LENGTHS: recipe.shapes.longest}),
        "shares": _shares(recipe),
    }


def _streams_by_name(run: RunPlan, digests: Sequence[str], last: int | None) -> dict[str, Any]:
    """Return the digests of streams that chapters use, and their limits, by name."""
    recipes = run.recipes[: None if last is None else last + 1]
    streams = run.recipes[0].streams
    used = [n for n in range(len(streams)) if any(recipe.uses(n) for recipe in recipes)]
    passes = {streams[n].name: streams[n].max_passes for n in used}
    return {
        "streams": {streams[n].name: digests[n] for n in used},
        "max_passes": {name: str(most) for name, most in passes.items() if most is not None},
    }


def _defaults(packing: Packing, order: Order) -> dict[str, int | list[int] | None]:
    """Return the effective values of settings with defaults that a release may change."""
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


def encode_state(
    run: RunPlan, digests: Sequence[str], progress: Progress, walk: WalkState | None = None
) -> State:
    """Return the state of a run at this position; its walk can resume from `walk`."""
    recipe, last = run.recipes[0], progress.epoch if run.chapters else None
    state = {
        "version": STATE_VERSION,
        "epoch": progress.epoch,
        "position": progress.position,
        "num_lanes": recipe.num_lanes,
        "fingerprint": plan_fingerprint(run, digests, last),
    }
    if not run.chapters:
        sizes = {"lane_run": recipe.lane_turn, "global_batch_size": recipe.global_batch_size}
        return with_snapshots(state | sizes, progress.snapshots)
    state |= {
        "kind": KIND,
        "streams": recipe.names,
        "chapters": [chapter_record(recipe) for recipe in run.recipes],
        "chain": chain(run.recipes[: progress.epoch]),
    }
    state = with_walk(state, "" if walk is None else walk_as_text(walk))
    return with_snapshots(state, progress.snapshots)


def decode_state(
    state: State, run: RunPlan, digests: Sequence[str]
) -> tuple[Progress, WalkState | None]:
    """Check that a state belongs to a run; return its position, and a state of the walk if known.

    A run of epochs must be made with the state's num_lanes, lane_run and global_batch_size; of
    chapters, `saved_chapters` and `check_past` have checked the state before. The ResumeError names
    the first field that differs.
    """
    check_common(state, run, digests)
    recipe = run.recipes[0]
    if not run.chapters:
        is_walked = recipe.mixing.epoch_end == "carry" and not recipe.is_mixed
        most = MAX_WALKED_EPOCHS if is_walked else MAX_EPOCH
        epoch = CHECKS.integer("epoch", state.get("epoch"), 0, most)
        position = CHECKS.integer("position", state.get("position"), 0, MAX_INTEGER)
        return Progress(epoch=epoch, position=position, snapshots=snapshots_in(state)), None
    current, names = state["epoch"], saved_names(state)
    snapshots, text = snapshots_in(state), walk_in(state)
    walk = text_as_walk(text, recipe, len(names)) if text else None
    renumbering = Renumbering(names, recipe.names)
    if renumbering.is_needed:
        snapshots = renumbering.snapshots(snapshots, is_mixed=recipe.is_mixed)
    if walk is not None:
        unused = replace(run.start(0), limits=limits_at(run.recipes, current))
        walk = renumbering.walk(walk, unused, saved_fingerprint(state)["streams"])
    return Progress(epoch=current, position=state["position"], snapshots=snapshots), walk


def check_common(state: State, run: RunPlan, digests: Sequence[str]) -> None:
    """Check what determines the sequence; the ResumeError names the first field that differs.

    The streams of chapters that ran are compared by name.
    """
    saved, recipe = saved_fingerprint(state), run.recipes[0]
    own = plan_fingerprint(run, digests, state["epoch"] if run.chapters else None)
    if PACK_LENGTHS in saved:
        own.setdefault(PACK_LENGTHS, None)  # compare it, although no stream has a length of its own
    if run.chapters:
        own_streams = dict(zip(recipe.names, digests, strict=True))
        ran = CHECKS.mapping("streams", saved.get("streams"))
        check_streams_by_name(ran, saved_names(state), own_streams)
    for key, value in own.items():
        if key == "streams" and (run.chapters or are_same_streams(saved.get(key), value)):
            continue
        if canonical_json(saved.get(key)) != canonical_json(value):
            raise ResumeError(difference(key, saved.get(key), value, recipe))


def check_kind(state: State, kind: str | None = None) -> None:
    """Check that a state has a version that this release reads, and is of such a run."""
    if not isinstance(state, dict) or "version" not in state:
        found = f"keys {list(state)}" if isinstance(state, dict) else type(state).__name__
        raise ResumeError(
            f"this is not a state of a PackedStreamingDataset: {found:.200}; {RETURNED}"
        )
    saved = state.get("kind") or None
    if saved not in (None, KIND):
        raise ResumeError(
            f"the state is of a dataset of iterables (kind {saved!r:.80}), not of a "
            "PackedStreamingDataset; load what its state_dict() or state_after(batch) returned"
        )
    if saved != kind:
        without, own = ("without", "=...") if saved is None else ("of", ", and it has none")
        raise ResumeError(
            f"the state, in epoch {state.get('epoch')!r:.80}, is of a run {without} chapters, and "
            f"this dataset has chapters{own}; resume with the arguments that the run began with, "
            "or begin without the state"
        )
    version = state["version"]
    if type(version) is not int or version != STATE_VERSION:
        raise ResumeError(
            f"the state has version {version!r:.80}, this release reads {STATE_VERSION}; "
            f"{RETURNED}, with the release that saved it"
        )


def run_shape(state: State) -> RunShape:
    """Return what a state's run keeps, after a check."""
    check_kind(state)
    num_lanes, lane_turn, global_batch_size = (
        CHECKS.integer(key, state.get(key), 1, MAX_LANES if key == "num_lanes" else MAX_PACKS)
        for key in ("num_lanes", "lane_run", "global_batch_size")
    )
    method = saved_fingerprint(state).get("method")
    is_known = isinstance(method, str) and method in get_args(Method)
    return RunShape(
        num_lanes,
        lane_turn,
        global_batch_size,
        method=cast(Method, method) if is_known else None,
    )


def saved_chapters(state: State) -> tuple[int, list[dict[str, Any]]]:
    """Return the current chapter of a state, and its chapters, after a check of both."""
    check_kind(state, KIND)
    records = CHECKS.up_to("chapters", state.get("chapters"), MAX_CHAPTERS)
    for record in records:
        CHECKS.mapping("chapters", record)
        CHECKS.integer("chapters' lane_run", record.get("lane_run"), 1, MAX_PACKS)
    current = CHECKS.integer("epoch", state.get("epoch"), 0, max(len(records) - 1, 0))
    CHECKS.integer("num_lanes", state.get("num_lanes"), 1, MAX_LANES)
    return current, records


def saved_names(state: State) -> list[str]:
    """Return the names of the streams of a state, in its order, after a check."""
    names = CHECKS.up_to("streams", state.get("streams"), MAX_STREAMS)
    if not names or not all(isinstance(name, str) for name in names):
        raise CHECKS.error("streams", names, wanted="a list of names")
    if len(set(names)) < len(names):
        raise CHECKS.error("streams", names, wanted="a list of different names")
    return names


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
    keep = f"omit it to keep {before}"
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
