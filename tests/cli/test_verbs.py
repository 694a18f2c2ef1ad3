"""The verbs on real streams: their output matches the files."""

from __future__ import annotations

import json
import re
from typing import ClassVar

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from streampack import ConfigError, Stream, register_stream
from streampack.cli import inspect
from streampack.cli.app import build_app
from streampack.mds.length_file import LENGTH_FILE
from streampack.streams import open_stream
from streampack.write import write_stream
from tests.helpers import builders
from tests.helpers.verbs import call_verb
from tests.helpers.words import word_tokenizer

LENGTHS = [5, 40, 7, 300, 12, 33, 1, 64, 9, 18] * 4


@pytest.fixture
def call(monkeypatch):
    """A function that calls a verb, in a terminal of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")
    return call_verb


def test_numbers_are_not_cut_in_a_pipe(tmp_path, config, monkeypatch):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    builders.write_stream_files(tmp_path / "a stream with a long name", LENGTHS * 9, seed=0)
    described = yaml.safe_load(config.read_text())
    described["streams"][0]["local"] = str(tmp_path / "a stream with a long name")
    config.write_text(yaml.safe_dump(described))

    for verb in ("run", "simulate"):
        assert "…" not in call_verb(verb, config)


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer file with ten words and a token for all others."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    path = tmp_path / "tokenizer.json"
    word_tokenizer(*words, "?", unknown="?").save(str(path))
    return path


@pytest.fixture
def config(tmp_path):
    for seed, name in enumerate(("code", "docs")):
        builders.write_stream_files(tmp_path / name, LENGTHS, seed=seed)
    streams = [
        {"local": str(tmp_path / "code"), "repeat": 2},
        {"local": str(tmp_path / "docs"), "name": "papers"},
    ]
    path = tmp_path / "run.yaml"
    described = {"streams": streams, "packing": {"max_seq_len": 128}, "batch_size": 2}
    path.write_text(yaml.safe_dump(described))
    return path


def test_run_takes_one_epoch_and_reports_it_as_one_json_line(call, config):
    record = json.loads(call("run", config, "--json"))

    tokens = {name: stream["tokens"] for name, stream in record["streams"].items()}
    assert tokens == {"code": 2 * sum(LENGTHS), "papers": sum(LENGTHS)}
    assert record["tokens"] == sum(tokens.values())
    assert record["steps"] == -(-record["packs"] // 2)
    assert record["tokens_per_s"] > 0


def test_run_takes_as_many_steps_as_it_is_told_over_epochs(call, config):
    in_epoch = json.loads(call("run", config, "--json"))["steps"]

    record = json.loads(call("run", config, "--json", "--steps", in_epoch + 3))

    assert record["steps"] == in_epoch + 3


def test_run_shows_a_table_of_the_streams(call, config):
    output = call("run", config)

    rows = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert f"{2 * sum(LENGTHS):,}" in rows["code"]
    assert f"{sum(LENGTHS):,}" in rows["papers"]
    assert rows["fill"].startswith("fill ")
    assert "tokens/s" in rows["fill"]
    assert re.search(r"[\d,]+ worker_tokens, [\d,]+ worker_bytes, [\d,]+ rank_tokens", output)
    assert "truncated" not in output  # what never happened has no column


def test_run_shows_a_column_for_what_happened(call, config):
    described = yaml.safe_load(config.read_text())
    config.write_text(
        yaml.safe_dump(described | {"packing": {"max_seq_len": 128, "overflow": "truncate"}})
    )
    rows = {line.split()[0]: line for line in call("run", config).splitlines() if line.strip()}

    num_long = sum(length > 128 for length in LENGTHS)
    assert "truncated" in rows["stream"]
    assert rows["papers"].split()[-1] == str(num_long)


def test_simulate_says_what_run_then_gives(call, config):
    said = json.loads(call("simulate", config, "--json"))
    given = json.loads(call("run", config, "--json"))

    for stream in said["streams"].values():
        del stream["repeats"]
    same = ("config", "streams", "packs", "tokens", "fill", "substituted", "steps")
    assert {key: said[key] for key in same} == {key: given[key] for key in same}


def test_simulate_of_more_ranks_takes_fewer_steps_over_as_many_tokens(call, config):
    alone = json.loads(call("simulate", config, "--json"))
    ranks = json.loads(call("simulate", config, "--json", "--num-ranks", 4, "--ranks-per-node", 2))
    few = json.loads(call("simulate", config, "--json", "--steps", 2))

    assert ranks["tokens"] == alone["tokens"]
    assert (ranks["ranks"], ranks["global_batch_size"]) == (4, 8)
    assert ranks["steps"] == -(-ranks["packs"] // 8)
    assert (few["steps"], few["packs"], few["epochs"]) == (2, 4, 1)


def test_ranks_that_share_rows_are_known_from_the_config_and_from_flags(call, config, tmp_path):
    ranks = json.loads(call("simulate", config, "--json", "--num-ranks", 2))
    flags = ("--replication", 4, "--context-parallel", 2)
    flagged = json.loads(call("simulate", config, "--json", "--num-ranks", 8, *flags))
    world = "world: {replication: 4, context_parallel: 2, context_layout: contiguous}\n"
    own = tmp_path / "own.yaml"
    own.write_text(config.read_text() + world)
    written = json.loads(call("simulate", own, "--json", "--num-ranks", 8))

    for found in (flagged, written):
        assert {**found, "config": ""} == {**ranks, "config": ""}


class Counting(Stream):
    """A custom stream class with an extra argument."""

    made: ClassVar[list[int]] = []

    def __init__(self, *, times, **others):
        super().__init__(**others)
        self.made.append(times)


def test_a_stream_of_a_config_may_be_of_a_registered_class(call, config):
    register_stream("counting", Counting)
    wanted = json.loads(call("simulate", config, "--json"))
    described = yaml.safe_load(config.read_text())
    described["streams"][1] |= {"stream_name": "counting", "stream_config": {"times": 3}}
    config.write_text(yaml.safe_dump(described))
    Counting.made.clear()

    assert json.loads(call("simulate", config, "--json")) == wanted
    assert Counting.made == [3]

    described["streams"][1] |= {"stream_name": "countin"}
    config.write_text(yaml.safe_dump(described))
    with pytest.raises(
        ConfigError, match=r"streams.1: stream_name='countin' is not .*mean 'counting'"
    ):
        call("simulate", config)


def test_only_verbs_with_targets_warn_of_a_mask_that_is_not_read(call, tmp_path, caplog):
    chat = tmp_path / "chat"
    write_stream([{"tokens": [3, 1, 4], "loss_mask": [0, 1, 1]}] * 4, chat)
    config = tmp_path / "run.yaml"
    described = {"streams": [{"local": str(chat)}], "packing": {"max_seq_len": 8}}
    config.write_text(yaml.safe_dump(described))

    call("inspect", chat)
    assert caplog.text == ""
    call("simulate", config)
    assert "stream 'chat': its 'loss_mask' is not read, so" in caplog.text


def test_brackets_and_colons_of_a_name_are_printed_as_they_are(call, tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "v[2]:100:", [4] * 8, lengths_file=False)

    assert call("index", path).startswith(f"{path}/lengths.bin: 8 samples, ")
    assert call("inspect", path).startswith(f"{path.name}: 1 shard, 8 samples ")


def test_write_makes_a_stream_of_text_and_inspect_reads_it_back(call, tmp_path, tokenizer):
    rows = tmp_path / "rows.jsonl"
    texts = ["one two three", "", "nine nine", "four five six seven eight nine zero"]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "numbers"

    written = call("write", rows, "--out", out, "--tokenizer", tokenizer)
    shown = call("inspect", out, "--tokenizer", tokenizer, "--pack", 16)

    assert written.endswith("3 samples, 12 tokens in 1 shard, 1 without tokens skipped\n")
    assert "numbers: 1 shard, 3 samples" in shown
    assert "\n12 tokens\n" in shown
    assert "median 3" in shown
    assert all(text in shown for text in texts)
    assert "3 segments" in shown


def test_write_takes_token_ids_and_more_columns_as_they_are(call, tmp_path):
    rows = tmp_path / "rows.jsonl"
    masks = ("[0, 1, 1]", "[0, 0, 0]")
    rows.write_text("".join(f'{{"ids": [3, 1, 4], "loss_mask": {mask}}}\n' for mask in masks))
    out = tmp_path / "ids"
    fields = ("--tokens", "ids", "--columns", "loss_mask", "--compression", "none")

    output = call("write", rows, "--out", out, *fields)

    assert output.endswith("in 1 shard, 1 with a loss_mask of 0 throughout\n")
    stream = open_stream(Stream(local=str(out), loss_mask="loss_mask"), 0)
    assert stream.shard_edges(0).tolist() == [[3, 4]] * 2
    assert stream.shards.index.shards[0].packed is None


def test_inspect_counts_a_local_stream_that_has_no_length_file(call, tmp_path):
    path, samples = builders.write_stream_files(
        tmp_path / "raw", LENGTHS, lengths_file=False, size_limit=512
    )

    output = call("inspect", path, "--pack", 64)

    assert len(list(path.glob("shard.*"))) > inspect.MAX_SHARDS_READ
    assert f"\n{sum(LENGTHS):,} tokens\n" in output
    assert " ".join(map(str, samples[2].tolist())) in output
    assert not (path / LENGTH_FILE).exists()


def test_inspect_says_about_where_it_has_not_read_all_and_index_then_counts(call, tmp_path):
    # Other columns take most of the bytes, and differ between samples.
    samples = [{"tokens": [7] * n, "source": "x" * (40 * (n % 7))} for n in LENGTHS]
    path = tmp_path / "packed"
    write_stream(samples, path, tokens_dtype="uint16", size_limit=512)
    (path / LENGTH_FILE).unlink()

    estimated = call("inspect", path)
    call("index", path)
    counted = call("inspect", path)

    found = re.search(
        r"\nabout ([\d,]+) tokens, estimated from 16 of \d+ shards; (.*)\n", estimated
    )
    assert found is not None, estimated
    assert found[2] == "`streampack index` counts them"
    assert int(found[1].replace(",", "")) == pytest.approx(sum(LENGTHS), rel=0.5)
    assert "(of the first " in estimated
    assert f"\n{sum(LENGTHS):,} tokens\n" in counted
    assert "(of the first " not in counted


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (("simulate", "CONFIG"), "batches planned"),
        (("plan", "CONFIG"), "planning"),
        (("report", "CONFIG", "--out", "report.html"), "planning"),
        (("at", "CONFIG", "--step", 0), "steps planned"),
        (("index", "FOLDER"), "shards read"),
        (
            (
                "index",
                "FOLDER/flat.npy",
                "--out",
                "FOLDER/i",
                "--eos-id",
                0,
                "--dtype",
                "uint16",
            ),
            "files indexed",
        ),
    ],
)
def test_progress_is_shown_on_terminals_only(tmp_path, config, monkeypatch, verb, words):
    def stderr_of(*more, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        shown = [
            str(v).replace("FOLDER", str(tmp_path)).replace("CONFIG", str(config)) for v in verb
        ]
        done = CliRunner().invoke(build_app(), [*shown, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stderr

    monkeypatch.chdir(tmp_path)
    np.array([1, 2, 0], np.uint16).tofile(tmp_path / "flat.npy")
    described = yaml.safe_load(config.read_text())
    if verb[0] == "plan":
        del described["streams"][0]["repeat"]
        described["chapters"] = [{"weights": {"code": 1}, "steps": 2}]
        described["mixing"] = {"global_batch_size": 2}
    config.write_text(yaml.safe_dump(described))
    assert stderr_of() == ""
    for file in tmp_path.rglob(LENGTH_FILE):
        file.unlink()
    if verb[0] in ("simulate", "plan", "at"):
        assert stderr_of("--json", TTY_COMPATIBLE="1", TERM="xterm") == ""
    assert words in stderr_of(TTY_COMPATIBLE="1", TERM="xterm")
