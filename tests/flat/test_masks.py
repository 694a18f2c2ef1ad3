"""Loss masks beside token files say which tokens are targets, as a column of MDS does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    Download,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    TokenFiles,
)
from streampack.errors import DataError
from streampack.flat import token_file
from streampack.streams import open_stream
from streampack.write import write_stream
from tests.helpers.faults import servers
from tests.helpers.flat import make_documents, write_datatrove, write_olmo
from tests.helpers.verbs import call_verb

MASKS = {"datatrove": "web.ds.loss", "olmo": "labels_mask_part_0000.npy"}
TOKENS = {"datatrove": "web.ds", "olmo": "token_ids_part_0000.npy"}
FORMS = ("datatrove", "olmo")
DOCUMENTS = make_documents()
RNG = np.random.default_rng(4)
OF_DOCUMENT = [RNG.integers(0, 2, len(each)).astype("u1") for each in DOCUMENTS]


@pytest.fixture(autouse=True)
def small_cells(monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", 4096)


def write(form: str, folder: Path) -> Path:
    """Write token files and a mask; return the path of the mask."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mask = folder / MASKS[form], np.concatenate(OF_DOCUMENT)
    if form == "datatrove":
        write_datatrove(folder, DOCUMENTS, masks=OF_DOCUMENT)
    else:
        write_olmo(folder, DOCUMENTS, "token_ids_part_0000")
        path.write_bytes(mask.tobytes() + b"\0" * 5)  # for the 5 tokens after the last document
    assert path.stat().st_size >= len(mask)
    return path


def options_of(form: str) -> dict[str, Any]:
    return {"format": form} | ({"dtype": "uint16"} if form == "olmo" else {})


@pytest.fixture
def expected(tmp_path) -> list[tuple[Any, Any]]:
    samples = [
        {"tokens": one, "loss_mask": other}
        for one, other in zip(DOCUMENTS, OF_DOCUMENT, strict=True)
    ]
    write_stream(samples, tmp_path / "mds")
    return targets_of(Stream(local=tmp_path / "mds", loss_mask="loss_mask"))


def targets_of(stream: Stream) -> list[tuple[Any, Any]]:
    """Return the tokens and labels of every sample, in order."""
    dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=1024), batch_size=2)
    found = {}
    for batch in PackedDataLoader(dataset):
        at = {}
        for row, _, _, sample, start, length in batch["segments"].tolist():
            begin = at.get(row, 0)
            at[row] = begin + length
            ids, labels = (batch[key][row, begin : begin + length] for key in ("tokens", "labels"))
            found[sample, start] = ids.tolist(), labels.tolist()
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_gives_the_labels_of_a_loss_mask_column(form, tmp_path, expected):
    write(form, tmp_path / "data")
    assert targets_of(Stream(TokenFiles(tmp_path / "data", **options_of(form)))) == expected
    one = Stream(TokenFiles(tmp_path / "data" / TOKENS[form], **options_of(form)))
    assert targets_of(one) == expected
    types = ["--dtype", "uint16"] if form == "olmo" else []
    call_verb("index", tmp_path / "data", "--out", tmp_path / "index", "--format", form, *types)
    indexed = Stream(TokenFiles(tmp_path / "data", index=tmp_path / "index", **options_of(form)))
    assert targets_of(indexed) == expected


@pytest.fixture
def bucket(tmp_path) -> Iterator[Path]:
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with servers.s3_server(tmp_path / "root") as s3, servers.s3_environment(s3.url):
        yield tmp_path / "root" / "bucket"


@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_is_fetched_with_its_tokens(form, tmp_path, expected, bucket):
    path = write(form, bucket / "data")
    for name in ("", TOKENS[form]):
        remote = f"s3://bucket/data/{name}"
        stream = Stream(TokenFiles(remote, local=tmp_path / f"cache{name}", **options_of(form)))
        assert targets_of(stream) == expected
    types = ["--dtype", "uint16"] if form == "olmo" else []
    out = tmp_path / "index"
    call_verb("index", "s3://bucket/data/", "--out", out, "--format", form, *types)
    options: dict[str, Any] = {"index": out, "download": Download(retry=0), **options_of(form)}
    remote = "s3://bucket/data/"
    assert targets_of(Stream(TokenFiles(remote, local=tmp_path / "other", **options))) == expected
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=TOKENS[form]):
        targets_of(Stream(TokenFiles(remote, local=tmp_path / "third", **options)))


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_does_not_fit_is_refused(form, tmp_path):
    path = write(form, tmp_path)
    content = path.read_bytes()
    stream = Stream(TokenFiles(tmp_path, **options_of(form)))
    digest = open_stream(stream, 0).full_digest
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=rf"{path.name}: has {len(content) - 1} bytes, but .* has"):
        open_stream(stream, 0)
    path.write_bytes(content[:99] + b"\2" + content[100:])
    message = rf"its loss mask has values other than 0 and 1: .*; write '{path.name}' again with 0"
    with pytest.raises(DataError, match=message):
        targets_of(stream)
    path.unlink()
    assert open_stream(stream, 0).full_digest != digest


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_only_some_files_is_refused(form, tmp_path):
    path = write(form, tmp_path)
    other = "other" if form == "datatrove" else "token_ids_part_0001"
    (write_datatrove if form == "datatrove" else write_olmo)(tmp_path, DOCUMENTS, other)
    stream = Stream(TokenFiles(tmp_path, **options_of(form)))
    with pytest.raises(DataError, match=r"has no loss mask .* but other files of the stream have"):
        open_stream(stream, 0)
    missing = {"datatrove": "other.ds.loss", "olmo": "labels_mask_part_0001.npy"}[form]
    (tmp_path / missing).write_bytes(path.read_bytes())
    assert open_stream(stream, 0).num_samples == 600


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_changes_while_it_is_read_is_an_error(form, tmp_path):
    path = write(form, tmp_path)
    stream = open_stream(Stream(TokenFiles(tmp_path, **options_of(form))), 0)
    stream.open_shard(0)
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(DataError, match=f"{path.name}: was changed since the stream was opened"):
        stream.open_shard(1)


@pytest.mark.parametrize("form", FORMS)
def test_an_index_covers_the_mask(form, tmp_path):
    path = write(form, tmp_path / "data")
    types = ["--dtype", "uint16"] if form == "olmo" else []
    call_verb("index", tmp_path / "data", "--out", tmp_path / "index", "--format", form, *types)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    stream = Stream(TokenFiles(tmp_path / "data", index=tmp_path / "index", **options_of(form)))
    with pytest.raises(DataError, match=rf"part of {path.name}, are not those that were indexed"):
        open_stream(stream, 0).open_shard(0)
