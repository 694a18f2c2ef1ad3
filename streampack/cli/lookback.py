"""``streampack at``, ``where`` and ``diff``: which data was in a step, and where runs differ."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from streampack import lookback
from streampack.cli.build import build_dataset
from streampack.cli.config import RunConfig, read_config
from streampack.cli.console import output_console, print_json, progress, read_json, visible
from streampack.cli.verbs import At, Diff, LookBack, Where
from streampack.errors import ConfigError
from streampack.plan.comparison import differences, flat, name_of
from streampack.plan.run_worlds import worlds_in
from streampack.planned.dataset import PackedStreamingDataset
from streampack.report.bars import colour
from streampack.texts.tokenization import load_tokenizer
from streampack.world import World

CHARACTERS_SHOWN = 400
COLUMNS = ("stream", "pass", "sample", "start", "length", "total")


def run_at(options: At) -> None:
    """Show a step of a run."""
    dataset = open_run(options)
    with progress("steps planned", options.step, hidden=options.as_json) as report:
        found = lookback.at(dataset, options.step, rank=options.rank, report=report)
    rows = [row_as_json(dataset, row) for row in found.rows]
    if options.text or options.tokenizer is not None:
        _add_texts(dataset, options, found.rows, rows)
    facts = {
        "step": found.step,
        "epoch": found.epoch,
        "position": found.position,
        "is_skipped": found.is_skipped,
    }
    if options.as_json:
        print_json({"config": str(options.config), **facts, "rows": rows})
        return
    console, skipped = output_console(), ", which the run skipped" if found.is_skipped else ""
    kind = "epoch" if dataset.arguments["chapters"] is None else "chapter"
    console.print(
        f"step {found.step}: {kind} {found.epoch}, position {found.position}{skipped}",
        highlight=False,
    )
    for row in rows:
        console.print(row_lines(row))


def run_where(options: Where) -> None:
    """Show the rows in which a sample was."""
    stream, _, number = options.sample.rpartition("/")
    if not stream or not number.isdecimal():
        raise ConfigError(
            f"sample={options.sample!r:.80} is not a stream and a number; write web/123456"
        )
    dataset = open_run(options)
    upto = options.upto
    if upto is None and options.state is not None:
        upto = lookback.last_step_begun(dataset)
    with progress("steps searched", upto, hidden=options.as_json) as report:
        found = lookback.where(dataset, stream, int(number), upto=upto, report=report)
    rows = [
        {"step": each.step, "is_skipped": each.is_skipped, **row_as_json(dataset, each.row)}
        for each in found
    ]
    if options.as_json:
        print_json({"config": str(options.config), "sample": options.sample, "rows": rows})
        return
    console = output_console()
    for row in rows:
        skipped = ", skipped" if row["is_skipped"] else ""
        console.print(f"step {row['step']}{skipped}", highlight=False)
        console.print(row_lines(row))
    if not rows:
        console.print(f"{options.sample} is in no step of the run", highlight=False)


def run_diff(options: Diff) -> None:
    """Show the differences of two configs."""
    configs = [read_config(path) for path in (options.config, options.other)]
    values = [flat(config.model_dump(mode="json")) for config in configs]
    changed = {name_of(path): own for path, *own in sorted(differences(*values), key=str)}
    datasets = []
    for path, config in zip((options.config, options.other), configs, strict=True):
        world = world_of_devices(config, options.devices, options.ranks_per_node)
        datasets.append(build_dataset(config, path, world))
    with progress("steps compared", options.upto, hidden=options.as_json) as report:
        found = lookback.difference(*datasets, upto=options.upto, report=report)
    step, reason = found or (None, None)
    if options.as_json:
        print_json({"changed": changed, "first_step": step, "reason": reason})
        return
    console = output_console()
    for key, (one, other) in changed.items():
        console.print(f"{key}: {one} -> {other}", markup=False, highlight=False)
    result = f"the packs differ from step {step} on: {reason}"
    if step is None:
        result = "the packs are the same"
    if step is None and datasets[0].digest != datasets[1].digest:
        end = "" if configs[0].chapters else " in the first epoch"
        result += end if options.upto is None else f" up to step {options.upto}"
    console.print(result, highlight=False)


def open_run(options: LookBack) -> PackedStreamingDataset:
    """Return the dataset of a run, in the world of its state or of the options."""
    described = read_config(options.config)
    state = read_json(options.state, "state", "state_dict")
    worlds = worlds_in(state) if isinstance(state, dict) else []
    sizes: dict[str, Any] = {}
    if options.devices is not None or not worlds:  # else the config's world has one device
        world = world_of_devices(described, options.devices or 1, options.ranks_per_node)
    else:
        world = worlds[-1].world(0)
        if all(chapter.batch_size is None for chapter in described.chapters or []):
            sizes["batch_size"] = worlds[-1].batch_size  # else it may be of a chapter only
    if options.batch_size is not None:
        sizes["batch_size"] = options.batch_size
    dataset = build_dataset(described.model_copy(update=sizes), options.config, world)
    if state is not None:
        dataset.load_state_dict(state)
    return dataset


def world_of_devices(described: RunConfig, devices: int, ranks_per_node: int | None) -> World:
    """Return rank 0 of a world in which so many ranks, or replicas, get rows of their own."""
    shared = {} if described.world is None else described.world.model_dump()
    ranks = devices * shared.get("replication", 1)
    return World(num_ranks=ranks, ranks_per_node=ranks_per_node, **shared)


def row_as_json(dataset: PackedStreamingDataset, row: lookback.Row) -> dict[str, Any]:
    """Return a row as plain values."""
    segments = [dict(zip(COLUMNS, segment, strict=True)) for segment in row.segments.tolist()]
    for each in segments:
        each["stream"] = dataset.stream_names[each["stream"]]
    return {"ranks": list(row.ranks), "batch": row.batch, "row": row.row, "segments": segments}


def row_lines(row: dict[str, Any]) -> Text:
    """Return the lines of a row: a heading, and its segments in colours."""
    ranks = ", ".join(map(str, row["ranks"]))
    noun = "rank" if len(row["ranks"]) == 1 else "ranks"
    lines = [Text(f"{noun} {ranks}, batch {row['batch']}, row {row['row']}", style="bold")]
    for number, each in enumerate(row["segments"]):
        start, stop = each["start"], each["start"] + each["length"]
        where = f"{each['stream']}/{each['sample']}, pass {each['pass']}, "
        tokens = f"tokens {start}-{stop - 1} of {each['total']}"
        lines.append(Text(f"  {where}{tokens}", style=colour(number)))
        for name, value in each.get("columns", {}).items():
            lines.append(Text(f"    {name}: {visible(str(value)[:CHARACTERS_SHOWN])}"))
    return Text("\n").join(lines)


def _add_texts(
    dataset: PackedStreamingDataset,
    options: At,
    rows: list[lookback.Row],
    written: list[dict[str, Any]],
) -> None:
    decoder = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    for row, shown in zip(rows, written, strict=True):
        for segment, each in zip(row.segments.tolist(), shown["segments"], strict=True):
            columns = dataset.document(segment)
            tokens = columns.pop("tokens")[each["start"] : each["start"] + each["length"]].tolist()
            columns |= {
                f"fields.{name}": value for name, value in columns.pop("fields", {}).items()
            }
            columns = {name: value for name, value in columns.items() if type(value) is not bytes}
            text = " ".join(map(str, tokens)) if decoder is None else decoder.decode(tokens)
            each["columns"] = {**columns, "tokens" if decoder is None else "text": text}
