"""A simulation predicts the run exactly: its padding, and the numbers its loaders report."""

from __future__ import annotations

import pytest

from streampack import AttentionCost, Balance, PackedDataLoader
from streampack.report import simulate
from streampack.runtime.resumable import engine_of
from streampack.streams.token_stream import TokenStream
from tests.helpers import conformance
from tests.helpers.conformance import worlds
from tests.helpers.examples import crossed

LENGTHS = ([5, 40, 7, 30, 12, 33, 1, 64, 9, 18] * 9, [90, 3, 150, 64, 20, 8] * 11)
WEIGHTS = [{"repeat": 1.5}, {"repeat": 0.75}]
SAME = ("streams", "packs", "tokens", "fill", "substituted")

OPTIONS = {
    "random": {"weights": WEIGHTS},
    "by tokens": {
        "weights": [{"proportion": 0.7}, {"proportion": 0.3}],
        "mixing": {"weight_unit": "tokens"},
    },
    "stratified": {"weights": WEIGHTS, "mixing": {"batching_method": "stratified"}},
    "per_stream": {
        "weights": WEIGHTS,
        "mixing": {"batching_method": "per_stream", "global_batch_size": 12},
    },
    "accumulated": {"mixing": {"global_batch_size": 12}},
    "drop": {"mixing": {"epoch_end": "drop", "global_batch_size": 12}},
    "carry": {"mixing": {"epoch_end": "carry"}},
    "truncate": {"packing": {"overflow": "truncate"}},
    "drop long": {"packing": {"overflow": "drop"}},
    "two lanes": {"order": {"num_lanes": 2}},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two streams; the second has samples longer than a pack."""
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), LENGTHS)


def ran(loader, steps=None):
    """Take batches, an epoch or a given number of them; return how many, and their padding."""
    num_steps = padding_tokens = padding_packs = num_epochs = 0
    while num_epochs == 0 or (steps is not None and num_steps < steps):
        num_epochs += 1
        for batch in loader:
            num_steps += 1
            is_padding = batch["document_ids"] == 0
            padding_tokens += int(is_padding.sum())
            padding_packs += int(is_padding.all(1).sum())
            if num_steps == steps:
                break
    return {
        "epochs": num_epochs,
        "steps": num_steps,
        "padding_packs": padding_packs,
        "padding_tokens": padding_tokens,
    }


def without_repeats(numbers):
    """Return the part that a loader's stats also have."""
    shown = {key: numbers[key] for key in SAME}
    shown["streams"] = {
        name: {key: value for key, value in stream.items() if key != "repeats"}
        for name, stream in numbers["streams"].items()
    }
    return shown


@every_option
def test_a_simulated_epoch_has_the_numbers_of_the_loaders_own(written, options):
    loader = PackedDataLoader(conformance.make(written, **options))
    counted = ran(loader)
    stats = loader.stats()

    numbers = simulate(conformance.make(written, **options))

    assert without_repeats(numbers) == {key: stats[key] for key in SAME}
    assert {key: numbers[key] for key in counted} == counted
    for stream, lengths in zip(numbers["streams"].values(), written.lengths, strict=True):
        assert stream["repeats"] == stream["samples"] / len(lengths)
    per_step = numbers["global_batch_size"] // 2
    assert numbers["global_batches"] == -(-numbers["steps"] // per_step)


@pytest.mark.parametrize("key", ["random", "stratified", "drop", "carry", "truncate"])
def test_simulated_steps_go_on_over_epochs_as_the_loaders_do(written, key):
    def make():
        return conformance.make(written, batch_size=1, **OPTIONS[key])

    steps = 5 * simulate(make())["steps"] // 2
    # If threads read ahead, the loader also counts what they dropped on the way.
    loader = PackedDataLoader(make(), prefetch_threads=0)
    counted = ran(loader, steps)
    stats = loader.stats()

    numbers = simulate(make(), steps=steps)

    assert numbers["epochs"] >= 3
    assert without_repeats(numbers) == {key: stats[key] for key in SAME}
    assert {key: numbers[key] for key in counted} == counted


def test_a_simulation_opens_no_shard_where_there_are_length_files(written, monkeypatch):
    monkeypatch.setattr(TokenStream, "open_shard", None)

    assert simulate(conformance.make(written))["tokens"] == sum(map(sum, written.lengths))


@pytest.mark.parametrize(
    ("key", "num_taken"),  # None is a whole epoch
    crossed(["random", "drop", "carry", "drop long"], [3, None, 0]),
)
def test_a_simulation_leaves_dataset_and_loader_as_they_are(written, key, num_taken):
    def run(is_simulated):
        dataset = conformance.make(written, batch_size=1, **OPTIONS[key])
        loader = PackedDataLoader(dataset, prefetch_threads=0)
        batches = iter(loader)
        _ = [next(batches) for _ in range(num_taken or 0)]
        if num_taken is None:
            _ = list(batches)
        before = loader.state_dict(), engine_of(dataset).state_here(), len(dataset), loader.stats()
        if is_simulated:
            simulate(dataset, steps=100)
            assert before == (
                loader.state_dict(),
                engine_of(dataset).state_here(),
                len(dataset),
                loader.stats(),
            )
        rest = [batch["tokens"].tolist() for batch in batches]
        return before[:3], rest, [batch["epoch"] for batch in loader], loader.state_dict()

    assert run(is_simulated=True) == run(is_simulated=False)


def test_a_simulation_of_a_loaded_state_begins_with_the_epoch_to_resume(written):
    dataset = conformance.make(written, batch_size=1, **OPTIONS["random"])
    loader = PackedDataLoader(dataset, prefetch_threads=0)
    batches = iter(loader)
    next(batches)
    resumed, expected = (
        conformance.make(written, batch_size=1, **OPTIONS["random"]),
        simulate(dataset),
    )
    resumed.load_state_dict(loader.state_dict())
    state = resumed.state_dict()
    assert simulate(resumed) != expected
    assert resumed.state_dict() == state
    _ = list(batches)
    resumed.load_state_dict(loader.state_dict())
    assert simulate(resumed) == expected


@pytest.mark.parametrize(
    ("within", "method"), crossed(["rank", "node", "batch"], ["random", "device_per_stream"])
)
def test_the_straggler_factor_is_that_of_the_batches_of_all_ranks(written, within, method):
    balance = Balance(within=within, cost=AttentionCost(hidden_size=8))
    mixing = {"global_batch_size": 24, "batching_method": method}

    def costs_of(balance: Balance | None) -> list[list[list[int]]]:
        """The cost of each rank's batch, by global batch and step."""
        ranks = [
            [balance_costs(batch) for batch in conformance.make(written, mixing=mixing, **options)]
            for options in (
                {"world": world, "balance": balance, "batch_size": 3} for world in worlds(4, 2)
            )
        ]
        steps = [list(step) for step in zip(*ranks, strict=True)]
        return [steps[n : n + 2] for n in range(0, len(steps) - 2, 2)]  # the last is padded

    def balance_costs(batch) -> int:
        rows = batch["segments"].numpy()
        lengths = rows[:, 5].astype(float)
        return int((lengths + lengths**2 / 96).sum() * 1024)

    def factor(batches) -> float:
        return sum(sum(map(max, steps)) * 4 / sum(map(sum, steps)) for steps in batches) / len(
            batches
        )

    dataset = conformance.make(
        written, mixing=mixing, batch_size=3, balance=balance, world=worlds(4, 2)[1]
    )
    found = simulate(dataset)["straggler"]
    assert found["planned"] == pytest.approx(factor(costs_of(None)), rel=1e-3)
    assert found["dealt"] == pytest.approx(factor(costs_of(balance)), rel=1e-3)
    assert found["is_dealt"]
    assert found["note"] is None
    if within == "batch":
        assert found["dealt"] <= found["planned"]
