"""Every backend gives the same, complete ids for a text."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from streampack import Texts
from streampack.errors import ConfigError
from streampack.streams import Stream, open_stream
from streampack.texts import RowFormat
from streampack.texts.tokenization import (
    COMPARED_EVERY,
    compare_added_tokens,
    describe_tokenizer,
    load_tokenizer,
    text_encoder,
)
from streampack.write import WriteOptions, write_texts
from tests.helpers.preparing import files_of, jsonl_file, tokenizer_file

needs_gigatoken = pytest.mark.skipif(
    find_spec("gigatoken") is None, reason="the extra gigatoken is not installed"
)
BACKENDS = ["huggingface", pytest.param("gigatoken", marks=needs_gigatoken)]
TEXTS = [
    "def f(x):\n    return x  # 12345 \u00e9t\u00e9 \u4e2d\u6587 \U0001f469\u200d\U0001f467\n",
    "",
    "<|endoftext|> a <|endoftext|>",
    "  leading, \t tabs\r\n and 'quotes' it's I'LL  ",
    "The quick brown fox " * 50,
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE tokenizer with 600 ids."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        TEXTS, vocab_size=600, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    made.save(str(path))
    return path


def changed(bpe: Path, to: Path, **changes) -> Path:
    """Write a tokenizer.json with some values changed."""
    document = json.loads(bpe.read_text())
    for key, value in changes.items():
        document[key] = {**document[key], **value} if isinstance(document[key], dict) else value
    to.write_text(json.dumps(document))
    return to


def write(folder: Path, tokenizer: Path, backend: str, texts=TEXTS, **options):
    rows = RowFormat(tokenizer=tokenizer, backend=backend)
    inputs = [jsonl_file(folder / "rows.jsonl", [{"text": text} for text in texts])]
    out = folder / backend
    return write_texts(inputs, out, WriteOptions(rows=rows, num_workers=1, **options)), out


@needs_gigatoken
@given(text=st.text(max_size=60))
def test_backends_give_equal_ids(bpe, text):
    ids = [text_encoder(bpe, backend)([text])[0] for backend in ("huggingface", "gigatoken")]
    np.testing.assert_array_equal(*ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokenizer_that_truncates_and_pads_does_neither(bpe, tmp_path, backend):
    exact, strict = (tokenizers.Tokenizer.from_file(str(bpe)) for _ in range(2))
    strict.enable_truncation(3)
    strict.enable_padding(length=40)
    strict.save(str(tmp_path / "tokenizer.json"))
    _, out = write(tmp_path, tmp_path / "tokenizer.json", backend)
    opened = open_stream(Stream(local=str(out)), 0)
    lengths = [len(exact.encode(text).ids) for text in TEXTS if text]
    assert opened.shard_lengths(0).tolist() == lengths


@needs_gigatoken
def test_other_ids_end_the_job_and_huggingface_is_the_way_out(bpe, tmp_path):
    # True of gigatoken 0.10, which splits words although this tokenizer does not.
    whole = changed(bpe, tmp_path / "tokenizer.json", pre_tokenizer={"use_regex": False})
    with pytest.raises(ConfigError, match=r"other ones, for the text .*backend='huggingface', and"):
        write(tmp_path, whole, "gigatoken")
    assert write(tmp_path, whole, "huggingface")[0].is_complete


@needs_gigatoken
@pytest.mark.parametrize(
    "added",
    [
        [{"content": "foo", "single_word": True}],
        [{"content": "<foo>", "single_word": True, "special": True}],
        [{"content": "ab", "special": True}, {"content": "abc", "normalized": True}],
        [{"content": "yz", "special": True}, {"content": "xy", "normalized": True}],
    ],
    ids=["single_word", "single_word special", "one begins another", "one overlaps another"],
)
def test_added_tokens_that_gigatoken_finds_elsewhere_are_refused_before_anything_is_written(
    bpe, tmp_path, added
):
    # True of gigatoken 0.10. None of the texts contains one of the tokens.
    whole = tokenizers.Tokenizer.from_file(str(bpe))
    for each in added:
        token = tokenizers.AddedToken(**{"normalized": False, **each})
        (whole.add_special_tokens if each.get("special") else whole.add_tokens)([token])
    whole.save(str(tmp_path / "tokenizer.json"))

    with pytest.raises(ConfigError, match=r"other ones, for the text .*backend='huggingface', and"):
        write(tmp_path, tmp_path / "tokenizer.json", "gigatoken", ["x"])
    assert not (tmp_path / "gigatoken").exists()
    assert write(tmp_path, tmp_path / "tokenizer.json", "huggingface", ["x"])[0].is_complete
    options = {"tokenizer": tmp_path / "tokenizer.json", "local": tmp_path / "cache"}
    with pytest.raises(ConfigError, match=r"other ones, for the text .*backend='huggingface', and"):
        open_stream(Stream(Texts(["x"], **options, backend="gigatoken")), 0)
    assert not list(tmp_path.glob("cache/tokens/*"))
    assert open_stream(Stream(Texts(["x"], **options)), 0)


@needs_gigatoken
def test_many_added_tokens_that_gigatoken_finds_are_no_obstacle(bpe, tmp_path):
    whole = tokenizers.Tokenizer.from_file(str(bpe))
    whole.add_special_tokens([f"<|reserved_{number}|>" for number in range(6000)])
    whole.save(str(tmp_path / "tokenizer.json"))

    begin = time.process_time()
    compare_added_tokens(tmp_path / "tokenizer.json")
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokenizer_that_is_replaced_between_two_jobs_of_a_process_is_loaded_again(
    bpe, tmp_path, backend
):
    path = changed(bpe, tmp_path / "tokenizer.json")
    for add_prefix_space in (False, True):
        changed(bpe, path, pre_tokenizer={"add_prefix_space": add_prefix_space})
        folder = tmp_path / str(add_prefix_space)
        folder.mkdir()
        _, out = write(folder, path, backend, ["The fox"])
        exact = tokenizers.Tokenizer.from_file(str(path)).encode("The fox").ids
        shard = open_stream(Stream(local=str(out)), 0).open_shard(0)
        assert shard.tokens.read(shard.data, 0).tolist() == exact


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_a_tokenizer_that_changes_after_a_job_began_ends_it_until_it_is_restored(
    bpe, tmp_path, num_workers
):
    path = changed(bpe, tmp_path / "tokenizer.json")
    inputs = [jsonl_file(tmp_path / f"{n}.jsonl", [{"text": "The fox"}]) for n in range(4)]
    options = WriteOptions(rows=RowFormat(tokenizer=path), num_workers=num_workers, part_bytes=10)

    def change(_progress):  # job.json is written before the first call
        changed(bpe, path, pre_tokenizer={"add_prefix_space": True})

    with pytest.raises(ConfigError, match="has changed since the job began, or differs on this ma"):
        write_texts(inputs, tmp_path / "s", options, change)
    changed(bpe, path)  # the way out
    write_texts(inputs, tmp_path / "s", options)
    write_texts(inputs, tmp_path / "whole", options)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")


@pytest.fixture
def with_template(bpe, tmp_path):
    """The folder of a tokenizer with a template that adds BOS, and an EOS in its config."""
    made = tokenizers.Tokenizer.from_file(str(bpe))
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["<plain>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of(out: Path, number: int) -> list[int]:
    shard = open_stream(Stream(local=str(out)), 0).open_shard(0)
    return shard.tokens.read(shard.data, number).tolist()


def test_special_tokens_that_texts_spell_are_ids_and_counted_or_text(with_template, tmp_path):
    texts = ["a <s> b</s>", "<plain> c", "d"]
    exact = tokenizers.Tokenizer.from_file(str(with_template / "tokenizer.json"))
    inputs = [jsonl_file(tmp_path / "rows.jsonl", [{"text": text} for text in texts])]
    for special_tokens, count in (("ids", 2), ("text", 0)):
        exact.encode_special_tokens = special_tokens == "text"
        rows = RowFormat(tokenizer=with_template, special_tokens=special_tokens)
        written = write_texts(inputs, tmp_path / special_tokens, WriteOptions(rows=rows))
        assert written.num_special_tokens == count
        for number, text in enumerate(texts):
            expected = exact.encode(text, add_special_tokens=False).ids
            assert ids_of(tmp_path / special_tokens, number) == expected
            assert (exact.token_to_id("</s>") in expected) == (
                special_tokens == "ids" and not number
            )
    with pytest.raises(
        ConfigError, match="with special_tokens='text', but this one has special_tokens='ids'"
    ):
        write_texts(
            inputs, tmp_path / "text", WriteOptions(rows=RowFormat(tokenizer=with_template))
        )


def test_a_sign_for_unknown_words_is_not_counted_as_spelled(tmp_path):
    vocabulary = {"<unk>": 0, "a": 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<unk>"])
    made.save(str(tmp_path / "tokenizer.json"))
    written, out = write(tmp_path, tmp_path / "tokenizer.json", "huggingface", ["a b a"])
    assert ids_of(out, 0) == [1, 0, 1]
    assert written.num_special_tokens == 0


def test_a_job_describes_its_tokenizer(with_template, bpe, tmp_path):
    written, out = write(tmp_path, with_template, "huggingface")
    facts = json.loads((out / "job.json").read_text())["settings"]["tokenizer_facts"]
    assert facts == written.tokenizer
    exact = tokenizers.Tokenizer.from_file(str(with_template / "tokenizer.json"))
    bos, eos = map(exact.token_to_id, ("<s>", "</s>"))
    assert facts == {
        "name": str(with_template),
        "size": exact.get_vocab_size(),
        "bos": "<s>",
        "bos_id": bos,
        "eos": "</s>",
        "eos_id": eos,
        "before": ["<s>"],
        "after": [],
    }
    assert {describe_tokenizer(bpe)[name] for name in ("bos", "bos_id", "eos", "eos_id")} == {None}
    # A different spelling of its path is still the same job.
    rows = RowFormat(tokenizer=with_template / "tokenizer.json")
    before = files_of(out)
    write_texts([tmp_path / "rows.jsonl"], out, WriteOptions(rows=rows))
    assert files_of(out) == before


@needs_gigatoken
def test_some_texts_of_the_first_batch_and_one_of_later_ones_are_compared(bpe, tmp_path):
    whole = changed(bpe, tmp_path / "tokenizer.json", pre_tokenizer={"use_regex": False})
    with pytest.raises(ConfigError, match="other ones, for the text"):
        text_encoder(whole, "gigatoken")([*"a" * 15, "".join(TEXTS)])
    encoder = text_encoder(whole, "gigatoken")
    for _ in range(COMPARED_EVERY):
        encoder(["a"])
    with pytest.raises(ConfigError, match="other ones, for the text"):
        encoder(["".join(TEXTS)])


@needs_gigatoken
def test_a_text_that_cannot_be_encoded_is_one_bad_row(bpe):
    encoder = text_encoder(bpe, "gigatoken")
    good, bad, also = encoder(["a b", "\ud800", "c"])
    assert isinstance(bad, str)
    assert bad.startswith("cannot be tokenized (")
    assert len(good)
    assert len(also)


@needs_gigatoken
def test_a_tokenizer_that_gigatoken_cannot_load_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"gigatoken cannot load .* set backend='huggingface'"):
        write(tmp_path, tokenizer_file(tmp_path), "gigatoken", ["a b"])
    assert not (tmp_path / "gigatoken").exists()
    assert write(tmp_path, tokenizer_file(tmp_path), "huggingface", ["a b"])[0].is_complete


def test_dropout_is_refused(bpe, tmp_path):
    random = changed(bpe, tmp_path / "tokenizer.json", model={"dropout": 0.1})
    with pytest.raises(ConfigError, match=r"has dropout=0.1, .* set dropout to null"):
        load_tokenizer(random)


def test_the_processes_that_tokenize_load_neither_torch_nor_numba():
    heavy = "{'torch', 'numba'} & set(sys.modules)"
    check = f"import sys, streampack.write.engines; sys.exit(bool({heavy}))"
    subprocess.run([sys.executable, "-c", check], check=True)
