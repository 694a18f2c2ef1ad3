"""Models of transformers that do not find the edges in position_ids, and what docs/formats.md says.

All have the weights that transformers gives them by default: a leak is at its weakest there.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from streampack import PackedStreamingDataset, Packing, Stream
from streampack.errors import ConfigError
from streampack.formats import to_hf
from streampack.testing import assert_no_leak
from streampack.write import write_stream
from tests.helpers.packs import ROWS_OF_4, VOCABULARY, native_batch

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
SHAPE |= {"max_position_embeddings": 64, "pad_token_id": 0}
UNGROUPED = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
MAMBA |= {"mamba_chunk_size": 16}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"rotary_dim": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8}

# By the name on the page: transformers' name, and the options of a tiny one.
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOss", SHAPE | {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
    "Falcon": ("Falcon", UNGROUPED),
    "OPT": ("OPT", UNGROUPED | {"ffn_dim": 32, "word_embed_proj_dim": 32}),
}
# Their masks look for edges since version 5.
MASKED_BEFORE_5: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-MoE": ("Qwen2Moe", SHAPE | EXPERTS),
    "StableLM": ("StableLm", SHAPE),
    "GPT-J": ("GPTJ", GPT),
    "CodeGen": ("CodeGen", GPT),
    "GPT-Neo": (
        "GPTNeo",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "OLMoE": ("Olmoe", SHAPE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "GraniteMoE": ("GraniteMoe", SHAPE | {"num_local_experts": 4}),
    "Nemotron": ("Nemotron", SHAPE),
    "Persimmon": ("Persimmon", UNGROUPED),
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": (
        "Qwen3Next",
        SHAPE
        | EXPERTS
        | LINEAR
        | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Bamba": ("Bamba", SHAPE | MAMBA | {"attn_layer_indices": [1]}),
    "Falcon-H1": ("FalconH1", SHAPE | MAMBA | {"mamba_d_ssm": 64}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        SHAPE
        | MAMBA
        | {"num_local_experts": 4, "shared_intermediate_size": 16}
        | {"layer_types": ["mamba", "attention"]},
    ),
    "Jamba": (
        "Jamba",
        SHAPE
        | {"use_mamba_kernels": False, "num_experts": 2, "mamba_d_state": 8}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "LFM2": ("Lfm2", SHAPE | {"layer_types": ["conv", "full_attention"]}),
}
WITHOUT_POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba": ("Mamba", UNGROUPED | {"state_size": 8}),
    "Mamba-2": (
        "Mamba2",
        UNGROUPED
        | {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "RWKV": ("Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
    "Bloom": ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "MPT": ("Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 2}),
}
LEAKING = MASKED | MASKED_BEFORE_5 | RECURRENT | WITHOUT_POSITIONS
IS_BEFORE_5 = int(transformers.__version__.partition(".")[0]) < 5
# Experts get other groups of tokens if samples are replaced, and so round in another way.
CLEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", SHAPE | {"num_local_experts": 4, "num_hidden_layers": 12}),
    "Qwen3-MoE": ("Qwen3Moe", SHAPE | EXPERTS | {"head_dim": 16, "num_hidden_layers": 12}),
    "Llama 4": ("Llama4Text", SHAPE | {"num_local_experts": 2, "intermediate_size_mlp": 32}),
    "Cohere": ("Cohere", SHAPE),
    "SmolLM3": ("SmolLM3", SHAPE),
}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of modules that a later torch deprecates
]


def model_of(name: str) -> Any:
    """A tiny model at its default initialisation, in sdpa where it has that."""
    torch.manual_seed(0)
    kind, options = (LEAKING | CLEAN)[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    make = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")._from_config
    try:
        return make(config, attn_implementation="sdpa").eval()
    except ValueError:
        return make(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MASKED | RECURRENT | (MASKED_BEFORE_5 if IS_BEFORE_5 else {}))
def test_a_leak_is_caught_at_the_initial_weights(name: str) -> None:
    with pytest.raises(AssertionError, match=r"the segment saw row 0: tokens 0 to 7"):
        assert_no_leak(model_of(name), native_batch(ROWS_OF_4, 24))


@pytest.mark.parametrize("name", CLEAN | ({} if IS_BEFORE_5 else MASKED_BEFORE_5))
def test_a_model_that_finds_the_edges_is_never_accused(name: str) -> None:
    assert_no_leak(model_of(name), native_batch(ROWS_OF_4, 24))


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_a_model_without_positions_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="takes input_ids but no position_ids"):
        assert_no_leak(model_of(name), native_batch(ROWS_OF_4, 24))


def with_a_dense_mask(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The logits of a model that gets the 4-D mask."""
    logits: torch.Tensor = model(**to_hf(batch, dense=True)).logits
    return logits


@pytest.mark.parametrize("name", MASKED | MASKED_BEFORE_5)
def test_a_dense_mask_keeps_the_samples_apart(name: str) -> None:
    model = model_of(name)
    assert_no_leak(partial(with_a_dense_mask, model), native_batch(ROWS_OF_4, 24))


@pytest.mark.parametrize("name", ["Bamba", "Falcon-H1", "LFM2", "Qwen3-Next"])
def test_a_dense_mask_does_not_stop_what_is_no_attention(name: str) -> None:
    # Falcon-H1's convolutions move a logit by 1e-5 of what its own tokens move.
    with pytest.raises(AssertionError, match="the segment saw row 0: tokens 0 to 7"):
        assert_no_leak(partial(with_a_dense_mask, model_of(name)), native_batch(ROWS_OF_4, 24))


@pytest.mark.parametrize("name", RECURRENT | WITHOUT_POSITIONS)
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


def test_the_page_names_the_models_that_leak_and_what_to_use() -> None:
    text = PAGE.read_text()
    table = re.search(r"\| architectures \|.*?\n\n", text, re.DOTALL)
    assert table is not None
    rows = [row.split("|")[1:4] for row in table[0].strip().splitlines()[2:]]
    names_of = {names.rpartition(":")[2]: way_out for names, _, way_out in rows}
    named = {
        name.strip(): way_out for names, way_out in names_of.items() for name in names.split(",")
    }
    assert set(named) == set(LEAKING)
    for name, way_out in named.items():
        expected = "dense=True" if name in MASKED | MASKED_BEFORE_5 else "max_samples_per_pack=1"
        assert expected in way_out
