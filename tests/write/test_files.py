"""A stream depends only on its input and settings, not on who writes it or how often."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from streaming.base.format import reader_from_json

from streampack.errors import BadRowsError, ConfigError, DataError
from streampack.streams import Stream, open_stream
from streampack.texts import RowFormat, pool
from streampack.texts.rows import tokenizer_digest
from streampack.texts.table import open_table
from streampack.texts.token_shard import ShardFormat, make_token_shard
from streampack.write import (
    WriteOptions,
    engines,
    files,
    merge,
    verify,
    write_stream,
    write_texts,
)
from streampack.write import (
    part as part_module,
)
from streampack.write.job import current_versions
from streampack.write.job_output import LocalOutput
from tests.helpers.caches import read_all
from tests.helpers.examples import crossed
from tests.helpers.inputs import write_table
from tests.helpers.preparing import (
    WORDS,
    Crash,
    CrashingOutput,
    StoppedOutput,
    files_of,
    jsonl_file,
    options_of,
    text_rows,
    tokenizer_file,
)

NUM_ROWS = 300
BAD = (3, 290, 295)  # the last two come after the first batch, which determines the columns
BAD_ROWS = (b'{"text": "a', {"text": "a b", "url": 5, "score": 0.5}, {"text": "a b", "url": "u"})


@pytest.fixture
def inputs(tmp_path):
    """Three files of rows."""
    return [
        jsonl_file(tmp_path / f"{n}.jsonl", text_rows(num, seed=n))
        for n, num in enumerate((60, 3, 40))
    ]


def read_words(path: Path) -> list[str]:
    """Return the samples of a stream of single letters."""
    samples = read_all(open_stream(Stream(local=str(path)), 0))
    return [" ".join(WORDS[token] for token in sample) for sample in samples]


def test_a_job_becomes_a_stream_in_the_order_of_its_input(tmp_path, inputs):
    seen = []
    written = write_texts(inputs, tmp_path / "s", options_of(tmp_path), seen.append)
    expected = [row["text"] for n, num in enumerate((60, 3, 40)) for row in text_rows(num, n)]
    expected = [text for text in expected if text]

    assert read_words(tmp_path / "s") == expected
    opened = open_stream(Stream(local=str(tmp_path / "s")), 0)
    assert opened.shards.has_lengths
    lengths = np.concatenate([opened.shard_lengths(shard) for shard in range(opened.num_shards)])
    assert lengths.tolist() == [len(text.split()) for text in expected]
    assert (written.num_samples, written.num_skipped) == (len(expected), 103 - len(expected))
    assert written.num_shards == opened.num_shards > written.num_parts > 2
    assert seen[-1].num_bytes == seen[-1].total_bytes == sum(f.stat().st_size for f in inputs)
    assert (seen[-1].num_tokens, seen[-1].num_parts) == (written.num_tokens, written.total_parts)


@pytest.mark.parametrize(("report_s", "num_seen"), [(0.0, 5), (1e9, 2)])
def test_the_progress_within_a_part_is_shown_from_time_to_time(
    tmp_path, monkeypatch, report_s, num_seen
):
    monkeypatch.setattr(part_module, "REPORT_S", report_s)
    path = jsonl_file(tmp_path / "rows.jsonl", text_rows(600))  # three batches
    seen: list[int] = []
    options = options_of(tmp_path, part_bytes="1mb")
    write_texts([path], tmp_path / "s", options, lambda now: seen.append(now.num_samples))
    assert seen == sorted(seen)
    assert len(seen) == num_seen
    assert len(set(seen)) == num_seen - (report_s == 0)  # the last batch, and the part


@pytest.mark.processes
def test_the_stream_is_the_same_in_any_number_of_processes(tmp_path, inputs, monkeypatch):
    monkeypatch.setattr(pool, "IDLE_S", 0.01)
    event = engines._event
    # However long workers wait for their next part.
    monkeypatch.setattr(engines, "_event", lambda outcome: time.sleep(0.2) or event(outcome))
    for num in (1, 2):
        write_texts(inputs, tmp_path / f"s{num}", options_of(tmp_path, num_workers=num))
    assert files_of(tmp_path / "s1") == files_of(tmp_path / "s2")


@pytest.mark.parametrize("seed", range(3))
def test_the_stream_is_the_same_in_any_order_of_its_parts(tmp_path, inputs, seed):
    write_texts(inputs, tmp_path / "whole", options_of(tmp_path))
    parts = [f"{number}/5" for number in range(1, 6)]
    random.Random(seed).shuffle(parts)
    for part in parts:
        written = write_texts(inputs, tmp_path / "s", options_of(tmp_path, part=part))
        if part == parts[0]:
            assert not written.is_complete
            assert not (tmp_path / "s" / "index.json").exists()
            with pytest.raises(DataError, match=r"\d+ of \d+ parts are not done"):
                merge(tmp_path / "s")
    merged = merge(tmp_path / "s")
    assert merged == write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")


def test_a_job_that_is_killed_at_any_step_is_finished_by_the_same_command(
    tmp_path, inputs, monkeypatch
):
    options = options_of(tmp_path, part_bytes=6000, size_limit=4000)
    write_texts(inputs, tmp_path / "whole", options)
    whole = files_of(tmp_path / "whole")
    crash_at, is_killed = 0, True
    while is_killed:
        out = tmp_path / f"s{crash_at}"
        outputs = [CrashingOutput(LocalOutput(url=str(out)), step) for step in (crash_at, -1)]
        monkeypatch.setattr(files, "open_output", lambda _, outputs=outputs: outputs[0])
        try:
            write_texts(inputs, out, options)
            is_killed = False
        except Crash:
            assert not (out / "index.json").exists() or outputs[0].log[-1] == "index.json"
            kept = {name: data for name, data in files_of(out).items() if "part.json" in name}
            monkeypatch.setattr(files, "open_output", lambda _, outputs=outputs: outputs[1])
            write_texts(inputs, out, options)
            rewritten = {Path(name).parent for name in outputs[1].log if name.startswith("parts/")}
            assert not rewritten & {Path(name).parent for name in kept if ".partial" not in name}
        assert files_of(out) == whole, crash_at
        crash_at += 1
    assert crash_at > 3 * len(whole) - 3


def test_a_job_that_is_done_writes_nothing_again(tmp_path, inputs, monkeypatch):
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    output = CrashingOutput(LocalOutput(url=str(tmp_path / "s")), -1)
    monkeypatch.setattr(files, "open_output", lambda _: output)
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    assert output.log == []


def test_appended_inputs_come_after_what_was_there(tmp_path, inputs):
    options = options_of(tmp_path)
    write_texts(inputs[:2], tmp_path / "s", options)
    old = files_of(tmp_path / "s")
    write_texts(inputs, tmp_path / "s", options_of(tmp_path, append=True))
    new = files_of(tmp_path / "s")
    shards = [json.loads(each["index.json"])["shards"] for each in (old, new)]

    assert shards[1][: len(shards[0])] == shards[0]
    changed = {name for name in old if new[name] != old[name]}
    assert changed == {"index.json", "lengths.bin"}
    # Once more, and the first command again: nothing is left to do.
    write_texts(inputs[2:], tmp_path / "s", options_of(tmp_path, append=True))
    write_texts(inputs[:2], tmp_path / "s", options)
    assert files_of(tmp_path / "s") == new
    assert read_words(tmp_path / "s") == [
        row["text"] for n, num in enumerate((60, 3, 40)) for row in text_rows(num, n) if row["text"]
    ]


def known_of(stream) -> list:
    """Return everything that a reader knows about a stream without reading tokens."""
    lengths = [stream.shard_lengths(shard).tolist() for shard in range(stream.num_shards)]
    edges = [stream.shard_edges(shard).tolist() for shard in range(stream.num_shards)]
    return [
        lengths,
        edges,
        stream.shard_tokens().tolist(),
        stream.total_tokens(),
        stream.full_digest,
    ]


@pytest.mark.parametrize("shards", [None, slice(1, 3), slice(0, 2)])
def test_a_reader_keeps_the_stream_that_it_opened_when_that_grows(tmp_path, inputs, shards):
    write_texts(inputs[:1], tmp_path / "s", options_of(tmp_path))
    opened = open_stream(Stream(local=str(tmp_path / "s"), only=shards), 0)
    known = known_of(opened)

    write_texts(inputs, tmp_path / "s", options_of(tmp_path, append=True))

    assert known_of(opened) == known
    for shard in range(opened.num_shards):
        assert opened.open_shard(shard).tokens.counts.tolist() == known[0][shard]


def test_a_reader_in_the_middle_of_a_commit_sees_the_stream_before_it(tmp_path, inputs):
    """So does a reader after a commit that was killed there, with a new length file only."""
    write_texts(inputs[:1], tmp_path / "s", options_of(tmp_path))
    before = known_of(open_stream(Stream(local=str(tmp_path / "s")), 0))
    index = (tmp_path / "s" / "index.json").read_bytes()
    write_texts(inputs, tmp_path / "s", options_of(tmp_path, append=True))
    after = known_of(open_stream(Stream(local=str(tmp_path / "s")), 0))
    new_index = (tmp_path / "s" / "index.json").read_bytes()

    (tmp_path / "s" / "index.json").write_bytes(index)
    opened = open_stream(Stream(local=str(tmp_path / "s")), 0)

    assert known_of(opened) == before
    (tmp_path / "s" / "index.json").write_bytes(new_index)
    assert known_of(opened) == before
    assert known_of(open_stream(Stream(local=str(tmp_path / "s")), 0)) == after != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compression": None},
            "with compression='zstd', but this one has compression=None; repeat the",
        ),
        ({"size_limit": 2000}, "with size_limit=1500, but this one has size_limit=2000"),
        ({"tokens_dtype": "int32"}, "with dtype='uint16', but this one has dtype='int32'"),
        ({"part_bytes": 5000}, "with part_bytes=4000"),
    ],
)
def test_the_folder_of_another_job_is_refused(tmp_path, inputs, change, message):
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    before = files_of(tmp_path / "s")
    with pytest.raises(ConfigError, match=message):
        write_texts(inputs, tmp_path / "s", options_of(tmp_path, **change))
    assert files_of(tmp_path / "s") == before
    write_texts(inputs, tmp_path / "another", options_of(tmp_path, **change))  # the way out


def test_a_job_that_another_command_replaced_is_not_committed(tmp_path, inputs, monkeypatch):
    def replaced(*arguments):
        (tmp_path / "s" / "job.00001.json").write_bytes((tmp_path / "s" / "job.json").read_bytes())
        return commit(*arguments)

    commit = files.commit
    monkeypatch.setattr(files, "commit", replaced)
    with pytest.raises(DataError, match="another command has replaced or extended this job"):
        write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    assert not (tmp_path / "s" / "index.json").exists()


def test_a_folder_that_is_removed_while_a_job_begins_is_one_error(tmp_path, inputs, monkeypatch):
    put_new = LocalOutput.put_new

    def removed(*arguments):
        put_new(*arguments)
        shutil.rmtree(tmp_path / "s")

    with monkeypatch.context() as patched:
        patched.setattr(LocalOutput, "put_new", removed)
        with pytest.raises(
            DataError, match=r"s/job\.json: was removed while .*; run the same comman"
        ):
            write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))  # the way out


@pytest.mark.parametrize("is_merge", [False, True])
def test_what_is_appended_beside_another_command_is_in_the_stream(
    tmp_path, inputs, monkeypatch, is_merge
):
    """The other command may be stopped at any point meanwhile."""
    appending = options_of(tmp_path, append=True)
    write_texts(inputs[:2], tmp_path / "whole", options_of(tmp_path))
    shutil.copytree(tmp_path / "whole", tmp_path / "begun")
    write_texts(inputs, tmp_path / "whole", appending)
    stop_at, is_stopped = 0, True
    while is_stopped:
        out = tmp_path / f"s{stop_at}"
        shutil.copytree(tmp_path / "begun", out)
        inner = LocalOutput(url=str(out))
        stopped = StoppedOutput(inner, stop_at, partial(write_texts, inputs, out, appending))
        by_thread = {threading.main_thread(): stopped}
        monkeypatch.setattr(
            files,
            "open_output",
            lambda _, known=by_thread, other=inner: known.get(threading.current_thread(), other),
        )
        with suppress(DataError):  # a rerun may be needed
            if is_merge:
                merge(out)
            else:
                write_texts(inputs[:2], out, options_of(tmp_path))
        is_stopped = bool(stopped.running)
        if is_stopped:
            assert stopped.running[0].result().is_complete
            assert files_of(out) == files_of(tmp_path / "whole"), stop_at
        stop_at += 1
    assert stop_at > 8


def test_two_equal_commands_both_succeed(tmp_path, inputs, monkeypatch):
    """One of them may be stopped at any point while it writes a file."""
    options, fsync = options_of(tmp_path), os.fsync
    write_texts(inputs, tmp_path / "whole", options)
    stop_at, is_stopped = 0, True
    while is_stopped:
        out = tmp_path / f"s{stop_at}"
        steps, running = count(), []

        def stopping(number: int, out=out, steps=steps, running=running, stop_at=stop_at) -> None:
            if threading.current_thread() is threading.main_thread() and next(steps) == stop_at:
                running.append(ThreadPoolExecutor(1).submit(write_texts, inputs, out, options))
                wait(running, 1)
            fsync(number)

        with monkeypatch.context() as patched:
            patched.setattr("streampack.write.job_output.os.fsync", stopping)
            write_texts(inputs, out, options)
        is_stopped = bool(running)
        if is_stopped:
            running[0].result()
        assert files_of(out) == files_of(tmp_path / "whole"), stop_at
        stop_at += 1
    assert stop_at > 10


def test_other_inputs_are_refused_and_may_be_appended(tmp_path, inputs):
    write_texts(inputs[:1], tmp_path / "s", options_of(tmp_path))
    with pytest.raises(ConfigError, match=r"of other inputs .*1\.jsonl.* or set append=True"):
        write_texts(inputs[:2], tmp_path / "s", options_of(tmp_path))
    write_texts(inputs[:2], tmp_path / "s", options_of(tmp_path, append=True))


def test_a_job_knows_its_inputs_from_another_folder_and_under_another_spelling(
    tmp_path, inputs, monkeypatch
):
    options = options_of(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    write_texts([path.name for path in inputs], tmp_path / "s", options_of(tmp_path, part="1/2"))
    monkeypatch.chdir(tmp_path / "other")
    write_texts([f"../{path.name}" for path in inputs], tmp_path / "s", options)
    written = files_of(tmp_path / "s")

    for spelling in (f"{tmp_path}/link/*.jsonl", f"{tmp_path}/?.jsonl", "../[012].jsonl"):
        write_texts([spelling], tmp_path / "s", options_of(tmp_path, append=True))
        assert files_of(tmp_path / "s") == written


def test_an_input_that_has_changed_since_is_refused(tmp_path, inputs):
    write_texts(inputs[:2], tmp_path / "s", options_of(tmp_path))
    jsonl_file(inputs[1], text_rows(4, 1))
    for append in (False, True):
        with pytest.raises(ConfigError, match=r"1\.jsonl: has changed .* put new rows into new f"):
            write_texts(inputs[:2], tmp_path / "s", options_of(tmp_path, append=append))


def test_a_bad_input_is_corrected_and_other_parts_are_kept(tmp_path, inputs):
    good = inputs[1].read_bytes()
    inputs[1].write_bytes(good + b"{\n")
    with pytest.raises(BadRowsError, match=r"1\.jsonl, row \d+.*: not valid JSON"):
        write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("parts/*/part.json")}
    assert done
    inputs[1].write_bytes(good)  # the way out
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    write_texts(inputs, tmp_path / "whole", options_of(tmp_path))
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
    kept = [path for path in done if path.exists() and path.stat().st_mtime_ns == done[path]]
    assert kept


def test_rows_of_a_file_that_is_cut_are_named_by_the_byte_that_they_are_counted_from(tmp_path):
    rows = text_rows(400)
    rows[-2] = b"{"
    path = jsonl_file(tmp_path / "rows.jsonl", rows)
    lines = path.read_bytes().splitlines(keepends=True)
    with pytest.raises(BadRowsError, match=r"row \d+ after byte \d+: not valid JSON") as caught:
        write_texts([path], tmp_path / "s", options_of(tmp_path, part_bytes=4000))
    row, first = map(int, re.findall(r"row (\d+) after byte (\d+)", str(caught.value))[0])
    before = sum(len(line) <= 2 and line.startswith(b"{") for line in lines)
    assert before == 1
    assert path.read_bytes()[first:].splitlines()[row] == b"{"


def test_parts_of_tables_and_of_shards_are_measured_without_compression(tmp_path):
    table = pa.table({"text": [f"{n:02}" * 500 for n in range(100)]})  # a tenth of it at rest
    write_table(tmp_path / "in.parquet", table, 10)
    rows = RowFormat(tokenizer=tokenizer_file(tmp_path))
    options = options_of(tmp_path, rows=rows, part_bytes=4000)
    found = write_texts([tmp_path / "in.parquet"], tmp_path / "s", options)
    assert (found.num_samples, found.num_parts) == (100, 10)
    samples = [{"tokens": [1], "text": "a" * 4000}] * 9
    write_stream(samples, tmp_path / "mds", size_limit=4000)
    options = replace(options, part_bytes=12_000)
    assert write_texts([tmp_path / "mds"], tmp_path / "of-mds", options).num_parts == 3


def test_inputs_that_are_written_are_not_opened_again_to_be_cut(tmp_path, monkeypatch):
    paths = [jsonl_file(tmp_path / f"{n}.jsonl", text_rows(90, n)) for n in range(3)]
    opened, cut = [], files.uncounted_units

    def noted(found, **arguments):
        opened.append([Path(each.uri).name for each in found])
        return cut(found, **arguments)

    monkeypatch.setattr(files, "uncounted_units", noted)
    write_texts(paths[:2], tmp_path / "s", options_of(tmp_path, part="1/2"))
    write_texts(paths[:2], tmp_path / "s", options_of(tmp_path))
    write_texts(paths, tmp_path / "s", options_of(tmp_path, append=True))
    assert opened == [["0.jsonl", "1.jsonl"], ["2.jsonl"]]


def test_a_job_of_conversations_records_what_renders_them():
    settings = {"backend": "huggingface", "chat": "messages"}
    assert {"transformers", "jinja2", "zstandard"} < current_versions(settings).keys()
    assert not {"transformers", "jinja2"} & current_versions({**settings, "chat": None}).keys()


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.markdown"])
def test_a_text_without_a_tokenizer_is_refused_before_anything_is_written(tmp_path, name):
    (tmp_path / name).write_text("a b")
    with pytest.raises(ConfigError, match=rf"{name}: is text; set tokenizer="):
        write_texts([tmp_path / name], tmp_path / "s", WriteOptions())
    assert not (tmp_path / "s").exists()
    rows = RowFormat(tokenizer=tokenizer_file(tmp_path))  # the way out
    written = write_texts([tmp_path / name], tmp_path / "s", WriteOptions(rows=rows))
    assert written.num_tokens == 2


def test_a_folder_without_a_job_is_refused(tmp_path, inputs):
    (tmp_path / "s").mkdir()
    with pytest.raises(ConfigError, match=r"has no job\.json, so append=True has nothing to add"):
        write_texts(inputs, tmp_path / "s", options_of(tmp_path, append=True))
    (tmp_path / "s" / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"already and is not empty, and has no job\.json"):
        write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    with pytest.raises(ConfigError, match=r"has no job\.json; name the folder that"):
        merge(tmp_path / "s")
    assert files_of(tmp_path / "s") == {"index.json": b"{}"}


def bad_rows(tmp_path: Path) -> Path:
    """Write rows of which three are bad."""
    rows = text_rows(NUM_ROWS)
    for place, bad in zip(BAD, BAD_ROWS, strict=True):
        rows[place] = bad
    return jsonl_file(tmp_path / "bad.jsonl", rows)


def test_bad_rows_are_left_out_counted_and_named(tmp_path):
    path = bad_rows(tmp_path)
    options = options_of(tmp_path, on_bad_row="skip", max_bad_rows=3)
    written = write_texts([path], tmp_path / "s", options)
    rows = [row for i, row in enumerate(text_rows(NUM_ROWS)) if i not in BAD and row["text"]]

    assert read_words(tmp_path / "s") == [row["text"] for row in rows]
    assert written.num_bad_rows == 3
    parts = (tmp_path / "s" / "parts").glob("*/part.json")
    named = [bad for part in parts for bad in json.loads(part.read_text())["bad_rows"]]
    assert {bad["uri"] for bad in named} == {str(path)}
    assert any(
        "must have type <class 'str'>, but has <class 'int'>" in bad["reason"] for bad in named
    )


def test_a_text_above_the_limit_is_a_bad_row_in_a_stream_and_in_a_token_shard(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("streampack.texts.rows.MAX_TEXT_BYTES", 100)
    texts = ["a" * 100, "é" * 51, "a" * 101, "é" * 50]
    path = jsonl_file(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    rows = RowFormat(tokenizer=tokenizer_file(tmp_path))
    options = options_of(tmp_path, rows=rows, on_bad_row="skip")
    assert write_texts([path], tmp_path / "s", options).num_bad_rows == 2
    form = ShardFormat(rows=rows, digest=tokenizer_digest(rows), dtype="uint16")
    table = open_table(path, rows.selection, tmp_path)
    make = partial(make_token_shard, table.shard(0), decoded=None, to=tmp_path / "shard")
    with pytest.raises(BadRowsError, match=r"row 1: has 102 bytes of text, but may have 100"):
        make(form)
    assert make(replace(form, on_bad_row="skip")).num_bad == 2


def damage(path: Path) -> None:
    """Cut a compressed file short, or overwrite the end of a table."""
    data = path.read_bytes()
    is_table = path.suffix in (".parquet", ".arrow")
    path.write_bytes(data[: len(data) // 2] + b"x" * (len(data) // 2 if is_table else 0))


@pytest.mark.parametrize(
    ("suffix", "part_bytes"),
    crossed(["jsonl.gz", "csv.gz", "txt.gz", "parquet", "arrow"], [1 << 10, 1 << 28]),
)
def test_the_rest_of_a_damaged_file_is_one_bad_row(tmp_path, suffix, part_bytes):
    random_texts = ["".join(random.Random(n).choices("ab cd", k=90)) for n in range(900)]
    path, other = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    for file in (path, other):
        if suffix in ("parquet", "arrow"):
            write_table(file, pa.table({"text": random_texts}), 100)
        else:
            lines = {
                "jsonl.gz": [json.dumps({"text": text}) for text in random_texts],
                "csv.gz": ["text", *random_texts],
                "txt.gz": random_texts,
            }[suffix]
            file.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    damage(path)
    rows = RowFormat(tokenizer=tokenizer_file(tmp_path))
    options = options_of(tmp_path, rows=rows, part_bytes=part_bytes)

    with pytest.raises(DataError, match=rf"^{path}: .*make a\s+new copy"):
        write_texts([path, other], tmp_path / "s", options)
    skipping = replace(options, on_bad_row="skip")
    written = write_texts([path, other], tmp_path / "s", skipping)

    assert written.is_complete
    assert written.num_bad_rows == 1
    [bad] = [
        bad
        for file in (tmp_path / "s").rglob("part.json")
        for bad in json.loads(file.read_text())["bad_rows"]
    ]
    assert bad["uri"] == str(path)
    assert bad["reason"].startswith("the rest of the file is omitted: ")
    num_whole = 1 if suffix == "txt.gz" else len(random_texts)
    assert bad["row"] == written.num_samples - num_whole
    assert (bad["row"] > 0) == (suffix == "jsonl.gz" or (suffix == "csv.gz"))


def test_the_budget_is_that_of_all_parts_together(tmp_path):
    path = bad_rows(tmp_path)
    options = options_of(tmp_path, on_bad_row="skip", max_bad_rows=2, part_bytes=500)
    with pytest.raises(BadRowsError, match=r"3 bad rows in all parts, but 2 may be skipped"):
        write_texts([path], tmp_path / "s", options)
    options = options_of(tmp_path, on_bad_row="skip", max_bad_rows=30, part_bytes=500)
    write_texts([path], tmp_path / "s", options)
    with pytest.raises(BadRowsError, match="3 bad rows in all parts, but 2 may be"):
        merge(tmp_path / "s", max_bad_rows=2)
    assert merge(tmp_path / "s").num_bad_rows == 3


def test_parts_of_other_versions_are_refused(tmp_path, inputs, monkeypatch):
    options = options_of(tmp_path, part="1/2")
    write_texts(inputs, tmp_path / "s", options)
    monkeypatch.setattr("streampack._extras.version", lambda _: "9.9")
    with pytest.raises(
        ConfigError, match=r"was begun with tokenizers [\d.]+, but 9\.9 is installe"
    ):
        write_texts(inputs, tmp_path / "s", options_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("part.json", r"part\.json: is damaged \(JSONDecodeError"),
        ("samples.bin", r"samples\.bin: is missing or damaged \(\d+ bytes\); delete part\.json"),
        ("shard.00000.mds.zstd", r"1 of \d+ shards are damaged: .*; delete part\.json next to"),
    ],
)
def test_a_damaged_file_is_named_and_written_again(tmp_path, inputs, name, message):
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    whole = files_of(tmp_path / "s")
    path = next((tmp_path / "s").glob(f"parts/*/{name}"))
    path.write_bytes(path.read_bytes()[:-7])
    notice = verify if name.startswith("shard") else merge
    with pytest.raises(DataError, match=message):
        notice(tmp_path / "s")
    path.with_name("part.json").unlink()  # the way out
    write_texts(inputs, tmp_path / "s", options_of(tmp_path))
    assert files_of(tmp_path / "s") == whole
    assert verify(tmp_path / "s") > 1


@pytest.mark.parametrize("field", ["tokens", "input_ids", "ids"])
def test_token_ids_and_their_masks_are_kept_as_they_are(tmp_path, field):
    rows = [
        {field: [1] * n, "loss_mask": [0, 1] * (n // 2) + [True] * (n % 2), "meta": {"n": [n]}}
        for n in range(1, 30)
    ]
    path = jsonl_file(tmp_path / "r.jsonl", rows)
    options = WriteOptions(
        rows=RowFormat(tokens="ids" if field == "ids" else "tokens", columns=("loss_mask", "meta"))
    )
    write_texts([path], tmp_path / "s", options)
    shard = open_stream(Stream(local=str(tmp_path / "s"), loss_mask="loss_mask"), 0).open_shard(0)
    for i, row in enumerate(rows):
        assert shard.tokens.read(shard.data, i).tolist() == row[field]
        assert shard.loss_mask.read(shard.data, i).tolist() == [int(x) for x in row["loss_mask"]]


LARGE = [1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


def kept_values(folder: Path) -> tuple[dict[str, str], list[dict]]:
    """Return the types and values of all columns but the tokens, as MosaicML reads them."""
    shards = json.loads((folder / "index.json").read_text())["shards"]
    types = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    types.pop("tokens")
    readers = [reader_from_json(str(folder), None, shard) for shard in shards]
    samples = [reader[i] for reader in readers for i in range(len(reader))]
    return types, [{name: row[name] for name in types} for row in samples]


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (LARGE[:3], "int"),
        (LARGE, "uint64"),
        ([-1, *LARGE], "json"),
        ([0.5, *LARGE], "json"),
        ([0.5, 2**53], "float64"),
        ([None, *LARGE], "json"),
    ],
)
def test_kept_numbers_keep_their_digits(tmp_path, values, encoding):
    path = jsonl_file(tmp_path / "r.jsonl", [{"tokens": [1], "x": value} for value in values])
    options = WriteOptions(rows=RowFormat(columns=("x",)), compression=None)
    write_texts([path], tmp_path / "s", options)
    assert kept_values(tmp_path / "s") == ({"x": encoding}, [{"x": value} for value in values])


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_kept_columns_of_a_table_have_its_types(tmp_path, suffix):
    later = {"hash": [2**64 - 1], "id": [2**63 - 1], "score": [0.5], "maybe": [2**60 + 1]}
    first = {"hash": [1], "id": [1], "score": [1.0], "maybe": [None]}
    columns = {name: first[name] * 300 + later[name] for name in first}
    types = {"hash": pa.uint64(), "id": pa.int64(), "score": pa.float64(), "maybe": pa.int64()}
    table = pa.table(
        {
            "tokens": [[1]] * 301,
            **{name: pa.array(values, types[name]) for name, values in columns.items()},
        }
    )
    path = write_table(tmp_path / f"r.{suffix}", table, 400)
    options = WriteOptions(rows=RowFormat(columns=tuple(columns)), compression=None)
    write_texts([path], tmp_path / "s", options)

    found, rows = kept_values(tmp_path / "s")
    assert found == {"hash": "uint64", "id": "int", "score": "float64", "maybe": "json"}
    assert rows == table.select(list(found)).to_pylist()


def test_a_kept_column_with_a_stated_type_has_it(tmp_path):
    rows = [{"tokens": [1], "a:b": "x", "hash": 1, "any": 1}] * 300
    rows += [{"tokens": [1], "a:b": "y", "hash": 2**64 - 1, "any": None}]
    path = jsonl_file(tmp_path / "r.jsonl", rows)

    def write(*fields: str) -> None:
        options = WriteOptions(rows=RowFormat(columns=fields), compression=None)
        write_texts([path], tmp_path / "-".join(fields), options)

    with pytest.raises(BadRowsError, match=r"does not fit an int64.*set columns=NAME:json, in"):
        write("a:b", "hash", "any:json")
    with pytest.raises(BadRowsError, match=r"NoneType.*set columns=NAME:json, in a new folder"):
        write("a:b", "hash:uint64", "any")
    write("a:b", "hash:uint64", "any:json")

    found, values = kept_values(tmp_path / "a:b-hash:uint64-any:json")
    assert found == {"a:b": "str", "hash": "uint64", "any": "json"}
    assert values == [{name: row[name] for name in found} for row in rows]
