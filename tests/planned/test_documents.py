"""The row behind a sample of texts, where samples, rows and shards are numbered otherwise."""

from __future__ import annotations

import pytest

from streampack import DataError, HeldOut, TokenFiles
from streampack.texts import units
from tests.helpers.chats import chat_tokenizer, say
from tests.helpers.texts import dataset_of, source_of, texts, write_files, write_lines


def documents(dataset):
    samples = sorted({s[3] for batch in dataset for s in batch["segments"].tolist()})
    return [dataset.document([0, 0, sample]) for sample in samples]


def test_samples_of_one_conversation_have_its_row(tmp_path):
    chats = [{"messages": say(*["a b", "c d"] * (1 + n % 3)), "id": n} for n in range(9)]
    write_lines(tmp_path / "chats.jsonl", chats)
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source = source_of(tmp_path, "chats.jsonl", tmp_path, train_on="each_response")
    found = documents(dataset_of(source))
    assert [each["row"] for each in found] == [n for n in range(9) for _ in range(1 + n % 3)]
    assert [each["fields"] for each in found] == [chats[each["row"]] for each in found]


@pytest.mark.parametrize("unit_bytes", [units.UNIT_BYTES, 1], ids=["plain", "large"])
def test_of_a_part_and_of_large_row_groups_it_is_the_row_of_the_file(
    tmp_path, monkeypatch, unit_bytes
):
    monkeypatch.setattr(units, "SHARD_BYTES", 200)
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    folder = write_files(tmp_path)
    source = source_of(folder, "rows.parquet", tmp_path)
    held = {"held_out": HeldOut("train", 0.25, by="row")}
    found = documents(dataset_of(source, stream=held))
    assert 100 < len(found) < 180
    assert {each["file"] for each in found} == {str(folder / "rows.parquet")}
    assert all(each["fields"]["text"] == texts()[each["row"]] for each in found)


def test_a_row_that_cannot_be_read_or_has_changed_is_an_error(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "a"}, "bad", {}, {"text": "c"}])
    path.write_text(path.read_text().replace("{}", ""))
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    dataset = dataset_of(source_of(tmp_path, "rows.jsonl", tmp_path, on_bad_row="skip"))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: str, but a row must be"):
        dataset.document([0, 0, 1])
    assert dataset.document([0, 0, 2])["fields"] == {}
    assert dataset.document([0, 0, 3])["fields"] == {"text": "c"}
    path.write_text(path.read_text().replace("c", "d"))
    with pytest.raises(DataError, match=r"rows\.jsonl: changed since"):
        dataset.document([0, 0, 3])


def test_a_row_of_token_ids_may_be_the_list_itself(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [[number + 1] * 5 for number in range(9)])
    found = documents(dataset_of(TokenFiles(str(path), local=tmp_path)))
    assert [each["fields"] for each in found] == [{"tokens": [n + 1] * 5} for n in range(9)]
