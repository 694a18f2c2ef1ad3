"""A report: one HTML file with everything in it, for those who know the run or not."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from streampack._extras import import_extra
from streampack._paths import replaced
from streampack.planned.dataset import PackedStreamingDataset
from streampack.report.charts import MOST_STREAMS, SECTIONS, Drawn, Specs, groups_of, percent
from streampack.report.drawing import FULL, HALF, VARIABLES, as_svg, shown
from streampack.report.facts import RunFacts, run_facts
from streampack.types import State


def write_report(
    dataset: PackedStreamingDataset,
    path: str | os.PathLike[str],
    *,
    title: str = "streampack",
    state: State | None = None,
    stats: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> None:
    """Write a report on a run as one HTML file, which needs no network.

    Args:
        dataset: The dataset, which is not changed. Its world gives ranks and nodes.
        path: The file to write.
        title: The name of the run.
        state: A state of the run, to show where it stands.
        stats: The result of ``loader.stats()``, to show what was delivered and waited for.
        steps: Batches per rank to plan, at most an epoch or the run. None: about a million pieces
            of documents.

    Raises:
        ConfigError: If matplotlib is not installed, or an epoch has no batch.
        ResumeError: If the state does not belong to the run.
    """
    import_extra("matplotlib", "plots", "a report")
    facts = run_facts(dataset, state, stats, steps)
    page = Template(files("streampack.report").joinpath("page.html").read_text(encoding="utf-8"))
    text = page.substitute(
        title=escape(title),
        about=escape(_about(facts)),
        tiles="".join(
            f"<li><span>{name}</span><strong>{value}</strong><small>{note}</small></li>"
            for name, value, note in _tiles(facts)
        ),
        sections="\n".join(_section(facts, *head, specs) for head, specs in SECTIONS.items()),
        digest=dataset.digest,
    )
    with replaced(Path(path)) as part:
        part.write_text(text, encoding="utf-8")


def _about(facts: RunFacts) -> str:
    recipe, world, unit = facts.engine.recipe, facts.engine.world, facts.engine.recipe.target_unit
    own = [stream[f"share_{unit}"] for stream in facts.numbers["streams"].values()]
    parts = (
        f"{100 * sum(own[at] for at in g.members):.0f} % {g.name}" for g in groups_of(facts, 4)
    )
    return (
        f"{unit.capitalize()}: {', '.join(parts)}\nPacks of {recipe.row_tokens:,} tokens  ·  "
        f"global batches of {recipe.global_batch_size:,}  ·  ranks: {world.num_ranks:,}, "
        f"nodes: {world.num_nodes:,}"
    )


def _tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    numbers, (tokens, _, documents, effective) = facts.numbers, facts.steps
    streams, times = numbers["streams"].values(), numbers["straggler"]
    split, samples = (sum(each[key] for each in streams) for key in ("split", "samples"))
    whole = "the run" if facts.num_chapters else "an epoch"
    is_part = not (facts.is_whole or facts.num_chapters)
    tiles = [
        ("Tokens", shown(facts.curves[0][-1]), "planned" if is_part else f"in {whole}"),
        (
            "Steps planned",
            f"{len(tokens):,}",
            f"{'all' if facts.is_whole else 'the first'} of {whole}",
        ),
        ("Fill", percent(numbers["fill"]), f"{numbers['packs']:,} packs"),
        ("Effective documents", f"{effective.mean():,.0f}", f"a step, of {documents.mean():,.0f}"),
        ("Split documents", percent(split / max(samples, 1)), f"{split:,} of them"),
    ]
    if times is not None and numbers["ranks"] > 1:
        factor = times["dealt" if times["is_dealt"] else "planned"]
        tiles.append(("Straggler factor", f"{factor:.3f}", "1 is ideal"))
    return tiles


def _section(facts: RunFacts, name: str, lead: str, specs: Specs) -> str:
    part = "" if facts.is_whole else f" Planned: {len(facts.steps[0]):,} steps."
    delivered = "" if facts.delivered else " What was delivered is not known: give statistics."
    lead, inside = escape(lead.format(part=part, delivered=delivered)), []
    last, names = groups_of(facts)[-1], facts.engine.recipe.names
    others = last.name, [names[at] for at in last.members if len(names) > MOST_STREAMS]
    for key, (title, unit, draw) in specs.items():
        drawn = draw(facts)
        if isinstance(drawn, str):
            inside.append(f'<p class="note">{escape(drawn)}</p>' if drawn else "")
            continue
        width = HALF if len(specs) > 2 else FULL
        inside.append(_figure(key, title.format(**drawn.words), unit, drawn, width, others))
    charts = f'<p class="lead">{lead}</p><div class="charts">{"".join(inside)}</div>'
    return f"<section><h2>{name}</h2>{charts}</section>"


def _figure(
    key: str, title: str, unit: str, drawn: Drawn, width: int, others: tuple[str, Collection[str]]
) -> str:
    """Return a chart with its words, and tables to open: the streams that share a row, and all.

    The text of the table of all is also the picture's.
    """
    unit = unit.format(**drawn.words)
    names, *rows = drawn.rows
    said = [", ".join(" ".join(pair) for pair in zip(names, row, strict=True)) for row in rows]
    text = escape(f"{title}; {unit}. {'; '.join(said)}.", quote=True)
    svg = as_svg(drawn.figure, key, text, drawn.titles)
    legend = "".join(f"<li>{_swatch(mark)}{escape(meaning)}</li>" for mark, meaning in drawn.legend)
    inside = [row for row in rows if row[0] in others[1]]
    opens = _table(others[0], names, inside) if inside else ""
    return (
        f'<figure id="{key}" class="w{width}">'
        f"<figcaption><h3>{escape(title)}</h3><p>{escape(unit)}</p></figcaption>"
        f'<ul class="legend">{legend}</ul><div class="plot">{svg}</div>'
        f"{opens}{_table(f'All numbers ({len(rows):,})', names, rows)}</figure>"
    )


def _table(summary: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = [[escape(cell) for cell in row] for row in [names, *rows]]
    body = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
    table = f"<table><tr><th>{'</th><th>'.join(head)}</th></tr>{body}</table>"
    return f'<details><summary>{summary}</summary><div class="table">{table}</div></details>'


def _swatch(mark: str) -> str:
    if mark in VARIABLES:
        return f'<i style="background:var(--{VARIABLES[mark]})"></i>'
    return f'<i class="{mark}"></i>'
