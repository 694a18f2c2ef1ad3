"""``streampack simulate``, ``plan`` and ``report``: a run before it runs, or so far."""

from __future__ import annotations

from streampack import report
from streampack.cli.build import build_dataset
from streampack.cli.config import RunConfig, read_config
from streampack.cli.console import output_console, print_json, progress, read_json
from streampack.cli.verbs import Plan, Report, Simulate, WorldOptions
from streampack.report.chapters import chapters_view
from streampack.report.nodes import node_table
from streampack.report.stats import simulation_view, stats_table
from streampack.runtime.resumable import engine_of
from streampack.world import World


def run_simulate(options: Simulate) -> None:
    """Plan the batches of a config, and print their statistics."""
    described = read_config(options.config)
    world = world_of(options, described)
    dataset = build_dataset(described, options.config, world)
    total = None if options.steps is None else options.steps * world.num_devices
    with progress("batches planned", total, hidden=options.as_json) as show:
        stats = report.simulate(dataset, steps=options.steps, progress=show)
    if options.as_json:
        print_json({"config": str(options.config), **stats})
        return
    unit = engine_of(dataset).recipe.target_unit
    if described.chapters is not None:
        is_whole = options.steps is None
        view = chapters_view(stats) if is_whole else stats_table(stats, weight_unit=unit)
        output_console().print(view, *([] if is_whole else [node_table(stats["nodes"])]))
        return
    output_console().print(simulation_view(stats, weight_unit=unit))
    output_console().print(node_table(stats["nodes"]))
    size, num_packs = described.mixing.global_batch_size, engine_of(dataset).spec.view().stride
    if size is not None and size % num_packs:
        fitting = -(-size // num_packs) * num_packs
        output_console().print(
            f"{num_packs} packs in a step of all ranks do not divide mixing.global_batch_size: "
            f"{size}, so an optimizer step is another one than with fewer ranks; set it to "
            f"{fitting}, or use fewer ranks or smaller batches"
        )


def run_plan(options: Plan) -> None:
    """Show the chapters of a config."""
    described = read_config(options.config)
    dataset = build_dataset(described, options.config, World())
    state = read_json(options.state, "state", "state_dict")
    with progress("planning", hidden=options.as_json):
        chapters = report.describe_run(dataset, state)
    if options.as_json:
        print_json({"config": str(options.config), **chapters})
        return
    output_console().print(chapters_view(chapters))


def run_report(options: Report) -> None:
    """Write the report of a config."""
    described = read_config(options.config)
    dataset = build_dataset(described, options.config, world_of(options, described))
    with progress("planning"):
        report.write_report(
            dataset,
            options.out,
            title=str(options.config),
            state=read_json(options.state, "state", "state_dict"),
            stats=read_json(options.stats, "stats", "stats"),
            steps=options.steps,
        )
    output_console().out(f"{options.out}: {options.out.stat().st_size:,} bytes", highlight=False)


def world_of(options: WorldOptions, described: RunConfig) -> World:
    """Return rank 0 of the world that options and a config describe."""
    shared = {} if described.world is None else described.world.model_dump()
    flags = {"replication": options.replication, "context_parallel": options.context_parallel}
    shared |= {key: value for key, value in flags.items() if value is not None}
    return World(num_ranks=options.num_ranks, ranks_per_node=options.ranks_per_node, **shared)
