"""The data of Megatron, GPT-NeoX and OLMo becomes a config that `streampack plan` accepts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from streampack.cli.migrate import migrate as migrated
from streampack.cli.verbs import Migrate
from streampack.errors import ConfigError
from tests.helpers.flat import make_documents, write_megatron, write_olmo
from tests.helpers.verbs import call_verb

LENGTHS: dict[str, Any] = {"max_seq_len": 256, "global_batch_size": 4}
BLEND = "0.7 d/web 0.3 d/code"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two files of Megatron in `d`, and one in `d/web`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d" / "web").mkdir(parents=True)
    write_megatron(tmp_path / "d", make_documents(300), "web")
    write_megatron(tmp_path / "d", make_documents(50), "code")
    write_megatron(tmp_path / "d" / "web", make_documents(10), "other")
    return tmp_path


def plan_of(path: Path) -> dict[str, Any]:
    planned: dict[str, Any] = json.loads(call_verb("plan", path, "--json"))
    return planned


def migrate(inputs: Iterable[str], **options: Any) -> str:
    return migrated(Migrate(inputs=list(inputs), **options))


def config_of(*inputs: str, **options: Any) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(migrate(inputs, **LENGTHS | options))
    return config


@pytest.mark.parametrize("dashes", [["--"], []])
def test_a_blend_is_planned_with_its_weights_and_its_steps(folder: Path, dashes: list[str]) -> None:
    path = folder / "run.yaml"
    words = ["--data-path", *BLEND.split(), "--train-iters", "50", "--split", "1"]
    words += ["--seq-length=256", "--global-batch-size", "8", "--micro-batch-size", "2"]
    shown = call_verb("migrate", "--out", path, *dashes, *words, "--num-layers", "4", "--fp8")
    assert "not carried over: fp8 num-layers" in shown
    [chapter] = plan_of(path)["chapters"]
    assert (chapter["steps"], chapter["batch_size"]) == (50, 2)
    assert chapter["tokens"] == 50 * 8 * 256
    shares = {name: stream["begin"] for name, stream in chapter["streams"].items()}
    assert shares == pytest.approx({"web": 0.7, "code": 0.3})


SCRIPT = """#!/bin/bash
# don't edit
DATA=${1:-"d"}
BLEND="0.7 $DATA/web 0.3 ${DATA}/code"
MODEL_ARGS="
    --num-layers 2
"
DATA_ARGS=()
DATA_ARGS+=(
    "--data-path $BLEND"
)
mkdir -p $(dirname x)
torchrun --nproc-per-node 8 pretrain_gpt.py ${DATA_ARGS[@]} $MODEL_ARGS \\
    --split 100,0,0
"""


def test_all_ways_to_write_a_blend_are_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPORA", "d")
    (folder / "blend.txt").write_text(f"{BLEND}\n")
    (folder / "args").write_text(f"--data-path \\\n  {BLEND}  # the blend\n --split 1")
    (folder / "splits.json").write_text(json.dumps({"train": BLEND, "valid": BLEND.split()}))
    (folder / "train.sh").write_text(SCRIPT)
    (folder / "neox.yml").write_text(
        '{"train-data-paths": ["d/web", "d/code"], "train_data_weights": [0.7, 0.3], # blend\n}'
    )
    configs = [
        config_of(*inputs)
        for inputs in (
            BLEND.split(),
            [BLEND],
            ["blend.txt"],
            ["args"],
            ["train.sh"],
            ["neox.yml"],
            ["splits.json"],
            ["--data_path", BLEND, "--split=1"],
            ["0.7 $CORPORA/web 0.3 ${CORPORA}/code"],
            ["--data-args-path", "blend.txt"],
            ["--per-split-data-args-path", "splits.json"],
            ["--train-data-path", *BLEND.split()],
        )
    ]
    assert all(config == configs[0] for config in configs)
    assert configs[0]["streams"] == [
        {"name": "web", "local": "d/web.bin", "format": "megatron"},
        {"name": "code", "local": "d/code.bin", "format": "megatron"},
    ]


def test_a_gpt_neox_config_of_two_files_is_planned(folder: Path) -> None:
    (folder / "model.yml").write_text(
        '{"seq-length": 256, "num-layers": 6, "train-iters": 20, "seed": 3, "fp16": {"a": 1},\n'
        '"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "use-cpu": false}'
    )
    (folder / "data.yml").write_text(
        '{"train-data-paths": ["d/web", "d/code"], "valid-data-paths": ["d/code"]}'
    )
    call_verb("migrate", "model.yml", "data.yml", "--out", folder / "run.yaml")
    text = (folder / "run.yaml").read_text()
    assert "# not carried over: fp16 num-layers valid-data-path\n" in text
    [chapter] = plan_of(folder / "run.yaml")["chapters"]
    shares = {name: stream["begin"] for name, stream in chapter["streams"].items()}
    assert shares == pytest.approx({"web": 0.5, "code": 0.5})  # its default: equal weights
    assert (chapter["steps"], chapter["batch_size"]) == (20, 2)


def test_a_prefix_that_is_named_twice_has_the_sum_of_its_weights() -> None:
    text = migrate(
        ["0.5", "d/web", "0.25", "d/code", "0.25", "d/web", "--reset-attention-mask"], **LENGTHS
    )
    config = yaml.safe_load(text)
    assert [stream["name"] for stream in config["streams"]] == ["web", "code"]
    assert config["chapters"][0]["weights"] == {"web": 0.75, "code": 0.25}
    assert "attend" not in text
    assert "reset-attention-mask" not in text


def test_a_blend_without_weights_takes_streams_by_their_tokens() -> None:
    # d/wide has the tokens of d/code in twice as many bytes; d/web is listed twice.
    write_megatron(Path("d"), make_documents(50, dtype="int32"), "wide")
    config = config_of("d/web", "d/code", "d/web", "d/wide")
    tokens = {name: Path(f"d/{name}.bin").stat().st_size // 2 for name in ("web", "code")}
    weights = config["chapters"][0]["weights"]
    assert weights == {"web": 2 * tokens["web"], "code": tokens["code"], "wide": tokens["code"]}


# Computed by the functions of Megatron-LM and GPT-NeoX, for 50 documents.
MEGATRON = {
    "969,30,1": [(0, 48), (48, 50), None],
    "949, 50, 1": [(0, 47), (47, 50), None],
    "90,5,5": [(0, 45), (45, 48), (48, 50)],
    "1,1,1": [(0, 17), (17, 33), (33, 50)],
    "0.98,0.02": [(0, 49), (49, 50), None],
}
NEOX = {
    "949,50,1": [(0, 48), (48, 50), None],
    "90,5,5": [(0, 46), (46, 48), (48, 50)],
    "1,1,1": [(0, 16), (16, 33), (33, 50)],
}


@pytest.mark.parametrize(
    ("program", "split", "expected"),
    [("megatron", *case) for case in MEGATRON.items()] + [("neox", *case) for case in NEOX.items()],
)
def test_a_split_has_the_borders_of_its_program(
    program: str, split: str, expected: list[tuple[int, int] | None]
) -> None:
    Path("neox.yml").write_text(yaml.safe_dump({"data-path": "d/code", "split": split}))
    words = ["neox.yml"] if program == "neox" else ["1", "d/code", "--split", *split.split()]
    for subset, part in zip(("train", "valid", "test"), expected, strict=True):
        if part is None:
            with pytest.raises(ConfigError, match="none of the 50 documents"):
                config_of(*words, subset=subset)
        else:
            [stream] = config_of(*words, subset=subset)["streams"]
            assert tuple(stream["samples"]) == part


def test_a_data_path_without_a_split_has_megatrons_default() -> None:
    text = migrate(["--data-path", "d/web"], **LENGTHS)
    assert yaml.safe_load(text)["streams"][0]["samples"] == [0, 291]
    assert "# split=969,30,1, as by default; --split 1 takes all documents\n" in text
    assert "samples" not in config_of("--data-path", "d/web", "--split", "1")["streams"][0]


def test_documents_of_several_sequences_are_split_by_sequences() -> None:
    write_megatron(Path("d"), make_documents(50), "sentences", sequences=2)
    [stream] = config_of("d/sentences", "--split", "1,1")["streams"]
    assert (stream["unit"], stream["samples"]) == ("sequence", [0, 50])


@pytest.mark.parametrize(("subset", "steps"), [("train", 12), ("valid", 3)])
def test_samples_of_training_become_steps(subset: str, steps: int) -> None:
    words = ["--data-path", BLEND, "--split", "1,1", "--train-samples", "50", "--eval-iters", "3"]
    assert config_of(*words, subset=subset)["chapters"][0]["steps"] == steps


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


@pytest.mark.parametrize(("duration", "steps"), [(9, 9), ("9", 9), ("1e4T", 10), ("2ep", None)])
def test_the_data_of_an_olmo_config_is_planned(
    folder: Path, duration: int | str, steps: int | None
) -> None:
    for number in range(2):
        write_olmo(folder / "d", make_documents(100, seed=number), f"{number}")
    paths = ["d/0.npy", "d/1.npy", "d/0.npy"]  # OLMo reads a file once for each time it is listed
    config: dict[str, Any] = {
        "seed": 7,
        "global_train_batch_size": 4,
        "model": {"max_sequence_length": 256},
        "optimizer": {"name": "adamw"},
        "max_duration": duration,
        "data": {"paths": paths, "instance_filter": {"repetition_max_period": 13}},
    }
    (folder / "olmo.yaml").write_text(yaml.safe_dump(config))
    call_verb("migrate", "olmo.yaml", "--out", folder / "run.yaml")
    text = (folder / "run.yaml").read_text()
    written = yaml.safe_load(text)
    [stream] = written["streams"]
    assert (stream["local"], stream["tokens_dtype"]) == (paths, "uint16")
    assert written["order"]["seed"] == 7
    left = ["data.instance_filter", *(["max_duration"] if steps is None else []), "optimizer"]
    assert f"# not carried over: {' '.join(left)}\n" in text
    if steps is not None:
        [chapter] = plan_of(folder / "run.yaml")["chapters"]
        assert chapter["steps"] == steps


def test_the_datasets_of_an_olmo_config_are_streams_by_their_sizes(folder: Path) -> None:
    for number in range(3):
        write_olmo(folder / "d", make_documents(10 + number, seed=number), f"{number}")
    datasets = {"web": ["d/0.npy", "d/1.npy"], "code": ["d/2.npy", "d/2.npy"]}
    (folder / "olmo.yaml").write_text(yaml.safe_dump({"data": {"datasets": datasets}}))
    config = config_of("olmo.yaml")
    sizes = [Path(f"d/{number}.npy").stat().st_size for number in range(3)]
    weights = config["chapters"][0]["weights"]
    assert weights == {"web": sizes[0] + sizes[1], "code": 2 * sizes[2]}


@pytest.mark.parametrize("missing", LENGTHS)
def test_a_length_that_is_nowhere_is_asked_for(missing: str) -> None:
    given = {name: value for name, value in LENGTHS.items() if name != missing}
    with pytest.raises(ConfigError, match="is not in") as caught:
        migrate(["1", "d/web"], **given)
    assert caught.value.option == missing
