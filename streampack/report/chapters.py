"""What a run of chapters will give, before it runs: a table, and a picture of its mixture.

Slots follow from the shares alone: the plan meets them to within one choice of a stream. Tokens and
passes are expected: they assume full packs and, where shares count samples, samples of mean length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from streampack.errors import ConfigError
from streampack.plan.chapter_plan import ChapterPlan
from streampack.plan.chapter_recipes import chapter_record
from streampack.plan.comparison import differences, flat
from streampack.plan.recipe import Recipe
from streampack.plan.repeats import taken_tokens
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.runtime.resumable import engine_of
from streampack.types import State

OPEN_STEPS = 1000  # steps of a chapter without an end that tables and pictures show
POINTS = 65  # places of a chapter at which a picture shows shares and passes


def describe_run(dataset: PackedStreamingDataset, state: State | None = None) -> dict[str, Any]:
    """Return what a run of chapters will deliver.

    Args:
        dataset: A dataset with chapters, which is not changed.
        state: A state of the run to compare with, or None at its beginning.

    Returns:
        `chapters`, a list with a dict for each: `first_step`, `steps` (None: it has no end),
        `tokens` (slots times max_seq_len), `max_seq_len`, `batch_size`, `global_batch_size`,
        `streams` (by name `begin` and `end`, its shares; `tokens`, what it is expected to deliver
        in full packs; `passes`, how often it was used by then), `changes` (what differs from the
        chapter before) and `edits` (what differs from what the state knows). Steps and tokens of
        chapters are exact. `stands_at`: chapter and step of the state; None without one.

    Raises:
        ConfigError: If the dataset has no chapters.
        ResumeError: If the state does not belong to the run. Names the chapter and the field.
    """
    engine = engine_of(dataset)
    if not engine.run.chapters:
        raise ConfigError(
            "the config has no chapters, so there is nothing to plan over a run; add a chapters "
            "section, or use `streampack simulate`"
        )
    known: Sequence[Mapping[str, Any]] = []
    stands_at = None
    if state is not None:
        number, position = engine.check_state(state)
        known = state["chapters"]
        size = engine.run.recipes[number].global_batch_size
        stands_at = {"chapter": number, "step": position // size}
    chapters: list[dict[str, Any]] = []
    first_step, used = 0, [Fraction(0)] * len(engine.recipe.streams)
    for number, recipe in enumerate(engine.run.recipes):
        chapter = _describe(recipe, engine.run.chapters[number], used)
        chapter |= {
            "first_step": first_step,
            "batch_size": engine.run.view(number).batch_size,
            "changes": _changes(engine.run.recipes[number - 1], recipe) if number else [],
            "edits": _edits(known, number, recipe) if known else [],
        }
        chapters.append(chapter)
        first_step += chapter["steps"] or 0
    return {"chapters": chapters, "stands_at": stands_at}


def _describe(recipe: Recipe, plan: ChapterPlan, used: list[Fraction]) -> dict[str, Any]:
    """Describe a chapter; add what it takes of each stream to `used`, in tokens."""
    slots, shown = plan.num_slots, _shown_slots(recipe, plan)
    streams = {}
    for number, tokens in enumerate(_taken(recipe, shown)):
        stream = recipe.streams[number]
        used[number] += tokens
        if plan.uses(number) or used[number]:
            streams[stream.name] = {
                "begin": float(plan.begin[number]),
                "end": float(plan.shares_at(plan.fraction_at(shown))[number]),
                "tokens": int(tokens),
                "passes": float(used[number] / max(stream.num_tokens, 1)),
            }
    size = recipe.global_batch_size
    return {
        "steps": None if slots is None else slots // size,
        "tokens": None if slots is None else slots * recipe.packing.max_seq_len,
        "max_seq_len": recipe.packing.max_seq_len,
        "global_batch_size": size,
        "streams": streams,
    }


def _shown_slots(recipe: Recipe, plan: ChapterPlan) -> int:
    slots = plan.num_slots
    return OPEN_STEPS * recipe.global_batch_size if slots is None else slots


def _taken(recipe: Recipe, slots: int) -> list[Fraction]:
    return [taken_tokens(recipe, number, slots) for number in range(len(recipe.streams))]


def chapters_view(described: Mapping[str, Any]) -> Group:
    """Return a run's table, with notes, for a terminal."""
    notes = ["steps and tokens are exact; passes are expected, for packs that are full"]
    if described["stands_at"] is not None:
        place = described["stands_at"]
        notes.append(f"the state is in chapter {place['chapter']}, at its step {place['step']}")
    return Group(chapter_table(described), Text("\n".join(notes)))


def _changes(before: Recipe, after: Recipe) -> list[str]:
    old, new = chapter_record(before), chapter_record(after)
    of_sizes = ("global_batch_size", "lane_run", "packing")
    found = differences(flat(old), flat(new))
    changes = [str(path[-1]) for path, *_ in found if path[0] in of_sizes]
    joins = [name for name in new["weights"] if name not in old["weights"]]
    leaves = [name for name in old["weights"] if name not in new["weights"]]
    return changes + [f"+{name}" for name in joins] + [f"-{name}" for name in leaves]


def _edits(known: Sequence[Mapping[str, Any]], number: int, recipe: Recipe) -> list[str]:
    if number >= len(known):
        return ["new"]
    found = differences(flat(known[number]), flat(chapter_record(recipe)))
    return list(dict.fromkeys(str(path[0]) for path, *_ in found))


def chapter_table(described: Mapping[str, Any]) -> Table:
    """Return a table of the chapters of a run, one row for each stream of each chapter."""
    table = Table(title="chapters", title_justify="left")
    for name in ("chapter", "steps", "tokens", "pack", "global batch"):
        table.add_column(name, justify="right")
    table.add_column("stream")
    for name in ("share", "of tokens", "passes"):
        table.add_column(name, justify="right")
    table.add_column("changes")
    for number, chapter in enumerate(described["chapters"]):
        first, steps = chapter["first_step"], chapter["steps"]
        notes = ", ".join([*chapter["changes"], *(f"edited: {e}" for e in chapter["edits"])])
        head = [
            str(number),
            f"{first:,}-{'end' if steps is None else f'{first + steps:,}'}",
            "" if chapter["tokens"] is None else f"{chapter['tokens']:,}",
            f"{chapter['max_seq_len']:,}",
            f"{chapter['global_batch_size']:,}",
        ]
        whole = sum(stream["tokens"] for stream in chapter["streams"].values())
        for name, stream in chapter["streams"].items():
            share = f"{stream['begin']:.3f}"
            if stream["end"] != stream["begin"]:
                share += f" to {stream['end']:.3f}"
            part = f"{stream['tokens'] / max(whole, 1):.1%}"
            table.add_row(*head, name, share, part, f"{stream['passes']:.2f}", notes)
            head, notes = [""] * 5, ""
        table.add_section()
    return table


def run_curves(engine: PlanEngine) -> tuple[Any, Any, Any]:
    """Return tokens, shape (n,), and shares and passes of each stream there, shape (n, streams)."""
    tokens, shares, passes = [], [], []
    begin, used = 0, [Fraction(0)] * len(engine.recipe.streams)
    for recipe, plan in zip(engine.run.recipes, engine.run.chapters, strict=True):
        shown = _shown_slots(recipe, plan)
        for point in range(POINTS):
            at = shown * point // (POINTS - 1)
            tokens.append(begin + at * recipe.packing.max_seq_len)
            shares.append([float(share) for share in plan.shares_at(plan.fraction_at(at))])
            rows = zip(used, _taken(recipe, at), recipe.streams, strict=True)
            passes.append([float(old + new) / max(s.num_tokens, 1) for old, new, s in rows])
        used = [old + new for old, new in zip(used, _taken(recipe, shown), strict=True)]
        begin += shown * recipe.packing.max_seq_len
    return np.array(tokens, np.float64), np.array(shares), np.array(passes)
