"""Sources of rows give the same samples for any container, and are made once for a node."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from streampack import (
    Chats,
    HeldOut,
    Order,
    PackedStreamingDataset,
    Packing,
    Stream,
    Texts,
    TokenFiles,
    chat_dataset,
    chat_datasets,
)
from streampack.errors import ConfigError, DataError
from streampack.planned import stream_lengths
from streampack.streams import open_stream
from streampack.texts import ChatEncoder, pool
from tests.helpers.chats import LETTERS, PACKING, TEMPLATE, chat_tokenizer, chats, say, words
from tests.helpers.examples import examples
from tests.helpers.faults.servers import s3_environment, s3_server
from tests.helpers.texts import digest_of_texts
from tests.helpers.verbs import call_verb


def texts(num: int) -> list[dict[str, Any]]:
    return [{"text": row["messages"][0]["content"]} for row in chats(num)]


def line_of(row: dict[str, Any]) -> str:
    return f"{json.dumps(row)}\n"


def close_pools() -> None:
    for each in list(pool._pools.values()):
        each.close()


def files_of(rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the same rows as files."""
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(map(line_of, rows)))
    return {"jsonl": folder / "rows.jsonl", "parquet": str(folder / "rows.parquet")}


def in_memory(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same rows in each kind of container."""
    return {
        "list": rows,
        "tuple": tuple(rows),
        "pandas": pd.DataFrame(rows),
        "arrow": pa.Table.from_pylist(rows),
        "datasets": datasets.Dataset.from_list(rows),
        "selected": datasets.Dataset.from_list([*rows, *rows]).select(range(len(rows))),
        "torch": datasets.Dataset.from_list(rows).with_format("torch"),
    }


def samples_of(stream: Stream) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and labels of each sample, in the order in which they are stored."""
    dataset = PackedStreamingDataset(
        [stream],
        packing=Packing(max_seq_len=64, method="next_fit", max_samples_per_pack=1),
        order=Order(shuffle=False, num_lanes=1),
        batch_size=64,
    )
    found = []
    for batch in dataset:
        for row, _, _, _, _, length in batch["segments"].tolist():
            tokens, labels = batch["tokens"][row, :length], batch["labels"][row, :length]
            found.append((tokens.tolist(), labels.tolist()))
    return found


def test_conversations_are_the_same_stream_in_any_container(tmp_path):
    rows = chats(30)
    encode = ChatEncoder(chat_tokenizer())
    wanted = []
    for sample in map(encode, rows):
        labels = np.where(sample["loss_mask"] == 1, sample["tokens"], -100)
        wanted.append((sample["tokens"].tolist(), [*labels[1:].tolist(), -100]))

    for name, each in (in_memory(rows) | files_of(rows, tmp_path)).items():
        stream = Stream(Chats(each, chat_tokenizer(), local=tmp_path / "cache"))
        assert samples_of(stream) == wanted, name


@pytest.mark.parametrize("kind", ["texts", "chats", "ids"])
def test_a_slice_of_rows_has_the_samples_of_the_slice(kind, tmp_path):
    rows, options = chats(20), {"local": tmp_path / "cache"}
    make = {
        "texts": lambda only: Texts(texts(20), words(), only=only, **options),
        "chats": lambda only: Chats(rows, chat_tokenizer(), only=only, **options),
        "ids": lambda only: TokenFiles([[n, n + 1] for n in range(20)], only=only, **options),
    }[kind]
    wanted = samples_of(Stream(make(None)))
    for only in (slice(3, 11), slice(15, None), slice(0, 1)):
        assert samples_of(Stream(make(only))) == wanted[only]
    made = list((tmp_path / "cache").glob("tokens/??/[0-9a-f]*"))
    assert len(made) == 1  # once, whatever the slice
    with pytest.raises(ConfigError, match=r"only=slice"):
        samples_of(Stream(make(slice(20, 30))))
    sides = [HeldOut(side, 0.25, by="row") for side in ("train", "held_out")]
    parts = [samples_of(Stream(make(slice(4, 20)), held_out=side)) for side in sides]
    assert sorted(parts[0] + parts[1]) == sorted(wanted[4:20])
    assert all(parts)


def test_texts_and_token_ids_are_rows_too(tmp_path):
    rows, tokenizer = texts(20), words()
    wanted = [tokenizer.encode(row["text"]).ids for row in rows]

    by_name = [{"body": row["text"], "url": b"not JSON"} for row in rows]
    each = [
        Stream(Texts(rows, tokenizer, local=tmp_path)),
        Stream(Texts([row["text"] for row in rows], tokenizer, local=tmp_path)),
        Stream(Texts(by_name, tokenizer, text="body", local=tmp_path)),
        Stream(TokenFiles(wanted, local=tmp_path)),
        Stream(TokenFiles([np.array(ids) for ids in wanted], local=tmp_path)),
        Stream(TokenFiles(datasets.Dataset.from_dict({"input_ids": wanted}), local=tmp_path)),
    ]
    for stream in each:
        assert [tokens for tokens, _ in samples_of(stream)] == wanted


def test_a_list_of_texts_is_never_one_of_paths(tmp_path):
    rows, tokenizer = ["a: b", "~/c"], words()
    source = Texts(rows, tokenizer, local=tmp_path)
    dataset = PackedStreamingDataset([Stream(source)], packing=PACKING)
    assert source.files == rows
    wanted = [tokenizer.encode(text).ids for text in rows]
    assert [tokens for tokens, _ in samples_of(Stream(source))] == wanted
    assert b"a: b" not in pickle.dumps(dataset)
    with pytest.raises(ConfigError, match=r"streams.0.files=.* is in memory"):
        dataset.to_config()


@pytest.mark.parametrize("kind", [Texts, Chats, TokenFiles])
def test_names_of_files_in_a_list_are_refused_where_a_list_is_rows(kind, tmp_path):
    rows = {Texts: texts(4), Chats: chats(4), TokenFiles: [{"tokens": [1, 2]}] * 4}[kind]
    tokenizer = {Texts: words, Chats: chat_tokenizer, TokenFiles: None}[kind]
    options = ({} if tokenizer is None else {"tokenizer": tokenizer()}) | {"local": tmp_path}
    paths = [files_of(rows, tmp_path)["jsonl"]]
    for names in (paths, tuple(map(str, paths))):
        with pytest.raises(
            ConfigError, match=r"a list must have rows, .* a glob, such as 'rows/\*.jso"
        ):
            kind(names, **options)
    assert len(samples_of(Stream(kind(f"{tmp_path}/*.jsonl", **options)))) == 4


@pytest.mark.parametrize("kind", ["list", "arrow", "jsonl", "parquet"])
def test_labels_and_masks_of_token_ids_are_kept(tmp_path, kind):
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "mask": [0, 0, 1]},
        {"input_ids": [], "labels": [], "mask": []},
        {"input_ids": [8, 9], "labels": [-100, -100], "mask": [1, 1]},
    ]
    each = (in_memory(rows) | files_of(rows, tmp_path))[kind]

    def read(**columns: Any) -> list[tuple[list[int], list[int]]]:
        return samples_of(Stream(TokenFiles(each, local=tmp_path / "cache", **columns)))

    assert read() == [([5, 6, 7], [6, 7, -100]), ([8, 9], [9, -100])]
    assert read(labels="labels") == [([5, 6, 7], [6, 7, -100]), ([8, 9], [-100, -100])]
    assert read(loss_mask="mask") == [([5, 6, 7], [-100, 7, -100]), ([8, 9], [9, -100])]
    as_labels = read(labels="mask", labels_shifted=False)  # of the same token shard
    assert as_labels == [([5, 6, 7], [0, 1, -100]), ([8, 9], [1, -100])]
    both = read(labels="labels", loss_mask="mask")
    assert both == [([5, 6, 7], [-100, 7, -100]), ([8, 9], [-100, -100])]


@pytest.mark.processes
def test_token_ids_in_lines_of_a_store_are_read_once_their_rows_are_counted(tmp_path):
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    rows, url = [{"tokens": [1, 2]}, {"tokens": [3]}], "s3://bucket/rows.jsonl"
    (tmp_path / "store" / "bucket" / "rows.jsonl").write_text("".join(map(line_of, rows)))
    with s3_server(tmp_path / "store") as s3, s3_environment(s3.url):
        close_pools()  # their processes have no such store
        with pytest.raises(ConfigError, match=f"streampack index {url} --out FOLDER, and set inde"):
            samples_of(Stream(TokenFiles(url, local=tmp_path / "a")))
        call_verb("index", url, "--out", tmp_path / "index")
        source = TokenFiles(url, local=tmp_path / "a", index=tmp_path / "index")
        assert [tokens for tokens, _ in samples_of(Stream(source))] == [[1, 2], [3]]
        close_pools()


def test_a_table_of_many_batches_keeps_its_rows_and_their_order(tmp_path):
    rows = [{"input_ids": [number + 1]} for number in range(2500)]
    for name, each in in_memory(rows).items():
        stream = Stream(TokenFiles(each, local=tmp_path / name))
        assert [tokens for tokens, _ in samples_of(stream)] == [row["input_ids"] for row in rows]


def test_a_stream_of_rows_is_a_stream_like_any_other(tmp_path):
    mixed = [
        Stream(Chats(chats(40), chat_tokenizer(), local=tmp_path), repeat=1),
        Stream(Texts(texts(90), words(), local=tmp_path), name="replay", choose=10),
    ]
    dataset = PackedStreamingDataset(mixed, packing=PACKING, order=Order(seed=3))
    assert dataset.stream_names == ["rows", "replay"]
    batches = list(dataset)
    assert len(batches) == len(dataset)
    segments = torch.cat([batch["segments"] for batch in batches])
    assert np.bincount(segments[:, 1]).tolist() == [40, 10]
    assert segments[segments[:, 1] == 0, 3].tolist() != list(range(40))  # shuffled

    again = PackedStreamingDataset(mixed, packing=PACKING, order=Order(seed=3))
    again.load_state_dict(dataset.state_after(batches[2]))
    for batch, other in zip(again, batches[3:], strict=True):
        assert batch["tokens"].equal(other["tokens"])


def test_workers_do_not_get_the_rows(tmp_path):
    dataset = chat_dataset(chats(500), chat_tokenizer(), packing=PACKING, local=tmp_path)
    assert len(pickle.dumps(dataset)) < 50_000
    sent = pickle.loads(pickle.dumps(dataset))
    assert sent.streams[0].source.files is list
    assert sent.with_arguments(batch_size=2).digest  # what was opened is not opened again


def name_of(rows: Any, local: Path, tokenizer: Any = None, kind: Any = Chats, **own: Any) -> str:
    """Return the name of the first token shard."""
    source = kind(rows, tokenizer or chat_tokenizer(), local=local, **own)
    return open_stream(Stream(source), 0).shards.file_name(0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@given(data=st.data())
@examples(20)
def test_the_name_of_rows_is_that_of_their_content(cache, data):
    text = st.text(alphabet=[*LETTERS, " "], min_size=1, max_size=5)
    rows = data.draw(st.lists(st.fixed_dictionaries({"text": text}), min_size=1, max_size=4))
    other = data.draw(st.lists(st.fixed_dictionaries({"text": text}), min_size=1, max_size=4))
    rows, other = [[*each, {"text": "a"}] for each in (rows, other)]
    names = [name_of(each, cache, words(), kind=Texts) for each in (rows, list(rows), other)]
    assert names[0] == names[1]
    assert (names[0] == names[2]) == (rows == other)


def test_the_name_depends_on_all_that_the_tokens_depend_on(tmp_path):
    rows = chats(5)
    other_end = chat_tokenizer()
    other_end.chat_template = TEMPLATE.replace("<end>", "?")
    other_words = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="?")
    other_words.chat_template = TEMPLATE
    other_words.add_tokens(["word"])
    names = [
        name_of(rows, tmp_path),
        name_of(rows[:4], tmp_path),
        name_of(rows[::-1], tmp_path),
        name_of(rows, tmp_path, other_end),
        name_of(rows, tmp_path, other_words),
        name_of(rows, tmp_path, train_on="all"),
    ]
    assert len(set(names)) == len(names)


KEEPS = TEMPLATE.replace(
    "{{ m.content }}", "{% if keep %}{{ m.thinking }}{% endif %} {{ m.content }}"
)
ASKED = {"role": "user", "content": "a"}
OPTIONS: list[tuple[dict[str, Any], list[dict[str, Any]], list[str]]] = [
    ({"train_on": "last_response"}, say("a", "b", "c", "d"), ["d <end>"]),
    ({"train_on": "each_response"}, say("a", "b", "c", "d"), ["b <end>", "d <end>"]),
    (
        {"template_kwargs": {"keep": True}},
        [ASKED, {"role": "assistant", "content": "b", "thinking": "i j"}],
        ["i j b <end>"],
    ),
    (
        {"context_roles": ["documents"]},
        [{"role": "documents", "content": "i"}, *say("a", "b")],
        ["b <end>"],
    ),
    ({"ignore_fields": ["notes"]}, [ASKED, {**say("a", "b")[1], "notes": "i j"}], ["b <end>"]),
    (
        {"chat_template": TEMPLATE.replace(" <end>", "")},
        say("a", "b"),
        ["b"],
    ),
]


@pytest.mark.parametrize(("options", "messages", "expected"), OPTIONS)
def test_options_of_chats_reach_their_encoder(tmp_path, options, messages, expected):
    packing = replace(PACKING, overflow="truncate")
    rows, tokenizer = [{"messages": messages}], chat_tokenizer(KEEPS)
    streams = [Stream(Chats(rows, tokenizer, local=tmp_path / "a", **options))]
    for dataset in (
        PackedStreamingDataset(streams, packing=packing),
        chat_dataset(rows, tokenizer, packing=packing, local=tmp_path / "b", **options),
    ):
        found = samples_of(dataset.streams[0])
        learned = [[label for label in labels if label >= 0] for _, labels in found]
        assert [tokenizer.decode(each) for each in learned] == expected
    [name] = options
    with pytest.raises(ConfigError, match=rf"^{name}=.*not an argument of Stream"):
        Stream(local=tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template_kwargs": "keep"}, "template_kwargs='keep' is not an object of JSON"),
        ({"template_kwargs": {"keep": object()}}, "is not an object of JSON"),
        ({"context_roles": "documents"}, r"is one text; write \['documents'\]"),
        ({"ignore_fields": "notes"}, r"is one text; write \['notes'\]"),
        ({"chat": True}, "chat=True is not the name of a column; write one"),
        ({"temperature": 1}, "temperature=1: not an argument of Chats"),
    ],
)
def test_options_of_chats_are_checked(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        name_of(chats(2), tmp_path, **options)


@pytest.mark.parametrize(("kind", "options"), [(Texts, {"eos_id": 4}), (Chats, {}), (Texts, {})])
@pytest.mark.parametrize("eos_id", [None, 4])
def test_texts_that_no_token_ends_are_warned_of_once(tmp_path, caplog, kind, options, eos_id):
    warn = stream_lengths._warn_of_open_text
    warn.cache_clear()
    rows = chats(3) if kind is Chats else texts(3)
    stream = Stream(kind(rows, chat_tokenizer(), local=tmp_path), **options)
    dataset = PackedStreamingDataset([stream], packing=replace(PACKING, eos_id=eos_id))
    dataset.with_arguments(batch_size=2)
    found = [each.getMessage() for each in caplog.records if "no token ends its texts" in each.msg]
    assert len(found) == (kind is Texts and not options and eos_id is None)


def test_a_tokenizer_that_has_padded_is_the_same_one(tmp_path):
    used = chat_tokenizer()
    used(["a b", "c"], padding=True, truncation=True, max_length=1)
    assert used.backend_tokenizer.truncation is not None
    chat_tokenizer().save_pretrained(tmp_path / "saved")
    loaded = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "saved"))
    found = {name_of(chats(5), tmp_path / "cache", each) for each in (used, loaded)}
    assert found == {name_of(chats(5), tmp_path / "cache")}


def test_a_run_knows_a_file_by_its_rows_and_not_by_its_time_or_folder(tmp_path):
    def digest_of(path: Path) -> str:
        source = Chats(path, chat_tokenizer(), local=tmp_path / "cache")
        return PackedStreamingDataset([Stream(source)], packing=PACKING).digest

    path = files_of(chats(5), tmp_path)["jsonl"]
    digest = digest_of(path)
    os.utime(path, (1, 1))
    (tmp_path / "other").mkdir()
    copied = shutil.copy(path, tmp_path / "other" / path.name)
    assert {digest_of(each) for each in (path, copied)} == {digest}
    path.write_text(path.read_text() + json.dumps(chats(1)[0]) + "\n")
    assert digest_of(path) != digest


SCRIPT = """
import logging, sys
from pathlib import Path
from tests.helpers.texts import digest_of_texts

logging.basicConfig(level=logging.INFO)
print(digest_of_texts(Path(sys.argv[1])))
"""  # without a guard: a worker that imported it would begin another build


def start(local: Path, seed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(local)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.processes
def test_processes_at_once_write_one_stream_and_a_later_run_finds_it(tmp_path, caplog):
    together = [start(tmp_path, str(seed)) for seed in range(2)]
    ends = [process.communicate(timeout=300) for process in together]
    assert [process.returncode for process in together] == [0, 0], ends
    assert len({said for said, _ in ends}) == 1
    assert sum("samples," in log for _, log in ends) == 1, ends
    caplog.set_level("INFO")  # and this process is a later run
    assert f"{digest_of_texts(tmp_path)}\n" == ends[0][0]
    assert "samples," not in caplog.text


def test_a_bad_row_is_named_as_the_user_counts(tmp_path):
    rows = [*texts(3), {"text": 5}]
    with pytest.raises(DataError, match=r"^rows, row 3: .*text.*; set on_bad_row='skip' to"):
        name_of(rows, tmp_path, words(), kind=Texts)
    long = [{"text": "a" * 1000}] * 9000  # in the third part of 4 MiB
    long[8700] = {"text": None}
    with pytest.raises(DataError, match=r"^rows, row 8700: "):
        name_of(long, tmp_path, words(), kind=Texts)


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
def test_bad_rows_are_left_out_and_counted_where_they_may_be(tmp_path, caplog, kind):
    num = 2100 if kind == "list" else 210  # more than `streampack write` omits by default
    rows = chats(num)
    for number in range(0, num, 2):
        rows[number]["messages"] = [{"role": "bot", "content": "a"}]
    each = (in_memory(rows) | files_of(rows, tmp_path))[kind]
    dataset = chat_dataset(
        each, chat_tokenizer(), packing=PACKING, local=tmp_path / "cache", on_bad_row="skip"
    )
    assert len(samples_of(dataset.streams[0])) == num // 2
    assert f"{num // 2} rows give no tokens: {num // 2} bad ones" in caplog.text
    with pytest.raises(DataError, match=r"has role 'bot'.*on_bad_row='skip'"):
        chat_dataset(each, chat_tokenizer(), packing=PACKING, local=tmp_path / "cache")


def test_a_value_without_a_json_type_is_refused_by_row(tmp_path):
    rows = [*chats(2), {**chats(1)[0], "picture": b"PNG"}]
    with pytest.raises(DataError, match=r"rows: row 2 has a value .* omit its column"):
        name_of(rows, tmp_path)


def test_rows_without_a_local_are_kept_in_the_folder_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = chat_dataset(chats(3), chat_tokenizer(), packing=PACKING)
    folder = Path(dataset.streams.opened[0].cache.folder)
    assert folder.parent == tmp_path / f"streampack-{os.getuid()}" / "texts"
    assert folder.parent.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
def test_a_conversation_of_several_samples_is_on_one_side_of_a_split(kind, tmp_path):
    def texts_of(number: int) -> list[str]:
        return [" ".join(LETTERS[int(digit)] for digit in f"{number:03}"), "a"] * 3

    rows = [{"messages": say(*texts_of(number))} for number in range(100)]
    files = {"list": rows, **files_of(rows, tmp_path)}[kind]
    options: dict[str, Any] = {"train_on": "each_response", "local": tmp_path}
    source = Chats(files, chat_tokenizer(), **options)
    streams = [Stream(source)]
    for dataset in chat_datasets(files, chat_tokenizer(), held_out=0.2, packing=PACKING, **options):
        streams += dataset.streams
    sides = [[tuple(tokens[:5]) for tokens, _ in samples_of(stream)] for stream in streams]
    whole, train, held = map(set, sides)
    assert sorted(sides[0]) == sorted(sides[1] + sides[2])
    assert (len(sides[0]), len(whole), len(held)) == (300, 100, 20)
    assert not train & held


@pytest.mark.parametrize("form", ["list", "json", "parquet", "dataset", "pandas", "pyarrow"])
def test_unread_targets_of_rows_of_ids_are_warned_of(form, tmp_path, caplog):
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "labels": n} for n in range(3)]
    source: Any = rows
    if form == "json":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif form == "parquet":
        source = tmp_path / "rows.parquet"
        datasets.Dataset.from_list(rows).to_parquet(source)
    elif form != "list":
        table = datasets.Dataset.from_list(rows)
        source = {"dataset": table, "pandas": table.to_pandas(), "pyarrow": table.data.table}[form]
    open_stream(Stream(TokenFiles(source, local=tmp_path / "a"), name="own"), 0)
    assert "'own': its 'completion_mask' is not read, so every token is a target" in caplog.text
    assert "set TokenFiles(loss_mask='completion_mask') to read it" in caplog.text
    assert "'labels'" not in caplog.text  # one number is the class of a row
    caplog.clear()
    read = TokenFiles(source, local=tmp_path / "a", loss_mask="completion_mask")
    open_stream(Stream(read), 0)
    assert "is not read" not in caplog.text
