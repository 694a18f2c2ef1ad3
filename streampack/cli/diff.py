"""``streampack diff A.yaml B.yaml``: what differs, and from which step on the packs do."""

from __future__ import annotations

from typing import Any

from streampack.cli.at import progress, world_of_devices
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.console import output_console, print_json
from streampack.cli.verbs import Diff
from streampack.lookback import first_difference


def run(options: Diff) -> None:
    """Show the differences of two configs."""
    configs = [read_config(path) for path in (options.config, options.other)]
    keys = [_flat("", config.model_dump(mode="json")) for config in configs]
    changed = {
        key: [own.get(key) for own in keys]
        for key in sorted({*keys[0], *keys[1]})
        if keys[0].get(key) != keys[1].get(key)
    }
    datasets = []
    for path, config in zip((options.config, options.other), configs, strict=True):
        world = world_of_devices(config, options.devices, options.ranks_per_node)
        datasets.append(build_dataset(config, path, world))
    with progress("compared", options.upto) as report:
        step = first_difference(*datasets, upto=options.upto, report=report)
    if options.as_json:
        print_json({"changed": changed, "first_step": step})
        return
    console = output_console()
    for key, (one, other) in changed.items():
        console.print(f"{key}: {one} -> {other}", markup=False, highlight=False)
    result = "the packs are the same" if step is None else f"the packs differ from step {step} on"
    if step is None and datasets[0].digest != datasets[1].digest:
        end = "" if configs[0].chapters else " in the first epoch"
        result += end if options.upto is None else f" up to step {options.upto}"
    console.print(result, highlight=False)


def _flat(place: str, value: Any) -> dict[str, Any]:
    """Return the values of nested mappings and lists by their dotted places."""
    if isinstance(value, list):
        value = {str(number): each for number, each in enumerate(value)}
    if not isinstance(value, dict):
        return {place: value}
    flat: dict[str, Any] = {}
    for key, each in value.items():
        flat |= _flat(f"{place}.{key}" if place else key, each)
    return flat
