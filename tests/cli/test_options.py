"""Options have one name, one type and one meaning in all verbs."""

from __future__ import annotations

import re
from collections import defaultdict
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import pytest
from typer.main import get_command

from streampack import PackedDataLoader, Stream, World
from streampack.cli.app import build_app
from streampack.cli.migrate import migrate
from streampack.cli.verbs import VERBS
from streampack.write import RowFormat, WriteOptions, merge, write_lengths
from streampack.write.token_index import write_token_index

COMMANDS = get_command(build_app()).commands
OPTIONS = [
    option
    for command in COMMANDS.values()
    for option in command.params
    if option.param_type_name == "option"
]
# Options that mean the same in every verb, and how their help text begins.
MEANINGS = {
    "--json": "Print one JSON line",
    "--max-bad-rows": "Bad rows that may",
    "--split": "Subfolder that holds",
    "--tokens": "Column of the token ids",
    "--tokens-dtype": "Integer type of the ids",
    "--verify": "Read the shards again",
}


def test_an_option_is_named_like_its_field_in_one_form():
    for option in OPTIONS:
        own_name = "--json" if option.name == "as_json" else f"--{option.name.replace('_', '-')}"

        assert option.opts == [own_name]
        assert option.secondary_opts == ([f"--no{own_name[1:]}"] if option.default is True else [])
        assert option.help.endswith(".")


def test_an_option_takes_the_same_type_in_all_verbs():
    types = defaultdict(set)
    for options in VERBS.values():
        for name, hint in get_type_hints(options).items():
            kinds = [kind for kind in (*get_args(hint), hint) if kind is not NoneType]
            kind = get_args(kinds[0])[0] if get_origin(kinds[0]) is list else kinds[0]  # several
            types[name].add(str if kind is Path else kind)  # a folder, or the URL of one

    # A column's name when writing texts, and whether to show texts when looking back.
    assert types.pop("text") == {str, bool}
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", MEANINGS)
def test_an_option_means_the_same_in_all_verbs(name):
    helps = [option.help for option in OPTIONS if option.opts[0] == name]

    assert helps
    assert [text for text in helps if not text.startswith(MEANINGS[name])] == []


# The classes and functions that each verb calls, which give its options their names, and the
# options that belong to the verb alone.
CALLS = {
    "write": ([RowFormat, WriteOptions], {"out", "verify", "json"}),
    "merge": ([merge], {"verify", "json"}),
    "index": ([write_lengths, write_token_index], set()),
    "migrate": ([migrate], {"out"}),
    "inspect": ([Stream], {"pack", "tokenizer"}),
    "run": ([PackedDataLoader], {"steps", "json"}),
    "simulate": ([World], {"steps", "json"}),
    "compare-packers": ([Stream], {"samples", "stream", "kind", "markdown"}),
}


@pytest.mark.parametrize("verb", CALLS)
def test_an_option_is_spelled_like_the_argument_in_python(verb):
    calls, own = CALLS[verb]
    arguments = {name for called in calls for name in signature(called).parameters}
    names = {o.opts[0][2:] for o in COMMANDS[verb].params if o.param_type_name == "option"}

    assert {name.replace("-", "_") for name in names - own - {"help"}} <= arguments


def test_paths_are_arguments_with_one_name_for_each_meaning():
    arguments = {
        (argument.name, argument.nargs)
        for command in COMMANDS.values()
        for argument in command.params
        if argument.param_type_name == "argument"
    }

    paths = {("inputs", -1), ("paths", -1), ("path", 1), ("config", 1), ("other", 1)}
    assert arguments == {*paths, ("sample", 1)}


def test_the_docs_use_only_options_that_exist():
    names = {option.opts[0] for option in OPTIONS} | {"--help", "--version"}
    used = set()
    for page in (Path(__file__).parents[2] / "docs").rglob("*.md"):
        for line in re.findall(r"^\$ streampack (.*)$", page.read_text(), flags=re.MULTILINE):
            if not line.startswith("migrate"):  # which reads the options of other programs
                used |= {(page.name, name) for name in re.findall(r"(?<!\S)--[\w-]+", line)}

    assert used
    assert {(page, name) for page, name in used if name not in names} == set()
