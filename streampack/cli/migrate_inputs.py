"""What `streampack migrate` is given: a command, a script, or YAML, as the options of Megatron.

::

    --data_path "0.7 $DATA/web 0.3 code"     --> {"data-path": ["0.7", "/data/web", "0.3", "code"]}
    train-data-paths: [web], seed: 1         --> {"train-data-path": ["1", "web"], "seed": ["1"]}

Cost: reading the files.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from streampack.errors import ConfigError

Options = dict[str, list[str]]

SUBSETS = ("train", "valid", "test")
NUMBER = re.compile(r"\+?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
ARRAY = re.compile(r"^\s*\w+\+?=\(|\)\s*$", re.MULTILINE)
ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
# GPT-NeoX's names of Megatron's options.
NEOX = {
    "train-batch-size": "global-batch-size",
    "train-micro-batch-size-per-gpu": "micro-batch-size",
}


def read_input_text(path: str) -> str:
    """Return the text of a file; ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); correct its name") from error


def yaml_of(paths: Sequence[str]) -> dict[str, Any]:
    """Return the keys of YAML or JSON files together: GPT-NeoX takes several."""
    loaded: dict[str, Any] = {}
    for path in paths:
        try:
            part = yaml.safe_load(read_input_text(path))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: is not YAML ({error}); correct it") from error
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: has no keys; name a YAML file of GPT-NeoX or OLMo")
        loaded |= part
    return loaded


def options_of_yaml(loaded: Mapping[str, Any]) -> Options:
    """Return the options in a GPT-NeoX config, or in a file of --per-split-data-args-path."""
    options: Options = {}
    for key, value in loaded.items():
        name = str(key).replace("_", "-")
        values = value if isinstance(value, list) else [value]
        if name in SUBSETS:
            options[f"{name}-data-path"] = [w for each in values for w in str(each or "").split()]
        elif value not in (None, False):  # as an option that is not given
            options[NEOX.get(name, name)] = list(map(str, values))
    for subset in SUBSETS:
        paths = options.pop(f"{subset}-data-paths", None)
        weights = options.pop(f"{subset}-data-weights", None)
        if paths is None:
            continue
        if weights is None:
            weights = ["1"] * len(paths)
        if len(weights) != len(paths):
            raise ConfigError(
                f"{subset}-data-weights are {len(weights)} for {len(paths)} {subset}-data-paths; "
                "write one for each"
            )
        options[f"{subset}-data-path"] = [
            w for pair in zip(weights, paths, strict=True) for w in pair
        ]
    if by := options.get("weight-by-num-documents"):
        raise ConfigError(
            f"weight-by-num-documents={by[0]} computes weights; write them as train-data-weights, "
            "and remove it"
        )
    return options


def options_of_text(text: str) -> Options:
    """Return the options of a command or a script; words before the first one have the key "".

    Variables are those that the text sets, and those of the environment.
    """
    found: Options = {}
    variables = dict(os.environ)
    option = ""

    def value_of(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2]) or match[3] or match[0]

    words = _words(text)[::-1]
    while words:
        word = VARIABLE.sub(value_of, words.pop())
        pieces = word.split()
        if assigned := ASSIGNMENT.fullmatch(word):
            has_options = "--" in assigned[2]
            variables[assigned[1]] = ";" if has_options else assigned[2]
            words += [";", *reversed(assigned[2].split())] if has_options else []
        elif len(pieces) > 1 and (word.startswith("--") or NUMBER.fullmatch(pieces[0])):
            words += reversed(pieces)  # they were in quotes
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            option = name.replace("_", "-")
            found[option] = [value] if equals else []
        elif word == ";" or word.endswith("[@]}"):
            option = ";"  # the words of another command are of no option
        else:
            found.setdefault(option, []).append(word)
    found.pop(";", None)
    for name, values in list(found.items()):
        if name == "data-args-path":
            found["data-args-path"] = read_input_text("".join(values)).split()
        elif name == "per-split-data-args-path":
            found |= options_of_yaml(yaml_of(values))
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(ARRAY.sub(" ; ", text.replace("\\\n", " ")), comments=True)
    except ValueError as error:
        raise ConfigError(
            f"{text!r:.60}: is not a command ({error}); correct its quotes"
        ) from error
