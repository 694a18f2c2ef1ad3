"""Rows that a tokenizer has padded: the padding is removed, or the rows are refused.

::

    input_ids 5 6 7 0 0     attention_mask 1 1 1 0 0     -->  5 6 7, online and written
"""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import streaming
import torch

from streampack import (
    DataError,
    IterableStream,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Payloads,
    Stream,
    TokenFiles,
)
from streampack.streams import open_stream
from streampack.texts import RowFormat
from streampack.write import WriteOptions, write_stream, write_texts

PACKING = Packing(max_seq_len=16)
PAD = 9
SAMPLES = [[5, 6, 7], [8, 1], [2, 3, 4, 5, 6, 7], [1]]
PADDED = {
    "right": [1, 1, 1, 0, 0, 0, 0, 0],
    "left": [0, 0, 0, 0, 0, 1, 1, 1],
    "both": [0, 0, 0, 1, 1, 1, 0, 0],
}


def padded(side: str) -> list[dict[str, list[int]]]:
    """Return the samples in rows of 8, with labels and masks padded the same way."""
    rows = []
    for sample in SAMPLES:
        before = {"right": 0, "left": 8 - len(sample), "both": (8 - len(sample)) // 2}[side]
        after = 8 - len(sample) - before
        row = {"input_ids": [PAD] * before + sample + [PAD] * after}
        row["labels"] = [-100] * before + sample + [PAD] * after
        row["loss_mask"] = [1] * before + [0, *[1] * (len(sample) - 1)] + [1] * after
        row["attention_mask"] = [0] * before + [1] * len(sample) + [0] * after
        rows.append(row)
    return rows


def delivered(dataset) -> list[tuple[list[int], list[int]]]:
    found = []
    for batch in dataset:
        documents = batch["document_ids"][0]
        for number in range(1, int(documents.max()) + 1):
            is_own = documents == number
            found.append((batch["tokens"][0][is_own].tolist(), batch["labels"][0][is_own].tolist()))
    return sorted(found)


def of_source(source, **options):
    return PackedIterableDataset([IterableStream(source, **options)], packing=PACKING)


def of_files(path, **options):
    return PackedStreamingDataset([Stream(local=str(path), **options)], packing=PACKING)


OPTIONS = [{}, {"labels": "labels", "labels_shifted": False}, {"loss_mask": "loss_mask"}]


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("form", ["lists", "arrays", "tensors", "one row of a batch", "table"])
@pytest.mark.parametrize("options", OPTIONS)
def test_padding_is_left_out_by_the_attention_mask(tmp_path, side, form, options):
    rows = padded(side)
    bare = [{k: v for k, v in row.items() if k != "attention_mask"} for row in rows]
    kept = [np.array(row["attention_mask"]) == 1 for row in rows]
    whole = [
        {name: np.array(values)[keep].tolist() for name, values in row.items()}
        for row, keep in zip(bare, kept, strict=True)
    ]
    wanted = delivered(of_source(whole, **options))
    convert = {
        "arrays": np.array,
        "tensors": torch.tensor,
        "one row of a batch": lambda values: torch.tensor([values]),
    }.get(form, list)
    given = [{name: convert(values) for name, values in row.items()} for row in rows]
    if form == "table":
        given = datasets.Dataset.from_list(rows)

    assert delivered(of_source(given, **options)) == wanted
    assert {token for tokens, _ in wanted for token in tokens}.isdisjoint({PAD})
    if form != "one row of a batch":  # which is also refused without padding
        write_stream(given, tmp_path / "s")
        assert delivered(of_files(tmp_path / "s", **options)) == wanted


def test_a_row_of_padding_alone_is_a_sample_without_tokens(tmp_path):
    rows = [{"input_ids": [PAD] * 4, "attention_mask": [0] * 4}, {"input_ids": [1, 2]}]
    with pytest.raises(DataError, match="sample 0: 0 tokens"):
        list(of_source(rows))
    rows[1]["attention_mask"] = [1, 1]

    assert write_stream(rows, tmp_path / "s").num_skipped == 1


def test_padding_between_tokens_is_refused(tmp_path):
    rows = [{"tokens": [1, 2, 3, 4], "attention_mask": [0, 1, 0, 1]}]
    message = "'attention_mask' is 0 at token 2, between tokens.*rename the field"
    with pytest.raises(DataError, match=f"sample 0: its {message}"):
        list(of_source(rows))
    with pytest.raises(DataError, match=f"sample 0: its {message}"):
        write_stream(rows, tmp_path / "s")
    renamed = [{"tokens": row["tokens"], "other": row["attention_mask"]} for row in rows]

    assert delivered(of_source(renamed))
    assert write_stream(renamed, tmp_path / "s").num_tokens == 4


def test_padding_before_spans_of_payloads_is_refused():
    row = padded("left")[0] | {"images": ["x"], "spans": [[5, 6]]}
    with pytest.raises(DataError, match=r"padding before the tokens.*pad on the right"):
        list(of_source([row], payloads=Payloads({"images": "spans"})))
    row = padded("right")[0] | {"images": ["x"], "spans": [[0, 2]]}
    batch = next(iter(of_source([row], payloads=Payloads({"images": "spans"}))))

    assert batch["images_at"].tolist() == [[0, 0, 2]]


def test_padded_samples_of_an_mds_stream_are_refused_and_can_be_written_without(tmp_path):
    columns = {"tokens": "ndarray:int32", "attention_mask": "ndarray:int64"}
    with streaming.MDSWriter(out=str(tmp_path / "padded"), columns=columns) as writer:
        for row in padded("right"):
            tokens, mask = np.array(row["input_ids"], np.int32), np.array(row["attention_mask"])
            writer.write({"tokens": tokens, "attention_mask": mask})
    with pytest.raises(DataError, match="sample 0: its 'attention_mask' has zeros"):
        list(of_files(tmp_path / "padded"))

    streaming.base.util.clean_stale_shared_memory()
    rows = streaming.StreamingDataset(local=str(tmp_path / "padded"), batch_size=1)
    write_stream(rows, tmp_path / "whole")
    assert delivered(of_files(tmp_path / "whole")) == delivered(of_source(SAMPLES))


def rows_of_ids(form, folder, rows):
    """Return rows of token ids in a form that `TokenFiles` reads."""
    if form == "list":
        return rows
    if form == "json":
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / "rows.jsonl").write_text(lines)
        return folder / "rows.jsonl"
    table = datasets.Dataset.from_list(rows)
    if form == "parquet":
        table.to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet"
    return table if form == "dataset" else table.to_pandas()


@pytest.mark.parametrize("form", ["list", "json", "parquet", "dataset", "pandas"])
def test_padded_rows_of_token_ids_are_refused_unless_the_mask_is_kept(tmp_path, form):
    source = rows_of_ids(form, tmp_path, padded("right"))
    with pytest.raises(
        DataError, match=r"row 0: its 'attention_mask' marks padding.*loss_mask='att"
    ):
        open_stream(Stream(TokenFiles(source, local=tmp_path / "a")), 0)
    options = {"local": tmp_path / "a", "loss_mask": "attention_mask"}
    stream = Stream(TokenFiles(source, **options))
    found = delivered(PackedStreamingDataset([stream], packing=PACKING))
    assert found == delivered(of_source(SAMPLES))
    full = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in SAMPLES]
    stream = Stream(TokenFiles(rows_of_ids(form, tmp_path, full), local=tmp_path / "b"))
    assert delivered(PackedStreamingDataset([stream], packing=PACKING)) == found


def test_padded_rows_of_token_ids_are_written_with_the_mask_alone(tmp_path):
    path = rows_of_ids("json", tmp_path, padded("left"))
    with pytest.raises(DataError, match=r"marks padding.* --columns attention_mask"):
        write_texts([path], tmp_path / "a", WriteOptions(rows=RowFormat()))
    kept = WriteOptions(rows=RowFormat(columns=("attention_mask",)))
    write_texts([path], tmp_path / "b", kept)
    assert delivered(of_files(tmp_path / "b")) == delivered(of_source(SAMPLES))
