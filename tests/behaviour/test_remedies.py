"""Every remedy that a message names is applied as it is written, and then it works.

::

    refuse() --> message --a regular expression--> the remedy's words --> apply(words) --> no error

Groups by what is built: configs, worlds, streams, iterables, datasets, files, the command line.
The last test reads the modules of `COMPLETE`: a new remedy there fails until a row applies it.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas
import pyarrow
import pytest
import streaming
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

import streampack
from streampack import (
    Bucketing,
    Buffers,
    IterableStream,
    Mixing,
    Order,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.balance import Balance
from streampack.compat.torchdata import MaxTokenBucketizer
from streampack.compat.torchtune import PackedDataset
from streampack.formats import to_hf
from streampack.mds.length_file import LENGTH_FILE
from streampack.storage.filesystem import MAX_ROOTS
from streampack.storage.location import StreamLocation
from streampack.streams import open_stream
from streampack.write import (
    ChatEncoder,
    ChatSamples,
    RowFormat,
    WriteOptions,
    write_stream,
    write_texts,
)
from streampack.write.lengths import write_lengths
from tests.helpers.remedies import PACKING, ROWS, Remedy, mds, packed, untried

COMPLETE = (
    "config/bucketing.py",
    "config/buffers.py",
    "config/mixing.py",
    "config/order.py",
    "config/packing.py",
    "_checks.py",
    "_paths.py",
    "runtime/arguments.py",
    "streams/tokenization.py",
)
COMPLETE += ("streams/iterable_stream.py", "streams/stream.py", "write/shards.py")
COMPLETE += ("balance.py",)
COMPLETE += ("write/samples.py",)


def with_temporary_folder(path: Path, call: Callable[[], Any]) -> Any:
    """Call something while the system's temporary folder is another one."""
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        return call()
    finally:
        tempfile.tempdir = before


def own_download(base: type) -> Any:
    """Return a class that copies its files itself."""

    def fetch(self: Any, from_basename: str, to_basename: str | None = None) -> str:
        to = Path(self.local, to_basename or from_basename)
        return str(shutil.copyfile(Path(self.remote, from_basename), to))

    return type("Mine", (base,), {"_download_file": fetch})


def without(library: str, function: Callable[[], Any]) -> Any:
    """Call a function as if a library were not installed."""
    with mock.patch.dict(sys.modules, {library: None}):
        return function()


def crowded(folder: Path) -> Path:
    """Return a temporary folder in which every name that this user's folder may have is taken."""
    for number in range(MAX_ROOTS):
        suffix = f"-{number}" if number else ""
        (folder / f"streampack-{os.getuid()}{suffix}").touch()
    return folder


def text_mds(folder: Path) -> Path:
    """Write a stream of texts, as MosaicML's own."""
    out = folder / "text"
    if not out.exists():
        with streaming.MDSWriter(out=str(out), columns={"text": "str"}) as writer:
            for _ in range(20):
                writer.write({"text": "one two three"})
    return out


def tokenizer() -> Tokenizer:
    words = ["one", "two", "three", "?"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def tokenizer_file(folder: Path) -> Path:
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def rows_file(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(folder: Path, path: Path, rows: RowFormat | None = None, **options: Any) -> int:
    """Write a file as a stream; return its tokens."""
    out = folder / f"written-{len(list(folder.iterdir()))}"
    options = {"rows": rows or RowFormat(), **options}
    return write_texts([path], out, WriteOptions(**options)).num_tokens


CONFIGS = {
    "a buffer that holds no pack": Remedy(
        lambda _: Packing(max_seq_len=64, buffer_tokens=8),
        r"set it to at least max_seq_len=(\d+)$",
        lambda _, least: Packing(max_seq_len=64, buffer_tokens=int(least)),
    ),
    "an option of another packer, left out": Remedy(
        lambda _: Packing(max_seq_len=64, open_packs=4),
        r"leave it out, or set method to '(\w+)' or '(\w+)'$",
        lambda _, *methods: [
            Packing(max_seq_len=64),
            *(Packing(max_seq_len=64, open_packs=4, method=method) for method in methods),
        ],
    ),
    "a bound of cuts without cuts": Remedy(
        lambda _: Packing(max_seq_len=64, min_fragment=8, method="exact_fit"),
        r"set split_gap, e\.g\. to ([\d.]+), or leave min_fragment out$",
        lambda _, gap: [
            Packing(max_seq_len=64, min_fragment=8, split_gap=float(gap)),
            Packing(max_seq_len=64),
        ],
    ),
    "the width of packs of equal cost without a cost": Remedy(
        lambda _: Packing(max_seq_len=64, capacity=80),
        r"capacity=(\d+) has no effect without max_cost; set max_cost, or leave capacity out$",
        lambda _, capacity: [
            Packing(max_seq_len=64, capacity=int(capacity), max_cost=100),
            Packing(max_seq_len=64),
        ],
    ),
    "a bound of packs of equal cost that is too large": Remedy(
        lambda _: Packing(max_seq_len=64, max_cost=100, capacity=128),
        r"capacity=128 must be from max_seq_len=(\d+) to 1\.5 times that, (\d+); leave it out",
        lambda _, least, most: [
            *(Packing(max_seq_len=64, max_cost=100, capacity=int(size)) for size in (least, most)),
            Packing(max_seq_len=64, max_cost=100),
        ],
    ),
    "a part of a stream that is not a slice": Remedy(
        lambda folder: Stream(local=mds(folder), shards=[0, 10]),
        r"shards=\[0, 10\] is not a slice of shards; write slice\((\d+), (\d+)\)",
        lambda folder, first, stop: packed(
            [Stream(local=mds(folder), shards=slice(int(first), int(stop)))]
        ),
    ),
    "no pass through a stream": Remedy(
        lambda folder: Stream(local=mds(folder), max_passes=0),
        r"max_passes=0 is not a number above 0; write one such as (\d+)$",
        lambda folder, passes: Stream(local=mds(folder), max_passes=int(passes)),
    ),
    "a fragment of more than half a pack": Remedy(
        lambda _: Packing(max_seq_len=64, min_fragment=40, split_gap=0.01),
        r"set it to (\d+) at most$",
        lambda _, most: Packing(max_seq_len=64, min_fragment=int(most), split_gap=0.01),
    ),
    "packs that are no multiple": Remedy(
        lambda _: Packing(max_seq_len=100, pad_to_multiple=16),
        r"set it to (\d+), for example$",
        lambda _, size: Packing(max_seq_len=int(size), pad_to_multiple=16),
    ),
    "short packs that are not shorter": Remedy(
        lambda _: Packing(max_seq_len=64, method="two_tiers", short_seq_len=64),
        r"set it to what short packs hold, such as (\d+)$",
        lambda _, size: Packing(max_seq_len=64, method="two_tiers", short_seq_len=int(size)),
    ),
    "a buffer that holds one tier": Remedy(
        lambda _: Packing(max_seq_len=64, method="two_tiers", short_seq_len=8, buffer_tokens=64),
        r"set it to at least max_seq_len \+ short_seq_len = (\d+)$",
        lambda _, least: Packing(
            max_seq_len=64, method="two_tiers", short_seq_len=8, buffer_tokens=int(least)
        ),
    ),
    "a gap that is no fraction": Remedy(
        lambda _: Packing(max_seq_len=64, split_gap=2),
        r"0 <= split_gap < 1, e\.g\. ([\d.]+)$",
        lambda _, gap: Packing(max_seq_len=64, split_gap=float(gap)),
    ),
    "a token id that is none": Remedy(
        lambda _: Packing(max_seq_len=64, padding_id=-1),
        r"they go from (0) to (\d+), leave it out for 0$",
        lambda _, *ids: [Packing(max_seq_len=64, padding_id=int(each)) for each in ids],
    ),
    "a word that is misspelt": Remedy(
        lambda _: Mixing(batching_method="stratfied"),
        r"did you mean '(\w+)'\?$",
        lambda _, word: Mixing(batching_method=word),
    ),
    "an epoch size that is no number": Remedy(
        lambda _: Mixing(epoch_size="many"),
        r"write (\d+), '(\w+)', '([\w.]+)' or '(\w+)'$",
        lambda _, *sizes: [Mixing(epoch_size=size) for size in (int(sizes[0]), *sizes[1:])],
    ),
    "a limit that is no number of bytes": Remedy(
        lambda _: Buffers(cache_limit="much"),
        r"write (\d+), '(\w+)' or '([\w.]+)'$",
        lambda _, *sizes: [Buffers(cache_limit=size) for size in (int(sizes[0]), *sizes[1:])],
    ),
    "a seed that is negative": Remedy(
        lambda _: Order(seed=-1),
        r"an integer of at least 0, such as (\d+); shuffle=False keeps stored order$",
        lambda _, seed: [Order(seed=int(seed)), Order(shuffle=False)],
    ),
    "a switch that is no bool": Remedy(
        lambda _: Order(shuffle="no"),
        r"write (True) or (False)$",
        lambda _, *words: [Order(shuffle=word == "True") for word in words],
    ),
    "a shuffle of packs in stored order": Remedy(
        lambda _: Order(shuffle=False, pack_shuffle=5),
        r"leave out one of them$",
        lambda _: [Order(shuffle=False), Order(pack_shuffle=5)],
    ),
    "a balance within something unknown": Remedy(
        lambda _: Balance(within="rack"),
        r"one of (\w+)\|(\w+)\|(\w+)",
        lambda _, *words: [Balance(within=word) for word in words],
    ),
    "a cost that is not a function": Remedy(
        lambda _: Balance(cost=4096),
        r"leave it out for AttentionCost\(\)$",
        lambda _: Balance(),
    ),
    "a cost of all samples together": Remedy(
        lambda _: Balance(cost=lambda lengths: lengths.sum()),
        r"return one cost for each length$",
        lambda _: Balance(cost=lambda lengths: lengths),
    ),
    "a cost below zero": Remedy(
        lambda _: Balance(cost=lambda lengths: -lengths),
        r"return a number of at least (\d+) and at most (\d+)$",
        lambda _, *bounds: [
            Balance(cost=lambda lengths, bound=bound: np.full(len(lengths), int(bound)))
            for bound in bounds
        ],
    ),
    "a bucketing that is no bool": Remedy(
        lambda _: Bucketing(max_tokens=8, include_padding="no"),
        r"write (True) or (False)$",
        lambda _, *words: [
            Bucketing(max_tokens=8, include_padding=word == "True") for word in words
        ],
    ),
    "rows that fit no batch": Remedy(
        lambda _: Bucketing(max_tokens=8, max_seq_len=16),
        r"is over max_tokens=(\d+), so its rows fit no batch; lower it, or leave it out$",
        lambda _, most: [
            Bucketing(max_tokens=8, max_seq_len=int(most)),
            Bucketing(max_tokens=8),
        ],
    ),
    "a replication that does not divide": Remedy(
        lambda _: World(num_ranks=4, replication=3),
        r"set it to the number of ranks that share a batch$",
        lambda _: World(num_ranks=4, replication=2),
    ),
    "a temporary folder that others crowd": Remedy(
        lambda p: with_temporary_folder(
            crowded(p), lambda: StreamLocation.of(Stream(remote="s3://bucket/web"))
        ),
        r"belong to other users, or are links; set (local)= or (TMPDIR)$",
        lambda p, *_: [
            with_temporary_folder(
                p,
                lambda: StreamLocation.of(Stream(remote="s3://bucket/web", local=str(p / "web"))),
            ),
            with_temporary_folder(
                p.parent, lambda: StreamLocation.of(Stream(remote="s3://bucket/web"))
            ),
        ],
    ),
    "a subclass of Stream with a method of MosaicML's": Remedy(
        lambda p: packed([own_download(Stream)(local=mds(p))]),
        r"derive the class from streaming\.(Stream), whose (_download_file) may be overridden",
        lambda p, name, _: packed(
            [own_download(getattr(streaming, name))(remote=str(mds(p)), local=str(p / "cache"))]
        ),
    ),
    "a compression without its library": Remedy(
        lambda p: without("brotli", lambda: mds(p, compression="br")),
        r"pip install 'streampack\[codecs\]', or write with (zstd)$",
        lambda p, name: without("brotli", lambda: mds(p, compression=name)),
    ),
    "a shard whose compression has no library": Remedy(
        lambda p: [
            mds(p, compression="br"),
            without("brotli", lambda: packed([Stream(local=mds(p))])),
        ],
        r"pip install 'streampack\[codecs\]', or write with zstd$",
        lambda p: packed([Stream(local=mds(p))]),
    ),
    "a negative download_retry": Remedy(
        lambda p: Stream(local=mds(p), download_retry=-1),
        r"download_retry=-1 is negative; (0) never tries again$",
        lambda p, retry: packed([Stream(local=mds(p), download_retry=int(retry))]),
    ),
    "samples that fit no batch": Remedy(
        lambda _: MaxTokenBucketizer([], max_token_count=8, max_len=9),
        r"max_token_count=(\d+) and max_len=9: .*; lower max_len, or leave it out$",
        lambda _, most: [
            MaxTokenBucketizer([], max_token_count=8, max_len=int(most)),
            MaxTokenBucketizer([], max_token_count=8),
        ],
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
    "a store that nothing here speaks to": Remedy(
        lambda folder: Stream(remote="gopher://host/code", local=folder),
        r"; a remote is a folder, or a url of .*; copy the files to one of them$",
        lambda folder: packed([Stream(remote=str(mds(folder)), local=folder / "l")]),
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
    "a negative weight": Remedy(
        lambda folder: Stream(local=folder, proportion=-1),
        r"a weight must be a number of 0 or more; 0 leaves it out$",
        lambda folder: packed(
            [
                Stream(local=mds(folder), proportion=0),
                Stream(local=mds(folder, "ids"), tokens="ids", proportion=1),
            ]
        ),
    ),
    "the store's URL as local": Remedy(
        lambda _: Stream(local="s3://bucket/code"),
        r"local='(s3://bucket/code)' is a URL, .*; set remote= to it, and local= to a folder$",
        lambda folder, url: Stream(remote=url, local=folder),
    ),
    "a type of columns that is misspelt": Remedy(
        lambda folder: Stream(local=folder, tokens_dtype="uint61"),
        r"did you mean '(\w+)'\?$",
        lambda folder, dtype: Stream(local=folder, tokens_dtype=dtype),
    ),
    "labels that are shifted, but are none": Remedy(
        lambda folder: Stream(local=folder, labels_shifted=True),
        r"set labels= to its name, or leave labels_shifted out$",
        lambda folder: [
            Stream(local=folder, labels_shifted=True, labels="labels"),
            Stream(local=folder),
        ],
    ),
    "a folder whose splits hold the stream": Remedy(
        lambda folder: open_stream(Stream(local=mds(folder).parent), 0),
        r"set split='([\w-]+)', whose folders hold one; or give the folder of an MDS stream as "
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
        r"it holds 'text'; none of its columns holds token ids: write the stream again with "
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
    "a column of text that is named": Remedy(
        lambda folder: open_stream(Stream(local=text_mds(folder), tokens="text"), 0),
        r"text/index\.json: shards\.0\): column 'text' is stored as 'str' \(column_encodings\), "
        r".*; none of its columns holds token ids: write the stream again with",
        lambda folder: packed(
            [Stream(local=write_stream(ROWS, folder / "anew").path, tokens="tokens")]
        ),
    ),
    "an encoding that nobody knows": Remedy(
        lambda folder: open_stream(Stream(local=strange(folder), tokens="ids"), 0),
        r"strange/index\.json: shards\.0\): column 'ids' is stored as 'rle:i' "
        r"\(column_encodings\), .*; set tokens= to '(\w+)'$",
        lambda folder, column: packed([Stream(local=strange(folder), tokens=column)]),
    ),
    "a hash that is not there": Remedy(
        lambda folder: open_stream(Stream(local=mds(folder), validate_hash="sha1"), 0),
        r"only \['(\w+)'\]; set validate_hash= to one of them, or to None$",
        lambda folder, name: [
            packed([Stream(local=mds(folder), validate_hash=each)]) for each in (name, None)
        ],
    ),
    "lengths of an index that was": Remedy(
        lambda folder: open_stream(Stream(local=stale(folder)), 0),
        r"streampack index (\S+)",
        lambda _, path: (write_lengths(Path(path)), packed([Stream(local=path)])),
    ),
}


def strange(folder: Path) -> Path:
    """A stream with a column of an encoding that MDS does not have."""
    out = folder / "strange"
    if not out.exists():
        columns = {"ids": "bytes", "tokens": "ndarray:int32"}
        with streaming.MDSWriter(out=str(out), columns=columns) as writer:
            for row in ROWS:
                writer.write({"ids": b"1", "tokens": np.array(row, np.int32)})
        for path in out.iterdir():
            path.write_bytes(path.read_bytes().replace(b'"bytes"', b'"rle:i"', 1))
    return out


def stale(folder: Path) -> Path:
    """A stream whose length file is that of another index.json."""
    out = mds(folder)
    index = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps(index, indent=1))
    return out


def padded_on(side: str) -> IterableStream:
    """Return samples with padding, and a payload that stands for the first token."""
    row = {"tokens": [0, 5, 6], "attention_mask": [0, 1, 1], "x": ["image"], "at": [[1, 2]]}
    if side == "right":
        row |= {"tokens": [5, 6, 0], "attention_mask": [1, 1, 0], "at": [[0, 1]]}
    return IterableStream([row] * 9, payloads={"x": "at"})


def chats(**options: Any) -> IterableStream:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}
    ]
    return IterableStream(rows * 9, **options)


def chat_samples(*_: str) -> int:
    from transformers import PreTrainedTokenizerFast  # seconds, for two rows of the table

    rows = chats().source
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    encoder = ChatEncoder(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template),
        train_on="all",
    )
    return packed([IterableStream(ChatSamples(rows, encoder), loss_mask="loss_mask")])


class Rows:
    """What a Hugging Face dataset is to those who have none: an iterable with a length."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": ROWS[number]}

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


TEXTS = [{"body": "one two", "text": None}] * 9
CHAT = (
    r"encode conversations with their template: IterableStream\((ChatSamples)\(rows, "
    r"(ChatEncoder)\(tokenizer\)\), loss_mask='loss_mask'\), both from streampack\.write$"
)

ITERABLES = {
    "a dataset where streams belong": Remedy(
        lambda _: PackedStreamingDataset([Rows()], packing=PACKING),
        r"Stream reads MDS shards; (PackedIterableDataset)\(\[(IterableStream)\(\.\.\.\)\]\) packs "
        r"anything else that can be iterated, or write it as MDS once: write_stream\(samples, ",
        lambda folder, dataset, stream: [
            list(
                getattr(streampack, dataset)([getattr(streampack, stream)(Rows())], packing=PACKING)
            ),
            packed([Stream(local=write_stream(Rows(), folder / "once").path)]),
        ],
    ),
    "a dataset where a list belongs": Remedy(
        lambda _: PackedStreamingDataset(Rows(), packing=PACKING),
        r"pass a list; Stream reads MDS shards; PackedIterableDataset\(\[IterableStream\(",
        lambda _: packed([IterableStream(Rows())]),
    ),
    "a dict of datasets where a list belongs": Remedy(
        lambda _: PackedIterableDataset({"train": Rows()}, packing=PACKING),
        r"pass a list; wrap one of its values: (IterableStream)\(\.\.\.\)$",
        lambda _, name: packed([getattr(streampack, name)({"train": Rows()}["train"])]),
    ),
    "a dataset where an iterable stream belongs": Remedy(
        lambda _: PackedIterableDataset([Rows()], packing=PACKING),
        r"wrap it: (IterableStream)\(\.\.\.\)$",
        lambda _, name: packed([getattr(streampack, name)(Rows())]),
    ),
    "a stream where a list belongs": Remedy(
        lambda folder: PackedStreamingDataset(Stream(local=folder), packing=PACKING),
        r"pass a list: \[(Stream)\(\.\.\.\)\]$",
        lambda folder, name: packed([getattr(streampack, name)(local=mds(folder))]),
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
    "a path of iterables": Remedy(
        lambda folder: PackedIterableDataset(str(folder), packing=PACKING),
        r"IterableStream takes samples; for a path, PackedStreamingDataset takes remote= or loc",
        lambda folder: list(PackedStreamingDataset(local=mds(folder), packing=PACKING)),
    ),
    "a class where an object belongs": Remedy(
        lambda _: PackedStreamingDataset([Stream], packing=PACKING),
        r"pass an object of a class: (Stream)\(\.\.\.\)$",
        lambda folder, name: packed([getattr(streampack, name)(local=mds(folder))]),
    ),
    "a number where a stream belongs": Remedy(
        lambda _: PackedStreamingDataset([3], packing=PACKING),
        r"pass (Stream) objects: \[Stream\(\.\.\.\)\]$",
        lambda folder, name: packed([getattr(streampack, name)(local=mds(folder))]),
    ),
    "numbers of streams": Remedy(
        lambda _: PackedStreamingDataset(3, packing=PACKING),
        r"pass a list of (Stream): \[Stream\(\.\.\.\), \.\.\.\]$",
        lambda folder, name: packed([getattr(streampack, name)(local=mds(folder))]),
    ),
    "no streams": Remedy(
        lambda _: PackedStreamingDataset([], packing=PACKING),
        r"pass at least one (Stream)$",
        lambda folder, name: packed([getattr(streampack, name)(local=mds(folder))]),
    ),
    "another dataset's streams": Remedy(
        lambda _: PackedStreamingDataset([IterableStream(ROWS)], packing=PACKING),
        r"(PackedIterableDataset) takes it, PackedStreamingDataset takes Stream objects$",
        lambda _, name: list(getattr(streampack, name)([IterableStream(ROWS)], packing=PACKING)),
    ),
    "a config of another kind": Remedy(
        lambda _: PackedIterableDataset([IterableStream(ROWS)], packing={"max_seq_len": 8}),
        r"pass packing=streampack\.(Packing)\(max_seq_len=(\d+)\)$",
        lambda _, name, size: PackedIterableDataset(
            [IterableStream(ROWS)], packing=getattr(streampack, name)(max_seq_len=int(size))
        ),
    ),
    "no batch size": Remedy(
        lambda _: PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, batch_size=None),
        r"leave it out for 1$",
        lambda _: packed([IterableStream(ROWS)]),
    ),
    "an argument that is set elsewhere": Remedy(
        lambda folder: PackedStreamingDataset(local=folder, packing=PACKING, shuffle_seed=3),
        r"set it with (Order)\((seed)=\.\.\.\)",
        lambda folder, config, name: packed(
            [Stream(local=mds(folder))], order=getattr(streampack, config)(**{name: 3})
        ),
    ),
    "a batch size that is no number": Remedy(
        lambda _: PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, batch_size="2"),
        r"write a whole number of at least (1), such as (\d+)$",
        lambda _, *sizes: [
            packed([IterableStream(ROWS)], batch_size=int(size), mixing=Mixing(epoch_end="pad"))
            for size in sizes
        ],
    ),
    "a batch of nothing": Remedy(
        lambda _: PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, batch_size=0),
        r"leave it out for the default$",
        lambda _: packed([IterableStream(ROWS)]),
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
    "a table of Arrow": Remedy(
        lambda _: IterableStream(pyarrow.table({"tokens": ROWS})),
        r"pass its rows: source=table\.(to_pylist)\(\)$",
        lambda _, call: packed([IterableStream(getattr(pyarrow.table({"tokens": ROWS}), call)())]),
    ),
    "a table of pandas, to be written": Remedy(
        lambda folder: write_stream(pandas.DataFrame({"tokens": ROWS}), folder / "s"),
        r"pass its rows: samples=table\.(to_dict)\('(records)'\)$",
        lambda folder, call, kind: write_stream(
            getattr(pandas.DataFrame({"tokens": ROWS}), call)(kind), folder / "s"
        ),
    ),
    "a sample without tokens": Remedy(
        lambda _: packed([IterableStream([*ROWS, []])]),
        r"leave it out of the source, or set (on_bad_sample)='(skip)'$",
        lambda _, name, how: [
            packed([IterableStream(ROWS)]),
            packed([IterableStream([*ROWS, []], **{name: how})]),
        ],
    ),
    "padding before the spans of payloads": Remedy(
        lambda _: packed([padded_on("left")]),
        r"pad on the (right), or not at all$",
        lambda _, side: packed([padded_on(side)]),
    ),
    "an index of a dataset": Remedy(
        lambda _: PackedIterableDataset([IterableStream(ROWS)], packing=PACKING)[0],
        r"take next\(iter\(dataset\)\), or loop over it$",
        lambda _: next(iter(PackedIterableDataset([IterableStream(ROWS)], packing=PACKING))),
    ),
    "an epoch that drops all it has": Remedy(
        lambda _: packed([IterableStream([[1]])], batch_size=2, mixing=Mixing(epoch_end="drop")),
        r"set Mixing\(epoch_end='(pad)'\), lower (batch_size)",
        lambda _, end, name: [
            packed([IterableStream([[1]])], batch_size=2, mixing=Mixing(epoch_end=end)),
            packed([IterableStream([[1]])], mixing=Mixing(epoch_end="drop"), **{name: 1}),
        ],
    ),
    "conversations with a tokenizer": Remedy(
        lambda _: packed([chats(tokenizer=tokenizer())]),
        CHAT,
        lambda _, *names: chat_samples(*names),
    ),
    "conversations without a tokenizer": Remedy(
        lambda _: packed([chats()]), CHAT, lambda _, *names: chat_samples(*names)
    ),
    "texts of another field": Remedy(
        lambda _: packed([IterableStream(TEXTS, tokenizer=tokenizer())]),
        r"set text= to the field that holds it: '(\w+)'$",
        lambda _, name: packed([IterableStream(TEXTS, tokenizer=tokenizer(), text=name)]),
    ),
    "texts without a tokenizer": Remedy(
        lambda _: packed([IterableStream([{"text": "one two"}])]),
        r"no field 'tokens'; it has 'text'; set tokenizer=$",
        lambda _: packed([IterableStream([{"text": "one two"}], tokenizer=tokenizer())]),
    ),
    "texts of another field without a tokenizer": Remedy(
        lambda _: packed([IterableStream([{"body": "one two"}])]),
        r"set tokenizer= and text='(\w+)'$",
        lambda _, name: packed(
            [IterableStream([{"body": "one two"}], tokenizer=tokenizer(), text=name)]
        ),
    ),
    "token ids of another field": Remedy(
        lambda _: packed([IterableStream([{"ids": row} for row in ROWS])]),
        r"set tokens= to the field that holds them: '(\w+)'$",
        lambda _, name: packed([IterableStream([{"ids": row} for row in ROWS], tokens=name)]),
    ),
    "token ids with a tokenizer": Remedy(
        lambda _: packed([IterableStream(ROWS, tokenizer=tokenizer())]),
        r"leave out tokenizer=, as its samples are token ids$",
        lambda _: packed([IterableStream(ROWS)]),
    ),
    "the name of a tokenizer": Remedy(
        lambda _: IterableStream(["one"], tokenizer="gpt2"),
        r"load it and pass the tokenizer itself: AutoTokenizer\.from_pretrained\(\.\.\.\) or "
        r"Tokenizer\.(from_file)\(\.\.\.\)$",
        lambda folder, name: packed(
            [
                IterableStream(
                    ["one"], tokenizer=getattr(Tokenizer, name)(str(tokenizer_file(folder)))
                )
            ]
        ),
    ),
    "a tokenizer that truncates": Remedy(
        lambda folder: IterableStream(["a b"], tokenizer=truncating(folder)),
        r"call tokenizer\.(no_truncation)\(\) before passing it$",
        lambda folder, name: packed(
            [IterableStream(["a b"], tokenizer=called(truncating(folder), name))]
        ),
    ),
    "a tokenizer that encodes nothing": Remedy(
        lambda _: IterableStream(["one"], tokenizer=3),
        r"pass a tokenizers\.Tokenizer, a transformers tokenizer, or an object whose "
        r"(encode)\(texts\) returns lists of token ids$",
        lambda _, name: [
            packed([IterableStream(["one"], tokenizer=tokenizer())]),
            packed(
                [
                    IterableStream(
                        ["one"],
                        tokenizer=type("Own", (), {name: lambda _, texts: [[1]] * len(texts)})(),
                    )
                ]
            ),
        ],
    ),
    "a tokenizer that encodes one text": Remedy(
        lambda _: packed(
            [IterableStream(["one"], tokenizer=type("One", (), {"encode": lambda *_: []})())]
        ),
        r"it must encode a list of texts to as many lists of ids; ",
        lambda _: packed(
            [
                IterableStream(
                    ["one"] * 9,
                    tokenizer=type("All", (), {"encode": lambda _, texts: [[1]] * len(texts)})(),
                )
            ]
        ),
    ),
    "a generator that is to be repeated": Remedy(
        lambda _: IterableStream(iter(ROWS), repeat=2),
        r"pass a list, a dataset, or an object whose __iter__ makes a new generator$",
        lambda _: [
            packed([IterableStream(ROWS, repeat=2)]),
            packed([IterableStream(Rows(), repeat=2)]),
        ],
    ),
}


def loaded(folder: Path, load: str, kind: str, split: str) -> Any:
    import datasets  # seconds, for one row of the table

    path = str(folder / "b.parquet")
    datasets.Dataset.from_dict({"input_ids": ROWS}).to_parquet(path)
    return getattr(datasets, load)(kind, data_files=path, split=split, cache_dir=str(folder))


def folder_as_index(folder: Path) -> Path:
    index = mds(folder) / "index.json"
    index.rename(folder / index.name)
    index.mkdir()
    return index.parent


def put_index(folder: Path) -> int:
    index = mds(folder) / "index.json"
    index.rmdir()
    (folder / index.name).rename(index)
    return packed([Stream(local=str(index.parent))])


FILES = {
    "a folder in place of index.json": Remedy(
        lambda folder: packed([Stream(local=str(folder_as_index(folder)))]),
        r"index\.json: is a folder, not a file; remove it, or put the stream's file there$",
        put_index,
    ),
    "a URL to write to": Remedy(
        lambda _: write_stream(ROWS, Path("s3://bucket/code")),
        r"out='s3://bucket/code' is a URL, but must be a local path; name a folder, then upload it",
        lambda folder: write_stream(ROWS, folder / "code"),
    ),
    "texts in a store without a driver": Remedy(
        lambda folder: written(folder, Path("gopher://bucket/a.txt")),
        r"gopher://bucket/a\.txt: .*name a copy in S3 or on this machine$",
        lambda folder: written(folder, rows_file(folder, [1, 2])),
    ),
    "a folder that holds something": Remedy(
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


def broken(folder: Path, text: str) -> Path:
    path = folder / "broken.jsonl"
    path.write_text(text)
    return path


def binary(folder: Path, content: bytes) -> Path:
    path = folder / "binary.txt"
    path.write_bytes(content)
    return path


def as_lines(folder: Path, path: str, to_json: str) -> Path:
    import datasets  # seconds, for one row of the table

    rows = datasets.Dataset.from_json(path, cache_dir=str(folder / "cache"))
    getattr(rows, to_json)(str(folder / "rows.jsonl"))
    return folder / "rows.jsonl"


def fields(**values: Any) -> list[dict[str, Any]]:
    return [{"tokens": [1, 2, 3], **values}] * 9


def two(folder: Path, first: dict[str, Any], second: dict[str, Any], **options: Any) -> int:
    """Iterate two streams with these weights."""
    one, other = Stream(local=mds(folder), **first), Stream(local=mds(folder, "ids"), **second)
    other.tokens = "ids"
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
    "proportions of nothing": Remedy(
        lambda folder: two(folder, {"proportion": 0}, {"proportion": 0}),
        r"give at least one stream more$",
        lambda folder: two(folder, {"proportion": 0}, {"proportion": 1}),
    ),
    "no samples at all": Remedy(
        lambda folder: two(folder, {"choose": 0}, {"choose": 0}),
        r"raise repeat, choose or epoch_size$",
        lambda folder: two(folder, {"choose": 5}, {"choose": 0}),
    ),
    "a part of a sample": Remedy(
        lambda folder: two(folder, {"choose": 2.5}, {"choose": 1}),
        r"round it, or use repeat$",
        lambda folder: [
            two(folder, {"choose": 2}, {"choose": 1}),
            two(folder, {"repeat": 2.5}, {"choose": 1}),
        ],
    ),
    "a size of an epoch beside absolute weights": Remedy(
        lambda folder: two(folder, {"repeat": 1}, {}, mixing=Mixing(epoch_size=5)),
        r"leave epoch_size out, or use proportion$",
        lambda folder: [
            two(folder, {"repeat": 1}, {}),
            two(folder, {"proportion": 1}, {"proportion": 1}, mixing=Mixing(epoch_size=5)),
        ],
    ),
    "an end that planned epochs do not have": Remedy(
        lambda folder: two(folder, {}, {}, mixing=Mixing(stop="first_exhausted")),
        r"leave stop out$",
        lambda folder: two(folder, {}, {}),
    ),
    "a global batch that is no multiple": Remedy(
        lambda folder: two(folder, {}, {}, batch_size=4, mixing=Mixing(global_batch_size=6)),
        r"set it to (\d+), or set batch_size to (\d+), for example",
        lambda folder, whole, part: [
            two(folder, {}, {}, batch_size=4, mixing=Mixing(global_batch_size=int(whole))),
            two(folder, {}, {}, batch_size=int(part), mixing=Mixing(global_batch_size=6)),
        ],
    ),
    "lanes that share no batch": Remedy(
        lambda folder: two(
            folder, {}, {}, mixing=Mixing(batching_method="per_stream"), order=Order(num_lanes=2)
        ),
        r"a multiple of num_lanes \* batch_size = (\d+), or Order\(num_lanes=(1)\)",
        lambda folder, multiple, lanes: [
            two(
                folder,
                {},
                {},
                mixing=Mixing(batching_method="per_stream", global_batch_size=int(multiple)),
                order=Order(num_lanes=2),
            ),
            two(
                folder,
                {},
                {},
                mixing=Mixing(batching_method="per_stream"),
                order=Order(num_lanes=int(lanes)),
            ),
        ],
    ),
    "an epoch of less than a batch": Remedy(
        lambda folder: two(folder, {}, {}, mixing=Mixing(epoch_end="carry", global_batch_size=100)),
        r"lower global_batch_size, raise epoch_size, or set epoch_end='(pad)'$",
        lambda folder, end: [
            two(folder, {}, {}, mixing=Mixing(epoch_end="carry", global_batch_size=1)),
            two(folder, {}, {}, mixing=Mixing(epoch_end=end, global_batch_size=100)),
            two(
                folder,
                {"proportion": 1},
                {"proportion": 1},
                mixing=Mixing(epoch_end="carry", global_batch_size=100, epoch_size=2000),
            ),
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
    "a cache that holds too little": Remedy(
        lambda folder: cached(folder, 1),
        r"set cache_limit to at least (\d+) ",
        lambda folder, least: cached(folder, int(least)),
    ),
    "a compact batch of a native one": Remedy(
        lambda folder: streampack.expand(first_batch(folder)),
        r"iterate the dataset with batch_format='(compact)' and pass one of its batches$",
        lambda folder, name: streampack.expand(first_batch(folder, batch_format=name)),
    ),
    "a native batch of a compact one": Remedy(
        lambda folder: to_hf(first_batch(folder, batch_format="compact")),
        r"iterate the dataset with batch_format='(native)' and pass one of its batches$",
        lambda folder, name: to_hf(first_batch(folder, batch_format=name)),
    ),
    "positions that go on in a format of restarts": Remedy(
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
    "a negative weight of an iterable": Remedy(
        lambda _: IterableStream(ROWS, proportion=-1),
        r"(0) leaves the stream out$",
        lambda _, weight: packed(
            [IterableStream(ROWS, proportion=int(weight)), IterableStream(ROWS, proportion=1)]
        ),
    ),
    "a label beyond int32": Remedy(
        lambda _: packed([IterableStream(fields(labels=[2**40, 1, 2]), labels="labels")]),
        r"a label is a token id, or (-100) for a token that is not a target$",
        lambda _, other: packed(
            [IterableStream(fields(labels=[int(other), 2, 3]), labels="labels")]
        ),
    ),
    "a payload without a span": Remedy(
        lambda _: packed([imaged([])]), r"give each one$", lambda _: packed([imaged([[0, 2]])])
    ),
    "a span of no tokens": Remedy(
        lambda _: packed([imaged([[2, 2]])]),
        r"a span is its first token and one past its last$",
        lambda _: packed([imaged([[0, 2]])]),
    ),
    "labels of another length": Remedy(
        lambda _: packed([IterableStream(fields(labels=[1]), labels="labels")]),
        r"give one for each token$",
        lambda _: packed([IterableStream(fields(labels=[1, 2, 3]), labels="labels")]),
    ),
    "numbers that are no integers": Remedy(
        lambda _: packed([IterableStream([[0.5, 1.5]])]),
        r"tokenize first$",
        lambda _: packed([IterableStream(["one two"], tokenizer=tokenizer())]),
    ),
    "a sample of two rows": Remedy(
        lambda _: packed([IterableStream([[[1, 2], [3, 4]]])]),
        r"give each row as a sample of its own$",
        lambda _: packed([IterableStream([[1, 2], [3, 4]])]),
    ),
    "a mask of token ids": Remedy(
        lambda _: packed([IterableStream(fields(m=[7, 8, -100]), loss_mask="m")]),
        r"token ids and -100 belong in (labels)=$",
        lambda _, name: packed(
            [IterableStream(fields(m=[7, 8, -100]), **{name: "m", "labels_shifted": True})]
        ),
    ),
    "what cannot be iterated": Remedy(
        lambda _: IterableStream(3),
        r"give a list, a generator or a dataset$",
        lambda _: [
            packed([IterableStream(ROWS)]),
            packed([IterableStream(iter(ROWS))]),
            packed([IterableStream(Rows())]),
        ],
    ),
    "a negative number of bad samples": Remedy(
        lambda _: IterableStream(ROWS, max_bad_samples=-1),
        r"(0) skips none$",
        lambda _, most: packed([IterableStream(ROWS, max_bad_samples=int(most))]),
    ),
    "a field that is no dict": Remedy(
        lambda _: IterableStream(fields(weight=[1, 1, 1]), token_fields="weight"),
        r"write token_fields=(\{.*\})$",
        lambda _, value: packed(
            [IterableStream(fields(weight=[1, 1, 1]), token_fields=ast.literal_eval(value))]
        ),
    ),
    "a field of no dtype": Remedy(
        lambda _: IterableStream(fields(weight=[1, 1, 1]), token_fields={"weight": "real"}),
        r"write '(\w+)' or '(\w+)', for example$",
        lambda _, *dtypes: [
            packed([IterableStream(fields(weight=[1, 1, 1]), token_fields={"weight": each})])
            for each in dtypes
        ],
    ),
    "a field that a batch has already": Remedy(
        lambda _: IterableStream(fields(position=[1, 1, 1]), token_fields={"position": "int64"}),
        r"give it another name in the source$",
        lambda _: packed([IterableStream(fields(p=[1, 1, 1]), token_fields={"p": "int64"})]),
    ),
    "text in a field of ids": Remedy(
        lambda _: packed([IterableStream([{"tokens": "one"}])]),
        r"holds text, but must hold integers; set tokenizer=$",
        lambda _: packed(
            [IterableStream([{"tokens": "one"}], tokenizer=tokenizer(), text="tokens")]
        ),
    ),
    "labels of an epoch beside absolute weights": Remedy(
        lambda _: packed([IterableStream(ROWS, repeat=1)], mixing=Mixing(epoch_size=5)),
        r"leave it out, or use proportion$",
        lambda _: [
            packed([IterableStream(ROWS, repeat=1)]),
            packed([IterableStream(ROWS, proportion=1)], mixing=Mixing(epoch_size=5)),
        ],
    ),
}


def imaged(spans: list[list[int]]) -> IterableStream:
    """Samples with one picture each, and the tokens it stands for."""
    return IterableStream(fields(image=["x"], spans=spans), payloads={"image": "spans"})


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
    "a rank that is none": Remedy(
        lambda _: World(rank=4, num_ranks=4),
        r"ranks count from (0)$",
        lambda _, first: [World(rank=rank, num_ranks=4) for rank in range(int(first), 4)],
    ),
    "nodes of unequal numbers of ranks": Remedy(
        lambda _: World(num_ranks=4, ranks_per_node=3),
        r"every node must run the same number of ranks$",
        lambda _: World(num_ranks=4, ranks_per_node=2),
    ),
    "half of the variables": Remedy(
        lambda _: World.from_env({"RANK": "1"}),
        r"set (WORLD_SIZE), unset (RANK), or pass world=World\(\.\.\.\)$",
        lambda folder, missing, stated: [
            World.from_env({stated: "1", missing: "2"}),
            World.from_env({}),
            packed([Stream(local=mds(folder))], world=World()),
        ],
    ),
    "a local rank that is another": Remedy(
        lambda _: World.from_env(
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        ),
        r"is local rank (\d); number the ranks node by node as torchrun does, or pass world=",
        lambda folder, local: [
            World.from_env(
                {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": local}
            ),
            packed([Stream(local=mds(folder))], world=World()),
        ],
    ),
}

WRITTEN = {
    "a sample of another type": Remedy(
        lambda folder: write_stream(
            [{"tokens": [1], "s": "a"}, {"tokens": [1], "s": 3}], folder / "a"
        ),
        r"make all samples like the first$",
        lambda folder: write_stream([{"tokens": [1], "s": "a"}] * 2, folder / "a"),
    ),
    "a file that was cut short": Remedy(
        lambda folder: written(folder, packed_rows(folder, cut=8)),
        r"copy it again$",
        lambda folder: written(folder, packed_rows(folder, cut=0)),
    ),
    "a compression that is none": Remedy(
        lambda folder: write_stream(ROWS, folder / "a", compression="zip"),
        r"as (zstd:7).*; (None) .* writes raw shards$",
        lambda folder, *names: [
            write_stream(ROWS, folder / name, compression=None if name == "None" else name)
            for name in names
        ],
    ),
    "a shard that holds no sample": Remedy(
        lambda folder: write_stream(ROWS, folder / "a", size_limit=10),
        r"set a size such as '(\w+)'$",
        lambda folder, size: write_stream(ROWS, folder / "a", size_limit=size),
    ),
    "a negative id": Remedy(
        lambda folder: write_stream([{"tokens": [1, -100]}], folder / "a"),
        r"write labels and masks in columns of their own$",
        lambda folder: write_stream([{"tokens": [1, 2], "labels": [1, -100]}], folder / "a"),
    ),
    "a text that is no sample": Remedy(
        lambda folder: write_stream(["one"], folder / "a"),
        r"tokenize it first$",
        lambda folder: write_stream([tokenizer().encode("one").ids], folder / "a"),
    ),
    "another column to write": Remedy(
        lambda folder: write_stream([{"ids": [1]}], folder / "a"),
        r"it has '(\w+)'; set tokens= to one of them$",
        lambda folder, name: write_stream([{"ids": [1]}], folder / "a", tokens=name),
    ),
    "samples of other fields": Remedy(
        lambda folder: write_stream([{"tokens": [1], "s": "a"}, {"tokens": [1]}], folder / "a"),
        r"give all samples the same fields$",
        lambda folder: write_stream([{"tokens": [1], "s": "a"}] * 2, folder / "a"),
    ),
    "a mask of another length": Remedy(
        lambda folder: write_stream([{"tokens": [1, 2], "loss_mask": [1]}], folder / "a"),
        r"write it so, or under another name$",
        lambda folder: [
            write_stream([{"tokens": [1, 2], "loss_mask": [1, 0]}], folder / "a"),
            write_stream([{"tokens": [1, 2], "other": [1]}], folder / "b"),
        ],
    ),
    "a list that is one in the first sample": Remedy(
        lambda folder: write_stream(
            [{"tokens": [1, 2], "m": [1, 0]}, {"tokens": [1, 2], "m": [1]}], folder / "a"
        ),
        r"fix it, or put it into a dict in all samples if it has another meaning$",
        lambda folder: [
            write_stream([{"tokens": [1, 2], "m": [1, 0]}] * 2, folder / "a"),
            write_stream(
                [{"tokens": [1, 2], "m": {"m": [1, 0]}}, {"tokens": [1, 2], "m": {"m": [1]}}],
                folder / "b",
            ),
        ],
    ),
    "nothing to write": Remedy(
        lambda folder: write_stream([[]], folder / "a"),
        r"a stream needs 1 or more$",
        lambda folder: write_stream([[], [1]], folder / "a"),
    ),
    "no files": Remedy(
        lambda folder: written(folder, empty(folder)),
        r"0 files in this folder; name one that holds files of rows or text$",
        lambda folder: written(folder, rows_file(empty(folder), [1])),
    ),
    "a file that is not there": Remedy(
        lambda folder: written(folder, folder / "none.jsonl"),
        r"check the path$",
        lambda folder: written(folder, rows_file(folder, [1])),
    ),
    "a file of another kind": Remedy(
        lambda folder: written(folder, rows_file(folder, [1]).rename(folder / "rows.dat")),
        r"supported are (\.jsonl), .*rename it if it is one of them",
        lambda folder, suffix: written(
            folder, (folder / "rows.dat").rename(folder / f"rows{suffix}")
        ),
    ),
    "texts without a tokenizer": Remedy(
        lambda folder: written(folder, binary(folder, b"one two")),
        r"is text; set tokenizer= to a (tokenizer\.json), or name JSON lines of token ids$",
        lambda folder, _: [
            written(folder, binary(folder, b"one"), RowFormat(tokenizer=tokenizer_file(folder))),
            written(folder, rows_file(folder, [1])),
        ],
    ),
    "no process": Remedy(
        lambda _: WriteOptions(num_workers=0),
        r"leave it out for one process per core$",
        lambda folder: written(folder, rows_file(folder, [1])),
    ),
}


def truncating(folder: Path) -> Tokenizer:
    """A tokenizer that takes one token of each text."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file(folder)))
    tokenizer.enable_truncation(1)
    return tokenizer


def called(value: Any, name: str) -> Any:
    """The value, after a call of one of its methods."""
    getattr(value, name)()
    return value


def packed_rows(folder: Path, cut: int) -> Path:
    """Rows in a .gz file that lacks its last bytes."""
    path = folder / "rows.jsonl.gz"
    content = gzip.compress(b"[1, 2]\n" * 9)
    path.write_bytes(content[: len(content) - cut])
    return path


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir(exist_ok=True)
    return folder / "empty"


def bytes_mds(folder: Path) -> Path:
    """A stream whose ids are bytes."""
    out = folder / "bytes"
    if not out.exists():
        with streaming.MDSWriter(out=str(out), columns={"tokens": "bytes"}) as writer:
            for _ in range(20):
                writer.write({"tokens": bytes([1, 0, 2, 0])})
    return out


def config(folder: Path, **stream: Any) -> Path:
    path = folder / "run.yaml"
    described = {"streams": [stream], "packing": {"max_seq_len": 16}}
    path.write_text(yaml.safe_dump(described))
    return path


TABLE = {**CONFIGS, **WORLDS, **STREAMS, **ITERABLES, **SAMPLES, **MIXES, **FILES, **WRITTEN}
every_remedy = pytest.mark.parametrize("remedy", TABLE.values(), ids=TABLE)


@every_remedy
def test_what_a_message_says_to_do_works(remedy: Remedy, tmp_path: Path):
    remedy.check(tmp_path)


def test_every_remedy_of_the_complete_modules_is_in_the_table(tmp_path: Path):
    assert untried(COMPLETE, TABLE.values(), tmp_path) == [], "add a row that applies the remedy"
