"""The trainers' examples: run as their pages say, and watched from inside the model.

::

    docs/trainers/plain.md    $ python examples/train_plain.py
        run in this process, with hooks on the model   steps 1 ... 30, 8 packs each
    stopped in step 7 and in step 13, resumed          steps 1 ... 5, 6 ... 10, 11 ... 30
    two ranks, forks of one process                    each step's packs on one rank or the other
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.functional import cross_entropy

from streampack import (
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from tests.helpers.packs import samples_of
from tests.helpers.trainers_seen import MAX_SEQ_LEN, ROOT, Seen, digest_of, load_example, run
from tests.helpers.worlds.torchrun_agents import PATIENCE_S, environment, run_job, torchrun

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # What Lightning warns of at every start.
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]

PAGES = sorted((ROOT / "docs" / "trainers").glob("*.md"))
COMMAND = re.compile(r"^\$ python examples/(\w+)\.py(.*)$", flags=re.MULTILINE)
COMMANDS = [found for page in PAGES for found in COMMAND.findall(page.read_text())]
IDS = ["".join(command) for command in COMMANDS]
NUM_STEPS = 30
SAVE_EVERY = 5
STEPS_IN_EPOCH = 10
GLOBAL_BATCH = 8

# (Micro-)batches in a step of one rank.
PER_STEP = {
    "train_plain": 2,
    "train_hf_trainer": 4,
    "train_lightning": 1,
    "train_torchtune_style": 2,
    "train_torchtitan_style": 2,
    "train_accelerate": 4,
}
# Unshifted labels have no place for the target at a cut: a sample's next token in another pack.
WITHOUT_CUTS = {"train_hf_trainer", "train_torchtune_style"}
RANKS = ["train_hf_trainer", "train_accelerate"]


def call_native(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return model(tokens, positions, torch.ones_like(tokens))


def call_torchtune(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    length = tokens.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    return model(tokens, mask=causal, input_pos=positions)


def call_torchtitan(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    length = tokens.shape[1]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    return model(tokens, positions, causal)


def call_llama(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return model(input_ids=tokens, position_ids=positions, use_cache=False).logits


CALLS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "train_plain": call_native,
    "train_lightning": call_native,
    "train_torchtune_style": call_torchtune,
    "train_torchtitan_style": call_torchtitan,
    "train_hf_trainer": call_llama,
    "train_accelerate": call_llama,
}


def streams_of(out: Path) -> list[Stream]:
    return [Stream(local=str(out / "data" / name)) for name in ("long", "short")]


def global_batches(out: Path, num_epochs: int, name: str) -> list[dict[str, Any]]:
    """What a lone process gets that iterates the dataset and does nothing else."""
    dataset = PackedStreamingDataset(
        streams=streams_of(out),
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        mixing=Mixing(global_batch_size=GLOBAL_BATCH),
        # PackedTrainer takes the seed of TrainingArguments.
        order=Order(seed=42) if name == "train_hf_trainer" else None,
        batch_size=GLOBAL_BATCH,
        world=World(),
    )
    return [batch for _ in range(num_epochs) for batch in dataset]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str, str], tuple[Path, Seen]]:
    """Return a function that runs a command of a page, once, and returns what it left."""

    @cache
    def run_whole(name: str, options: str) -> tuple[Path, Seen]:
        out = tmp_path_factory.mktemp(name)
        return out, run(name, [*options.split(), "--out", out])

    return run_whole


def final_weights(seen: Seen) -> dict[str, Tensor]:
    return seen.model.state_dict()


# One rank.


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_every_step_trains_on_the_next_global_batch(whole, command):
    out, seen = whole(*command)

    batches = global_batches(out, 3, command[0])

    assert seen.steps == [[digest_of(row) for row in batch["tokens"]] for batch in batches]
    assert len(seen.steps) == NUM_STEPS


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_the_gradient_is_that_of_the_samples_one_by_one(whole, command):
    name, _ = command
    out, seen = whole(*command)
    example = load_example(name)
    torch.manual_seed(0)
    model = example.make_model() if hasattr(example, "make_model") else example.Decoder()
    batch = global_batches(out, 1, name)[0]

    total, num_targets = torch.zeros(()), 0
    for row, first, length in samples_of(batch):
        tokens = batch["tokens"][row, first : first + length]
        labels = batch["labels"][row, first : first + length].clone()
        if name in WITHOUT_CUTS:
            labels[-1] = -100
        logits = CALLS[name](model, tokens[None], torch.arange(length)[None])
        total = total + cross_entropy(logits[0], labels, reduction="sum")
        num_targets += int((labels != -100).sum())
    (total / num_targets).backward()

    gradient = {key: parameter.grad for key, parameter in model.named_parameters()}
    torch.testing.assert_close(seen.gradient, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_a_run_that_was_stopped_twice_ends_as_if_it_never_was(whole, command, tmp_path):
    name, options = command
    _, never_stopped = whole(*command)
    arguments = [*options.split(), "--out", tmp_path]
    per_step = PER_STEP[name]

    # In step 7, between its micro-batches if it has several; then after the first of epoch 2.
    first = run(name, arguments, stop_after=7 * per_step - 1)
    second = run(name, arguments, stop_after=7 * per_step + 1)
    third = run(name, arguments)

    done = first.steps[:SAVE_EVERY] + second.steps[: STEPS_IN_EPOCH - SAVE_EVERY] + third.steps
    assert len(third.steps) == NUM_STEPS - STEPS_IN_EPOCH
    assert done == never_stopped.steps
    assert_equal(final_weights(third), final_weights(never_stopped))


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# Lightning's ways to break off.


@pytest.mark.parametrize(
    ("length", "limit", "saves"),
    [
        pytest.param(length, limit, saves, marks=() if number in (1, 3, 4) else pytest.mark.slow)
        for number, (length, limit, saves) in enumerate(
            product([{"max_steps": 26}, {"max_epochs": 3}], [None, 4], ["steps", "epochs"])
        )
    ],
)
def test_lightning_skips_and_repeats_nothing_wherever_it_breaks_off(
    whole, tmp_path, length, limit, saves
):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    example = load_example("train_lightning")
    _, never_stopped = whole("train_lightning", "")
    in_epoch = limit or STEPS_IN_EPOCH
    every = {"every_n_train_steps": 3} if saves == "steps" else {"every_n_epochs": 1}
    checkpoint = tmp_path / "last.ckpt"

    def train(stop_after: int | None) -> list[list[str]]:
        saving = ModelCheckpoint(
            dirpath=tmp_path,
            filename="last",
            enable_version_counter=False,
            save_on_train_epoch_end=saves == "epochs",
            **every,
        )
        trainer = Trainer(
            **length,
            limit_train_batches=limit,
            callbacks=[saving],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with Seen(stop_after) as seen:
            trainer.fit(
                example.Decoder(),
                datamodule=example.make_data(tmp_path),
                ckpt_path=str(checkpoint) if checkpoint.exists() else None,
            )
        return seen.steps

    stopped = train(in_epoch + 1)
    resumed = train(None)

    saved = (in_epoch + 1) // 3 * 3 if saves == "steps" else in_epoch
    # Three of Lightning's epochs of 4 steps: the third ends with the loader's first.
    num_steps = 26 if "max_steps" in length else 3 * in_epoch if limit is None else STEPS_IN_EPOCH
    done = stopped[:saved] + resumed
    assert done == never_stopped.steps[: len(done)]
    assert len(done) == num_steps


# What the pages say of the loader.


def test_accelerate_returns_the_loader_as_it_is_and_torchtitan_can_keep_its_state(whole):
    from accelerate import Accelerator

    out, _ = whole("train_plain", "")
    dataset = PackedStreamingDataset(streams_of(out), packing=Packing(max_seq_len=MAX_SEQ_LEN))
    loader = PackedDataLoader(dataset)

    assert Accelerator(cpu=True).prepare(loader) is loader
    assert isinstance(loader, Stateful)


# Two ranks.


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> SimpleNamespace:
    """What two ranks saw: each example whole, and stopped twice."""
    out = tmp_path_factory.mktemp("two_ranks")
    told: dict[str, Any] = {"out": str(out), "runs": []}
    for name in RANKS:
        per_step = PER_STEP[name] // 2
        stops = {"whole": [None], "stopped": [7 * per_step - 1, 7 * per_step + 1, None]}
        told["runs"] += [
            {
                "example": name,
                "arguments": ["--out", str(out / name / folder)],
                "stop_after": stop_after,
            }
            for folder in stops
            for stop_after in stops[folder]
        ]
    (out / "told.json").write_text(json.dumps(told))
    run_job("trainers_job.py", out / "told.json")
    steps = [
        [json.loads((out / f"{number}-rank{rank}.json").read_text()) for rank in range(2)]
        for number in range(len(told["runs"]))
    ]
    return SimpleNamespace(
        out=out, steps={"train_hf_trainer": steps[:4], "train_accelerate": steps[4:]}
    )


def of_both(ranks: list[list[list[str]]]) -> list[list[str]]:
    """The packs of each step, on whichever rank they were."""
    return [sorted(one + other) for one, other in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_train_on_each_pack_once(two_ranks, name):
    ranks = two_ranks.steps[name][0]
    batches = global_batches(two_ranks.out / name / "whole", 3, name)

    assert {len(step) for rank in ranks for step in rank} == {GLOBAL_BATCH // 2}
    assert of_both(ranks) == [sorted(map(digest_of, batch["tokens"])) for batch in batches]


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_have_the_gradient_of_one(two_ranks, whole, name):
    number = 4 * RANKS.index(name)
    gradient = torch.load(two_ranks.out / f"{number}.pt", weights_only=True)

    _, alone = whole(name, "")

    torch.testing.assert_close(gradient, alone.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_that_were_stopped_go_on(two_ranks, name):
    whole_run, *parts = two_ranks.steps[name]

    first, second, third = (of_both(part) for part in parts)

    done = first[:SAVE_EVERY] + second[: STEPS_IN_EPOCH - SAVE_EVERY] + third
    assert done == of_both(whole_run)


# The pages.


def test_every_example_has_a_page_and_every_page_examples_that_exist():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\b(train_\w+\.py)\b", page)}

    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name, _ in COMMANDS} == set(PER_STEP)
    # The code of Megatron-LM's page is run beside megatron-core, in test_other_environments.py.
    without = [page.stem for page in PAGES if not COMMAND.search(page.read_text())]
    assert without == ["megatron"]
    assert len(PAGES) == len(PER_STEP) + 1


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_each_command_runs_as_it_is_written(command, tmp_path):
    name, options = command
    subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *options.split()],
        cwd=tmp_path,
        env=environment() | {"OMP_NUM_THREADS": "2"},
        timeout=PATIENCE_S,
        check=True,
    )
    assert list((tmp_path / "train-output").glob("*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_torchrun_goes_on_with_another_number_of_ranks(name, tmp_path):
    out = tmp_path / "out"
    for num_ranks, steps in ((2, 10), (1, 15), (4, 20)):
        log = tmp_path / f"log{num_ranks}.txt"
        arguments = ["--out", out, "--steps", steps]
        script = ROOT / "examples" / f"{name}.py"
        with torchrun(script, arguments, log=log, num_ranks=num_ranks) as job:
            job.wait()
    assert (out / "checkpoint-20").is_dir()
