"""Names of token shards change if, and only if, something changes that ids depend on."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from streampack.errors import ConfigError
from streampack.texts import units
from streampack.texts.rows import RowFormat, tokenizer_digest
from streampack.texts.table import TextTable, open_table
from streampack.texts.token_shard import (
    Identity,
    ShardFormat,
    _probed,
    described,
    fingerprint,
    identity_of,
    make_token_shard,
    probe,
    row_encoder,
    token_shard_name,
)
from streampack.texts.tokenization import load_tokenizer, tokenizer_folder
from streampack.texts.transform import Transform
from tests.helpers.inputs import TEXT, write_rows

TEXTS = ["a b", "b", "", "c a b"] * 100


def save_tokenizer(folder: Path, *words: str) -> Path:
    folder.mkdir(exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(("?", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def words(tmp_path):
    return save_tokenizer(tmp_path / "words", "a", "b", "c")


def rows_of(words: Path, **options) -> RowFormat:
    return RowFormat(tokenizer=words, **options)


def form_of(rows: RowFormat, transform: Transform | None = None) -> ShardFormat:
    digest = tokenizer_digest(rows)
    return ShardFormat(rows=rows, digest=digest, dtype="uint16", transform=transform)


def names_of(table: TextTable, identity: Identity) -> set[str]:
    return {token_shard_name(table, number, identity) for number in range(len(table))}


def probe_of(table: TextTable, rows: RowFormat) -> tuple[str, float]:
    return probe(table, form_of(rows))


CHANGES = {
    "another tokenizer": lambda folder, rows: replace(
        rows, tokenizer=save_tokenizer(folder / "other", "a", "b")
    ),
    "special tokens": lambda _, rows: replace(rows, special_tokens="text"),
    "another column": lambda _, rows: replace(rows, text="body"),
    "gigatoken": lambda _, rows: replace(rows, backend="gigatoken"),
    "chats": lambda _, rows: replace(rows, chat="messages"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_option_that_changes_ids_changes_names_and_fingerprint(change, tmp_path, words):
    table = open_table(write_rows(tmp_path / "a.jsonl", TEXTS), TEXT, tmp_path)
    before = identity_of(form_of(rows_of(words)))
    after = identity_of(form_of(CHANGES[change](tmp_path, rows_of(words))))
    probed, _ = probe_of(table, rows_of(words))
    assert names_of(table, before).isdisjoint(names_of(table, after))
    assert fingerprint(described(table, before, probed)) != fingerprint(
        described(table, after, probed)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_on", "all"),
        ("chat_template", "{{ messages }}"),
        ("template_kwargs", {"a": 1}),
        ("context_roles", ("tool",)),
        ("ignore_fields", ("id",)),
        ("max_seq_len", 9),
    ],
)
def test_an_option_of_conversations_changes_names(name, value, words):
    rows = rows_of(words, chat="messages")
    assert identity_of(form_of(rows)) != identity_of(form_of(replace(rows, **{name: value})))


def test_what_changes_no_id_changes_no_name(tmp_path, words):
    path = write_rows(tmp_path / "a.jsonl", TEXTS)
    table = open_table(path, TEXT, tmp_path)
    identity = identity_of(form_of(rows_of(words)))
    copy = save_tokenizer(tmp_path / "copy", "a", "b", "c")
    assert identity_of(form_of(rows_of(copy))) == identity
    assert identity_of(form_of(rows_of(words, columns=("url",)))) != identity  # the shard has it
    again = open_table(path, TEXT, tmp_path / "other")
    assert names_of(again, identity) == names_of(table, identity)
    memory = [open_table(TEXTS, TEXT, tmp_path / cache) for cache in ("one", "two")]
    assert names_of(memory[0], identity) == names_of(memory[1], identity)
    assert (
        memory[0].digest() == memory[1].digest() != open_table(TEXTS[1:], TEXT, tmp_path).digest()
    )


def test_another_version_of_a_file_or_a_library_changes_names_and_no_fingerprint(
    tmp_path, words, monkeypatch
):
    monkeypatch.setattr(units, "SHARD_BYTES", 1 << 10)
    path = write_rows(tmp_path / "a.jsonl", TEXTS)
    table, rows = open_table(path, TEXT, tmp_path), rows_of(words)
    identity = identity_of(form_of(rows))
    probed, _ = probe_of(table, rows)
    assert len(names_of(table, identity)) == len(table) > 2

    os.utime(path, (1, 1))
    touched = open_table(path, TEXT, tmp_path)
    assert names_of(touched, identity).isdisjoint(names_of(table, identity))
    assert fingerprint(described(touched, identity, probed)) == fingerprint(
        described(table, identity, probed)
    )

    monkeypatch.setattr("streampack.texts.token_shard.installed", lambda _: "99")
    upgraded = identity_of(form_of(rows))
    assert names_of(table, upgraded).isdisjoint(names_of(table, identity))
    assert fingerprint(described(table, upgraded, probed)) == fingerprint(
        described(table, identity, probed)
    )
    # The library gives other ids.
    assert fingerprint(described(table, upgraded, "other")) != fingerprint(
        described(table, identity, probed)
    )


def test_a_transform_and_its_version_are_in_the_name(words):
    rows = rows_of(words)
    transforms = [
        None,
        Transform("copy:copy"),
        Transform("copy:copy", "2"),
        Transform("copy:deepcopy"),
    ]
    assert len({identity_of(form_of(rows, transform)).options for transform in transforms}) == 4


def test_a_probe_reads_the_first_rows_and_no_more(tmp_path, words):
    rows = rows_of(words)
    few = open_table(write_rows(tmp_path / "a.jsonl", TEXTS[:256]), TEXT, tmp_path)
    more = open_table(write_rows(tmp_path / "b.jsonl", TEXTS[:256] + ["c"] * 9), TEXT, tmp_path)
    other = open_table(write_rows(tmp_path / "c.jsonl", ["c", *TEXTS[1:256]]), TEXT, tmp_path)
    one, two, three = (probe_of(table, rows) for table in (few, more, other))
    assert one == two
    assert one[0] != three[0]
    ids = [["a", "b c"], ["a b", "c"]]  # the same ids in other rows
    split = [probe_of(open_table(each, TEXT, tmp_path), rows)[0] for each in ids]
    assert split[0] != split[1]
    tokens = sum(len(text.split()) for text in TEXTS[:256])
    assert one[1] == tokens / sum(len(json.dumps(text)) for text in TEXTS[:256])

    long = open_table(write_rows(tmp_path / "d.jsonl", ["a " * 300_000] * 3), TEXT, tmp_path)
    assert probe_of(long, rows)[1] == pytest.approx(0.5, rel=1e-3)
    empty = open_table(write_rows(tmp_path / "e.jsonl", [""]), TEXT, tmp_path)
    assert probe_of(empty, rows)[1] == 0.25


def test_rows_that_were_probed_are_not_encoded_again_for_their_shards(tmp_path, words, monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 1 << 10)
    texts = [text.replace("b", "b" * (number % 9 > 0)) for number, text in enumerate(TEXTS)]
    rows = rows_of(words)
    form = form_of(rows)
    table = open_table(write_rows(tmp_path / "a.jsonl", texts), TEXT, tmp_path)
    assert len(table) == 6
    seen: list[str] = []
    encoder = row_encoder(form)
    encode = encoder._texts
    monkeypatch.setattr(encoder, "_texts", lambda some: seen.extend(some) or encode(some))

    def made(number: int) -> bytes:
        make_token_shard(table.shard(number), form, None, tmp_path / "shard")
        return (tmp_path / "shard").read_bytes()

    alone = list(map(made, range(len(table))))
    seen.clear()
    probe(table, form)
    assert list(map(made, range(len(table)))) == alone
    assert Counter(seen) == Counter(texts)
    assert seen[:256] == texts[:256]


def test_rows_that_were_probed_are_kept_of_few_shards(tmp_path, words, monkeypatch):
    monkeypatch.setattr("streampack.texts.token_shard.MOST_PROBED", 2)
    _probed.clear()
    for name in "abc":
        table = open_table(write_rows(tmp_path / f"{name}.jsonl", ["a"]), TEXT, tmp_path)
        probe_of(table, rows_of(words))
    assert [Path(shard.units[0].uri).name for shard, _ in _probed] == ["b.jsonl", "c.jsonl"]
    _probed.clear()


def test_a_name_of_the_hub_is_resolved_to_a_revision_offline_too(tmp_path, words, monkeypatch):
    import huggingface_hub  # noqa: F401

    folder = tmp_path / "hub" / "models--org--name"
    revision = "1234567890123456789012345678901234567890"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    words.rename(folder / "snapshots" / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("org/name", f"org/name@{revision}"):
        found = tokenizer_folder(name, tmp_path)
        assert found == folder / "snapshots" / revision
        assert load_tokenizer(found).get_vocab_size() == 4
    with pytest.raises(ConfigError, match=r"'org/other' is not a path here, and cannot be fetched"):
        tokenizer_folder("org/other", tmp_path)


def test_slow_tokenizers_are_refused_with_the_line_that_converts(tmp_path):
    (tmp_path / "slow").mkdir()
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (tmp_path / "slow" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "slow" / "merges.txt").write_text("#version: 0.2\na b\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "model_type": "gpt2"}
    (tmp_path / "slow" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "slow" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="convert it once: ") as refused:
        load_tokenizer(tmp_path / "slow")
    line = str(refused.value).partition("once: ")[2].partition(", and pass")[0]
    fast = str(tmp_path / "fast")
    exec(f"import transformers; {line.replace('FOLDER', fast)}")
    assert load_tokenizer(Path(fast)).encode("ab").ids == [2]

    from transformers import ByT5Tokenizer

    with pytest.raises(ConfigError, match="A slow one may have a fast form"):
        tokenizer_folder(ByT5Tokenizer(), tmp_path)
    encoding = type("Encoding", (), {"__module__": "tiktoken.core"})()
    with pytest.raises(ConfigError, match="convert_tiktoken_to_fast"):
        tokenizer_folder(encoding, tmp_path)
