"""`streampack at`, `where` and `diff`: their output, and the options they require."""

from __future__ import annotations

import json
from datetime import datetime

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from tokenizers import Tokenizer, models

from streampack import ConfigError, PackedDataLoader, World, from_config
from streampack.write import write_stream
from tests.helpers.verbs import call_verb
from tests.helpers.words import word_tokenizer

NUM_SAMPLES = 300


@pytest.fixture
def config(tmp_path):
    """A config of two streams with an extra column per sample."""
    for name in ("web", "code"):
        samples = (
            {"tokens": [n % 9 + 1] * (n % 40 + 1), "url": f"{name}://{n}"}
            for n in range(NUM_SAMPLES)
        )
        write_stream(samples, tmp_path / name)
    run = {
        "streams": [{"name": name, "local": str(tmp_path / name)} for name in ("web", "code")],
        "packing": {"max_seq_len": 64},
        "mixing": {"global_batch_size": 8},
        "chapters": [{"weights": {"web": 3, "code": 1}, "steps": 5}],
        "batch_size": 2,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def as_json(*arguments):
    return json.loads(call_verb(*arguments, "--json"))


def test_at_prints_what_a_rank_got(config):
    batches = list(from_config(config, world=World(rank=1, num_ranks=2)))
    shown = as_json("at", config, "--step", 3, "--devices", 2, "--rank", 1)

    assert (shown["step"], shown["epoch"], shown["position"]) == (3, 0, 24)
    rows = {(row["batch"], row["row"]): row["segments"] for row in shown["rows"]}
    for number, batch in enumerate(batches[6:8]):
        for row in range(2):
            own = batch["segments"][batch["segments"][:, 0] == row][:, 1:].tolist()
            names = {"web": 0, "code": 1}
            assert own == [
                [names[each["stream"]], each["pass"], each["sample"], each["start"], each["length"]]
                for each in rows[number, row]
            ]


def test_at_prints_columns_and_texts(config, tmp_path):
    tokenizer = word_tokenizer("?", *(f"w{n}" for n in range(1, 10)))
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    shown = as_json(
        *("at", config, "--step", 0, "--devices", 1),
        *("--text", "--tokenizer", tmp_path / "tokenizer.json"),
    )

    for row in shown["rows"]:
        for each in row["segments"]:
            word = f"w{each['sample'] % 9 + 1}"
            assert each["columns"]["url"] == f"{each['stream']}://{each['sample']}"
            assert each["columns"]["text"].split() == [word] * each["length"]
    output = call_verb("at", config, "--step", 0, "--devices", 1, "--text")
    assert "step 0: chapter 0, position 0" in output
    assert "url: web://" in output


def test_at_prints_the_row_behind_a_text(config, tmp_path):
    rows = [{"text": f"w{n % 9 + 1}", "ids": [n], "at": datetime(2026, 1, 1)} for n in range(50)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    word_tokenizer("?", *(f"w{n}" for n in range(1, 10))).save(str(tmp_path / "tokenizer.json"))
    files = {"files": str(tmp_path / "rows.parquet"), "tokenizer": str(tmp_path / "tokenizer.json")}
    texts = {"name": "texts", "texts": {**files, "local": str(tmp_path)}}
    run = {"streams": [texts], "packing": {"max_seq_len": 8}, "batch_size": 2}
    config.write_text(yaml.safe_dump(run))

    shown = as_json("at", config, "--step", 0, "--text")

    for segment in (each for row in shown["rows"] for each in row["segments"]):
        columns = segment["columns"]
        assert columns["file"] == str(tmp_path / "rows.parquet")
        assert columns["fields.text"] == rows[segment["sample"]]["text"]
        assert columns["fields.ids"] == [columns["row"]] == [segment["sample"]]
        assert columns["fields.at"].startswith("2026-01-01")
    assert "fields.text: w" in call_verb("at", config, "--step", 0, "--text")


def test_where_finds_what_at_shows(config):
    segment = as_json("at", config, "--step", 4, "--devices", 2)["rows"][0]["segments"][0]
    sample = f"{segment['stream']}/{segment['sample']}"
    found = as_json("where", config, sample, "--devices", 2)

    assert 4 in [row["step"] for row in found["rows"]]
    assert f"step 4\nrank 0, batch 0, row 0\n  {sample}" in call_verb(
        "where", config, sample, "--devices", 2
    )
    assert "in no step" in call_verb("where", config, sample, "--devices", 2, "--upto", 0) or (
        found["rows"][0]["step"] == 0
    )


def test_a_state_says_in_which_world_a_step_was(config, tmp_path):
    loader = PackedDataLoader(from_config(config, world=World(num_ranks=4)))
    next(iter(loader))
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))

    shown = as_json("at", config, "--step", 2, "--state", tmp_path / "state.json")

    assert {tuple(row["ranks"]) for row in shown["rows"]} == {(0,), (1,), (2,), (3,)}


def test_a_state_inside_a_chapter_leaves_the_batch_sizes_of_others(config, tmp_path):
    run = yaml.safe_load(config.read_text())
    own = {"weights": {"code": 1}, "steps": 3}
    config.write_text(yaml.safe_dump(run | {"chapters": [own, {**own, "batch_size": 4}, own]}))
    loader = PackedDataLoader(from_config(config, world=World()))
    for _ in zip(range(4 * 3 + 2), loader, strict=False):
        pass
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))

    sizes = [
        1 + max(row["row"] for row in shown["rows"])
        for step in (1, 4, 7)
        if (shown := as_json("at", config, "--step", step, "--state", tmp_path / "state.json"))
    ]

    assert sizes == [2, 4, 2]


def test_diff_names_keys_and_the_first_step(config, tmp_path):
    run = yaml.safe_load(config.read_text())
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(run | {"buffers": {"rank_tokens": 10**6}}))
    assert as_json("diff", config, other) == {
        "changed": {"buffers.rank_tokens": [None, 10**6]},
        "first_step": None,
        "reason": None,
    }
    chapters = [
        {"weights": {"web": 3, "code": 1}, "steps": 3},
        {"weights": {"web": 1}, "steps": 2},
    ]
    other.write_text(yaml.safe_dump(run | {"chapters": chapters}))
    found = as_json("diff", config, other)
    assert (found["first_step"], found["reason"]) == (3, "chapters[0].steps: 5 -> 3")
    output = call_verb("diff", config, other)
    assert "chapters[0].steps: 5 -> 3" in output
    assert "the packs differ from step 3 on: chapters[0].steps: 5 -> 3" in output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"order": {"seed": 3}}, "seed: 9176 -> 3"),
        ({"chapters": [{"weights": {"web": 3, "code": 1}, "steps": 4}]}, "the second run ends"),
        (
            {"chapters": [{"weights": {"web": 1, "code": 1}, "steps": 4}]},
            "chapters[0].weights['code']: 1/4 -> 1/2",
        ),
        ({"streams": "other"}, "stream 'code' has other samples"),
        ({"chapters": [{"weights": {"web": 1}, "steps": 5}]}, "stream 'code' is in the first run"),
        ({"chapters": None, "order": {"seed": 3}}, "seed: 9176 -> 3"),
        ({"chapters": None, "streams": "other"}, "stream 'code' has other samples"),
        ({"chapters": None, "streams": "fewer"}, "stream 'code' is in the first run only"),
    ],
)
def test_diff_names_what_differs_first(config, tmp_path, change, reason):
    run = yaml.safe_load(config.read_text())
    if change.get("streams"):
        write_stream(([7] * 5 for _ in range(NUM_SAMPLES)), tmp_path / "new")
        others = {"other": [{"name": "code", "local": str(tmp_path / "new")}], "fewer": []}
        change = change | {"streams": run["streams"][:1] + others[change["streams"]]}
    if "chapters" in change and change["chapters"] is None:
        del run["chapters"]
        config.write_text(yaml.safe_dump(run))
        change = {key: value for key, value in change.items() if key != "chapters"}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(run | change))
    assert as_json("diff", config, other)["reason"].startswith(reason)


def test_where_looks_up_to_the_state_of_a_run_without_an_end(config, tmp_path):
    run = yaml.safe_load(config.read_text())
    del run["chapters"]
    config.write_text(yaml.safe_dump(run))
    loader = PackedDataLoader(from_config(config))
    batches = [next(batches) for batches in [iter(loader)] for _ in range(9)]  # of 4 in a step
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    segment = batches[-1]["segments"][0].tolist()  # in step 2
    sample = f"{loader.dataset.stream_names[segment[1]]}/{segment[3]}"

    shown = as_json("where", config, sample, "--state", tmp_path / "state.json")

    assert shown == as_json("where", config, sample, "--upto", 2)
    assert 2 in [row["step"] for row in shown["rows"]]
    with pytest.raises(ConfigError, match="has no end"):
        call_verb("where", config, sample)


def test_control_characters_of_documents_do_not_reach_the_terminal(tmp_path, config):
    samples = ({"tokens": [5, 6], "url": f"\x1b]0;a\x07\x1b[2J{n}"} for n in range(300))
    write_stream(samples, tmp_path / "esc")
    run = yaml.safe_load(config.read_text())
    run["streams"] = [{"name": "web", "local": str(tmp_path / "esc")}]
    run["chapters"][0]["weights"] = {"web": 1}
    config.write_text(yaml.safe_dump(run))
    shown = call_verb("at", config, "--step", 0, "--text")  # in the config's own world
    assert "\x1b" not in shown
    assert "\\x1b]0;a\\x07\\x1b[2J" in shown
    made = Tokenizer(models.WordLevel({"?": 0, "a": 5, "\x1b[2J": 6}, unk_token="?"))
    made.save(str(tmp_path / "t.json"))
    shown = call_verb("inspect", tmp_path / "esc", "--tokenizer", tmp_path / "t.json")
    assert "\x1b" not in shown
    assert "a \\x1b[2J" in shown
