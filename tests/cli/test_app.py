"""The command line as a whole: quick help, errors in one line, no verb without a page."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import streampack
from streampack.cli.app import build_app
from streampack.cli.verbs import VERBS


def run(*arguments, code="from streampack.cli import main; main()"):
    """Run the command line in a new process."""
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
    assert "Usage: streampack" in run().stdout + run().stderr


def test_the_version_is_the_packages():
    assert run("--version").stdout.strip() == streampack.__version__


def test_the_package_runs_as_a_module_too():
    command = [sys.executable, "-m", "streampack", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == run("--version").stdout


def test_an_error_of_ours_is_a_red_line_and_exit_code_2(tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("streams: [{local: a, repat: 2}]\npacking: {max_seq_len: 8}\n")

    done = run("run", config)

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {config}: streams.0.repat: unknown key (got 2) - did you mean 'repeat'?",
    ]
    assert done.stdout == ""


def test_a_verb_that_is_not_there_is_refused_with_the_nearest():
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
