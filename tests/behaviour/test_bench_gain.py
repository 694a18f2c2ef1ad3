"""benchmarks/bench_gain.py compares equal tokens and records how it measured."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WAYS = ["padded_max", "padded_longest", "padded_budget", "bucketed"]
WAYS += ["packed_mask", "packed_segments"]
MAX_SEQ_LEN, BATCH_SIZE = 24, 3


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The bench, imported as if it were run, with a single thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        yield import_module("bench_gain")
    torch.set_num_threads(threads)


def samples_of(lengths: list[int]) -> list[np.ndarray]:
    """Samples of these lengths in which no token occurs twice."""
    edges = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype=np.int32) for a, b in pairwise(edges)]


def epoch_of(way: Any) -> list[dict[str, Any]]:
    """The batches of an epoch for one layout."""
    return [next(way.batches) for _ in range(way.steps)]


LENGTHS = np.random.Generator(np.random.Philox(1)).integers(1, 40, 60).tolist()
EVERY_TURN = 1000  # enough to keep all batches


@pytest.mark.parametrize("number", range(len(WAYS)), ids=WAYS)
def test_every_way_sees_the_same_tokens_and_targets_once(bench: Any, number: int) -> None:
    samples = samples_of(LENGTHS)
    way = bench.layouts(samples, MAX_SEQ_LEN, BATCH_SIZE, EVERY_TURN)[number]
    epoch = epoch_of(way)

    cut = [sample[:MAX_SEQ_LEN].tolist() for sample in samples]
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in epoch:
        targets = batch["labels"] != bench.IGNORED
        pairs.update(
            zip(batch["tokens"][targets].tolist(), batch["labels"][targets].tolist(), strict=True)
        )
    assert way.name == WAYS[number]
    assert pairs == Counter(pair for ids in cut for pair in pairwise(ids))
    assert way.tokens == sum(map(len, cut))
    assert way.slots == sum(batch["tokens"].numel() for batch in epoch)


def test_the_losses_of_an_epoch_are_the_same_in_every_way(bench: Any) -> None:
    torch.manual_seed(3)
    samples = [sample % bench.VOCABULARY for sample in samples_of(LENGTHS)]
    model = bench.Decoder(bench.VOCABULARY, 16, 2, 2).double()
    model.requires_grad_(False)
    torch.nn.init.normal_(model.embedding.weight)  # large enough that a leak shows
    totals = []
    for way in bench.layouts(samples, MAX_SEQ_LEN, BATCH_SIZE, EVERY_TURN):
        total = 0.0
        for batch in epoch_of(way):
            logits = model(batch, way.kind).flatten(0, 1)
            total += float(cross_entropy(logits, batch["labels"].flatten(), reduction="sum"))
        totals.append(total)
    assert np.ptp(totals) < 1e-6 * totals[0], dict(zip(WAYS, totals, strict=True))


def test_lines_have_every_field_and_gains_are_those_of_the_numbers(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, plot, table = tmp_path / "lines", tmp_path / "plot.png", tmp_path / "table"
    words = ["--num-samples", "80", "--runs", "2", "--max-seq-len", "256", "--dim", "8"]
    words += ["--num-layers", "1", "--num-heads", "2", "--batch-size", "2"]
    words += ["--out", str(out), "--plot", str(plot), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", ["bench_gain.py", *words])

    bench.main()

    lines = {line["bench"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(lines) == [f"gain/{name}" for name in WAYS]
    for line in lines.values():
        assert line["unit"] == "tokens/s"
        assert len(line["runs"]) == 2
        assert line["median"] == pytest.approx(line["slots_per_s"] * line["fill"], rel=1e-2)
        assert line["epoch_s"] == pytest.approx(line["epoch_tokens"] / line["median"], abs=0.06)
        assert {"dim", "threads", "batch_size", "workload"} <= set(line["params"])
    padded, packed = lines["gain/padded_max"], lines["gain/packed_mask"]
    gain = packed["gain_over"]["padded_max"]
    assert gain["measured"] == pytest.approx(packed["median"] / padded["median"], abs=0.006)
    assert gain["bound"] == pytest.approx(packed["fill"] / padded["fill"], rel=1e-2)
    assert packed["torchtune_reports"] is None
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(table.read_text().splitlines()) == 2 + len(WAYS)
