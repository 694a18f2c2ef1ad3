"""The site's pages: complete, linked from the navigation, up to date, and their code runs."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from streampack import PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.write import write_stream
from tests.helpers.flat import make_documents, write_megatron, write_olmo
from tests.helpers.verbs import call_verb

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "streampack"
ROOMS = ("formats", "testing", "texts", "write", "index", "report", "hf", "lightning")
PUBLIC = ("streampack", *(f"streampack.{name}" for name in ROOMS))
RUN_ELSEWHERE = {"migrating-mosaicml": "test_readme.py"}
RUN_ELSEWHERE |= dict.fromkeys(("megatron", "torchtitan"), "test_other_environments.py")
PAGES_WITH_CODE = sorted(
    path.relative_to(DOCS).with_suffix("").as_posix()
    for path in DOCS.rglob("*.md")
    if "```python\n" in path.read_text() and path.stem not in RUN_ELSEWHERE
)

pytestmark = pytest.mark.usefixtures("one_thread")


def leaves(nav: Any) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from leaves(target)


def test_every_page_is_in_the_navigation_once():
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]

    assert sorted(leaves(site["nav"])) == sorted(pages)


def test_the_folder_of_the_site_has_nothing_but_pages_and_pictures():
    files = [path for path in DOCS.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.suffix not in {".md", ".png"}] == []


def test_every_name_that_pages_import_is_in_the_reference():
    listed = set(re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    imports = re.compile(r"^ *from (streampack[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "trainers").glob("*.md")]
    found = {
        f"{module}.{name}"
        for page in pages
        for module, names in imports.findall(page.read_text())
        for name in re.findall(r"\w+", re.sub("#.*", "", names))
    }
    assert len(found) > 30
    assert found - listed - set(filter(is_file, found)) == set()


def is_file(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name):
    listed = re.findall(rf"^::: {name}\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)

    assert sorted(listed) == sorted(importlib.import_module(name).__all__)


@pytest.mark.parametrize("page", ["config-reference", "combinations", "moved-options"])
def test_a_generated_page_is_what_its_generator_prints(page):
    script = str(ROOT / "scripts" / "generate.py")
    pages = runpy.run_path(script)["PAGES"]

    assert (DOCS / f"{page}.md").read_text() == pages[page](), f"run python {script}"


def test_the_architecture_page_names_only_files_that_exist():
    text = (DOCS / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    missing = [path for path in named if not any((at / path).exists() for at in (ROOT, PACKAGE))]
    assert not missing


def test_decision_records_name_only_tests_that_exist():
    tests = "\n".join(f"{path}" for path in ROOT.glob("tests/**/test_*.py")) + "\n"
    missing = [
        (page.name, named)
        for page in sorted((DOCS / "adr").glob("0*.md"))
        for named in re.findall(r"`((?:\w+/)*test_\w+\.py)`", page.read_text())
        if f"/{named.removeprefix('tests/')}\n" not in tests
    ]
    assert not missing


def test_the_index_of_decisions_lists_every_page_with_its_date_and_status():
    index = (DOCS / "adr" / "index.md").read_text()
    pages = sorted((DOCS / "adr").glob("0*.md"))

    assert len(re.findall(r"^\| \d+ \|", index, flags=re.MULTILINE)) == len(pages)
    for page in pages:
        heading, _, note = page.read_text().splitlines()[:3]
        number, title = re.fullmatch(r"# (\d+)\. (.*)", heading).groups()
        date, status = re.fullmatch(r"Date: (\d{4}-\d\d-\d\d)\. Status: (.+)\.", note).groups()
        assert f"| {number} | [{title}]({page.name}) | {date} | {status} |" in index


def names_of_a_run() -> dict[str, Any]:
    """The names that docs/distributed.md expects its reader to have, for a single rank."""
    stream = Stream(local=write_stream([[1, 2, 3]] * 60, "data/text").path)
    loader = PackedDataLoader(PackedStreamingDataset([stream], packing=Packing(max_seq_len=8)))
    next(iter(loader))
    given = {"torch": torch, "os": os, "rank": 0, "model": torch.nn.Linear(1, 1)}
    return given | {"loader": loader}


NAMES = {"distributed": names_of_a_run}
ALONE = {"iterables"}  # pages in which each block runs independently


# MosaicML's merge_index does not close the files that it reads.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# Warnings that Lightning gives at every start.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)

    assert blocks
    given = NAMES[page]() if page in NAMES else {}
    for code in blocks if page in ALONE else ["\n".join(blocks)]:
        exec(compile(code, f"{page}.md", "exec", dont_inherit=True), {"__name__": page, **given})


def test_the_yaml_of_the_first_page_describes_a_run_of_its_streams(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "quickstart-pretraining.md").read_text()
    first, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(first, "first block", "exec"), {})
    [described] = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    Path("run.yaml").write_text(described)
    [command] = re.findall(r"^\$ streampack (simulate run.yaml .*)$", text, flags=re.MULTILINE)
    assert "2 steps of 64 x 1 packs" in call_verb(*command.split())
    assert call_verb("run", "run.yaml")


@pytest.mark.parametrize("trainer", ["Megatron", "OLMo"])
def test_the_yaml_that_replaces_the_data_of_another_trainer_is_planned(
    trainer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    section = (DOCS / "migrating-token-files.md").read_text().split(f"## {trainer}\n")[1]
    described = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)[0]
    Path("run.yaml").write_text(described)
    Path("data").mkdir()
    Path("mix").mkdir()
    for name, num_documents in (("web", 2000), ("code", 500)):
        write_megatron(Path("data"), make_documents(num_documents), name)
    for name in ("web-0", "web-1", "code-0"):
        write_olmo(Path("mix"), make_documents(), name)

    planned = json.loads(call_verb("plan", "run.yaml", "--json"))

    [chapter] = planned["chapters"]
    written = yaml.safe_load(described)["chapters"][0]
    total = sum(written["weights"].values())
    shares = {name: stream["begin"] for name, stream in chapter["streams"].items()}
    assert shares == pytest.approx({n: w / total for n, w in written["weights"].items()})
    assert chapter["steps"] == written["steps"]


def test_each_message_of_the_troubleshooting_table_is_one_of_the_package():
    table = (DOCS / "operations.md").read_text().split("| the message contains |")[1]
    rows = re.findall(r"^\| (`.*?) \|", table.split("\n\n")[0], flags=re.MULTILINE)
    texts = "\0".join(
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    ours = [row for row in rows if "torchvision" not in row]
    pieces = [
        piece for row in ours for span in re.findall("`(.*?)`", row) for piece in span.split("...")
    ]

    assert len(rows) > 10
    assert [piece for piece in pieces if piece.strip(" ()=") not in texts] == []
