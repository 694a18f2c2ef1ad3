"""How a saved state differs from the run that it is loaded into, and what to do about it.

The checks here say more than that a field of the fingerprint differs: which stream has other
data, which chapter ran with other shares, which sizes would work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack._state import FieldChecks, canonical_json, field_difference
from streampack.errors import ResumeError
from streampack.plan.chapter_recipes import chapter_record
from streampack.plan.recipe import Recipe
from streampack.plan.snapshots import MAX_INTEGER
from streampack.types import State

RETURNED = "load what state_dict() or state_after(batch) returned"
CHECKS = FieldChecks("the state's ", f"{RETURNED}, unchanged")
PACK_LENGTHS = "max_seq_len_of_streams"


def are_same_streams(saved: Any, own: list[str]) -> bool:
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


def difference(key: str, saved: Any, own: Any, recipe: Recipe) -> str:
    """Describe the difference in a fingerprint field, and a fix."""
    if recipe.chapter is not None:
        way_out = "it holds for all chapters: set what the run began with"
        return field_difference(key, saved, own, way_out)
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
    if sorted(map(canonical_json, saved)) == sorted(map(canonical_json, own)):
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
            "length file was rewritten; put back the file that the run began with, or start "
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
        if canonical_json(before) != canonical_json(now)
    ]
    return (
        f"the state was saved with {'; '.join(changed)}: resume with the run's proportion, repeat "
        "or choose of each stream, epoch_size and weight_unit, or start again without the state"
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def check_streams_by_name(
    ran: Mapping[str, Any], saved: Sequence[str], own: Mapping[str, str]
) -> None:
    """Check the streams that had a share in a chapter that ran: they have the same contents.

    They are in the same order as then, and others may be between. `ran` and `own` are digests by
    name; `saved` are the names of all streams of the state, in its order.
    """
    for name, digest in ran.items():
        if name not in own:
            raise ResumeError(
                f"stream {name!r} had a share in a chapter that ran, and this dataset has "
                f"{', '.join(map(repr, own))}; pass it too, with no share it only rests"
            )
        if not is_same_stream(str(digest), own[name]):
            raise ResumeError(
                f"since the state was saved stream {name!r} holds other data, lengths or columns; "
                "resume with what the run began with. If shards were appended, pass "
                f"Stream(name={name!r}, shards=slice(0, n)) and "
                f"Stream(name={name + '2'!r}, shards=slice(n, None)) with the former number n of "
                "shards"
            )
    order = [name for name in saved if name in ran]
    if order != [name for name in own if name in order]:
        raise ResumeError(
            "the state was saved with streams in another order: "
            f"{', '.join(map(repr, order))}; pass them in that order, as it decides between "
            "streams that are due at the same time; new streams may stand anywhere"
        )


def check_past(records: Sequence[dict[str, Any]], recipes: Sequence[Recipe], state: State) -> None:
    """Check that the chapters before a state's position are those of this run.

    The ResumeError names the chapter and the field that differs.
    """
    current = state["epoch"]
    position = CHECKS.integer("position", state.get("position"), 0, MAX_INTEGER)
    if current >= len(recipes):
        raise ResumeError(
            f"the state lies in chapters[{current}], but this run has {len(recipes)} chapters; "
            "keep those that the run began, and add others after them"
        )
    for number in range(current + 1):
        saved, own = records[number], chapter_record(recipes[number])
        for key, value in own.items():
            # The running chapter may get another length, as long as no share depends on it.
            is_length = key == "steps" and number == current
            if is_length and own["ramp_steps"] is None and saved.get("ramp_steps") is None:
                _check_length(number, position, value, recipes[number].global_batch_size)
            elif canonical_json(saved.get(key)) != canonical_json(value):
                field, before, now = _part_that_differs(key, saved.get(key), value)
                way_out = f"restore it, and edit chapters after chapters[{current}]"
                if number == current and saved.get("ramp_steps") is None:
                    way_out += ", or set its until and add a chapter"
                raise ResumeError(
                    f"chapters[{number}] ran with {field}={before!r:.300}, but this run has "
                    f"{now!r:.300}; what ran cannot change: {way_out}"
                )


def _part_that_differs(key: str, saved: Any, own: Any) -> tuple[str, Any, Any]:
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
