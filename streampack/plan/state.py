"""The state of a run: a position in the canonical sequence, and a fingerprint of that sequence.

::

    {"version": 6, "epoch": 0, "position": 4096, "num_lanes": 1,
     "lane_run": 4, "global_batch_size": 32,                                without chapters
     "kind": "chapters", "streams": ["web"], "chapters": [...],             with chapters
     "skip": [], "origins": [0], "amended": [], "batch_sizes": [4],         see chapter_edits.py
     "fingerprint": {"seed": 17, "streams": ["5f2c...", "91aa..."], ...},   every field must match
     "worlds": "[[0, 0, 8, 8, 1, 4, null, null]]",                          see run_worlds.py
     "snapshots": "[...]"}                                                  optional, for speed

The position counts packs over all ranks, so the state does not depend on ranks, nodes or workers.
A state may come from a damaged file or an untrusted source: `read_state` checks every value once,
by the table `FIELDS`. What must match the run is compared by comparison.py.
docs/adr/0011 says why snapshots are one string, and docs/chapters.md what may be edited.

Cost: O(streams x lanes): 10 KB for 100 streams and 64 lanes.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast, get_args

from streampack._checks import MAX_EPOCH
from streampack.chapters import SHAPES
from streampack.config.packing import Method
from streampack.errors import ResumeError
from streampack.plan.chapter_recipes import chapter_record
from streampack.plan.comparison import PACK_LENGTHS, check_same, run_values
from streampack.plan.recipe import MAX_LANES, MAX_PACKS
from streampack.plan.snapshots import MAX_INTEGER, renumbered, snapshots_in, with_snapshots
from streampack.plan.spans import RunPlan
from streampack.types import State

MAX_WALKED_EPOCHS = 50_000  # each takes up to 1 ms
STATE_VERSION = 7  # incremented when the same config gives different packs
KIND = "chapters"  # of states of runs of chapters; others have no kind
RETURNED = "load what state_dict() or state_after(batch) returned"
COUNT, PACKS = range(2**62), range(1, MAX_PACKS + 1)
POSITION = {
    "num_lanes": range(1, MAX_LANES + 1),
    "epoch": range(MAX_EPOCH + 1),  # with epoch_end="carry" the epochs before it are walked
    "position": range(MAX_INTEGER + 1),
}
# By kind of state, what the values must be: in a range, of a type, or a list or a dict of such.
FIELDS: dict[str | None, dict[str, Any]] = {
    None: {
        **POSITION,
        "lane_run": PACKS,
        "global_batch_size": PACKS,
        "fingerprint": {"streams": list, "weights": list},
    },
    KIND: {
        **POSITION,
        "streams": [str],
        "chapters": [{"lane_run": PACKS, "weights": dict}],
        "origins": [COUNT],
        "amended": [COUNT],
        "batch_sizes": list,
        "skip": [[COUNT]],
        "fingerprint": {"streams": dict},
    },
}
# Fields that do not change which segments are in which pack. They are not in the fingerprint.
NOT_IN_SEQUENCE = {
    "arithmetic",
    "epoch_size",
    "global_batch_size",
    "max_repeats",
    "num_lanes",
    "stop",
}
# Those that a chapter may change, or that a run of chapters does not have.
NOT_IN_CHAPTERS = {*SHAPES, "epoch_end", "sampling_method"}


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


def run_shape(state: State) -> RunShape:
    """Return what a state's run keeps."""
    method = state["fingerprint"].get("method")
    return RunShape(
        state["num_lanes"],
        state["lane_run"],
        state["global_batch_size"],
        method=cast(Method, method) if method in get_args(Method) else None,
    )


def plan_fingerprint(
    run: RunPlan, digests: Sequence[str], used: Container[str] | None = None
) -> dict[str, Any]:
    """Return everything that determines the sequence, as JSON: no paths, ranks or workers.

    `digests` are of each stream's contents, followed by a colon and a digest of its lengths if
    there is a length file. In a run of chapters, it is what they have in common, and the streams
    that are `used`, or in any chapter if that is None.
    """
    recipe = run.recipes[0]
    values = recipe.packing.in_sequence() | asdict(recipe.mixing) | asdict(recipe.order)
    # The effective values of settings with defaults that a release may change.
    values["shuffle_block_size"] = recipe.order.block_size
    values["pack_shuffle"] = list(recipe.order.pack_window)
    unused = NOT_IN_SEQUENCE
    if run.chapters:
        unused = unused | NOT_IN_CHAPTERS | (set() if recipe.is_mixed else {"weight_unit"})
    values = {key: value for key, value in values.items() if key not in unused}
    if run.chapters:
        used = run.uses() if used is None else used
        streams = zip(recipe.names, digests, strict=True)
        return {"streams": {name: digest for name, digest in streams if name in used}} | values
    values = {
        "streams": list(digests),
        "weights": [[stream.quota.amount, stream.quota.unit] for stream in recipe.streams],
        **values,
    }
    if not recipe.shapes.is_uniform:
        values[PACK_LENGTHS] = recipe.shapes.longest
    by_samples = recipe.is_mixed and recipe.mixing.weight_unit == "samples"
    if not by_samples or recipe.is_endless:  # expected tokens influence the order
        values["tokens"] = [stream.num_tokens for stream in recipe.streams]
    return values


def _kept(run: RunPlan) -> dict[str, Any]:
    """Return what a run keeps apart from its options, as JSON."""
    recipe = run.recipes[0]
    kept: dict[str, Any] = {"num_lanes": recipe.num_lanes}
    if run.chapters:
        return kept | {"chapters": [chapter_record(each) for each in run.recipes]}
    return kept | {"lane_run": recipe.lane_turn, "global_batch_size": recipe.global_batch_size}


def run_fingerprint(run: RunPlan, digests: Sequence[str]) -> dict[str, Any]:
    """Return everything that determines the packs of a whole run, as JSON."""
    return plan_fingerprint(run, digests) | _kept(run)


def encode_state(run: RunPlan, digests: Sequence[str], progress: Progress) -> State:
    """Return the state of a run at this position."""
    recipe = run.recipes[0]
    state = {
        "version": STATE_VERSION,
        "epoch": progress.epoch,
        "position": progress.position,
        "num_lanes": recipe.num_lanes,
        "fingerprint": plan_fingerprint(run, digests, run.uses(progress.epoch)),
    }
    if run.chapters:
        state |= {"kind": KIND, "streams": recipe.names}
    return with_snapshots(state | _kept(run), progress.snapshots)


def decode_state(state: State, run: RunPlan, digests: Sequence[str]) -> Progress:
    """Return the position of a state, once it is known to belong to a run.

    The recipes have the state's lanes, turns and, of epochs, global batch size. Streams are
    compared by place; in a run of chapters, those of chapters that began by name. The ResumeError
    names the first field that differs.
    """
    number, position, lanes = state["epoch"], state["position"], state["num_lanes"]
    recipe, fingerprint = run.recipes[0], state["fingerprint"]
    names, ran = recipe.names, fingerprint["streams"]
    before, chapters = names, []
    if run.chapters:
        before, chapters = state["streams"], state["chapters"]
        if number >= len(run):
            raise ResumeError(
                f"the state is in chapters[{number}], but this run has {len(run)} chapters; "
                "keep those that the run began, and add others after them"
            )
        saved, ran = [ran.get(name) for name in names], run.uses(number)
    else:
        saved, ran = ran, names
        if len(saved) != len(names):
            raise ResumeError(
                f"the state was saved with {len(saved)} streams, but this dataset has "
                f"{len(names)}, {', '.join(map(repr, names))}; resume with those of the run"
            )
        if saved != digests and sorted(map(str, saved)) == sorted(digests):
            before = [names[digests.index(digest)] for digest in saved]
    own = [a if is_same_stream(a, b) else b for a, b in zip(saved, digests, strict=True)]
    own_fingerprint = plan_fingerprint(run, own, ran) | {
        "num_lanes": recipe.order.num_lanes or lanes
    }
    check_same(
        run_values(
            fingerprint | {"num_lanes": lanes},
            [name for name in before if name in ran],
            chapters[: number + 1],
        ),
        run_values(
            json.loads(json.dumps(own_fingerprint)),
            [name for name in names if name in ran],
            [chapter_record(each) for each in run.recipes[: number + 1]],
        ),
        names,
        running=number if run.chapters else None,
    )
    slots = run.chapters[number].num_slots if run.chapters else None
    if slots is not None and slots < position:
        size = run.recipes[number].global_batch_size
        begun = -(-position // size)
        raise ResumeError(
            f"chapters[{number}] has {slots // size} steps, but {begun} of them have begun; "
            f"give it at least {begun}, or set until to as many tokens"
        )
    snapshots = snapshots_in(state)
    if run.chapters and before != names:
        snapshots = renumbered(snapshots, before, names, is_mixed=recipe.is_mixed)
    if recipe.chapter is None and recipe.is_endless and not recipe.is_mixed:
        check_value("epoch", number, range(MAX_WALKED_EPOCHS + 1))
    return Progress(epoch=number, position=position, snapshots=snapshots)


def read_state(state: Any, kind: str | None = None) -> State:
    """Return a state of this kind as JSON, after a check of every value in it."""
    _check_kind(state, kind)
    try:
        saved: State = json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResumeError(f"the state is not JSON: {error!s:.80}; {RETURNED}, unchanged") from error
    for key, wanted in FIELDS[kind].items():
        check_value(key, saved.get(key), wanted)
    if kind == KIND:
        names, num = saved["streams"], len(saved["chapters"])
        for key, is_right, words in (
            ("streams", names and len(set(names)) == len(names), "a list of different names"),
            ("epoch", saved["epoch"] < num, f"one of {num} chapters"),
            (
                "chapters",
                all(type(each.get("steps")) in (int, type(None)) for each in saved["chapters"]),
                "with integers as steps, or null",
            ),
            ("origins", len(saved["origins"]) == num, f"a list of {num}"),
            ("amended", all(n < num for n in saved["amended"]), f"of {num} chapters"),
        ):
            if not is_right:
                raise wrong_value(key, saved[key], words)
    return saved


def check_value(name: str, value: Any, wanted: Any) -> None:
    """Refuse a value that is not what `FIELDS` says."""
    if isinstance(wanted, range):
        is_right = type(value) is int and value in wanted
        words = f"an integer of at least {wanted[0]} and at most {wanted[-1]}"
    else:
        kind = wanted if isinstance(wanted, type) else type(wanted)
        is_right, words = isinstance(value, kind), f"a {kind.__name__}"
    if not is_right:
        raise wrong_value(name, value, words)
    if isinstance(wanted, list):
        for each in value:
            check_value(name, each, wanted[0])
    elif isinstance(wanted, dict):
        for key, inner in wanted.items():
            check_value(f"{name}' {key}", value.get(key), inner)


def wrong_value(name: str, value: Any, wanted: str) -> ResumeError:
    """Return the error of a value that no state has."""
    return ResumeError(f"the state's {name} is {value!r:.80}, not {wanted}; {RETURNED}, unchanged")


def is_same_stream(saved: Any, own: str) -> bool:
    """Compare two digests.

    >>> is_same_stream("a", "a:1"), is_same_stream("a:2", "a:1"), is_same_stream("b", "a:1")
    (True, False, False)
    """
    contents, _, lengths = str(saved).partition(":")
    own_contents, _, own_lengths = own.partition(":")
    return contents == own_contents and (not lengths or not own_lengths or lengths == own_lengths)


def _check_kind(state: Any, kind: str | None) -> None:
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
