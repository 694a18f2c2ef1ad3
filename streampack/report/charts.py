"""The charts of a report, in a table: section, title, unit, and the function that draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from streampack.plan.recipe import Recipe
from streampack.report import drawing as draw
from streampack.report.bars import colour
from streampack.report.chapters import POINTS
from streampack.report.facts import RunFacts, stream_lengths
from streampack.report.nodes import BYTES, node_rows, shown_bytes
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM, TOTAL, Int64Array

HATCHES = ("//", "\\\\", "xx", "..", "--", "||", "++", "oo")
SHADES = (1, 0.66, 0.82)  # opacities of neighbouring documents
MOST_STREAMS = 10  # by name, and with a colour of their own; the others share a row
CUTS = {"split": (None, "area"), "truncated": ("///", "hatch"), "dropped": ("xxx", "cross")}
DOCUMENT = [STREAM, PASS, SAMPLE]


class Drawn(NamedTuple):
    """A figure, its numbers, and what its marks mean."""

    figure: Any
    rows: Sequence[Sequence[str]]
    """Its numbers, below the names of the columns; also its text alternative."""
    legend: Sequence[tuple[str, str]] = ()
    """The colour or the kind of each mark, and its meaning."""
    words: Mapping[str, str] = {}
    """What the title and the unit say of this run."""
    titles: Mapping[str, str] = {}
    """What patches say when the pointer is over them, by gid."""


def percent(share: float) -> str:
    """Return a share as text.

    >>> percent(0.25), percent(0.99981)
    ('25.0 %', '99.98 %')
    """
    return f"{100 * share:.{2 if 0.99 < share < 1 else 1}f} %"


class Group(NamedTuple):
    """A large stream, or all small ones together: a row of a chart."""

    name: str
    members: Int64Array
    colour: str


def groups_of(facts: RunFacts, most: int = MOST_STREAMS) -> list[Group]:
    """Return the streams as they are listed, or the `most` largest in order and then the rest."""
    streams, used = facts.engine.recipe.streams, facts.curves[2][-1]
    sizes = used * [stream.num_tokens for stream in streams]
    order = np.argsort(-sizes, kind="stable") if len(sizes) > most else np.arange(len(sizes))
    named = [short_name(streams[number].name) for number in order[:most]]
    groups = [Group(name, order[[at]], colour(at)) for at, name in enumerate(named)]
    rest = order[most:]
    name = f"{len(rest)} other{'s' * (len(rest) > 1)}"
    return groups + [Group(name, rest, draw.SERIES[1])] * (len(rest) > 0)


def short_name(name: str, most: int = 28) -> str:
    """Return a name, without its middle if it is long."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 :]}"


def _mixture(facts: RunFacts) -> Drawn:
    unit, lines, marks, found = facts.engine.recipe.target_unit, [], [], []
    rows = [["stream", "asked", "planned", *(["delivered"] if facts.delivered else [])]]
    for name, stream in facts.numbers["streams"].items():
        shares = [stream["target"], stream[f"share_{unit}"]]
        shares += [facts.delivered[name][f"share_{unit}"]] if name in facts.delivered else []
        rows.append([name, *map(percent, shares)])
        found.append(shares + [0.0] * (len(rows[0]) - len(rows[-1])))
    for group in groups_of(facts):
        marks.append(np.sum([found[number] for number in group.members], axis=0).tolist())
        words = zip(rows[0][1:], map(percent, marks[-1]), strict=True)
        text = "  ·  ".join(" ".join(word) for word in words)
        lines.append((group.name, [(marks[-1][1], group.colour, None)], text))
    figure, axes = draw.bars(draw.FULL, lines, 1.5 * np.max(marks), np.max(marks, axis=1).tolist())
    for number, (asked, _, *delivered) in enumerate(marks):
        axes.plot([asked] * 2, [number - 0.4, number + 0.4], color=draw.INK, lw=2)
        style = {"ms": 9, "color": draw.SURFACE, "mec": draw.INK, "mew": 2}
        axes.plot(delivered, [number] * len(delivered), "o", **style)
    legend = [("line", "asked"), ("area", "planned")]
    legend += [("dot", "delivered: measured by loader.stats()")] if facts.delivered else []
    return Drawn(figure, rows, legend, {"unit": unit})


def _run(facts: RunFacts) -> Drawn:
    recipe, (tokens, shares, passes) = facts.engine.recipe, facts.curves
    rows = [["stream", "share at the start", "share at the end", "tokens", "repeats"]]
    for number, stream in enumerate(recipe.streams):
        own = [percent(shares[0, number]), percent(shares[-1, number])]
        own.append(draw.shown(passes[-1, number] * stream.num_tokens))
        rows.append([stream.name, *own, f"{passes[-1, number]:.2f}"])
    words = {"unit": _unit_of(recipe, facts.num_chapters), "tokens": draw.shown(tokens[-1])}
    in_chapters = f" in {facts.num_chapters} chapters; tokens and repeats are expected ones"
    words["chapters"] = in_chapters if facts.num_chapters else ""
    legend = [(group.colour, group.name) for group in groups_of(facts)]
    return Drawn(_draw_run(facts), rows, legend, words)


def _unit_of(recipe: Recipe, num_chapters: int) -> str:
    # Chapters have the shares that were asked for, other runs what was planned, which is tokens.
    return recipe.target_unit if num_chapters else "tokens"


def _draw_run(facts: RunFacts) -> Any:
    recipe, (tokens, shares, passes) = facts.engine.recipe, facts.curves
    num_chapters, state_tokens = facts.num_chapters, facts.state_tokens
    figure, panels = draw.new_figure(draw.FULL, 560, rows=3, sharex=True, height_ratios=(3, 2, 2))
    upper, middle, lower = panels = panels[:, 0]
    groups, sizes = groups_of(facts), np.array([stream.num_tokens for stream in recipe.streams])
    parts, colours = [shares[:, g.members].sum(axis=1) for g in groups], [g.colour for g in groups]
    upper.stackplot(tokens, parts, colors=colours, ec=draw.SURFACE, lw=1.5)
    upper.set(ylim=(0, 1), xlim=(0, tokens[-1]))
    upper.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    for _, members, hue in groups:
        used = passes[:, members] @ sizes[members]
        middle.plot(tokens, used, color=hue, lw=2)
        lower.plot(tokens, used / max(sizes[members].sum(), 1), color=hue, lw=2)
    for axis in (middle.yaxis, lower.yaxis, lower.xaxis):
        draw.short_ticks(axis)
    edges = [0, *tokens[POINTS - 1 :: POINTS]]
    for number in range(num_chapters if num_chapters > 1 else 0):
        first, last = edges[number : number + 2]
        for panel in panels[1:]:
            panel.axvspan(first, last, color=draw.BAND, lw=0, zorder=0, alpha=number % 2)
        upper.axvline(first, color=draw.SURFACE, lw=2)
        if last - first > 0.045 * tokens[-1]:  # else its name is wider
            middle_of = (first + last) / 2
            draw.note(upper, f"chapter {number}", (middle_of, 1), (0, 6), axis="x", ha="center")
    for panel in panels if state_tokens is not None and state_tokens <= tokens[-1] else ():
        panel.axvline(state_tokens, color=draw.INK, lw=1.5, ls=(0, (4, 3)))
        draw.note(panel, "state" if panel is middle else "", (state_tokens, 0.9), (6, 0), axis="x")
    middle.set_ylim(0)
    lower.set_ylim(0)
    draw.label(upper, y=f"share of {_unit_of(recipe, num_chapters)}")
    draw.label(middle, y="tokens of each stream, in total")
    draw.label(lower, x="tokens of the run", y="repeats: how often a sample was used")
    return figure


def _length(facts: RunFacts) -> Drawn | str:
    recipe, found = facts.engine.recipe, stream_lengths(facts.engine.recipe)
    if not found:
        return "No stream has a length file; `streampack index` writes them."
    rows = [["stream", "median", "mean", "longest", "longer than a pack", "tokens in these"]]
    rows[0].append("shards read")
    for name, (lengths, num_read, num) in found.items():
        numbers = np.median(lengths), lengths.mean(), lengths.max()
        is_longer = lengths > recipe.longest(recipe.names.index(name))
        shares = is_longer.mean(), lengths[is_longer].sum() / lengths.sum()
        rows.append([name, *(f"{value:,.0f}" for value in numbers), *map(percent, shares)])
        rows[-1].append(f"{num_read:,} of {num:,}")
    lengths_of = {at: found[name][0] for at, name in enumerate(recipe.names) if name in found}
    groups = [(g, [lengths_of[n] for n in g.members if n in lengths_of]) for g in groups_of(facts)]
    drawn = [(group, np.concatenate(own)) for group, own in groups if own]
    columns = min(len(drawn), 4)
    lines = -(-len(drawn) // columns)
    shape, shared = (draw.FULL, 20 + 200 * lines, lines, columns), {"sharex": True, "sharey": True}
    figure, axes = draw.new_figure(*shape, **shared)
    most = max([2 * recipe.row_tokens, *(lengths.max() for _, lengths in drawn)])
    edges = np.geomspace(min(lengths.min() for _, lengths in drawn), most + 1, 40)
    for panel in axes.flat[len(drawn) :]:
        panel.set_visible(False)
    for panel, (group, lengths) in zip(axes.flat, drawn, strict=False):
        size, parts = recipe.longest(int(group.members[0])), lengths / lengths.sum()
        panel.hist(lengths, edges, weights=0 * parts + 1 / len(parts), color=group.colour)
        panel.hist(lengths, edges, weights=parts, histtype="step", color=draw.INK, lw=1.5)
        panel.axvline(size, color=draw.INK, lw=1.5, ls=(0, (4, 3)))
        panel.set(xscale="log", yticks=[])
        panel.xaxis.set_major_formatter(lambda value, _: draw.shown(value))
        panel.minorticks_off()
        draw.label(panel, y=group.name)
    legend = [("area", "share of the documents"), ("step", "share of the tokens")]
    legend.append(("dash", f"a pack: {recipe.shapes.longest[0]:,} tokens"))
    return Drawn(figure, rows, legend)


def _fill(facts: RunFacts) -> Drawn:
    tokens, room, *_ = facts.steps
    fill = tokens.sum(axis=1) / room
    figure, axes = draw.step_lines(draw.HALF, [fill], [draw.INK])
    low = min(0.98, float(fill.min()) - 0.01)
    axes.set_ylim(low, 1 + 0.02 * (1 - low))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.1f} %")
    rows = [["", "fill"], ["all steps", percent(tokens.sum() / room.sum())]]
    rows.append(["the step with the least", percent(fill.min())])
    return Drawn(figure, rows)


def _documents(facts: RunFacts) -> Drawn:
    series = dict(zip(("documents", "effective"), facts.steps[2:], strict=True))
    figure, axes = draw.step_lines(draw.HALF, list(series.values()), [draw.SERIES[1], draw.INK])
    axes.set_ylim(0)
    draw.short_ticks(axes.yaxis)
    rows = [["", "mean of a step"], *([key, f"{of.mean():,.1f}"] for key, of in series.items())]
    return Drawn(figure, rows, [(draw.SERIES[1], "documents"), (draw.INK, "effective documents")])


def _cuts(facts: RunFacts) -> Drawn:
    rows, lines = [["stream", "documents", *CUTS]], []
    streams = list(facts.numbers["streams"].items())
    rows += [[name, *(f"{own[key]:,}" for key in ("samples", *CUTS))] for name, own in streams]
    for name, members, hue in groups_of(facts):
        sums = {key: sum(streams[at][1][key] for at in members) for key in ("samples", *CUTS)}
        whole = max(sums["samples"] + sums["dropped"], 1)
        parts = [(sums[kind] / whole, hue, hatch) for kind, (hatch, _) in CUTS.items()]
        lines.append((name, parts, percent(sum(part[0] for part in parts))))
    figure, _ = draw.bars(draw.HALF, lines)
    return Drawn(figure, rows, [(mark, kind) for kind, (_, mark) in CUTS.items()])


def _straggler(facts: RunFacts) -> Drawn | str:
    times = facts.numbers["straggler"]
    if facts.numbers["ranks"] == 1:
        return "One rank trains, so none waits for another."
    if times is None:
        return "No global batch is a whole number of steps: the straggler factor is not known."
    names = ("as planned", "with balance" if times["is_dealt"] else "with balance=Balance()")
    found = dict(zip(names, (times["planned"], times["dealt"]), strict=True))
    lines = [(name, [(at - 1, draw.SERIES[0], None)], f"{at:.3f}") for name, at in found.items()]
    figure, _ = draw.bars(draw.HALF, lines)
    return Drawn(figure, [["packs", "straggler factor"], *([line[0], line[2]] for line in lines)])


def documents_again(packs: Sequence[Int64Array]) -> dict[tuple[int, ...], int]:
    """Number the documents that have pieces in several of these packs, in order."""
    each = [dict.fromkeys(map(tuple, pack[:, DOCUMENT].tolist())) for pack in packs]
    keys = [key for pack in each for key in pack]
    several = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    return {key: number for number, key in enumerate(several)}


def _packs(facts: RunFacts) -> Drawn:
    packs, names = facts.packs, facts.engine.recipe.names
    size = max(int(pack[:, LENGTH].sum()) for pack in packs)
    size = max(size, facts.engine.recipe.row_tokens)
    figure, axes = draw.new_figure(draw.FULL, 60 + 26 * len(packs))
    axes, again, titles, groups = axes[0, 0], documents_again(packs), {}, groups_of(facts)
    hues = {number: group.colour for group in groups for number in group.members.tolist()}
    axes.grid(visible=False)
    axes.barh(range(len(packs)), size, 0.78, color=draw.BAND)
    rows = [["pack", "documents", "in other packs too", "fill"]]
    for number, pack in enumerate(packs):
        left, marks = 0, []
        for place, row in enumerate(pack.tolist()):
            document = again.get(tuple(row[column] for column in DOCUMENT))
            stop, gid = row[START] + row[LENGTH], f"piece-{number}-{place}"
            part = f"{row[START]:,} to {stop:,} of {row[TOTAL]:,}"
            mark = "" if row[LENGTH] == row[TOTAL] else "…"
            style: dict[str, Any] = {"alpha": SHADES[place % len(SHADES)]}
            if document is not None:
                style, mark = {"hatch": HATCHES[document % 8]}, ascii_uppercase[document % 26]
                marks.append(mark)
            if mark and row[LENGTH] > size / 4:
                mark = f"{mark.strip('…')}  {part}".strip()
            style |= {"gid": gid, "color": hues[row[STREAM]], "ec": draw.SURFACE, "lw": 1}
            axes.barh(number, row[LENGTH], 0.78, left, **style)
            if mark and row[LENGTH] > size / 60:
                box = {"boxstyle": "round,pad=0.2", "fc": draw.SURFACE, "lw": 0}
                axes.text(left + row[LENGTH] / 2, number, mark, ha="center", va="center", bbox=box,
                          color=draw.INK, fontsize=draw.SIZE - 1, weight="bold")  # fmt: skip
            titles[gid] = escape(f"{names[row[STREAM]]}, sample {row[SAMPLE]:,}: tokens {part}")
            left += row[LENGTH]
        rows.append([f"{number}", f"{len(pack)}", " ".join(marks), percent(left / size)])
        draw.note(axes, f"{len(pack)}", (1, number), (8, 0), axis="y", va="center")
    axes.set(xlim=(0, size), ylim=(len(packs) - 0.4, -0.6))
    axes.set_yticks(range(len(packs)), [f"pack {number}" for number in range(len(packs))])
    draw.note(axes, "documents", (1, -0.6), (8, 6), axis="y")
    draw.short_ticks(axes.xaxis)
    draw.label(axes, x="token of the pack")
    legend = [(group.colour, group.name) for group in groups]
    legend += [("hatch", "one document in several packs: the same hatch and letter")]
    legend += [("dots", "a piece of a cut document: the box names its tokens")]
    legend.append(("empty", "padding"))
    words = {"packs": f"{len(packs)}", "tokens": f"{size:,}"}
    return Drawn(figure, rows, legend, words, titles)


def _nodes(facts: RunFacts) -> Drawn:
    nodes = facts.nodes
    keys = [key for key in BYTES if any(node[key] for node in nodes)]
    keys = keys[1:] if "fetched_bytes" in keys else keys
    figure, axes = draw.new_figure(draw.FULL, 240)
    axes, width = axes[0, 0], min(0.75, len(nodes) / 12) / max(len(keys), 1)
    for number, key in enumerate(keys):
        at = np.arange(len(nodes)) + (number - (len(keys) - 1) / 2) * width
        axes.bar(at, [node[key] for node in nodes], width * 0.9, color=draw.SERIES[number])
    axes.set(xlim=(-0.6, len(nodes) - 0.4), xticks=range(0, len(nodes), -(-len(nodes) // 16)))
    axes.yaxis.set_major_formatter(lambda value, _: shown_bytes(value))
    axes.locator_params(axis="y", nbins=5)
    draw.label(axes, x="node")
    legend = [(draw.SERIES[number], BYTES[key]) for number, key in enumerate(keys)]
    how = "exactly" if facts.is_whole else "expected of the whole run or epoch"
    return Drawn(figure, node_rows(nodes), legend, {"how": how})


Specs: TypeAlias = Mapping[str, tuple[str, str, Callable[[RunFacts], Drawn | str]]]
# Sections with their leads; by key, each chart's title, its unit, and what draws it. It returns a
# text if there is nothing to draw.
SECTIONS: Mapping[tuple[str, str], Specs] = {
    ("Mixture", "What the config asks for, and what the plan gives.{part}{delivered}"): {
        "mixture": (
            "The mixture as asked, planned and delivered",
            "share of {unit}, over the steps planned",
            _mixture,
        ),
        "run": (
            "Each stream over the run",
            "shares of {unit}, tokens and repeats, over {tokens} tokens{chapters}",
            _run,
        ),
    },
    ("Lengths", "Documents longer than a pack are cut; shorter ones share packs."): {
        "lengths": ("How long documents are", "tokens of a document, logarithmic", _length)
    },
    ("Packing", "How full packs are, and how much a step sees.{part}"): {
        "fill": ("Fill", "real tokens in the slots of packs, by step", _fill),
        "documents": (
            "Documents in a step",
            "number by step; effective: 1 / sum of (share of tokens)²",
            _documents,
        ),
        "cuts": ("Cut documents", "share of a stream's documents", _cuts),
        "straggler": (
            "Waiting for the slowest rank",
            "time of a global batch over the ideal: straggler factor",
            _straggler,
        ),
    },
    ("Packs", "Each row is a pack, each block a document."): {
        "packs": ("The first {packs} packs", "packs of {tokens} tokens, in order", _packs)
    },
    ("Nodes", "The bytes of shards that each node needs."): {
        "nodes": ("What each node reads and caches", "bytes, {how}", _nodes)
    },
    ("Time", "Planning needs no clock, so this is measured or not known."): {
        "waits": ("", "", lambda facts: facts.waits),
    },
}
