"""Refusals that no other test provokes: each names the value, the limit and the way out."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    Balance,
    Bucketing,
    Chapter,
    Download,
    IterableStream,
    Mixing,
    Order,
    PackCost,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Payloads,
    Shards,
    Stream,
    TokenFiles,
    World,
    at,
    formats,
    where,
)
from streampack.chapters import check_chapters
from streampack.compat.torchdata import MaxTokenBucketizer
from streampack.errors import StreampackError
from streampack.index import write_lengths
from streampack.mix.weights import Weight, resolve_weights
from streampack.stores.threads import within_time
from streampack.texts import ChatEncoder, RowFormat
from streampack.write import WriteOptions, write_stream, write_texts
from tests.helpers.builders import write_stream_files
from tests.helpers.flat import make_documents, write_litdata
from tests.helpers.remedies import PACKING, ROWS, mds, packed
from tests.helpers.words import word_tokenizer, words


def planned(folder: Path, **options: Any) -> PackedStreamingDataset:
    return PackedStreamingDataset([Stream(local=mds(folder))], packing=PACKING, **options)


def balanced(folder: Path, cost: Callable[[Any], Any]) -> int:
    return packed([Stream(local=mds(folder))], batch_size=2, balance=Balance(cost=cost))


def going_on(folder: Path, convert: Callable[[Any], Any]) -> None:
    """Convert the batches of samples that are cut and whose positions continue."""
    write_stream([list(range(1, 40))] * 4, folder / "long")
    packing = Packing(max_seq_len=16, positions="continue")
    for batch in PackedStreamingDataset([Stream(local=folder / "long")], packing=packing):
        convert(batch)


def flipped(folder: Path, value: int) -> int:
    """Write a stream whose samples end at another byte than its shard; return its tokens."""
    path, _ = write_stream_files(folder / "stream", [3] * 4, lengths_file=False)
    [shard] = path.glob("*.mds")
    content = np.fromfile(shard, np.uint8)
    ends = content[4 : 4 * 6].view(np.uint32)  # where each of four samples begins, and the end
    ends[-1] += value
    content.tofile(shard)
    return write_lengths(path)


def litdata_of(folder: Path, kinds: Any) -> int:
    write_litdata(folder, make_documents(3))
    index = json.loads((folder / "index.json").read_text())
    index["config"]["data_format"] = kinds
    (folder / "index.json").write_text(json.dumps(index))
    return packed([Stream(local=folder)])


def chat_encoder(**options: Any) -> ChatEncoder:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return ChatEncoder(tokenizer, **options)


def write_rows(folder: Path, name: str = "a.txt", out: Any = None, **options: Any) -> Any:
    (folder / name).write_text("a text")
    words().save(str(folder / "tokenizer.json"))
    rows = RowFormat(tokenizer=folder / "tokenizer.json")
    return write_texts(
        [folder / name], out or folder / "out", WriteOptions(**{"rows": rows, **options})
    )


def narrow(folder: Path, dtype: str) -> Any:
    word_tokenizer(*(f"w{n}" for n in range(300))).save(str(folder / "large.json"))
    return write_rows(folder, rows=RowFormat(tokenizer=folder / "large.json"), tokens_dtype=dtype)


def without_local(folder: Path, kind: Any = Shards, **options: Any) -> int:
    """Read a stream without `local` where its temporary folder is a link."""
    (folder / f"streampack-{os.getuid()}").symlink_to(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        return packed([Stream(kind(local=None, **options))])


def sample_of(**fields: Any) -> dict[str, Any]:
    return {"tokens": [1, 2, 3], **fields}


CONFIGS = [
    (lambda: Order(shuffle=1), r"shuffle=1 is not a bool; write True or False"),
    (
        lambda: Packing(max_seq_len=10.5),
        r"max_seq_len=10.5 is not an integer; write a whole number",
    ),
    (lambda: Order(seed=17.0), r"seed=17.0 is not an integer; a seed is .* at least 0, such as 17"),
    (
        lambda: Packing(max_seq_len=8, eos_id=-1),
        r"eos_id=-1 is not a token id; they go from 0 to \d+, None adds none",
    ),
    (
        lambda: Packing(max_seq_len=100, cost=PackCost(200, capacity=151)),
        r"capacity=151 must be from max_seq_len=100 to 1.5 times that, 150; omit it",
    ),
    (
        lambda: Bucketing(max_tokens=8, max_seq_len=16),
        r"max_seq_len=16 is over max_tokens=8, so its rows fit no batch; lower it, or omit it",
    ),
    (
        lambda: World(rank=4, num_ranks=4),
        r"rank=4 is not one of num_ranks=4; ranks count from 0",
    ),
    (
        lambda: World(num_ranks=2**31 - 1),
        r"num_ranks=2147483647 is more than the maximum of 1048576; lower it",
    ),
    (
        lambda: Chapter(weights={"web": -1}),
        r"weights\['web'\]=-1 is not a weight; write a number of at least 0, such as 0.5",
    ),
    (
        lambda: Chapter(weights={"web": 1}, passes=1, steps=2),
        r"steps=2 and passes=1 both set the length of a chapter; omit one of them",
    ),
    (
        lambda: Chapter(weights={"web": 1}, passes=1, stop_after=2),
        r"passes=1 and stop_after=2 both set the length of a chapter; omit one of them",
    ),
    (
        lambda: Chapter(weights={"web": 1, "code": 1}, passes=1),
        r"passes=1 is for a single stream, but the weights name 'web', 'code'; give a weight to",
    ),
    (
        lambda: check_chapters([Chapter(weights={"web": 1}, passes=1)] * 2, PACKING),
        r"chapters\[0\] has passes=1, and the run ends with them; set its until or steps, or make",
    ),
    (
        lambda: resolve_weights([Weight(name="a", proportion="x")], [(1, 1)]),
        r"'a'.* must be a number of at least 0, such as 0.5 or 2$",
    ),
    (
        lambda: resolve_weights([Weight(name="a", proportion=-0.5)], [(1, 1)]),
        r"'a'.* must be a number of at least 0; 0 leaves the stream out$",
    ),
    (
        lambda: formats.additive_mask(torch.ones(1, 4), dtype=torch.int32),
        r"dtype=torch.int32 is not a floating type; pass the model's dtype, or use a bool mask",
    ),
    (
        lambda: formats.fixed_cu_seqlens(torch.tensor([0, 3, 8]), 1),
        r"has 2 segments, padding included, but capacity=1; raise it: B \* S is always enough",
    ),
    (
        lambda: MaxTokenBucketizer([], max_token_count=8, buffer_size=0),
        r"positive integer, but is 0; 1 keeps the order, and more sorts further",
    ),
    (
        lambda: RowFormat(chat="messages", tokenizer="x", backend="gigatoken"),
        r"backend='gigatoken' encodes texts, and these rows are conversations; omit it",
    ),
    (
        lambda: RowFormat(train_on="all"),
        r"train_on='all' is for conversations; name their column with chat=, or omit it",
    ),
    (
        lambda: chat_encoder(context_roles="documents"),
        r"context_roles='documents' is one text; write \['documents'\]",
    ),
]
STREAMS = [
    (
        lambda: Stream(local="x", labels_shifted=True),
        r"labels_shifted=True .* but labels=None; set labels= to its name, or omit labels_shifted",
    ),
    (
        lambda: Stream(local="x", download=Download(retry=-1)),
        r"retry=-1 is negative; 0 never tries again",
    ),
    (
        lambda: Stream(local="x", download=Download(timeout=0)),
        r"timeout=0 must be a number of seconds, more than 0 and at most \d+",
    ),
    (
        lambda: Stream(remote="gopher://x"),
        r"remote='gopher://x': nothing can fetch from gopher:; .*copy the files to one of these",
    ),
    (
        lambda: packed([IterableStream(ROWS, proportion=-1)]),
        r"'stream-0'.: proportion=-1 must be a number of at least 0; 0 leaves the stream out",
    ),
    (
        lambda: IterableStream(ROWS, token_fields={"tokens": "int32"}),
        r"token_fields has a field 'tokens', which is a key of batches .* another name",
    ),
    (
        lambda: packed([IterableStream(ROWS, choose=0), IterableStream(ROWS, choose=0)]),
        r"the weights choose 0 samples of 2 streams; raise repeat or choose, or pass sources",
    ),
    (
        lambda: IterableStream(ROWS, payloads=Payloads({"seq_lens": None})),
        r"payloads has a field 'seq_lens', which is a key of batches .* another name",
    ),
    (
        lambda: packed(
            [IterableStream([sample_of(w=["x", "y", "z"])], token_fields={"w": "int8"})]
        ),
        r"field 'w' cannot be converted to int8: .*'x'",
    ),
    (
        lambda: PackedDataLoader(
            PackedIterableDataset([IterableStream(ROWS)], packing=PACKING)
        ).load_state_dict({"epoch": 1}),
        r"the state, .*epoch.*, is not of a PackedDataLoader .* what its state_dict\(\) returned",
    ),
]
FILES = [
    (
        lambda folder: balanced(folder, lambda lengths: lengths[:, None]),
        r"cost returned shape \(\d+, 1\) for \d+ lengths; return one cost for each length",
    ),
    (
        lambda folder: balanced(folder, lambda lengths: lengths * np.nan),
        r"cost returned nan for a sample of \d tokens; return a number of at least 0 and at most",
    ),
    *(
        (
            lambda folder, name=name: going_on(folder, formats.get_format(name)),
            rf"'{name}' .* begins at position \d+; set Packing\(positions='restart'\)",
        )
        for name in ("hf", "hf_flash", "torchtitan", "torchtitan_flat", "llama_factory")
    ),
    (
        lambda folder: planned(folder, chapters=[{"web": 1}]),
        r"chapters\[0\]=\{'web': 1\} is not a Chapter; write Chapter\(weights=\{...\}, until=...\)",
    ),
    (
        lambda folder: PackedDataLoader(planned(folder), timeout=-1),
        r"timeout=-1 must be a number of seconds, at least 0 and at most \d+; 0 or None waits",
    ),
    (
        lambda folder: at(
            planned(
                folder,
                chapters=[Chapter(weights={"mds-tokens": 1}, steps=2)],
                mixing=Mixing(global_batch_size=1),
            ),
            step=2,
        ),
        r"step=2: the run has 2 steps; they count from 0",
    ),
    (
        lambda folder: where(planned(folder), "mds-tokens", 20, upto=1),
        r"sample=20: stream 'mds-tokens' has 20 samples; they count from 0",
    ),
    (
        lambda folder: flipped(folder, 4),
        r"samples take bytes \d+ to \d+, but the shard has .* in \d+ to \d+; fetch or rewrite it",
    ),
    (
        lambda folder: litdata_of(folder, ["jpeg"]),
        r"config.data_format is \['jpeg'\], but only texts and headerless arrays .* can be read: ",
    ),
    (
        lambda folder: packed([Stream(local=mds(folder), download=Download(hash="sha1"))]),
        r"shard.00000.* has no 'sha1' hash, only \[.*\]; set Download\(hash=\) to one",
    ),
    (
        lambda folder: without_local(folder, remote=str(mds(folder))),
        r"local=None: .*streampack-\d+ belongs to .* or is a link; set local= or TMPDIR",
    ),
    (
        lambda folder: without_local(folder, kind=TokenFiles, files=str(folder / "a.jsonl")),
        r"local=None: .*streampack-\d+ belongs to .* or is a link; set local= or TMPDIR",
    ),
    (
        lambda folder: write_texts(
            [mds(folder)], mds(folder) / "out", WriteOptions(rows=RowFormat())
        ),
        r"out='.*/out' is in the input .*/mds-tokens, .*; name a folder outside of it",
    ),
    (
        lambda folder: write_rows(folder, "a.xyz"),
        r"a.xyz: is not a supported file; supported are .*jsonl.*; rename it if it is one of them",
    ),
    (
        lambda folder: write_texts(["s3://"], folder / "out", WriteOptions(rows=RowFormat())),
        r"s3://: names no bucket; write it as s3://bucket/path",
    ),
    (
        lambda folder: write_rows(folder, out="s3://bucket"),
        r"out='s3://bucket' names no place in a bucket; write it as s3://bucket/path",
    ),
    (
        lambda folder: write_rows(folder, out="gs://bucket/path"),
        r"out='gs://bucket/path' is neither a folder nor s3://bucket/path; name a folder, then",
    ),
    (
        lambda folder: narrow(folder, "uint8"),
        r"tokens_dtype='uint8' has room for ids up to 255, but .*json has ids up to 299; omit it",
    ),
    (
        lambda _: chat_encoder()({"title": "a", "text": "b"}),
        r"a row with 'title', 'text' has no conversation; name its fields .*, or pass",
    ),
    (
        lambda _: chat_encoder()([{"role": "assistant", "content": "a", "train": 2}]),
        r"message 0 has train=2, .* either learned or not; write 0 or 1, or true or false",
    ),
]


@pytest.mark.parametrize(
    ("refuse", "says"),
    [*((lambda _, call=call: call(), says) for call, says in (*CONFIGS, *STREAMS)), *FILES],
    ids=[says[:40] for _, says in (*CONFIGS, *STREAMS, *FILES)],
)
def test_a_refusal_names_the_value_the_limit_and_the_way_out(refuse, says, tmp_path):
    with pytest.raises(StreampackError, match=says) as raised:
        refuse(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_request_that_is_overdue_names_its_time_and_how_many_others_are_open():
    ended = threading.Event()
    for says in (r"not done within 0.1 s$", r"0.1 s, 2 overdue requests are still open$"):
        with pytest.raises(TimeoutError, match=says):
            within_time(lambda: ended.wait(60), 0.1)
    ended.set()
