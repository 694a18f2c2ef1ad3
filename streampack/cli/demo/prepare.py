"""The demo's data: text that every Python installation contains, a tokenizer and streams.

::

    code         the standard library's source files           long        PSF-2.0
    manuals      pydoc's topics, the packages' descriptions    medium      PSF-2.0, theirs
    docstrings   the standard library's docstrings             short       PSF-2.0

    demo-output/text/code.jsonl           demo-output/streams/code/index.json, lengths.bin,
                manuals.jsonl    ----->                       shard.00000.mds.zstd ...
                docstrings.jsonl
                      '--> demo-output/tokenizer.json

Cost: about ten seconds on two cores for 12 MB of text, 3.5 million tokens.
"""

from __future__ import annotations

import ast
import json
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from streampack._paths import replaced

# Tables and texts in many languages: many bytes with little to learn from.
EXCLUDED = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
MIN_CHARACTERS = 100  # one-liners are omitted
VOCABULARY = 4096
END = "<|end|>"  # the first token, so its id is 0
CHARACTERS_PER_TEXT = 20_000  # for the tokenizer, so that a few huge texts do not dominate


def code() -> Iterator[str]:
    """Yield the standard library's source files, without those of a line or two."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if EXCLUDED & set(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= MIN_CHARACTERS:
            yield text


def manuals() -> Iterator[str]:
    """Yield the topics of ``help()``, then the descriptions of the installed packages."""
    yield from (topics[name] for name in sorted(topics))
    # A package may be found twice, in a virtual environment and in its base installation.
    descriptions = {
        str(package.metadata["Name"]): str(package.metadata.json.get("description", ""))
        for package in distributions()
    }
    for name in sorted(descriptions):
        if len(descriptions[name]) >= MIN_CHARACTERS:
            yield descriptions[name]


def docstrings() -> Iterator[str]:
    """Yield the distinct docstrings of the standard library."""
    seen = set()
    for text in code():
        for docstring in _docstrings_in(text):
            if docstring not in seen and len(docstring) >= MIN_CHARACTERS:
                seen.add(docstring)
                yield docstring


def _docstrings_in(text: str) -> Iterator[str]:
    with warnings.catch_warnings():
        # Old modules contain escape sequences that newer Pythons warn about.
        warnings.simplefilter("ignore")
        module = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(module):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


def demo_config(out: Path) -> Path:
    """Copy the demo's config to its folder, and return the copy."""
    out.mkdir(parents=True, exist_ok=True)
    config = Path(__file__).with_name("demo.yaml")
    return Path(shutil.copy(config, out / config.name))


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "code": code,
    "manuals": manuals,
    "docstrings": docstrings,
}


def write_text(name: str, folder: Path) -> Path:
    """Write one of the demo's sources as JSONL, unless the file exists; return the file."""
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with replaced(path) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in SOURCES[name]())
    return path


def train_tokenizer(texts: list[Path], path: Path) -> None:
    """Train a byte-level BPE tokenizer on every second text, unless the file exists."""
    if path.exists():
        return
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginnings(texts), trainer)
    with replaced(path) as part:
        tokenizer.save(str(part))


def _beginnings(texts: list[Path]) -> Iterator[str]:
    for path in texts:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number % 2 == 0:
                    yield json.loads(line)["text"][:CHARACTERS_PER_TEXT]
