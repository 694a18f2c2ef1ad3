"""The command line as a whole: help, errors in one line, and the same options in all verbs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import streampack
from streampack import PackedDataLoader, Shards, Texts, TokenFiles, World
from streampack.cli.app import build_app
from streampack.cli.verbs import VERBS
from streampack.index import write_lengths
from streampack.index.token_index import index_files
from streampack.texts import RowFormat
from streampack.write import WriteOptions, merge


def run(*arguments, code="from streampack.cli import main; main()"):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_help_page_names_every_verb_and_loads_nothing_heavy():
    heavy = "{'torch', 'streaming', 'numba', 'numpy', 'pydantic', 'matplotlib', 'tokenizers'}"
    code = (
        "import sys, atexit; from streampack.cli import main; "
        f"atexit.register(lambda: print('loaded:', {heavy} & set(sys.modules))); main()"
    )

    done = run("--help", code=code)

    assert done.returncode == 0
    assert "loaded: set()" in done.stdout
    assert all(name in done.stdout for name in VERBS)


def test_no_arguments_show_the_help_page():
    done = run()
    assert "Usage: streampack" in done.stdout + done.stderr


def test_the_version_is_the_packages():
    assert run("--version").stdout.strip() == streampack.__version__


def test_an_error_of_ours_is_a_red_line_and_exit_code_2(tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("streams: [{local: a, repat: 2}]\npacking: {max_seq_len: 8}\n")

    done = run("run", config)

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {config}: streams.0.repat: unknown key (got 2) - did you mean 'repeat'?",
    ]
    assert done.stdout == ""


def test_an_unknown_verb_is_refused_with_the_nearest():
    done = CliRunner().invoke(build_app(), ["inpsect"])

    assert done.exit_code == 2
    assert "No such command 'inpsect'. Did you mean 'inspect'?" in done.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_as_the_help_page_says(verb):
    done = CliRunner().invoke(build_app(), [verb, "--help"])

    assert done.exit_code == 0, done.output
    assert f"streampack {verb}" in done.output
    overview = CliRunner().invoke(build_app(), ["--help"]).output
    summary = VERBS[verb].__doc__.split(",")[0]
    assert summary in done.output
    assert summary in overview


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
    "--split": "Subfolder ",
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
    "write": ([RowFormat, WriteOptions], {"out", "warm", "verify", "json"}),
    "merge": ([merge], {"verify", "json"}),
    "index": ([write_lengths, index_files, TokenFiles, RowFormat, Texts], set()),
    "inspect": ([Shards], {"pack", "tokenizer"}),
    "run": ([PackedDataLoader], {"steps", "json"}),
    "simulate": ([World], {"steps", "json"}),
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
            used |= {(page.name, name) for name in re.findall(r"(?<!\S)--[\w-]+", line)}

    assert used
    assert {(page, name) for page, name in used if name not in names} == set()
