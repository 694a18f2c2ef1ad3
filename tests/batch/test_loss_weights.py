"""Loss weights: packing, micro-batches and ranks do not change the average."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from streampack.formats import count_units, global_units, loss_weights
from tests.helpers.packs import ROWS_OF_4, VOCABULARY, native_batch, samples_of

AVERAGES = ("tokens", "samples", "packs")
average = st.sampled_from(AVERAGES)
every_average = pytest.mark.parametrize("average", AVERAGES)


pytestmark = pytest.mark.usefixtures("one_thread")


def masked_batch(seed: int = 0, rows: list[list[int]] = ROWS_OF_4) -> dict[str, Any]:
    """A batch with some labels ignored, as prompts are, and a sample without any target."""
    batch = native_batch(rows, 24, seed=seed, cuts=[(0, 1)])
    generator = torch.Generator().manual_seed(seed)
    ignored = torch.rand(batch["labels"].shape, generator=generator) < 0.3
    batch["labels"].masked_fill_(ignored, -100)
    return batch


def token_losses(batch: dict[str, Any], seed: int = 0) -> torch.Tensor:
    """A loss for every token, 0 if it is ignored; shape (B, S)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((*batch["labels"].shape, VOCABULARY), generator=generator)
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


def mean_loss(batches: list[dict[str, Any]], losses: list[torch.Tensor], average: str) -> float:
    """The average in plain Python, one token, sample or pack at a time."""
    means: list[float] = []
    for batch, loss in zip(batches, losses, strict=True):
        places = []
        if average == "samples":
            places = [(row, slice(at, at + length)) for row, at, length in samples_of(batch)]
        elif average == "packs":
            places = [(row, slice(0, 24)) for row in range(len(batch["tokens"]))]
        else:
            places = [(row, slice(i, i + 1)) for row in range(len(loss)) for i in range(24)]
        for row, inside in places:
            targets = batch["labels"][row, inside] != -100
            if targets.any():
                means.append(float(loss[row, inside][targets].mean()))
    return sum(means) / len(means)


@given(average=average, seed=st.integers(0, 20))
def test_weights_of_a_batch_alone_give_its_average(average, seed):
    batch = masked_batch(seed)
    weights, losses = loss_weights(batch, average=average), token_losses(batch)
    assert (weights.dtype, weights.shape) == (torch.float32, batch["labels"].shape)
    assert (weights[batch["labels"] == -100] == 0).all()
    assert abs(float(weights.sum()) - 1) < 1e-5
    expected = mean_loss([batch], [losses], average)
    assert abs(float((weights * losses).sum()) - expected) < 1e-5


@every_average
def test_micro_batches_with_global_units_add_up_to_the_average_of_all(average):
    batches = [masked_batch(0), masked_batch(1, [[3], [], [20, 4], [1, 2]]), masked_batch(2)]
    losses = [token_losses(batch, seed) for seed, batch in enumerate(batches)]
    units = global_units(batches, average=average)
    total = sum(
        float((loss_weights(batch, average=average, units=units) * loss).sum())
        for batch, loss in zip(batches, losses, strict=True)
    )
    assert abs(total - mean_loss(batches, losses, average)) < 1e-5


@every_average
def test_how_samples_share_packs_changes_only_the_average_over_packs(average):
    lengths = [7, 12, 5, 9, 10]
    together, apart = native_batch([lengths], 48), native_batch([[n] for n in lengths], 48)
    value = {"tokens": 38, "samples": 5, "packs": 1}[average]  # a sample's last token: no target
    assert count_units(together, average=average) == value
    weights = [loss_weights(batch, average=average) for batch in (together, apart)]
    there = [row[row > 0] for row in weights]
    if average == "packs":
        assert not torch.allclose(*there)
    else:
        assert torch.allclose(*there)


@every_average
def test_padding_within_a_segment_and_samples_without_targets_count_nothing(average):
    padded, bare = (native_batch([[7, 6], [5], []], 24, multiple=m) for m in (4, 1))
    for batch in (padded, bare):
        batch["labels"][1] = -100
    assert count_units(padded, average=average) == count_units(bare, average=average)
    there = [loss_weights(batch, average=average) for batch in (padded, bare)]
    assert torch.equal(*[weights[weights > 0] for weights in there])


# Two ranks, two micro-batches each, gradients averaged by DDP.

STEP = [[masked_batch(0), masked_batch(1)], [masked_batch(2, [[2], [], [], []]), masked_batch(3)]]


def small_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).double()


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(batch["tokens"]).transpose(1, 2)
    return functional.cross_entropy(logits, batch["labels"], reduction="none")


def train_rank(rank: int, folder: str) -> None:
    """Take an optimizer step with each average, and save its units and gradients in `folder`."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    found = {}
    for average in AVERAGES:
        model = DistributedDataParallel(small_model())
        units = global_units(STEP[rank], average=average)
        *first, last = (
            (batch, loss_weights(batch, average=average, units=units, num_ranks=2))
            for batch in STEP[rank]
        )
        with model.no_sync():
            for batch, weights in first:
                (weights * loss_of(model, batch)).sum().backward()
        (last[1] * loss_of(model, last[0])).sum().backward()
        found[average] = (units, [weight.grad for weight in model.parameters()])
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.processes
def test_ddp_with_accumulation_has_the_gradient_of_the_whole_batch(tmp_path):
    # Not forked, since a child would inherit locks held by threads of earlier tests.
    ranks = multiprocessing.start_processes(
        train_rank, (str(tmp_path),), nprocs=2, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + 180
    while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):  # at the end of each
        if time.monotonic() >= deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail("the ranks did not finish within 180 s")

    batches = [batch for rank in STEP for batch in rank]
    for average in AVERAGES:
        units = sum(count_units(batch, average=average) for batch in batches)
        model = small_model()
        for batch in batches:
            weights = loss_weights(batch, average=average, units=units)
            (weights * loss_of(model, batch)).sum().backward()
        for rank in (0, 1):
            found_units, gradients = torch.load(tmp_path / f"{rank}.pt")[average]
            assert found_units == units
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                assert torch.allclose(weight.grad, gradient, atol=1e-7)
