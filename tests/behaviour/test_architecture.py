"""The code map of docs/ARCHITECTURE.md: which room may import which, and which names are public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import streampack

PACKAGE = Path(streampack.__file__).parent
PAGE = PACKAGE.parent / "docs" / "ARCHITECTURE.md"
CODE_MAP = PAGE.read_text(encoding="utf-8").partition("## Code map")[2].split("```")[1]
UPPER, _, LOWER = CODE_MAP.partition(" ground ")
ROOMS = tuple(re.findall(r"[a-z]+", UPPER.replace("integers only", "")))
GROUND, BESIDE = (tuple(line.split()) for line in LOWER.split(" alongside "))
WINGS = ("planned", "online")
FRONT_DOOR = "__init__"
BELL = "__main__"  # next to the front door: all it does is start `cli`

# What a room without I/O cannot need: files, the network, clocks, the environment.
OUTSIDE = {"datetime", "glob", "io", "os", "pathlib", "shutil", "socket", "subprocess"}
OUTSIDE |= {"tempfile", "time", "torch.distributed", "urllib"}
PURE = ("mix", "order", "pack", "plan", "batch")

FILES = sorted(PACKAGE.rglob("*.py"))


def in_every_file(offences: Callable[[Path], Iterable[str]]) -> None:
    """Fail with every offence in the package, each after the name of its file."""
    found = [f"{path.relative_to(PACKAGE)}: {text}" for path in FILES for text in offences(path)]
    assert not found, "\n".join(found)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, including those inside functions, with the module first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_seen(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported(path)]
    return {part[1] for part in parts if part[0] == "streampack" and len(part) > 1}


def rooms_allowed(room: str) -> set[str]:
    if room == BELL:
        return {"cli"}
    if room in GROUND:
        return set(GROUND)
    if room in ROOMS:
        other_wing = set(WINGS) - {room} if room in WINGS else set()
        return {*GROUND, *ROOMS[: ROOMS.index(room) + 1]} - other_wing
    # The command line may use all of these; none of them uses the command line.
    return {*GROUND, *ROOMS, *BESIDE} - ({"cli"} if room != "cli" else set())


def test_every_file_lies_in_a_room_of_the_plan():
    assert {room_of(path) for path in FILES} <= {*GROUND, *ROOMS, *BESIDE, FRONT_DOOR, BELL}


def test_imports_only_go_upstream():
    def offences(path: Path) -> Iterator[str]:
        if room_of(path) != FRONT_DOOR:
            for room in sorted(rooms_seen(path) - rooms_allowed(room_of(path))):
                yield f"imports {room}, downstream of it"

    in_every_file(offences)


def test_no_room_is_imported_by_its_name_in_a_text():
    names = re.compile(r"""import_(?:module|extra)\(\s*f?["']streampack\.""")
    in_every_file(lambda path: names.findall(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("room", [*ROOMS, "index", "report", "cli"])
def test_every_room_says_what_comes_in_and_what_goes_out(room):
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert all(word in text for word in ("In: ", "Out: ", "ay import", "Cost: "))
    assert len(text.splitlines()) <= 10


def test_rooms_are_imported_by_name_and_not_through_the_front_door():
    through_door = {f"streampack.{name}" for name in streampack.__all__}
    in_every_file(lambda path: imported(path) & through_door)


def test_imports_stand_at_the_top_and_are_absolute():
    def offences(path: Path) -> Iterator[str]:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"line {node.lineno}: a relative import"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
                yield from (f"line {n.lineno}: an import inside {node.name}" for n in inner)
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name == "TYPE_CHECKING":
                    yield f"line {node.lineno}: an import for types only"

    in_every_file(offences)


def test_the_package_neither_asserts_nor_prints():
    def offences(path: Path) -> Iterator[str]:
        for node in nodes(path):
            if isinstance(node, ast.Assert):
                yield f"line {node.lineno}: raise a typed error instead"
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "print":
                yield f"line {node.lineno}: prints"

    in_every_file(offences)


def test_every_module_and_every_public_thing_in_it_is_documented():
    def offences(path: Path) -> Iterator[str]:
        module = nodes(path)[0]
        definitions = [n for n in module.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        if not ast.get_docstring(module):
            yield "does not say what it is for"
        for node in definitions:
            if not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"{node.name} has no docstring"

    in_every_file(offences)


def test_mosaicml_streaming_is_imported_at_one_door_only():
    # By its name, as an extra is; `import streaming` stands in no file.
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and str(node.value).startswith("streaming.base")
    }
    assert users == {"storage/mosaicml.py"}
    in_every_file(lambda path: {name for name in imported(path) if re.match(r"streaming\b", name)})


def test_torchs_workers_are_known_to_one_file_only():
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if imported(path) & {"torch.utils.data.get_worker_info", "torch.utils.data._utils"}
    }
    # Rooms before `runtime` cannot ask it: a user may call `block_mask` in a worker.
    assert users == {"runtime/torch_worker.py", "batch/masks.py"}


def test_drawing_leaves_pyplot_and_its_global_figures_alone():
    in_every_file(lambda path: imported(path) & {"matplotlib.pyplot"})


def test_rooms_without_io_import_nothing_of_the_outside():
    in_every_file(lambda path: imported(path) & OUTSIDE if room_of(path) in PURE else ())


def test_torch_is_needed_from_batch_on_only():
    before = {*ROOMS[: ROOMS.index("batch")], *GROUND}

    def offences(path: Path) -> list[str]:
        if room_of(path) not in before:
            return []
        return [name for name in imported(path) if name.split(".")[0] == "torch"]

    in_every_file(offences)


def test_no_room_reads_the_environment_behind_its_callers_back():
    readers = {
        room_of(path)
        for path in FILES
        # These pass all variables on to a worker of a fork server, or set some in their own
        # process, without reading any.
        if path.name not in {"worker_main.py", "worker_processes.py", "pool.py"}
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    # The dataset passes torchrun's variables to `World`, `_layout` reads one that no mesh tells,
    # `stores` reads addresses as the libraries of stores do, and `write` the one of Ray's cluster,
    # and sets variables for the processes that it starts.
    allowed = {*WINGS, "stores", "write", "_layout"}
    assert readers & {*GROUND, *ROOMS} <= allowed, "the outside world enters as an argument"


@pytest.mark.processes
def test_importing_streampack_loads_nothing_heavy():
    heavy = "{'torch', 'streaming', 'numba', 'numpy', 'pydantic', 'matplotlib', 'rich'}"
    check = f"import sys, streampack; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)
    assert output.stdout.decode().strip() == "[]"


def test_the_public_names_are_sorted_few_and_all_there():
    assert streampack.__all__ == sorted(streampack.__all__)
    assert len(streampack.__all__) <= 41
    missing = [name for name in streampack.__all__ if not hasattr(streampack, name)]
    assert not missing
    assert set(streampack.__all__) <= set(dir(streampack))


def test_the_stub_tells_editors_the_same_names():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    named = {
        alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert named == set(streampack.__all__)
    assert all(hasattr(streampack, name) for name in named)


def test_what_a_file_takes_from_another_is_public_there():
    def offences(path: Path) -> Iterator[str]:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("streampack."):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                yield from (f"line {node.lineno}: {name} of {node.module}" for name in private)

    in_every_file(offences)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'streampack' has no attribute 'PackedDataset'"):
        _ = streampack.PackedDataset


def test_every_pinned_version_is_one_that_the_project_allows():
    root = PACKAGE.parent
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [line for name in extras for line in extras[name]]
    clients = (root / "requirements-mosaicml.txt").read_text().splitlines()
    wanted += [line for line in clients if not line.startswith("#")]
    # The site has a separate venv; `dev` refers to the other extras through the package itself.
    wanted = [line for line in wanted if line not in extras["docs"] and "[" not in line]

    assert {line.split(">=")[0].lower() for line in wanted} <= {name.lower() for name in pins}
    assert not [line for line in wanted if "<" in line or "==" in line], "an untested upper bound"
    assert not [name for name, version in pins.items() if "+" in version], "a build of one machine"


def test_what_a_path_names_is_decided_in_one_file():
    deciders = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "expanduser"
    }
    assert deciders == {"_paths.py"}


def test_the_label_that_losses_skip_has_one_home():
    homes = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "-100"
    ]
    assert homes == ["types.py"]


def test_no_public_name_is_defined_twice():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path)[0].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert twice == {}
