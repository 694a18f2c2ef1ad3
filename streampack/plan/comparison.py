"""The first field in which two runs differ, for loads, `diff` and ranks, and when it may change.

::

    a state and a run    fingerprint, and records of the chapters that began --.
    runs A and B         fingerprint, and records of all chapters -------------+--> {path: value}
    ranks 0, 1, ...      what each plans from, or asks for --------------------'          |
                                            the first path with two values <--------------'

`FIELDS` says when a run may change a field that its states record, and what to do where it may not.
Ranks, workers and batch sizes are not among them, and may change at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from streampack.errors import ResumeError

Path: TypeAlias = tuple[str | int, ...]
Values: TypeAlias = dict[Path, Any]
CHAPTERS = "chapters"
PACK_LENGTHS = "max_seq_len_of_streams"
MOST_LEVELS = 5  # what is nested deeper is compared as a whole


NEVER = "never"
LATER = "in chapters that have not begun"
RUNNING = "in the running chapter too, if no share changes in it"


class Field(NamedTuple):
    """What to do where a field differs, and when a run may change it."""

    way_out: str
    when: str = NEVER


TOKENS = (
    "they are those of each stream, from its lengths if they are known, or else from its bytes: "
    "restore the length files, and lengths= and index= of texts"
)
EDIT = "what ran cannot change: restore it, and edit chapters after chapters[{running}]"
FIELDS = {
    "": Field("it is fixed for the whole run: resume with the saved value"),
    "num_lanes": Field("a run keeps its num_lanes: set {saved}, or omit it"),
    "streams": Field("resume with what the run began with"),
    "order": Field("pass them in that order; in a run of chapters, add others anywhere"),
    "weights": Field(
        "resume with the run's proportion, repeat or choose of each stream, epoch_size and "
        "weight_unit"
    ),
    "split_payloads": Field("resume with the run's Payloads(..., split=)"),
    "length_fns": Field("resume with the run's Payloads(..., cost=), or with none, as it had"),
    "on_bad_sample": Field("resume with the run's on_bad_row: 'error', or 'skip' or a number"),
    "pack_shuffle": Field("resume with Order(pack_shuffle={first})"),
    PACK_LENGTHS: Field("resume with the max_seq_len of each Stream that the run began with"),
    "tokens": Field(TOKENS),
    "chapters.": Field(EDIT, LATER),
    "chapters.steps": Field(EDIT, RUNNING),
    "chapters.tokens": Field(TOKENS, LATER),
    "chapters.streams": Field(
        "resume with what the run began with; if shards were appended, pass Stream(Shards(..., "
        "only=slice(0, n)), name={name!r}) and Stream(Shards(..., only=slice(n, None)), "
        "name='{name}2') with the former number n of shards"
    ),
}


class Difference(NamedTuple):
    """A field with two values, None where it is missing."""

    path: Path
    first: Any
    second: Any


def flat(value: Any, path: Path = ()) -> Values:
    """Return the values inside of a JSON value by path; lists of plain values stay whole.

    >>> flat({"seed": 3, "chapters": [{"weights": {"web": [1, 2]}}]})
    {('seed',): 3, ('chapters', 0, 'weights', 'web'): [1, 2]}
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or len(path) == MOST_LEVELS:
        return {path: value}
    found: Values = {}
    for key, each in value.items():
        found |= flat(each, (*path, key))
    return found


def name_of(path: Path) -> str:
    """Return a path as messages name it.

    >>> name_of(("chapters", 1, "weights", "web"))
    "chapters[1].weights['web']"
    """
    name = ""
    for before, key in zip(("", *path), path, strict=False):
        is_key = isinstance(key, int) or before in ("streams", "weights")
        name += f"[{key!r}]" if is_key else f".{key}"
    return name.removeprefix(".")


def differences(first: Values, second: Values) -> Iterator[Difference]:
    """Yield the fields with two values, in the order of the first."""
    for path in {**first, **second}:
        if first.get(path) != second.get(path):
            yield Difference(path, first.get(path), second.get(path))


def run_values(
    fingerprint: Mapping[str, Any], names: Sequence[str], chapters: Sequence[Any] = ()
) -> Values:
    """Return what determines the packs of a run by path; the lengths of chapters are their last.

    `fingerprint` has the digests of the streams with these `names`, and `chapters` are records.
    """
    values = dict(fingerprint)
    streams = values.pop("streams")
    if isinstance(streams, list):
        own = {"streams": streams, "weights": values.pop("weights")}
        values = {key: dict(zip(names, each, strict=False)) for key, each in own.items()} | values
        return flat(values | {"order": list(names)})
    records = []
    for each in chapters:
        shown = {"streams": {name: streams.get(name) for name in each["weights"]}}
        last = {key: each.get(key) for key in ("tokens", "steps")}
        own = {key: value for key, value in each.items() if key not in last}
        records.append(own | shown | last)
    return flat(values | {CHAPTERS: dict(enumerate(records)), "order": list(names)})


def shown_value(path: Path, value: Any) -> Any:
    """Return a value as messages show it: a share that does not change once, not twice."""
    if path[0] != CHAPTERS or "weights" not in path:
        return value
    if value is None:
        return "no share"
    is_constant = isinstance(value, list) and len(value) == 2 and value[0] == value[1]
    return value[0] if is_constant else value


def check_same(
    saved: Values, own: Values, names: Sequence[str] = (), *, running: int | None = None
) -> None:
    """Refuse a state of another run, with the first field that differs and may not.

    Both are `run_values`, in a run of chapters up to the `running` one; the dataset's streams have
    these `names`.
    """
    key: Path = (CHAPTERS, -1 if running is None else running)
    # The length of a chapter with a ramp decides its shares, and whole passes have no other end.
    fixed = ((*key, name) for name in ("ramp_steps", "passes"))
    is_fixed = any(each.get(path) is not None for path in fixed for each in (saved, own))
    for found in differences(saved, own):
        kind = f"{CHAPTERS}." if _is_of_chapter(found.path) else ""
        way_out, when = FIELDS.get(f"{kind}{found.path[2 if kind else 0]}", FIELDS[kind])
        is_open = found.path[:2] == key and not is_fixed
        if is_open and when == RUNNING:
            continue
        first = found.first[0] if isinstance(found.first, list) and found.first else found.first
        values = {"saved": found.first, "first": first, "running": running, "name": found.path[-1]}
        end = "set its until and add a chapter" if kind else "start again without the state"
        end = f", or {end}" if is_open or not kind else ""
        others = [each for each in differences(saved, own) if each.path[:-1] == found.path[:-1]]
        raise ResumeError(f"{_difference(found, others, names)}; {way_out.format(**values)}{end}")


def _is_of_chapter(path: Path) -> bool:
    return path[0] == CHAPTERS and len(path) > 2


def _difference(found: Difference, others: Sequence[Difference], names: Sequence[str]) -> str:
    """Return how a field differs, and which of the `others` differ too, if it is a stream."""
    path, saved, own = found
    if path == ("order",):
        quoted = ", ".join(map(repr, saved))
        return f"the state was saved with this dataset's streams in another order: {quoted}"
    if path[-2:-1] == ("streams",) and None not in (saved, own):
        is_same = ":" in str(saved) and all(_has_same_data(each) for each in others)
        what = "it has other data, or another column of it"
        if is_same:
            what = "its length file, or the table of a token file, was rewritten with other lengths"
        own_names = [str(each.path[-1]) for each in others if None not in each[1:]]
        quoted = " and ".join(f"{name!r} (streams[{names.index(name)}])" for name in own_names)
        return f"stream {quoted} has changed since the state was saved: {what}"
    before, now = shown_value(path, saved), shown_value(path, own)
    if _is_of_chapter(path):
        return (
            f"chapters[{path[1]}] ran with {name_of(path[2:])}={before!r:.300}, but this run has "
            f"{now!r:.300}"
        )
    return (
        f"the state was saved with {name_of(path)}={before!r:.400}, but this dataset has "
        f"{name_of(path)}={now!r:.400}"
    )


def _has_same_data(found: Difference) -> bool:
    first, second = (str(value).partition(":")[0] for value in found[1:])
    return first == second
