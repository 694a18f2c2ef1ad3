"""Models of transformers that leak between packed samples, as docs/architectures.md lists them.

All models keep the weights of transformers' default initialisation, under which a leak is weakest.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from streampack import PackedStreamingDataset, Packing, Stream
from streampack.errors import ConfigError
from streampack.formats import to_hf
from streampack.testing import assert_no_leak
from streampack.write import write_stream
from tests.helpers import architectures
from tests.helpers.architecture_results import RESULTS
from tests.helpers.architectures import FAMILIES, VERSION, config_of, measure, measure_hf, model_of
from tests.helpers.packs import ROWS_OF_4, VOCABULARY, native_batch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # some modules are deprecated in later versions of torch
]

RECURRENT = ("Qwen3-Next", "Bamba", "Falcon-H1", "GraniteMoeHybrid", "Jamba", "LFM2")
WITHOUT_POSITIONS = ("Mamba", "Mamba-2", "RWKV", "Bloom", "MPT")


# The slow ones try the other families, and all of them in hf_flash.
OFTEN = ("Llama 2 and 3", "Mistral", "Qwen3-MoE", "gpt-oss", "Falcon", "StableLM", "LFM2", "Bloom")


@pytest.mark.parametrize("name", OFTEN)
def test_the_table_has_what_is_measured_now(name: str) -> None:
    assert RESULTS[config_of(name).model_type].results[VERSION][0] == measure_hf(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_whole_table_has_what_is_measured_now(name: str) -> None:
    assert RESULTS[config_of(name).model_type].results[VERSION] == measure(name)


def test_the_page_has_the_table() -> None:
    assert architectures.table(dict(RESULTS)) in architectures.PAGE.read_text()
    assert len(RESULTS) == len(FAMILIES) >= 35
    assert all(set(each.results) == {"4.57", "5"} for each in RESULTS.values())


@pytest.mark.parametrize("name", ["Falcon", "Bamba"])
def test_a_leak_is_caught_with_the_way_out_that_was_tried(name: str) -> None:
    mask = r"batch_format=functools\.partial\(streampack\.formats\.to_hf, dense=True\), .* or "
    ways = f"{mask if name == 'Falcon' else ''}Packing"
    says = rf"the segment saw row 0: tokens 0 to 7.*\. Use {ways}\(max_samples_per_pack=1\); docs/"
    with pytest.raises(AssertionError, match=says):
        assert_no_leak(model_of(name), native_batch(ROWS_OF_4, 24))
    if name == "Falcon":
        dense = functools.partial(to_hf, dense=True)
        assert_no_leak(model_of(name), native_batch(ROWS_OF_4, 24), batch_format=dense)


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_a_model_without_positions_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="takes input_ids but no position_ids"):
        assert_no_leak(model_of(name), native_batch(ROWS_OF_4, 24))


@pytest.mark.parametrize("name", RECURRENT + WITHOUT_POSITIONS)
def test_one_sample_in_a_row_has_the_logits_that_it_has_alone(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_stream((rng.integers(1, VOCABULARY, n) for n in [9, 3, 20, 14]), str(tmp_path / "a"))
    packing = Packing(max_seq_len=24, max_samples_per_pack=1)
    dataset = PackedStreamingDataset(
        [Stream(local=str(tmp_path / "a"))], packing=packing, batch_size=4
    )
    batch, model = next(iter(dataset)), model_of(name).requires_grad_(False)

    together = model(input_ids=batch["tokens"], use_cache=False).logits

    rows = batch["segments"][:, 0].tolist()
    assert sorted(rows) == [0, 1, 2, 3]
    for row, length in zip(rows, batch["segments"][:, 5].tolist(), strict=True):
        alone = model(input_ids=batch["tokens"][row, :length][None], use_cache=False).logits[0]
        assert float((together[row, :length] - alone).abs().max()) < 1e-5
