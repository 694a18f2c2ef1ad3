"""A Megatron blend or an OLMo mix becomes a config that `streampack plan` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from streampack.cli.migrate import migrate
from streampack.errors import ConfigError
from tests.helpers.flat import make_documents, write_megatron, write_olmo
from tests.helpers.verbs import call_verb

LENGTHS: dict[str, Any] = {"max_seq_len": 256, "global_batch_size": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two files of Megatron in `d`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    write_megatron(tmp_path / "d", make_documents(300), "web")
    write_megatron(tmp_path / "d", make_documents(200), "code")
    return tmp_path


def plan_of(path: Path) -> dict[str, Any]:
    planned: dict[str, Any] = json.loads(call_verb("plan", path, "--json"))
    return planned


def test_a_blend_is_planned_with_its_weights_and_its_steps(folder: Path) -> None:
    path = folder / "run.yaml"
    words = ["--data-path", "0.7", "d/web", "0.3", "d/code", "--train-iters", "50"]
    words += ["--seq-length=256", "--global-batch-size", "8", "--micro-batch-size", "2"]
    shown = call_verb("migrate", "--out", path, "--", *words, "--num-layers", "4", "--fp8")
    assert "not carried over: --fp8 --num-layers" in shown
    [chapter] = plan_of(path)["chapters"]
    assert (chapter["steps"], chapter["batch_size"]) == (50, 2)
    assert chapter["tokens"] == 50 * 8 * 256
    shares = {name: stream["begin"] for name, stream in chapter["streams"].items()}
    assert shares == pytest.approx({"web": 0.7, "code": 0.3})


def test_the_words_of_a_blend_a_file_of_them_and_an_args_path_are_alike(folder: Path) -> None:
    blend = "0.7 d/web 0.3 d/code"
    (folder / "blend.txt").write_text(f"{blend}\n")
    (folder / "args").write_text(f"--data-path \\\n  {blend}  # the blend\n")
    found = {
        migrate(inputs, **LENGTHS)
        for inputs in (
            blend.split(),
            [blend],
            ["blend.txt"],
            ["args"],
            ["--data-args-path", "blend.txt"],
            ["--train-data-path", *blend.split()],
        )
    }
    assert len(found) == 1


def test_a_prefix_that_is_named_twice_has_the_sum_of_its_weights() -> None:
    words = ["0.5", "d/web", "0.25", "d/code", "0.25", "d/web", "--reset-attention-mask"]
    text = migrate(words, **LENGTHS)
    config = yaml.safe_load(text)
    assert [stream["name"] for stream in config["streams"]] == ["web", "code"]
    assert config["chapters"][0]["weights"] == {"web": 0.75, "code": 0.25}
    assert "--reset-attention-mask" not in text


def test_a_blend_without_weights_takes_streams_by_their_sizes() -> None:
    [chapter] = yaml.safe_load(migrate(["d/web", "d/code"], **LENGTHS))["chapters"]
    sizes = {name: Path(f"d/{name}.bin").stat().st_size for name in ("web", "code")}
    assert chapter["weights"] == sizes


@pytest.mark.parametrize("split", ["969,30,1", "90,10", "1,1,2", "1"])
def test_the_parts_of_a_split_are_disjoint_and_all_of_a_file(split: str) -> None:
    parts = []
    for subset in ("train", "valid", "test"):
        words = ["1", "d/web", "--split", split]
        try:
            written = yaml.safe_load(migrate(words, subset=subset, **LENGTHS))
        except ConfigError as error:
            assert "none of the 300 documents" in str(error)  # noqa: PT017 - of some subsets
            continue
        parts.append(written["streams"][0]["samples"])
    assert [part[0] for part in parts] == [0, *[part[1] for part in parts[:-1]]]
    assert parts[-1][1] == 300


def test_megatrons_split_rounds_as_megatron_does() -> None:
    # In Megatron, indices of 969,30,1 of 300 documents begin at round(0.969 * 300) = 291.
    written = yaml.safe_load(migrate(["1", "d/web", "--split", "969,30,1"], **LENGTHS))
    assert written["streams"][0]["samples"] == [0, 291]


def test_a_mix_is_a_stream_for_each_label_with_its_files_in_order(folder: Path) -> None:
    for number in range(3):
        write_olmo(folder / "d", make_documents(100, seed=number), f"part-dolma2-{number}")
    lines = ["web,part-{TOKENIZER}-1.npy", "code,part-{TOKENIZER}-2.npy", "# a comment"]
    lines += ["", "web,part-{TOKENIZER}-0.npy"]
    (folder / "mix.txt").write_text("\n".join(lines))
    path = folder / "run.yaml"
    options = ["--max-seq-len", 256, "--global-batch-size", 4, "--tokenizer-id", "dolma2"]
    options += ["--tokens-dtype", "uint16", "--root", "d"]
    call_verb("migrate", "mix.txt", "--out", path, *options)
    web, code = yaml.safe_load(path.read_text())["streams"]
    assert (web["name"], code["name"]) == ("web", "code")
    assert web["local"] == ["d/part-dolma2-1.npy", "d/part-dolma2-0.npy"]
    assert set(plan_of(path)["chapters"][0]["streams"]) == {"web", "code"}


def test_a_mix_of_12252_files_is_read_as_a_config(folder: Path) -> None:
    paths = [f"preprocessed/dclm/baseline/dolma2-tokenizer/part-{n:06}.npy" for n in range(12_252)]
    for path in paths[:1]:
        (folder / path).parent.mkdir(parents=True)
    for path in paths:
        (folder / path).write_bytes(b"\1\0")
    (folder / "mix.txt").write_text("\n".join(f"dclm,{path}" for path in paths))
    written = migrate(["mix.txt"], root=str(folder), tokens_dtype="uint16", **LENGTHS)
    (folder / "run.yaml").write_text(written)
    with pytest.raises(Exception, match=r"part-000000\.npy: has no .*\.csv\.gz"):
        call_verb("plan", folder / "run.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0.7 d/web d/code", "weights and prefixes in turn"),
        ("0.7 0.3 d/web d/code", "weights and prefixes in turn"),
        ("--seq-length 8", "has neither --data-path nor --train-data-path"),
        ("0.7 d/web --split a,b", "--split"),
        ("0.7 d/web --seed x", "--seed 'x' is not a whole number"),
        ("--data-args-path nowhere", "cannot be read"),
    ],
)
def test_a_mistake_is_named(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        migrate(words.split(), **LENGTHS)


@pytest.mark.parametrize("missing", LENGTHS)
def test_a_length_that_is_nowhere_is_asked_for(missing: str) -> None:
    given = {name: value for name, value in LENGTHS.items() if name != missing}
    with pytest.raises(ConfigError, match="is not in") as caught:
        migrate(["1", "d/web"], **given)
    assert caught.value.option == missing
