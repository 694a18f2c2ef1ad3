"""The remedy that an error message names is applied as written, and works.

This file and the one next to it collect the commonest mistakes, grouped by the object being built.
The last test reads every message in the package and checks that it offers a way out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import pytest
import streaming
from tokenizers import Tokenizer

import streampack
from streampack import (
    Buffers,
    IterableStream,
    Mixing,
    Order,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.compat.torchtune import PackedDataset
from streampack.formats import to_llama_factory
from streampack.index.lengths import write_lengths
from streampack.mds.length_file import LENGTH_FILE
from streampack.streams import open_stream
from streampack.texts import ChatEncoder, ChatSamples, RowFormat
from streampack.write import WriteOptions, write_stream, write_texts
from tests.helpers.remedies import PACKING, ROWS, Remedy, mds, messages, packed
from tests.helpers.words import word_tokenizer


def without(library: str, function: Callable[[], Any]) -> Any:
    with mock.patch.dict(sys.modules, {library: None}):
        return function()


def text_mds(folder: Path) -> Path:
    out = folder / "text"
    if not out.exists():
        with streaming.MDSWriter(out=str(out), columns={"text": "str"}) as writer:
            for _ in range(20):
                writer.write({"text": "one two three"})
    return out


def tokenizer() -> Tokenizer:
    return word_tokenizer("?", "one", "two", "three")


def tokenizer_file(folder: Path) -> Path:
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def rows_file(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(folder: Path, path: Path, rows: RowFormat | None = None, **options: Any) -> int:
    out = folder / f"written-{len(list(folder.iterdir()))}"
    options = {"rows": rows or RowFormat(), **options}
    return write_texts([path], out, WriteOptions(**options)).num_tokens


CONFIGS = {
    "a buffer too small for a pack": Remedy(
        lambda _: Packing(max_seq_len=64, buffer_tokens=8),
        r"set it to at least max_seq_len=(\d+)$",
        lambda _, least: Packing(max_seq_len=64, buffer_tokens=int(least)),
    ),
    "an option of another packer, omitted": Remedy(
        lambda _: Packing(max_seq_len=64, short_seq_len=4),
        r"needs method='(\w+)', .*; set method='\w+', or omit short_seq_len$",
        lambda _, method: [
            Packing(max_seq_len=64),
            Packing(max_seq_len=64, short_seq_len=4, method=method),
        ],
    ),
    "packs that are no multiple": Remedy(
        lambda _: Packing(max_seq_len=100, pad_to_multiple=16),
        r"set it to (\d+) or (\d+)$",
        lambda _, *sizes: [Packing(max_seq_len=int(size), pad_to_multiple=16) for size in sizes],
    ),
    "a word that is misspelt": Remedy(
        lambda _: Mixing(batching_method="stratfied"),
        r"did you mean '(\w+)'\?$",
        lambda _, word: Mixing(batching_method=word),
    ),
    "a replication that does not divide": Remedy(
        lambda _: World(num_ranks=4, replication=3),
        r"set it to the number of ranks that share a batch$",
        lambda _: World(num_ranks=4, replication=2),
    ),
    "context ranks that do not divide a replica": Remedy(
        lambda _: World(num_ranks=8, context_parallel=4),
        r"set replication to context_parallel .*, such as (\d+)$",
        lambda _, size: World(num_ranks=8, context_parallel=4, replication=int(size)),
    ),
    "a sample that is longer than a pack": Remedy(
        lambda _: PackedDataset([{"tokens": [1] * 9, "labels": [1] * 9}], max_seq_len=8),
        r"has (\d+) tokens, but max_seq_len=8; set split_across_pack=(True), or raise max_seq_len$",
        lambda _, length, __: [
            PackedDataset(
                [{"tokens": [1] * 9, "labels": [1] * 9}], max_seq_len=8, split_across_pack=True
            ),
            PackedDataset([{"tokens": [1] * 9, "labels": [1] * 9}], max_seq_len=int(length)),
        ],
    ),
}


STREAMS = {
    "no path at all": Remedy(
        lambda _: Stream(),
        r"set one of them to the stream's folder$",
        lambda folder: packed([Stream(local=mds(folder))]),
    ),
    "an argument that is misspelt": Remedy(
        lambda folder: Stream(local=folder, propotion=1),
        r"did you mean '(\w+)'\?; it takes ",
        lambda folder, name: packed([Stream(local=mds(folder), **{name: 1})]),
    ),
    "two weights": Remedy(
        lambda folder: Stream(local=folder, repeat=2, choose=3),
        r"repeat=(\d), choose=(\d): a stream has at most one of them; keep one$",
        lambda folder, repeat, choose: [
            packed([Stream(local=mds(folder), repeat=int(repeat))]),
            packed([Stream(local=mds(folder), choose=int(choose))]),
        ],
    ),
    "the store's URL as local": Remedy(
        lambda _: Stream(local="s3://bucket/code"),
        r"local='(s3://bucket/code)' is a URL, .*; set remote= to it, and local= to a folder$",
        lambda folder, url: Stream(remote=url, local=folder),
    ),
    "a folder with the stream in its splits": Remedy(
        lambda folder: open_stream(Stream(local=mds(folder).parent), 0),
        r"set split='([\w-]+)', a subfolder that has one; or give the folder of an MDS stream as "
        r"local=",
        lambda folder, split: [
            packed([Stream(local=folder, split=split)]),
            packed([Stream(local=mds(folder))]),
        ],
    ),
    "a column of another name": Remedy(
        lambda folder: open_stream(Stream(local=mds(folder, "ids")), 0),
        r"mds-ids' \(.*mds-ids/index\.json: shards\.0\): no column .*; set tokens= to '(\w+)'$",
        lambda folder, column: packed([Stream(local=mds(folder, "ids"), tokens=column)]),
    ),
    "a stream of text": Remedy(
        lambda folder: open_stream(Stream(local=text_mds(folder)), 0),
        r"it has 'text'; none of its columns has token ids: rewrite the stream with "
        r"token ids \(`streampack write`\), or iterate its text: IterableStream\(streaming\."
        r"(StreamingDataset)\(\.\.\.\), tokenizer=\.\.\., text=\.\.\.\)$",
        lambda folder, dataset: packed(
            [
                IterableStream(
                    getattr(__import__("streaming"), dataset)(
                        local=str(text_mds(folder)), batch_size=1
                    ),
                    tokenizer=tokenizer(),
                    text="text",
                )
            ]
        ),
    ),
}


def chats(**options: Any) -> IterableStream:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}
    ]
    return IterableStream(rows * 9, **options)


def chat_samples(*_: str) -> int:
    from tests.helpers.chats import chat_tokenizer  # takes seconds, and only one row needs it

    samples = ChatSamples(chats().source, ChatEncoder(chat_tokenizer(), train_on="all"))
    return packed([IterableStream(samples, loss_mask="loss_mask")])


class Rows:
    """A stand-in for a Hugging Face dataset: an iterable with a length."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": ROWS[number]}

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


TEXTS = [{"body": "one two", "text": None}] * 9
CHAT = (
    r"encode conversations with their template: IterableStream\((ChatSamples)\(rows, "
    r"(ChatEncoder)\(tokenizer\)\), loss_mask='loss_mask'\), both from streampack\.texts$"
)

ITERABLES = {
    "a dataset where streams belong": Remedy(
        lambda _: PackedStreamingDataset([Rows()], packing=PACKING),
        r"is not of type Stream; .*; (PackedIterableDataset)\(\[(IterableStream)\(\.\.\.\)\]\) "
        r"packs anything that can be iterated",
        lambda folder, dataset, stream: [
            list(
                getattr(streampack, dataset)([getattr(streampack, stream)(Rows())], packing=PACKING)
            ),
            packed([Stream(local=write_stream(Rows(), folder / "once").path)]),
        ],
    ),
    "a path where a list belongs": Remedy(
        lambda folder: PackedStreamingDataset(str(folder), packing=PACKING),
        r"pass a path as remote= or local=, or \[Stream\(local=\.\.\.\)\]$",
        lambda folder: [
            list(PackedStreamingDataset(local=mds(folder), packing=PACKING)),
            list(PackedStreamingDataset(remote=str(mds(folder)), packing=PACKING)),
            packed([Stream(local=mds(folder))]),
        ],
    ),
    "a file's name where samples belong": Remedy(
        lambda _: IterableStream("b.parquet"),
        r"pass what reads the file, such as datasets\.(load_dataset)\('(parquet)', "
        r"data_files=path, split='(train)'\), or a list of texts: \[text\]$",
        lambda folder, load, kind, split: [
            packed([IterableStream(loaded(folder, load, kind, split))]),
            packed([IterableStream(["one two"], tokenizer=tokenizer())]),
        ],
    ),
    "a dict of splits": Remedy(
        lambda _: IterableStream({"train": ROWS}),
        r"pass one of its values, such as source\['(train)'\], or a list of rows$",
        lambda _, split: packed([IterableStream({"train": ROWS}[split])]),
    ),
    "a table of pandas": Remedy(
        lambda _: IterableStream(pandas.DataFrame({"tokens": ROWS})),
        r"pass its rows: source=table\.(to_dict)\('(records)'\)$",
        lambda _, call, kind: packed(
            [IterableStream(getattr(pandas.DataFrame({"tokens": ROWS}), call)(kind))]
        ),
    ),
    "conversations with a tokenizer": Remedy(
        lambda _: packed([chats(tokenizer=tokenizer())]),
        CHAT,
        lambda _, *names: chat_samples(*names),
    ),
    "texts of another field": Remedy(
        lambda _: packed([IterableStream(TEXTS, tokenizer=tokenizer())]),
        r"set text= to the field that has it: '(\w+)'$",
        lambda _, name: packed([IterableStream(TEXTS, tokenizer=tokenizer(), text=name)]),
    ),
    "texts without a tokenizer": Remedy(
        lambda _: packed([IterableStream([{"text": "one two"}])]),
        r"no field 'tokens'; it has 'text'; set tokenizer=$",
        lambda _: packed([IterableStream([{"text": "one two"}], tokenizer=tokenizer())]),
    ),
    "token ids with a tokenizer": Remedy(
        lambda _: packed([IterableStream(ROWS, tokenizer=tokenizer())]),
        r"omit tokenizer=, as its samples are token ids$",
        lambda _: packed([IterableStream(ROWS)]),
    ),
}


def loaded(folder: Path, load: str, kind: str, split: str) -> Any:
    import datasets  # takes seconds, and only one row of the table needs it

    path = str(folder / "b.parquet")
    datasets.Dataset.from_dict({"input_ids": ROWS}).to_parquet(path)
    return getattr(datasets, load)(kind, data_files=path, split=split, cache_dir=str(folder))


FILES = {
    "a folder that is not empty": Remedy(
        lambda folder: write_stream(ROWS, mds(folder)),
        r"remove it, or name another$",
        lambda folder: write_stream(ROWS, folder / "another"),
    ),
    "ids that are too large": Remedy(
        lambda folder: write_stream([[70_000]], folder / "a", tokens_dtype="uint16"),
        r"set tokens_dtype='(\w+)'$",
        lambda folder, dtype: write_stream([[70_000]], folder / "a", tokens_dtype=dtype),
    ),
    "a tokenizer that is none": Remedy(
        lambda folder: written(
            folder, rows_file(folder, {"text": "a"}), RowFormat(tokenizer=rows_file(folder, 1))
        ),
        r"give a (tokenizer\.json) file$",
        lambda folder, name: written(
            folder,
            rows_file(folder, {"text": "a"}),
            RowFormat(tokenizer=tokenizer_file(folder).with_name(name)),
        ),
    ),
}


def binary(folder: Path, content: bytes) -> Path:
    path = folder / "binary.txt"
    path.write_bytes(content)
    return path


def fields(**values: Any) -> list[dict[str, Any]]:
    return [{"tokens": [1, 2, 3], **values}] * 9


def two(folder: Path, first: dict[str, Any], second: dict[str, Any], **options: Any) -> int:
    one = Stream(local=mds(folder), **first)
    other = Stream(local=mds(folder, "ids"), tokens="ids", **second)
    return packed([one, other], **options)


MIXES = {
    "a proportion that one lacks": Remedy(
        lambda folder: two(folder, {"proportion": 1}, {}),
        r"every stream must use proportion, or none$",
        lambda folder: [
            two(folder, {"proportion": 1}, {"proportion": 2}),
            two(folder, {}, {}),
        ],
    ),
    "a global batch that is not a multiple": Remedy(
        lambda folder: two(folder, {}, {}, batch_size=4, mixing=Mixing(global_batch_size=6)),
        r"set it to (\d+) or (\d+), or set batch_size to (\d+), for example",
        lambda folder, less, more, part: [
            two(folder, {}, {}, batch_size=4, mixing=Mixing(global_batch_size=int(less))),
            two(folder, {}, {}, batch_size=4, mixing=Mixing(global_batch_size=int(more))),
            two(folder, {}, {}, batch_size=int(part), mixing=Mixing(global_batch_size=6)),
        ],
    ),
    "lanes without length files": Remedy(
        lambda folder: lanes_of_a_remote(folder),
        r"set Mixing\(epoch_end='(carry)'\) or Order\(num_lanes=(1)\)$",
        lambda folder, end, lanes: [
            lanes_of_a_remote(folder, mixing=Mixing(epoch_end=end)),
            lanes_of_a_remote(folder, order=Order(num_lanes=int(lanes))),
            (write_lengths(folder / "there"), lanes_of_a_remote(folder, local="new")),
        ],
    ),
    "a cache that is too small": Remedy(
        lambda folder: cached(folder, 1),
        r"set cache_limit to at least (\d+) ",
        lambda folder, least: cached(folder, int(least)),
    ),
    "positions that continue in a format of restarts": Remedy(
        lambda folder: first_batch(
            folder,
            batch_format="hf",
            packing=Packing(max_seq_len=16, positions="continue"),
        ),
        r"set positions='(restart)'$",
        lambda folder, word: first_batch(
            folder, batch_format="hf", packing=Packing(max_seq_len=16, positions=word)
        ),
    ),
}

SAMPLES = {
    "labels of another length": Remedy(
        lambda _: packed([IterableStream(fields(labels=[1]), labels="labels")]),
        r"give one for each token$",
        lambda _: packed([IterableStream(fields(labels=[1, 2, 3]), labels="labels")]),
    ),
    "several packs that are numbered": Remedy(
        lambda folder: first_batch(folder, batch_format="llama_factory", batch_size=2),
        r"not 2: .*batch_size=(1)\b.*batch_format='(\w+)'.*, (dense)=True\)$",
        lambda folder, one, name, option: [
            first_batch(folder, batch_format="llama_factory", batch_size=int(one)),
            first_batch(folder, batch_format=name, batch_size=2),
            first_batch(
                folder, batch_format=partial(to_llama_factory, **{option: True}), batch_size=2
            ),
        ],
    ),
}


def lanes_of_a_remote(folder: Path, local: str = "here", **options: Any) -> int:
    """Iterate a remote stream in two lanes; it has no length file unless one was written."""
    there = folder / "there"
    if not there.exists():
        write_stream(ROWS, there, size_limit=300)
        (there / LENGTH_FILE).unlink()
    options = {"order": Order(num_lanes=2), **options}
    return packed([Stream(remote=str(there), local=folder / local)], **options)


def cached(folder: Path, limit: int) -> int:
    there = folder / "there"
    if not there.exists():
        write_stream(ROWS, there, size_limit=300)
    stream = Stream(remote=str(there), local=folder / "here")
    return packed([stream], buffers=Buffers(cache_limit=limit))


def first_batch(folder: Path, packing: Packing = PACKING, **options: Any) -> Any:
    dataset = PackedStreamingDataset([Stream(local=mds(folder))], packing=packing, **options)
    return next(iter(dataset))


WORLDS = {
    "half of the variables": Remedy(
        lambda _: World.from_env({"RANK": "1"}),
        r"set (WORLD_SIZE), unset (RANK), or pass world=World\(\.\.\.\)$",
        lambda folder, missing, stated: [
            World.from_env({stated: "1", missing: "2"}),
            World.from_env({}),
            packed([Stream(local=mds(folder))], world=World()),
        ],
    ),
}

WRITTEN = {
    "texts without a tokenizer": Remedy(
        lambda folder: written(folder, binary(folder, b"one two")),
        r"is text; set tokenizer= to a (tokenizer\.json), or name JSON lines of token ids$",
        lambda folder, _: [
            written(folder, binary(folder, b"one"), RowFormat(tokenizer=tokenizer_file(folder))),
            written(folder, rows_file(folder, [1])),
        ],
    ),
}


TABLE = {
    **CONFIGS,
    **WORLDS,
    **STREAMS,
    **ITERABLES,
    **SAMPLES,
    **MIXES,
    **FILES,
    **WRITTEN,
}
every_remedy = pytest.mark.parametrize("remedy", TABLE.values(), ids=TABLE)


@every_remedy
def test_what_a_message_says_to_do_works(remedy: Remedy, tmp_path: Path):
    remedy.check(tmp_path)


# After a semicolon, in a "must be", or as a value at the end of the message.
WAY_OUT = re.compile(r"; |\bmust\b|\0$|: (?:run|pass|set) |, or (?:choose|pass) ")


def test_every_message_has_a_way_out_and_nearly_every_one_a_value():
    found = list(messages())

    assert len(found) > 400
    assert [each for each in found if not WAY_OUT.search(each[1])] == []
    # The rest are about calls made in the wrong order and have no value to show.
    assert sum("\0" in text for _, text in found) > 0.97 * len(found)
