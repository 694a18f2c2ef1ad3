"""The state of a run of chapters: what each chapter was, and where the walk stands.

::

    {"version": 6, "kind": "chapters", "epoch": 1, "position": 4096, "num_lanes": 4,
     "chapters": [{"weights": {"web": ["4/5", "4/5"], ...}, "steps": 1000, "lane_run": 8, ...}],
     "chain": "5c1f...",              hash of the chapters before this one
     "fingerprint": {"streams": {"web": "5f2c..."}, "seed": 17, ...},
     "skip": [[34017, 34161]],
     "walk": "91aa...:eJx...",        the state of a walk, compressed, after its digest
     "snapshots": "[...]"}

Chapters before the position are as they were. The running one may change its length, unless a share
ramps. What comes later may be edited freely, and so may streams that never had a share.

Cost: O(streams x lanes): 10 KB for 100 streams and 64 lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

from streampack._state import UNCHANGED, FieldChecks, as_text
from streampack.chapters import SHAPES
from streampack.errors import ResumeError
from streampack.plan.recipe import MAX_LANES, MAX_PACKS, Recipe
from streampack.plan.renumber import Renumbering
from streampack.plan.run_limits import limits_at
from streampack.plan.run_plan import RunPlan
from streampack.plan.slots import WalkState
from streampack.plan.snapshots import MAX_INTEGER, snapshots_in, walk_in, with_snapshots, with_walk
from streampack.plan.state import STATE_VERSION, Progress, is_same_stream
from streampack.plan.state_text import text_as_walk, walk_as_text
from streampack.types import State

CHECKS = FieldChecks("the state's ", UNCHANGED)
KIND = "chapters"
MAX_CHAPTERS = 10_000
MAX_STREAMS = 1_000_000


def chapter_record(recipe: Recipe) -> dict[str, Any]:
    """Return what determines a chapter's packs, as JSON: no batch size, ranks or workers."""
    plan = recipe.chapter
    if plan is None:
        return {}
    packing = asdict(recipe.packing)
    return {
        "weights": {
            recipe.streams[n].name: [str(plan.begin[n]), str(plan.end[n])]
            for n in sorted(recipe.used, key=recipe.names.__getitem__)
        },
        "steps": None if plan.num_slots is None else plan.num_slots // recipe.global_batch_size,
        "ramp_steps": plan.ramp_slots // recipe.global_batch_size if plan.ramps else None,
        "global_batch_size": recipe.global_batch_size,
        "lane_run": recipe.lane_run,
        "packing": {name: packing[name] for name in SHAPES},
    }


def run_fingerprint(
    run: RunPlan, digests: Sequence[str], last: int | None = None
) -> dict[str, Any]:
    """Return what all chapters have in common, as JSON.

    Of the streams, it holds those with a share in a chapter up to `last`; None: in any.
    """
    first = run.recipes[0]
    packing = {k: v for k, v in asdict(first.packing).items() if k not in SHAPES}
    mixing: dict[str, str] = {"batching_method": first.mixing.batching_method}
    if first.is_mixed:
        mixing["weight_unit"] = first.mixing.weight_unit
    order = {
        "seed": first.order.seed,
        "shuffle": first.order.shuffle,
        "shuffle_block_size": first.order.block_size,
        "pack_shuffle": list(first.order.pack_window),
    }
    recipes = run.recipes[: None if last is None else last + 1]
    streams = {
        stream.name: digest
        for number, (stream, digest) in enumerate(zip(first.streams, digests, strict=True))
        if any(recipe.uses(number) for recipe in recipes)
    }
    limits = {
        stream.name: str(stream.max_passes)
        for stream in first.streams
        if stream.name in streams and stream.max_passes is not None
    }
    return {"streams": streams, **packing, **mixing, **order, "max_passes": limits}


def chain(run: RunPlan, chapter: int) -> str:
    """Return the hash of the chapters before one, each with the hash of those before it."""
    link = ""
    for recipe in run.recipes[:chapter]:
        # Chained, so that equal last hashes mean equal chapters before.
        text = link + as_text(chapter_record(recipe))
        link = blake2b(text.encode(), digest_size=16).hexdigest()
    return link


def encode_run_state(
    run: RunPlan, digests: Sequence[str], progress: Progress, walk: WalkState | None
) -> State:
    """Return the state of a run at this position."""
    state = {
        "version": STATE_VERSION,
        "kind": KIND,
        "epoch": progress.epoch,
        "position": progress.position,
        "num_lanes": run.recipes[0].num_lanes,
        "streams": run.recipes[0].names,
        "chapters": [chapter_record(recipe) for recipe in run.recipes],
        "chain": chain(run, progress.epoch),
        "fingerprint": run_fingerprint(run, digests, progress.epoch),
    }
    state = with_walk(state, "" if walk is None else walk_as_text(walk))
    return with_snapshots(state, progress.snapshots)


def check_kind(state: State) -> None:
    """Check that a state is of a run of chapters, or raise a ResumeError that names its kind."""
    if not isinstance(state, dict) or "version" not in state:
        raise ResumeError(f"this is not a state of a PackedStreamingDataset; {UNCHANGED}")
    if state.get("kind") != KIND:
        raise ResumeError(
            f"the state, in epoch {state.get('epoch')!r:.80}, is of a run without chapters, and "
            "this dataset has chapters=...; resume without them, or begin a run of chapters "
            "without the state"
        )
    if state["version"] != STATE_VERSION:
        raise ResumeError(
            f"the state has version {state['version']!r:.80}, this release reads {STATE_VERSION}; "
            "load it with the release that saved it"
        )


def saved_chapters(state: State) -> tuple[int, list[dict[str, Any]]]:
    """Return the current chapter of a state, and its chapters, after a check of both."""
    check_kind(state)
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


def saved_streams(state: State) -> dict[str, Any]:
    """Return the digests of the streams of a state that had a share in a chapter that ran."""
    fingerprint = CHECKS.mapping("fingerprint", state.get("fingerprint"))
    return CHECKS.mapping("streams", fingerprint.get("streams"))


def check_past(records: Sequence[dict[str, Any]], run: RunPlan, state: State) -> None:
    """Check that the chapters before a state's position are those of this run.

    The ResumeError names the chapter and the field that differs.
    """
    current = state["epoch"]
    position = CHECKS.integer("position", state.get("position"), 0, MAX_INTEGER)
    if current >= len(run):
        raise ResumeError(
            f"the state lies in chapters[{current}], but this run has {len(run)} chapters; keep "
            "those that the run began, and add others after them"
        )
    for number in range(current + 1):
        saved, own = records[number], chapter_record(run.recipes[number])
        for key, value in own.items():
            # The running chapter may get another length, as long as no share depends on it.
            is_length = key == "steps" and number == current
            if is_length and own["ramp_steps"] is None and saved.get("ramp_steps") is None:
                _check_length(number, position, value, run.recipes[number].global_batch_size)
            elif as_text(saved.get(key)) != as_text(value):
                field, before, now = _difference(key, saved.get(key), value)
                way_out = f"restore it, and edit chapters after chapters[{current}]"
                if number == current and saved.get("ramp_steps") is None:
                    way_out += ", or set its until and add a chapter"
                raise ResumeError(
                    f"chapters[{number}] ran with {field}={before!r:.300}, but this run has "
                    f"{now!r:.300}; what ran cannot change: {way_out}"
                )


def _difference(key: str, saved: Any, own: Any) -> tuple[str, Any, Any]:
    """Return the first part of a chapter's field that differs, and both its values."""
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return key, saved, own
    parts = sorted({*saved, *own}, key=str)
    part = next((part for part in parts if saved.get(part) != own.get(part)), "")
    before, now = saved.get(part), own.get(part)
    if key != "weights":
        return f"{key}.{part}", before, now
    return f"{key}[{part!r}]", *(_share_text(value) for value in (before, now))


def _share_text(share: Any) -> Any:
    """Return a share as a chapter has it: the same at its begin and its end, or a ramp."""
    if share is None:
        return "no share"
    is_constant = isinstance(share, list) and len(share) == 2 and share[0] == share[1]
    return share[0] if is_constant else share


def _check_length(number: int, position: int, steps: int | None, size: int) -> None:
    if steps is not None and steps * size < position:
        raise ResumeError(
            f"chapters[{number}] has {steps} steps, but {-(-position // size)} of them have begun; "
            f"give it at least {-(-position // size)}, or set until to as many tokens"
        )


def check_common(state: State, run: RunPlan, digests: Sequence[str]) -> None:
    """Check what all chapters have in common, and the contents of streams that ran."""
    saved = CHECKS.mapping("fingerprint", state.get("fingerprint"))
    own = run_fingerprint(run, digests, state["epoch"])
    own_streams = dict(zip(run.recipes[0].names, digests, strict=True))
    for name, digest in saved_streams(state).items():
        if name not in own_streams:
            raise ResumeError(
                f"stream {name!r} had a share in a chapter that ran, and this dataset has "
                f"{', '.join(map(repr, own_streams))}; pass it too, with no share it only rests"
            )
        if not is_same_stream(str(digest), own_streams[name]):
            raise ResumeError(
                f"since the state was saved stream {name!r} holds other data, lengths or columns; "
                "resume with what the run began with. If shards were appended, pass "
                f"Stream(name={name!r}, shards=slice(0, n)) and "
                f"Stream(name={name + '2'!r}, shards=slice(n, None)) with the former number n of "
                "shards"
            )
    ran = [name for name in saved_names(state) if name in saved_streams(state)]
    _check_order(ran, run.recipes[0].names)
    for key, value in own.items():
        if key != "streams" and as_text(saved.get(key)) != as_text(value):
            raise ResumeError(
                f"the run began with {key}={saved.get(key)!r:.200}, but this dataset has "
                f"{value!r:.200}; it holds for all chapters: set what the run began with"
            )


def _check_order(ran: Sequence[str], own: Sequence[str]) -> None:
    """Check that streams that ran are in the same order as then; others may be between."""
    if list(ran) != [name for name in own if name in ran]:
        raise ResumeError(
            f"the state was saved with streams in another order: {', '.join(map(repr, ran))}; "
            "pass them in that order, as it decides between streams that are due at the same time; "
            "new streams may stand anywhere"
        )


def decode_run_state(state: State, run: RunPlan) -> tuple[Progress, WalkState | None]:
    """Return where a state stands, and a state from which its walk resumes, by this run's streams.

    Without such a state, the run is walked from its start.
    """
    current, names = state["epoch"], saved_names(state)
    recipe = run.recipes[current]
    snapshots, text = snapshots_in(state), walk_in(state)
    walk = text_as_walk(text, recipe, len(names)) if text else None
    renumbering = Renumbering(names, recipe.names)
    if renumbering.is_needed:
        snapshots = renumbering.snapshots(snapshots, is_mixed=recipe.is_mixed)
    if walk is not None:
        unused = replace(run.start(0), limits=limits_at(run.recipes, current))
        walk = renumbering.walk(walk, unused, saved_streams(state))
    return Progress(epoch=current, position=state["position"], snapshots=snapshots), walk
