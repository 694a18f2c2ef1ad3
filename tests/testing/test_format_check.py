"""`assert_format` accepts the formats of this package, and finds the bugs of others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import Stream, TokenFiles
from streampack.flat.files import Datatrove, Megatron
from streampack.flat.token_file import Ends, FoundFile, Options, TokenFile
from streampack.streams import open_stream
from streampack.testing import assert_format
from tests.helpers.flat import make_documents, options_of, write, write_megatron

COUNTS = """
import numpy as np
from streampack.flat.token_file import Ends, TokenFile


class CountsFormat:
    name, suffix = "counts", ".tok"

    def open(self, file, options):
        counts = np.fromfile(file.table(file.name.removesuffix(".tok") + ".counts"), "<u4")
        ends = np.cumsum(counts)
        return TokenFile(
            name=file.name, dtype="uint16", num_bytes=file.num_bytes, boundaries=Ends(ends)
        )
"""


@pytest.mark.parametrize("form", ["megatron", "olmo", "datatrove", "arrow"])
def test_the_formats_of_this_package_pass(form: str) -> None:
    assert_format(form, lambda *args: write(form, *args), **options_of(form))


class _JoinedDocuments(Megatron):
    def open(self, file: FoundFile, options: Options) -> TokenFile:
        opened = super().open(file, options)
        ends = opened.boundaries.begins(np.arange(2, opened.boundaries.num_samples))
        ends = np.append(ends, file.num_bytes // 2)
        return TokenFile(
            name=file.name, dtype="uint16", num_bytes=file.num_bytes, boundaries=Ends(ends)
        )


class _OtherType(Megatron):
    def open(self, file: FoundFile, options: Options) -> TokenFile:
        opened = super().open(file, options)
        return TokenFile(
            name=file.name, dtype="int16", num_bytes=file.num_bytes, boundaries=opened.boundaries
        )


class _NoChecks(Datatrove):
    def open(self, file: FoundFile, options: Options) -> TokenFile:  # noqa: ARG002
        path = file.path_of(f"{file.name}.index")
        assert path is not None
        ends = np.fromfile(path, "<u8").astype(np.int64)
        ends = ends[ends * 2 <= file.num_bytes]
        return TokenFile(
            name=file.name, dtype="uint16", num_bytes=file.num_bytes, boundaries=Ends(ends)
        )


def _write_other(folder: Path, documents: Any, name: str) -> None:
    write_megatron(folder, [each ^ 1 for each in documents], name)


@pytest.mark.parametrize(
    ("form", "writer", "message"),
    [
        (_JoinedDocuments(), write_megatron, "all documents: has lengths"),
        (_OtherType(), _write_other, "document 0 has tokens"),
        (_NoChecks(), lambda *args: write("datatrove", *args), "cut to half of its bytes"),
    ],
)
def test_a_fault_is_found(form: Any, writer: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_format(form, writer)


def test_a_registered_format_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "own_formats-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: own-formats\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[streampack.formats]\ncounts = own_formats:CountsFormat\n"
    )
    (tmp_path / "own_formats.py").write_text(COUNTS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    documents = make_documents(20)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.tok").write_bytes(np.concatenate(documents).tobytes())
    np.array([len(each) for each in documents], "<u4").tofile(tmp_path / "data" / "a.counts")
    stream = open_stream(Stream(TokenFiles(tmp_path / "data", format="counts")), 0)
    assert stream.shard_lengths(0).tolist() == [len(each) for each in documents]
