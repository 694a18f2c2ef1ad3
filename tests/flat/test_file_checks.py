"""A token file that does not fit its table: a wrong type, tokens after the documents, headers."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest

from streampack import Stream, TokenFiles
from streampack.errors import DataError
from streampack.streams import open_stream
from tests.helpers.flat import make_documents, read_documents, write_datatrove


def write_olmo(
    folder: Path, dtype: str, num_after: int = 0, num_documents: int = 300
) -> list[list[int]]:
    """Write files with tokens of a type, so many of them after the last document."""
    documents = make_documents(num_documents, dtype=dtype)
    after = np.full(num_after, 7, dtype)
    (folder / "web.npy").write_bytes(np.concatenate([*documents, after]).tobytes())
    ends = np.cumsum(list(map(len, documents)))
    with gzip.open(folder / "web.csv.gz", "wt") as file:
        file.writelines(
            f"{end - len(each)},{end}\n" for end, each in zip(ends, documents, strict=True)
        )
    return [each.tolist() for each in documents]


@pytest.mark.parametrize("num_after", [0, 20])
@pytest.mark.parametrize(
    ("written", "read"), [("uint32", "uint16"), ("uint16", "uint32"), ("uint16", "uint8")]
)
def test_tokens_of_another_type_are_refused_with_the_one_that_fits(
    written, read, num_after, tmp_path
):
    documents = write_olmo(tmp_path, written, num_after)
    with pytest.raises(DataError, match=f"set dtype='{written}'"):
        open_stream(Stream(TokenFiles(tmp_path, dtype=read)), 0)
    found = read_documents(Stream(TokenFiles(tmp_path, dtype=written)))
    assert [each.tolist() for each in found] == documents
    if not num_after:
        with pytest.raises(DataError, match=f"set dtype='{written}'"):
            open_stream(Stream(TokenFiles(tmp_path, trailing="ignore", dtype=read)), 0)


@pytest.mark.parametrize("trailing", [None, "ignore"])
def test_a_few_tokens_after_the_last_document_are_warned_of(trailing, tmp_path, caplog):
    documents = write_olmo(tmp_path, "uint16", 90)
    with caplog.at_level(logging.WARNING):
        found = read_documents(Stream(TokenFiles(tmp_path, trailing=trailing, dtype="uint16")))
    assert [each.tolist() for each in found] == documents
    num_bytes = (tmp_path / "web.npy").stat().st_size
    shown = f"180 of the {num_bytes} bytes of its files ({18000 / num_bytes:.2g} %) are tokens"
    assert (shown in caplog.text) == (trailing is None)


def test_many_tokens_after_the_last_document_need_trailing(tmp_path):
    documents = write_olmo(tmp_path, "uint16", 3000)
    with pytest.raises(DataError, match=r"6000 of its \d+ bytes \(\d+%\).*trailing='ignore'"):
        open_stream(Stream(TokenFiles(tmp_path, dtype="uint16")), 0)
    found = read_documents(Stream(TokenFiles(tmp_path, trailing="ignore", dtype="uint16")))
    assert [each.tolist() for each in found] == documents


def test_datatroves_index_ends_with_its_tokens_or_needs_trailing(tmp_path):
    documents = make_documents()
    write_datatrove(tmp_path, documents)
    with (tmp_path / "web.ds").open("ab") as file:
        file.write(b"\7\0" * 5)
    with pytest.raises(DataError, match=r"end at byte \d+, but web.ds has .*trailing='ignore'"):
        open_stream(Stream(TokenFiles(tmp_path)), 0)
    assert len(read_documents(Stream(TokenFiles(tmp_path, trailing="ignore")))) == 300
    (tmp_path / "web.ds.metadata").unlink()
    (tmp_path / "web.ds").write_bytes((tmp_path / "web.ds").read_bytes()[:-10] * 2)
    with pytest.raises(DataError, match="set dtype='uint16' or 'uint32'"):
        open_stream(Stream(TokenFiles(tmp_path, trailing="ignore")), 0)
    stream = Stream(TokenFiles(tmp_path, trailing="ignore", dtype="uint16"))
    np.testing.assert_array_equal(read_documents(stream)[9], documents[9])


@pytest.mark.parametrize("trailing", [None, "ignore"])
@pytest.mark.parametrize("num_documents", [20, 300])
def test_a_file_with_a_numpy_header_is_refused_where_it_is_opened(
    num_documents, trailing, tmp_path
):
    write_olmo(tmp_path, "uint16", num_documents=num_documents)
    np.save(tmp_path / "web.npy", np.fromfile(tmp_path / "web.npy", "uint16"))
    source = TokenFiles(tmp_path, dtype="uint16", only=slice(10, None), trailing=trailing)
    with pytest.raises(DataError, match=r"web\.npy: begins with a numpy header"):
        open_stream(Stream(source), 0)


def test_a_numpy_header_in_a_store_is_refused_where_it_is_opened(tmp_path):
    write_olmo(tmp_path, "uint16")
    np.save(tmp_path / "web.npy", np.fromfile(tmp_path / "web.npy", "uint16"))
    store = pytest.importorskip("fsspec").filesystem("memory")
    for name in ("web.npy", "web.csv.gz"):
        store.pipe(f"/with-header/{name}", (tmp_path / name).read_bytes())
    source = TokenFiles("memory://with-header/", local=tmp_path / "cache", dtype="uint16")
    with pytest.raises(DataError, match=r"web\.npy: begins with a numpy header"):
        open_stream(Stream(source), 0)
    store.rm("/with-header", recursive=True)
