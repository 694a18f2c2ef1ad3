"""No code comes from data: banned by syntax tree, and watched by an audit hook while hostile bytes
are read.

The bans apply to every file of the package. The hook runs in a separate process, because hooks
cannot be removed. About 6 s together.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import streampack
from tests.helpers.faults.pickles import pickled_column

PACKAGE = Path(streampack.__file__).parent

LOADERS = "_pickle|cPickle|cloudpickle|dill|joblib|jsonpickle|marshal|pickle|runpy|shelve"
RUNS_DATA = re.compile(
    rf"eval|exec|execfile|compile|__import__|builtins\..*|code\.interact|import ({LOADERS})(\..*)?"
    r"|pickle\.(?!dumps|PickleBuffer|PicklingError)\w+|pandas\.read_pickle|(np|numpy)\.load"
    r"|torch\.load\((?!.*weights_only=True).*|yaml\.(?!safe_load\()\w*load\w*\(.*"
    r"|allow_pickle=|shell=|os\.(popen|system)|subprocess\.get\w*output"
    rf"|(importlib\.)?import_module\((?!').*|(importlib\.)?import_module\('({LOADERS})'.*"
    r"|importlib\.(__import__|util\.spec_from_file_location)"
)
"""Names, imports, calls and keyword arguments that may run what they read."""
ALLOWED = {
    # Imports by a computed name: from the package's own tables, an extra that the caller names in
    # a literal, and the verb of a command line.
    ("__init__.py", "import_module(_LATE[name])"),
    ("_extras.py", "import_module(module)"),
    ("cli/app.py", "import_module(where)"),
    # torch, once something of it is used.
    ("texts/pool.py", "import_module(self.__name__)"),
    # A function of the user's own, which is named in code or in the run's YAML, never in data.
    ("texts/transform.py", "import_module(module)"),
    # Arrays in our own caches; pickles in them are refused.
    ("texts/counts.py", "np.load"),
    ("texts/counts.py", "allow_pickle="),
    # `_Loader` is checked below.
    ("cli/config.py", "yaml.load(content.decode(), Loader=_Loader)"),
    # Writing a pickle runs no code; it shows whether a worker can send an error to its rank.
    ("runtime/worker_main.py", "import pickle"),
    # What a worker of ours sends over the socket that only it and its rank have.
    ("runtime/worker_main.py", "pickle.loads"),
    # numba's cache of compiled kernels, next to the package's files. It never contains stream data
    # and is only read if its digest matches.
    ("_numba.py", "import pickle"),
    ("_numba.py", "pickle.loads"),
}


def uses(path: Path) -> Iterator[str]:
    """Yield the dotted names, imports, calls and keyword arguments of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"import {node.module}"
        elif isinstance(node, ast.keyword):
            yield f"{node.arg}="
        elif isinstance(node, ast.Call):
            # Of calls, only loads and imports may be allowed by their arguments.
            if re.search("load|import_module", dotted(node.func)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Name | ast.Attribute):
            yield dotted(node)


def dotted(node: ast.expr) -> str:
    """Return a dotted name, or an empty text for anything else that has an attribute."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def test_no_file_of_the_package_can_run_what_it_reads():
    found = {
        (str(path.relative_to(PACKAGE)), use)
        for path in PACKAGE.rglob("*.py")
        for use in uses(path)
        if RUNS_DATA.fullmatch(use)
    }

    assert found == ALLOWED


def test_the_only_loader_of_yaml_is_a_safe_one():
    tree = ast.parse((PACKAGE / "cli/config.py").read_text(encoding="utf-8"))
    loaders = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (loader,) = [node for node in loaders if node.name == "_Loader"]
    assert [ast.unparse(base) for base in loader.bases] == ["yaml.SafeLoader"]


WATCHED = """
import json, sys
from pathlib import Path
from tests.helpers.faults import fuzz

folder, hostile = Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]]
fuzz.read_everything(folder)  # imports and compiles everything that reading needs
with fuzz.watch(folder.parent) as seen:
    fuzz.read_everything(folder)
    results = [fuzz.read_everything(each) for each in hostile]
print(json.dumps([seen.code, seen.outside, results]))
"""


def test_reading_a_stream_with_pickles_and_hostile_bytes_raises_no_event_of_running_code(tmp_path):
    good, ran = tmp_path / "good", tmp_path / "ran"
    pickled_column(good, ran)
    hostile = []
    for number, cut in enumerate((0, 40, 4000)):
        folder = tmp_path / f"hostile{number}"
        pickled_column(folder, ran)
        shard = folder / "shard.00000.mds"
        content = bytearray(shard.read_bytes())
        content[cut : cut + 64] = b"cos\nsystem\n(S'touch x'\ntR." * 2 + b"c" * 10
        shard.write_bytes(content)
        hostile.append(folder)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(good), *map(str, hostile)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    code, outside, results = json.loads(done.stdout.splitlines()[-1])
    assert code == []
    assert outside == []
    assert "DataError" in results
    assert not ran.exists()
