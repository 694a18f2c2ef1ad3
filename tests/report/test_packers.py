"""The comparison of packers: its counts match the packs."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.config import Packing
from streampack.report.packers import packer_result, packings_to_compare
from tests.helpers import builders
from tests.helpers.verbs import call_verb


def call(*arguments: object) -> str:
    return call_verb("compare-packers", *arguments)


def test_next_fit_of_six_and_five_tokens_wastes_nine_of_twenty_and_waits_for_one_pack():
    result = packer_result(np.array([6, 5] * 50), Packing(max_seq_len=10, method="next_fit"))

    assert result.fill == pytest.approx(550 / 1000, abs=0.01)
    assert result.cuts_per_pack == 0
    # As each sample arrives, the previous pack leaves; only the first sample has no pack before it.
    assert result.wait == (pytest.approx(98 / 99), 1, 1)


def test_cuts_of_samples_longer_than_a_pack_are_not_counted_and_others_are():
    long = packer_result(np.array([25, 5] * 50), Packing(max_seq_len=10, method="exact_fit"))
    cut = packer_result(np.array([6] * 100), Packing(max_seq_len=10, method="concat"))

    assert (long.fill, long.cuts_per_pack) == (1, 0)
    # From any multiple of 30 tokens on, three of five packs of 10 end within a sample of 6.
    assert cut.fill == 1
    assert cut.cuts_per_pack == pytest.approx(2 / 3, abs=0.02)


def test_a_sample_that_waits_is_counted_with_the_packs_that_leave_before_it():
    packing = Packing(max_seq_len=10, method="first_fit", open_packs=2)

    result = packer_result(np.array([6, 5, 5, 5, 5, 7, 7]), packing)

    # The packs are 1+2 and 3+4; then 0 closes, and the last two never leave.
    assert result.wait == (pytest.approx(2 / 5), 2, 2)


def test_the_verb_compares_made_up_lengths_and_those_of_a_stream(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    builders.write_stream_files(tmp_path / "news", [5, 40, 7, 30, 12, 33] * 10)

    tables = call(
        "--max-seq-len", 64, "--samples", 200, "--kind", "sft", "--stream", tmp_path / "news"
    )
    one = call("--max-seq-len", 64, "--samples", 200, "--kind", "web", "--markdown")

    assert "sft 64" in tables
    assert "news 64" in tables
    assert tables.count("exact_fit, split_gap=0.01") == 2
    rows = [[cell.strip() for cell in line.split("|")] for line in one.splitlines() if line.strip()]
    assert rows[0][1:4] == ["lengths", "packer", "fill %"]
    assert [row[2] for row in rows[2:]] == list(packings_to_compare(64))
