"""No code comes from data: banned by syntax tree, and watched by an audit hook while hostile bytes
are read.

The bans apply to every file of the package. The hook runs in a separate process, because hooks
cannot be removed. About 6 s together.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import streampack
from tests.helpers.faults.pickles import pickled_column

PACKAGE = Path(streampack.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
file_ids = [str(path.relative_to(PACKAGE)) for path in FILES]
every_file = pytest.mark.parametrize("path", FILES, ids=file_ids)

BANNED_MODULES = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal"}
BANNED_MODULES |= {"pickle", "runpy", "shelve"}
BANNED_NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
BANNED_CALLS = {
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "code.interact",
    "importlib.__import__",
    "importlib.util.spec_from_file_location",
    "np.load",
    "numpy.load",
    "os.popen",
    "os.system",
    "pandas.read_pickle",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
}
# Imports by a computed name that are allowed: those from the package's own tables, and the command
# line's import of the requested verb.
IMPORTS_BY_NAME = {
    "__init__.py": {"_LATE[name]"},
    "_extras.py": {"module"},  # modules of extras; the callers pass literal names
    "cli/app.py": {"module"},
    "write/__init__.py": {"f'streampack.write.{_FILES[name]}'"},
}
# Writing a pickle runs no code; it shows whether a worker can send an error to its rank.
MAY_WRITE_PICKLES = {"runtime/worker_main.py", "_numba.py"}
# What a worker of ours sends over the socket that only it and its rank have. The other messages of
# this socket are pickled by multiprocessing.
MAY_READ_RESULTS = {"runtime/transfer.py"}
# numba's cache of compiled kernels, next to the package's files: machine code that numba itself
# unpickles. It never contains stream data and is only read if its digest matches.
MAY_READ_KERNELS = {"_numba.py"}


def problems(text: str, name: str) -> list[str]:
    """Return the calls in a file, with their lines, that could execute data."""
    found = []
    for node in ast.walk(ast.parse(text)):
        what = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            what = _bad_import(node, name)
        elif isinstance(node, ast.Name) and node.id in BANNED_NAMES:
            what = node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            allowed = {"dumps", "PickleBuffer", "PicklingError"}
            if name in MAY_READ_KERNELS | MAY_READ_RESULTS:
                allowed.add("loads")
            what = None if node.attr in allowed else ast.unparse(node)
        elif isinstance(node, ast.Call):
            what = _bad_call(node, name)
        if what is not None:
            found.append(f"{name}:{node.lineno}: {what}")
    return found


def _bad_import(node: ast.Import | ast.ImportFrom, name: str) -> str | None:
    modules = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    for module in modules:
        is_allowed = module == "pickle" and name in MAY_WRITE_PICKLES | MAY_READ_RESULTS
        if module.split(".")[0] in BANNED_MODULES and not (
            is_allowed and isinstance(node, ast.Import)
        ):
            return f"imports {module}"
    return None


def _is_true(node: ast.Call, keyword: str) -> bool:
    values = [each.value for each in node.keywords if each.arg == keyword]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def _bad_call(node: ast.Call, name: str) -> str | None:
    called = ast.unparse(node.func)
    last = called.rpartition(".")[2]
    if last == "import_module":
        module = node.args[0]
        if isinstance(module, ast.Constant) and module.value not in BANNED_MODULES:
            return None
        is_known = ast.unparse(module) in IMPORTS_BY_NAME.get(name, ())
        return None if is_known else ast.unparse(node)
    if called in BANNED_CALLS:
        return called
    if called == "torch.load" and not _is_true(node, "weights_only"):
        return "torch.load without weights_only=True"
    if called in ("yaml.load", "yaml.load_all"):
        loaders = [ast.unparse(each.value) for each in node.keywords if each.arg == "Loader"]
        is_safe = loaders in (["yaml.SafeLoader"], ["yaml.CSafeLoader"], ["_Loader"])
        return None if is_safe else f"{called} without SafeLoader"
    if any(each.arg == "allow_pickle" for each in node.keywords):
        return "allow_pickle="
    if any(each.arg == "shell" for each in node.keywords) and called.startswith("subprocess."):
        return f"{called} with shell="
    return None


@every_file
def test_no_file_of_the_package_can_run_what_it_reads(path):
    name = str(path.relative_to(PACKAGE))
    assert problems(path.read_text(encoding="utf-8"), name) == []


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
