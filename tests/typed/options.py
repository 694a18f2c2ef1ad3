"""Each class knows its options: mypy and pyright accept all, and report one that is wrong.

`make lint` checks this file with mypy --strict, and CI with pyright. Both also refuse an ignored
error that is none, so a wrong line that a checker would accept is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from pathlib import Path

from streampack import (
    Chats,
    Download,
    HeldOut,
    IterableStream,
    PackedStreamingDataset,
    Packing,
    Payloads,
    Shards,
    Stream,
    Texts,
    TokenFiles,
    chat_dataset,
    chat_datasets,
    register_source,
)


def right(tokenizer: object, folder: Path) -> list[Stream]:
    """Use each option of each class."""
    download = Download(retry=5, timeout=30, hash="sha1", keep_zip=False)
    side = HeldOut(side="train", fraction=0.005, by="row")
    web = Shards(
        remote="s3://b/web",
        local=folder,
        split="train",
        format="mds",
        tokens="ids:uint16",
        labels="labels",
        labels_shifted=True,
        loss_mask="mask:uint8",
        check_dtypes=False,
        only=slice(0, 10),
        index=None,
        split_at=None,
        check_remote=True,
        download=download,
    )
    documents = TokenFiles(
        ["s3://b/a.npy", "s3://b/b.npy"],
        local=folder,
        format="olmo",
        tokens="tokens",
        dtype="uint16",
        unit="document",
        only=slice(10, None),
        index="index",
        split_at=2,
        has=("bos", "eos"),
        trailing="ignore",
        download=download,
    )
    rows = [{"ids": [1, 2], "labels": [2, -100], "mask": [1, 0]}]
    ids = TokenFiles(
        rows,
        tokens="ids",
        labels="labels",
        labels_shifted=True,
        loss_mask="mask",
        on_bad_row="skip",
    )
    books = Texts(
        folder / "*.parquet",
        tokenizer,
        local=folder,
        text="body",
        special_tokens="text",
        backend="huggingface",
        only=slice(5),
        index=None,
        on_bad_row="skip",
        transform="cleaning:without_short",
        version="2",
        lengths="lazy",
    )
    chats = Chats(
        files="chats.jsonl",
        tokenizer="tokenizer",
        local=None,
        chat="conversation",
        train_on="each_response",
        chat_template="{{ messages }}",
        template_kwargs={"tools": None},
        context_roles=["documents"],
        ignore_fields=("id",),
        only=slice(1, 3),
        index=None,
        on_bad_row="error",
        transform=None,
        version="1",
        lengths="eager",
    )
    return [
        Stream(web, name="web", proportion=0.6, loss_weight=0.5, held_out=side),
        Stream(documents, repeat=2, max_seq_len=4096, overflow="split", bos_id=1, eos_id=2),
        Stream(ids, choose=10),
        Stream(books),
        Stream(chats),
        Stream(remote="s3://b/web", local="/nvme/web", only=slice(0, 10), proportion=0.6),
        Stream(local="a", index="index", split_at=2),
        Stream(Shards(local="a", index="index", split_at=2)),
    ]


def of_chats(tokenizer: object) -> list[PackedStreamingDataset]:
    """Pass options of `Chats` to the functions that make datasets of them."""
    packing = Packing(max_seq_len=8)
    side = HeldOut("held_out", 0.05, "row")
    one = chat_dataset([], tokenizer, packing=packing, name="a", held_out=side, train_on="all")
    return [one, *chat_datasets([], tokenizer, packing=packing, held_out=0.05, batch_size=2)]


def wrong(tokenizer: object) -> None:
    """Use one option of each class that it does not have, or a value that it does not take."""
    Stream(remot="a")  # type: ignore[call-arg]
    Stream(local="a", check_remote=1)  # type: ignore[arg-type]
    Stream(Shards(local="a"), held_out=0.1)  # type: ignore[arg-type]
    Shards(files="a")  # type: ignore[call-arg]
    TokenFiles("a", remote="b")  # type: ignore[call-arg]
    TokenFiles("a", unit="sample")  # type: ignore[arg-type]
    TokenFiles("a", has=("bos", "end"))  # type: ignore[arg-type]
    Texts("a", tokenizer, chat="b")  # type: ignore[call-arg]
    Texts("a")  # type: ignore[call-arg]
    Chats("a", tokenizer, text="b")  # type: ignore[call-arg]
    Chats("a", tokenizer, train_on="response")  # type: ignore[arg-type]
    HeldOut("train", 0.1, unit="row")  # type: ignore[call-arg]
    HeldOut("test", 0.1, "row")  # type: ignore[arg-type]
    Download(retries=3)  # type: ignore[call-arg]
    IterableStream([], remote="a")  # type: ignore[call-arg]
    IterableStream([], on_bad_row="raise")  # type: ignore[arg-type]
    IterableStream([], payloads={"images": None})  # type: ignore[arg-type]
    Payloads({}, spans="a")  # type: ignore[call-arg]
    chat_datasets([], tokenizer)  # type: ignore[call-arg]
    register_source(Shards, "shards")  # type: ignore[arg-type]
