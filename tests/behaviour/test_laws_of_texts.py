"""The laws of planned streams hold for texts of every input, with their rows behind them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import datasets
import litdata
import pyarrow as pa
import pytest
from streaming import MDSWriter
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from streampack import (
    Buffers,
    Chats,
    DataError,
    PackedDataLoader,
    PackedStreamingDataset,
    Shards,
    Texts,
    World,
)
from streampack.testing import assert_exactly_once, assert_resumes, assert_same_in_every_world
from streampack.testing.shown import all_rows, show, worlds
from streampack.texts import units
from streampack.texts.rows import RowFormat
from streampack.write.files import write_texts
from streampack.write.options import WriteOptions
from tests.helpers.chats import chat_tokenizer, chats
from tests.helpers.examples import crossed
from tests.helpers.inputs import csv_text, packed, write_table
from tests.helpers.texts import PACKING, dataset_of, ids_of, texts, tokens_of, write_lines

NUM_ROWS = 84
TEXTS = texts(NUM_ROWS)  # each seventh is empty
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
CHATS = chats(NUM_ROWS)
TABLE = pa.Table.from_pylist(ROWS)
# Of windows of packs, those of texts are smaller, so that the first batch waits for few shards.
IN_ORDER = {"order": {"shuffle": False}, "packing": replace(PACKING, method="next_fit", eos_id=5)}
LANES = {"order": {"num_lanes": 2}, "mixing": {"epoch_end": "carry"}}


def lines(folder: Path, suffix: str = "") -> Path:
    plain, path = write_lines(folder / "plain", ROWS), folder / f"rows.jsonl{suffix}"
    path.write_bytes(packed(plain.read_bytes(), suffix))
    return path


def comma_separated(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_bytes(csv_text([["id", "text"], *([str(n), text] for n, text in enumerate(TEXTS))]))
    return path


def text_files(folder: Path, suffix: str) -> Path:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}{suffix}").write_text(text)
    return folder


def mds(folder: Path) -> Path:
    columns = {"id": "int", "text": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1500) as writer:
        for row in ROWS:
            writer.write(row)
    return folder


def litdata_chunks(folder: Path) -> Path:
    writer = litdata.streaming.writer.BinaryWriter(str(folder), chunk_size=30)
    for number, row in enumerate(ROWS):
        writer[number] = row
    writer.done()
    writer.merge()
    return folder


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


INPUTS: dict[str, Any] = {
    "jsonl": lines,
    "jsonl.gz": lambda folder: lines(folder, ".gz"),
    "jsonl.zst": lambda folder: lines(folder, ".zst"),
    "csv": comma_separated,
    "parquet": lambda folder: write_table(folder / "rows.parquet", TABLE, 20),
    "arrow": lambda folder: write_table(folder / "rows.arrow", TABLE, 20),
    "txt": lambda folder: text_files(folder, ".txt"),
    "md": lambda folder: text_files(folder, ".md"),
    "mds": mds,
    "litdata": litdata_chunks,
    "saved": saved,
    "list": lambda _: ROWS,
    "table": lambda _: TABLE,
    "dataset": lambda _: datasets.Dataset.from_list([{"id": -1, "text": "a"}, *ROWS]).select(
        range(1, NUM_ROWS + 1)
    ),
    "chats": lambda folder: write_lines(folder / "chats.jsonl", CHATS),
}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 1000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=INPUTS)
def source(request, tokenizer, tmp_path_factory) -> Any:
    """Return a function from options to the source of an input, with a cache of its own."""
    folder = tmp_path_factory.mktemp("input")
    files, kind = INPUTS[request.param](folder), Chats if request.param == "chats" else Texts
    cache = tmp_path_factory.mktemp("cache")
    return lambda **options: kind(files, tokenizer, **{"local": cache, **options})


def in_order(source: Any) -> list[Any]:
    keys = ("tokens", "labels", "position_ids", "segment_ids")
    batches = dataset_of(source, **IN_ORDER)
    return [show({key: batch[key] for key in keys if key in batch}) for batch in batches]


@pytest.fixture(scope="module")
def written(tokenizer, tmp_path_factory) -> dict[bool, list[Any]]:
    """Return the batches of the same rows in MDS, of texts and of conversations."""
    folder, found = tmp_path_factory.mktemp("written"), {}
    for rows, option in ((ROWS, {"text": "text"}), (CHATS, {"chat": "messages"})):
        is_chat = rows is CHATS
        path = write_lines(folder / f"{is_chat}.jsonl", rows)
        form = RowFormat(tokenizer=tokenizer, **option)
        write_texts([path], folder / str(is_chat), WriteOptions(rows=form, num_workers=1))
        mask = {"loss_mask": "loss_mask"} if is_chat else {}
        found[is_chat] = in_order(Shards(local=folder / str(is_chat), **mask))
    return found


@pytest.mark.parametrize(
    ("source", "lengths"), crossed(list(INPUTS), ["lazy", "eager"]), indirect=["source"]
)
def test_in_order_they_are_what_was_written(source, written, lengths):
    opened = source(lengths=lengths)
    assert in_order(opened) == written[isinstance(opened, Chats)]


def test_each_row_is_delivered_once_and_document_says_where_it_is(source):
    dataset, is_chat = dataset_of(source(lengths="eager")), isinstance(source(), Chats)
    batches, found = list(dataset), {}
    for batch in batches:
        for segment, ids in zip(batch["segments"].tolist(), tokens_of([batch]), strict=True):
            found[segment[3]] = document = dataset.document(segment[1:])
            assert document["tokens"][segment[4] :][: len(ids)].tolist() == ids
    if is_chat:
        assert sorted(found) == [*range(NUM_ROWS)]
    else:
        lengths = list(map(len, ids_of(TEXTS)))
        assert_exactly_once(batches, [lengths], [sum(map(bool, lengths))])
    begins: dict[str, int] = {}
    for sample, document in sorted(found.items()):
        row = (CHATS if is_chat else ROWS)[sample]
        as_text = {name: str(value) for name, value in row.items()}  # of CSV
        assert document["fields"] in (row, as_text, {"text": row.get("text")})
        begin = sample - document["row"]
        assert begins.setdefault(document["file"], begin) == begin


# Texts whose lengths are known are planned as any other stream.
EAGER = ("jsonl.gz", "chats")


def test_every_world_gets_the_same_packs_and_they_resume(source):
    def make(world: World | None = None) -> PackedStreamingDataset:
        return dataset_of(source(lengths="lazy"), world, **LANES)

    assert_same_in_every_world(make, [(4, 2)])
    assert_resumes(lambda: PackedDataLoader(make()), every=8)


@pytest.mark.parametrize(
    "source",
    [name if name in EAGER else pytest.param(name, marks=pytest.mark.slow) for name in INPUTS],
    indirect=True,
)
def test_every_world_gets_the_same_packs_of_known_lengths(source):
    assert_same_in_every_world(lambda world: dataset_of(source(lengths="eager"), world), [(2, 2)])


def test_lanes_of_texts_that_are_nearly_all_empty_end_where_their_packs_end(tokenizer, tmp_path):
    rows = [text if number % 40 == 0 else "" for number, text in enumerate(texts(4000))]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in rows])

    def make(world: World | None = None) -> PackedStreamingDataset:
        source = Texts(path, tokenizer, local=tmp_path / "cache")
        options = {"order": {"num_lanes": 2}, "mixing": {"epoch_end": "pad"}}
        return dataset_of(source, world, **options)

    assert all_rows([make(world) for world in worlds(4, 2)]) == all_rows([make()])


FILES = [name for name in INPUTS if name not in ("list", "table", "dataset", "chats")]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_changes_after_it_was_planned_is_an_error(name, tokenizer, tmp_path):
    folder = tmp_path / "input"
    folder.mkdir()
    files = INPUTS[name](folder)
    dataset = dataset_of(Texts(files, tokenizer, local=tmp_path, lengths="lazy"), **LANES)
    for path in folder.rglob("*.*"):
        if path.is_file() and path.suffix != ".json":
            data = path.read_bytes()
            # Shards have no time of change in their index, and these have no hash.
            end = b"!" if name in ("mds", "litdata") else b""
            path.write_bytes(data[: len(data) // 2] + b"!" + data[len(data) // 2 + 1 :] + end)
    with pytest.raises(DataError, match=r"changed since|but index.json says"):
        list(dataset)


def test_gigatoken_gives_the_batches_of_huggingface(tmp_path):
    pytest.importorskip("gigatoken", reason="the extra gigatoken is not installed")
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=300, show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    found = []
    for backend in ("huggingface", "gigatoken"):
        files, file = lines(tmp_path), tmp_path / "tokenizer.json"
        source = Texts(files, file, local=tmp_path, backend=backend, lengths="lazy")
        found.append(list(map(show, dataset_of(source, **LANES))))
    assert found[0] == found[1]
    assert len({path.name for path in (tmp_path / "tokens").glob("??/[0-9a-f]*")}) > 4


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("lengths", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_worker_processes_deliver_the_same_batches_and_resume(lengths, tokenizer, tmp_path):
    files, caches = lines(tmp_path), count()

    def make() -> PackedStreamingDataset:
        local = tmp_path / str(next(caches))
        source = Texts(files, tokenizer, local=local, lengths=lengths)
        return dataset_of(source, buffers=Buffers(tokenizing=1), **LANES)

    def stateful() -> StatefulDataLoader:
        return StatefulDataLoader(make(), batch_size=None, num_workers=2)

    wanted = list(map(show, make()))
    assert list(map(show, PackedDataLoader(make(), num_workers=2))) == wanted
    assert list(map(show, DataLoader(make(), batch_size=None, num_workers=2))) == wanted
    loader = stateful()
    first = [show(batch) for batch in islice(loader, 3)]
    resumed = stateful()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert first + list(map(show, resumed)) == wanted
