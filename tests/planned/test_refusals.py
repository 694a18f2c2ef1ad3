"""Epochs without a batch are errors, on which a training loop would spin."""

from __future__ import annotations

from typing import Any

import pytest

from streampack.errors import ConfigError, DataError
from streampack.loader.loader import PackedDataLoader
from tests.helpers import conformance

CASES = {
    "samples that are all too long": (
        {"max_seq_len": 16, "packing": {"overflow": "drop"}},
        DataError,
        "epoch 0: all of its samples are longer than max_seq_len=16",
        {"max_seq_len": 32, "packing": {"overflow": "drop"}},
    ),
    "fewer packs than a global batch": (
        {"mixing": {"epoch_end": "drop", "global_batch_size": 64}},
        ConfigError,
        "epoch_end='drop' leaves no batch",
        {"mixing": {"epoch_end": "pad", "global_batch_size": 64}},
    ),
}


@pytest.mark.parametrize("loader_of", [iter, PackedDataLoader], ids=["dataset", "loader"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_epoch_without_a_batch_is_an_error_and_its_way_out_gives_batches(
    tmp_path, case, loader_of
):
    options, error, message, way_out = case
    written = conformance.write_streams(tmp_path, [[20] * 12])

    def batches(options: dict[str, Any]) -> list[Any]:
        return list(loader_of(conformance.make(written, **options)))

    with pytest.raises(error, match=message):
        batches(options)
    assert batches(way_out)
