"""A report: one HTML file with everything in it, for those who know the run or not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from streampack._extras import import_extra
from streampack._paths import replaced
from streampack.planned.dataset import PackedStreamingDataset
from streampack.report import charts
from streampack.report.charts import Chart, percent
from streampack.report.drawing import VARIABLES, as_svg, shown
from streampack.report.facts import RunFacts, run_facts
from streampack.types import State


def write_report(
    dataset: PackedStreamingDataset,
    path: str | os.PathLike[str],
    *,
    title: str = "streampack",
    state: State | None = None,
    stats: Mapping[str, Any] | None = None,
    times: Mapping[str, float] | None = None,
    steps: int | None = None,
) -> None:
    """Write a report on a run as one HTML file, which needs no network.

    Args:
        dataset: The dataset; its world gives ranks and nodes. It stays as it is.
        path: The file to write.
        title: The name of the run.
        state: A state of the run: what was delivered by then, where that takes seconds to plan.
        stats: The result of ``loader.stats()``: what was delivered and waited for, as measured.
        times: Seconds of the training process, by what they were spent on.
        steps: Batches per rank to plan, at most an epoch or the run. None: about a million pieces
            of documents.

    Raises:
        ConfigError: If matplotlib is not installed, or an epoch has no batch.
        ResumeError: If the state does not belong to the run.
    """
    import_extra("matplotlib", "plots", "a report")
    facts = run_facts(dataset, state, stats, steps)
    page = Template(files("streampack.report").joinpath("page.html").read_text(encoding="utf-8"))
    sections = _sections(facts, [*_measured(stats, times)])
    text = page.substitute(
        title=escape(title),
        about=escape(_about(facts)),
        tiles="".join(
            f"<li><span>{name}</span><strong>{value}</strong><small>{note}</small></li>"
            for name, value, note in _tiles(facts)
        ),
        sections="\n".join(_section(*section) for section in sections),
        digest=dataset.digest,
    )
    with replaced(Path(path)) as part:
        part.write_text(text, encoding="utf-8")


def _about(facts: RunFacts) -> str:
    recipe, world = facts.engine.recipe, facts.engine.world
    return (
        f"{', '.join(recipe.names)}  ·  packs of {recipe.row_tokens:,} tokens  ·  "
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


def _sections(
    facts: RunFacts, measured: Sequence[Chart | str]
) -> list[tuple[str, str, Sequence[Chart | str]]]:
    no_wait = "One rank trains, so none waits for another."
    if facts.numbers["ranks"] > 1:
        no_wait = "No global batch is a whole number of steps: the straggler factor is not known."
    no_lengths = "No stream has a length file; `streampack index` writes them."
    lengths: Chart | str = charts.length_chart(facts) or no_lengths
    packing = [charts.fill_chart(facts), charts.documents_chart(facts), charts.cuts_chart(facts)]
    waits: Chart | str = charts.straggler_chart(facts) or no_wait
    delivered = "" if facts.delivered else f" What was delivered is {facts.source}."
    part = "" if facts.is_whole else f" Planned: {len(facts.steps[0]):,} steps."
    mixture = f"What the config asks for, and what the plan gives.{part}{delivered}"
    return [
        ("Mixture", mixture, [charts.mixture_chart(facts), charts.run_chart(facts)]),
        ("Lengths", "Documents longer than a pack are cut; shorter ones share packs.", [lengths]),
        ("Packing", f"How full packs are, and how much a step sees.{part}", [*packing, waits]),
        ("Packs", "Each row is a pack, each block a document.", [charts.packs_chart(facts)]),
        ("Nodes", "The bytes of shards that each node needs.", [charts.nodes_chart(facts)]),
        ("Time", "Planning needs no clock, so this is measured or not known.", measured),
    ]


def _measured(
    stats: Mapping[str, Any] | None, times: Mapping[str, float] | None
) -> list[Chart | str]:
    found: list[Chart | str] = [charts.time_chart(times)] if times else []
    if stats is not None and (shards := stats.get("shards")):
        waits = f"waited {shards['waited_s']:,.2f} s for {shards['waited_for']:,} of them"
        found.append(f"The loader fetched {shards['fetched']:,} shards, and {waits}.")
    return found or ["Not measured: give --stats, a file with the JSON of loader.stats()."]


def _section(name: str, lead: str, parts: Sequence[Chart | str]) -> str:
    notes = (p if isinstance(p, Chart) else f'<p class="note">{escape(p)}</p>' for p in parts)
    inside = "".join(_figure(part) if isinstance(part, Chart) else part for part in notes)
    head = f'<h2>{name}</h2><p class="lead">{escape(lead)}</p>'
    return f'<section>{head}<div class="charts">{inside}</div></section>'


def _figure(chart: Chart) -> str:
    """Return a chart with its words: the table's text is also the picture's."""
    names, *rows = chart.rows
    said = [", ".join(" ".join(pair) for pair in zip(names, row, strict=True)) for row in rows]
    text = escape(f"{chart.title}; {chart.unit}. {'; '.join(said)}.", quote=True)
    svg = as_svg(chart.figure, chart.key, text, chart.titles)
    legend = "".join(f"<li>{_swatch(mark)}{escape(meaning)}</li>" for mark, meaning in chart.legend)
    head, *lines = [[escape(cell) for cell in row] for row in chart.rows]
    body = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
    table = f"<table><tr><th>{'</th><th>'.join(head)}</th></tr>{body}</table>"
    title = f"<h3>{escape(chart.title)}</h3><p>{escape(chart.unit)}</p>"
    return (
        f'<figure id="{chart.key}" class="w{chart.width}"><figcaption>{title}</figcaption>'
        f'<ul class="legend">{legend}</ul><div class="plot">{svg}</div>'
        f'<details><summary>Numbers</summary><div class="table">{table}</div></details></figure>'
    )


def _swatch(mark: str) -> str:
    if mark in VARIABLES:
        return f'<i style="background:var(--{VARIABLES[mark]})"></i>'
    return f'<i class="{mark}"></i>'
