"""`streampack write`, `merge` and `inspect` from the command line, on all kinds of input."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from streampack import PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.cli.app import build_app, main
from streampack.streams import open_stream
from tests.helpers.faults.servers import s3_environment, s3_server
from tests.helpers.preparing import WORDS, files_of, jsonl_file, text_rows, tokenizer_file
from tests.helpers.verbs import call_verb

TEMPLATE = (
    "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' }} {{ m.content }} h "
    "{% endfor %}{% if add_generation_prompt %}b {% endif %}"
)


def fails(*arguments: object) -> tuple[int, str]:
    """Call a verb as its script would; return the exit code and the last line of the error."""
    error = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["streampack", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(error),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return ended.value.code, error.getvalue().rstrip().rpartition("\n")[2]


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_file(tmp_path)


def packed_words(stream: Stream) -> dict[str, int]:
    dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=64), batch_size=1)
    counts = np.zeros(len(WORDS), np.int64)
    for batch in PackedDataLoader(dataset, num_workers=0):
        # Each batch is one row, and its segments follow each other from the first token.
        length = int(batch["segments"][:, 5].sum())
        counts += np.bincount(batch["tokens"][0, :length].numpy(), minlength=len(WORDS))
    return dict(zip(WORDS, counts.tolist(), strict=True))


def word_counts(rows) -> dict[str, int]:
    words = [word for row in rows for word in row["text"].split()]
    return {word: words.count(word) for word in WORDS}


@pytest.fixture
def chat_tokenizer(tmp_path, tokenizer) -> Path:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(tokenizer)))
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


@pytest.mark.parametrize(
    ("train_on", "num_targets"),
    [("responses", 6), ("last_response", 3), ("each_response", 6), ("all", 16)],
)
def test_train_on_says_which_tokens_are_targets(tmp_path, chat_tokenizer, train_on, num_targets):
    turn = [{"role": "user", "content": "c d"}, {"role": "assistant", "content": "e f"}]
    path = jsonl_file(tmp_path / "rows.jsonl", [{"messages": 2 * turn}])
    out = tmp_path / "s"
    command = ("write", path, "--out", out, "--tokenizer", chat_tokenizer, "--chat", "messages")
    call_verb(*command, "--train-on", train_on)
    stream = open_stream(Stream(local=str(out), loss_mask="loss_mask"), 0)
    shard = stream.open_shard(0)
    num_samples = 2 if train_on == "each_response" else 1
    targets = [shard.loss_mask.read(shard.data, sample).sum() for sample in range(num_samples)]
    assert (stream.num_samples, sum(targets)) == (num_samples, num_targets)
    other = "all" if train_on == "responses" else "responses"
    assert "with train_on=" in fails(*command, "--train-on", other)[1]


def test_a_template_of_ones_own_marks_what_is_learned(tmp_path, chat_tokenizer):
    template = tmp_path / "own.jinja"
    begin, end = "{% generation %}", "{% endgeneration %}"
    template.write_text(TEMPLATE.replace("{{ m.content }}", f"{begin}{{{{ m.content }}}}{end}"))
    turn = [{"role": "user", "content": "c d"}, {"role": "assistant", "content": "e f"}]
    path = jsonl_file(tmp_path / "rows.jsonl", [{"messages": turn}])
    command = ("write", path, "--tokenizer", chat_tokenizer, "--chat", "messages")
    command += ("--chat-template", template)
    call_verb(*command, "--out", tmp_path / "s")
    shard = open_stream(Stream(local=str(tmp_path / "s"), loss_mask="loss_mask"), 0).open_shard(0)
    assert int(shard.loss_mask.read(shard.data, 0).sum()) == 4  # of both messages, no end
    call_verb("inspect", tmp_path / "s", "--tokenizer", chat_tokenizer)
    template.write_text(TEMPLATE)
    assert "with chat_template=" in fails(*command, "--out", tmp_path / "s")[1]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_store_becomes_a_stream_in_a_store(tmp_path, tokenizer):
    bucket = tmp_path / "store" / "bucket"
    (bucket / "raw").mkdir(parents=True)
    for number in range(3):
        jsonl_file(bucket / "raw" / f"{number}.jsonl", text_rows(100, number))
    with s3_server(tmp_path / "store", is_written=True) as s3, s3_environment(s3.url):
        command = ("write", "s3://bucket/raw", "--out", "s3://bucket/s", "--tokenizer", tokenizer)
        call_verb(*command, "--part-bytes", "4kb", "--verify")
        before = files_of(bucket / "s")
        call_verb(*command, "--part-bytes", "4kb")
        assert files_of(bucket / "s") == before
        assert "parts are done, 0 bad rows" in call_verb("inspect", "s3://bucket/s")
        stream = Stream(remote="s3://bucket/s", local=str(tmp_path / "cache"))
        rows = [row for number in range(3) for row in text_rows(100, number)]
        assert packed_words(stream) == word_counts(rows)


def test_write_and_inspect_say_which_special_tokens_a_stream_has(tmp_path):
    folder = tmp_path / "tok"
    folder.mkdir()
    made = Tokenizer.from_file(str(tokenizer_file(tmp_path)))
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 8), ("</s>", 9)]
    )
    made.save(str(folder / "tokenizer.json"))
    path = jsonl_file(tmp_path / "rows.jsonl", [{"text": "a b </s> c"}])

    said = call_verb("write", path, "--out", tmp_path / "s", "--tokenizer", folder)
    assert "1 special token spelled in texts became ids; --special-tokens text encodes" in said
    assert "the tokenizer's template is <s> TEXT </s>, and only TEXT was written" in said
    assert "adds BOS (8) and EOS (9)" in said
    command = ("write", path, "--out", tmp_path / "t", "--special-tokens", "text")
    assert "became ids" not in call_verb(*command, "--tokenizer", folder)

    shown = call_verb("inspect", tmp_path / "s", "--tokenizer", folder / "tokenizer.json")
    assert f"tokenizer {folder}: 10 ids, BOS <s> (8), EOS </s> (9)" in shown
    code, message = fails("inspect", tmp_path / "s", "--tokenizer", tmp_path / "tokenizer.json")
    assert code == 2
    assert f"differs from the one that wrote {tmp_path / 's'}, {folder}; name that one" in message
    call_verb("inspect", tmp_path / "s")  # the way out


def test_shares_are_merged_and_inspect_shows_how_far_they_are(tmp_path, tokenizer):
    path = jsonl_file(tmp_path / "rows.jsonl", [*text_rows(100), b"{"])
    out = tmp_path / "s"
    command = ("write", path, "--out", out, "--tokenizer", tokenizer, "--part-bytes", "2kb")
    command += ("--on-bad-row", "skip", "--part")
    said = call_verb(*command, "1/2")
    assert said.endswith(f"all of --part 1/2\nwhen all are: streampack merge {out}\n")
    assert "the stream is not finished: run the command" in call_verb("inspect", out)
    assert fails("merge", out)[1].endswith("not a share: it writes what is missing")
    call_verb(*command, "2/2")
    (out / "index.json").unlink()
    assert f"finish the stream: streampack merge {out}" in call_verb("inspect", out)
    written = json.loads(call_verb("merge", out, "--verify", "--json"))
    assert (written["num_bad_rows"], written["is_complete"]) == (1, True)
    assert written["num_verified"] == written["num_shards"]
    num = written["num_shards"]
    verified = f"{num} shard{'s' if num > 1 else ''} reread: all hashes are equal"
    assert f"\n{verified}" in call_verb("merge", out, "--verify")
    shown = call_verb("inspect", out)
    assert "1 bad row skipped" in shown
    assert f"{path}, row " in shown
    assert fails("merge", out, "--max-bad-rows", 0)[0] == 4


def test_too_many_bad_rows_are_exit_code_4_and_one_line(tmp_path, tokenizer):
    path = jsonl_file(tmp_path / "rows.jsonl", [*text_rows(10), b"{", b"["])
    command = ("write", path, "--out", tmp_path / "s", "--tokenizer", tokenizer)
    code, line = fails(*command)
    assert (code, line.endswith("set on_bad_row='skip' to skip such rows")) == (4, True)
    code, line = fails(*command, "--on-bad-row", "skip", "--max-bad-rows", 1)
    assert (code, line.endswith("set max_bad_rows=10 to allow more")) == (4, True)
    assert fails(*command, "--on-bad-row", "skip", "--max-bad-rows", "10", "--json")[0] == 0


def test_a_write_prints_a_line_now_and_then_and_json_at_the_end(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("streampack.cli.write.LINE_S", 0.0)
    path = jsonl_file(tmp_path / "rows.jsonl", text_rows(100))
    command = ("write", path, "--out", tmp_path / "s", "--tokenizer", tokenizer, "--part-bytes")
    lines = call_verb(*command, "2kb").splitlines()
    assert "parts, " in lines[2]
    assert "tokens/s" in lines[2]
    assert lines[-1].endswith("without tokens skipped")
    done = CliRunner().invoke(build_app(), [*map(str, command), "2kb", "--json"])
    written = json.loads(done.stdout)
    assert (written["is_complete"], written["num_samples"]) == (True, 97)


def test_inspect_without_half_of_the_credentials_names_it_and_nothing_of_write(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)

    code, message = fails("inspect", "s3://bucket/s")

    assert code
    assert "missing: AWS_SECRET_ACCESS_KEY" in message
    assert "parts" not in message
