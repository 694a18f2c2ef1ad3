"""The options of all public classes, counted: a class stays small, and a word has one meaning."""

from __future__ import annotations

import ast
import inspect
import runpy
from pathlib import Path

import streampack

TYPED = Path(__file__).parents[1] / "typed" / "options.py"

# As many as before sources were values of their own, and four of texts that are tokenized while
# training runs: `lengths`, `transform`, `version` and `Buffers(tokenizing=)`.
MOST_NAMES = 130


def options_of(kind: type) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def test_public_classes_have_few_options_and_share_their_names():
    public = [getattr(streampack, name) for name in streampack.__all__]
    kinds = [kind for kind in public if inspect.isclass(kind) and not issubclass(kind, Exception)]
    options = {kind.__name__: options_of(kind) for kind in kinds}

    assert len(options["Stream"]) == 11
    assert {name: own for name, own in options.items() if len(own) > 16} == {}
    assert len({name for own in options.values() for name in own}) <= MOST_NAMES


def test_the_script_for_type_checkers_passes_each_option_of_sources(tmp_path):
    made = runpy.run_path(str(TYPED))["right"](object(), tmp_path)
    calls = [
        (node.func.id, {each.arg for each in node.keywords}, len(node.args))
        for node in ast.walk(ast.parse(TYPED.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]

    for kind in {type(stream.source).__name__ for stream in made} | {
        "Stream",
        "HeldOut",
        "Download",
    }:
        options = options_of(getattr(streampack, kind))
        passed = [names | {*options[:num]} for name, names, num in calls if name == kind]
        assert set(options) <= set().union(*passed), kind
