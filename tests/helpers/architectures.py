"""Tiny models of transformers' families, and whether they keep the samples of a pack apart.

::

    python -m tests.helpers.architectures     measure with the transformers that is installed, and
                                              write architecture_results.py and the page
    python -m tests.helpers.architectures --page   write the page only

All models keep the weights of transformers' default initialisation, under which a leak is weakest.
Flash attention runs all of transformers' code except the kernel; see `flash.py`.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from streampack.errors import ConfigError
from streampack.formats import to_hf
from streampack.testing import assert_no_leak
from tests.helpers import architecture_results
from tests.helpers.architecture_results import Architecture
from tests.helpers.flash import flash_in_torch
from tests.helpers.packs import ROWS_OF_4, VOCABULARY, native_batch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architectures.md"
MODULE = ROOT / "tests" / "helpers" / "architecture_results.py"
VERSION = ".".join(
    transformers.__version__.split(".")[: 2 if transformers.__version__ < "5" else 1]
)

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
WINDOW = {"sliding_window": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "head_dim": 8}
LATENT |= {"first_k_dense_replace": 1}

ATTENTION, SLIDING, STATES, HYBRID = "attention", "sliding windows", "state space", "hybrid"

# By their name on the page: transformers' name, what the layers are, the options of a tiny one.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 2 and 3": ("Llama", ATTENTION, SHAPE),
    "Llama 4": (
        "Llama4Text",
        ATTENTION,
        SHAPE | {"num_local_experts": 2, "intermediate_size_mlp": 32},
    ),
    "Mistral": ("Mistral", SLIDING, SHAPE | WINDOW),
    "Mixtral": ("Mixtral", ATTENTION, SHAPE | {"num_local_experts": 4}),
    "Qwen2": ("Qwen2", ATTENTION, SHAPE),
    "Qwen2-MoE": ("Qwen2Moe", ATTENTION, SHAPE | EXPERTS),
    "Qwen3": ("Qwen3", ATTENTION, SHAPE | {"head_dim": 16}),
    "Qwen3-MoE": ("Qwen3Moe", ATTENTION, SHAPE | EXPERTS | {"head_dim": 16}),
    "Qwen3-Next": (
        "Qwen3Next",
        HYBRID,
        SHAPE
        | EXPERTS
        | LINEAR
        | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Gemma": ("Gemma", ATTENTION, SHAPE | {"head_dim": 16}),
    "Gemma 2": ("Gemma2", SLIDING, SHAPE | WINDOW | {"head_dim": 16}),
    "Gemma 3": ("Gemma3Text", SLIDING, SHAPE | WINDOW | {"head_dim": 16}),
    "Phi": ("Phi", ATTENTION, SHAPE),
    "Phi-3 and 4": ("Phi3", SLIDING, SHAPE | WINDOW),
    "GPT-2": ("GPT2", ATTENTION, {k: v for k, v in GPT.items() if k != "rotary_dim"}),
    "GPT-Neo": (
        "GPTNeo",
        SLIDING,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "GPT-NeoX": ("GPTNeoX", ATTENTION, UNGROUPED),
    "GPT-J": ("GPTJ", ATTENTION, GPT),
    "CodeGen": ("CodeGen", ATTENTION, GPT),
    "gpt-oss": ("GptOss", SLIDING, SHAPE | WINDOW | {"head_dim": 16, "num_local_experts": 4}),
    "StarCoder 2": ("Starcoder2", SLIDING, SHAPE | WINDOW),
    "StableLM": ("StableLm", ATTENTION, SHAPE),
    "OLMo 2": ("Olmo2", ATTENTION, SHAPE),
    "OLMo 3": ("Olmo3", SLIDING, SHAPE | WINDOW),
    "OLMoE": ("Olmoe", ATTENTION, SHAPE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": ("Granite", ATTENTION, SHAPE),
    "GraniteMoE": ("GraniteMoe", ATTENTION, SHAPE | {"num_local_experts": 4}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        HYBRID,
        SHAPE
        | MAMBA
        | {"num_local_experts": 4, "shared_intermediate_size": 16}
        | {"layer_types": ["mamba", "attention"]},
    ),
    "Cohere": ("Cohere", ATTENTION, SHAPE),
    "SmolLM3": ("SmolLM3", ATTENTION, SHAPE),
    "GLM-4": ("Glm4", ATTENTION, SHAPE | {"head_dim": 16}),
    "DeepSeek-V3": ("DeepseekV3", ATTENTION, SHAPE | LATENT),
    "Seed-OSS": ("SeedOss", ATTENTION, SHAPE | {"head_dim": 16}),
    "EXAONE 4": ("Exaone4", SLIDING, SHAPE | WINDOW | {"sliding_window_pattern": 2}),
    "Nemotron": ("Nemotron", ATTENTION, SHAPE),
    "Persimmon": ("Persimmon", ATTENTION, UNGROUPED),
    "Falcon": ("Falcon", ATTENTION, UNGROUPED),
    "OPT": ("OPT", ATTENTION, UNGROUPED | {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    "Bloom": (
        "Bloom",
        ATTENTION,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    ),
    "MPT": (
        "Mpt",
        ATTENTION,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 2},
    ),
    "Bamba": ("Bamba", HYBRID, SHAPE | MAMBA | {"attn_layer_indices": [1]}),
    "Falcon-H1": ("FalconH1", HYBRID, SHAPE | MAMBA | {"mamba_d_ssm": 64}),
    "Jamba": (
        "Jamba",
        HYBRID,
        SHAPE
        | {"use_mamba_kernels": False, "num_experts": 2, "mamba_d_state": 8}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "LFM2": ("Lfm2", HYBRID, SHAPE | {"layer_types": ["conv", "full_attention"]}),
    "Mamba": ("Mamba", STATES, UNGROUPED | {"state_size": 8}),
    "Mamba-2": (
        "Mamba2",
        STATES,
        UNGROUPED
        | {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "RWKV": (
        "Rwkv",
        STATES,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    ),
}


def config_of(name: str) -> Any:
    kind, _, options = FAMILIES[name]
    return getattr(transformers, f"{kind}Config")(**options)


def model_of(name: str, attention: str | None = None) -> Any:
    """A tiny model with its default initialisation, using SDPA by default if it supports that."""
    torch.manual_seed(0)
    kind = FAMILIES[name][0]
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    make = getattr(transformers, kind.removesuffix("Text") + head)._from_config
    if attention is not None:
        return make(config_of(name), attn_implementation=attention).eval()
    try:
        return make(config_of(name), attn_implementation="sdpa").eval()
    except ValueError:
        return make(config_of(name), attn_implementation="eager").eval()


def leaks(model: Any, batch_format: Any, rows: Any = ROWS_OF_4) -> bool:
    try:
        assert_no_leak(model, native_batch(rows, 24), batch_format=batch_format)
    except AssertionError:
        return True
    return False


def measure_hf(name: str) -> str:
    try:
        model = model_of(name)
    except AttributeError:
        return "absent"
    try:
        if not leaks(model, "hf"):
            return "apart"
    except ConfigError:  # it takes no position_ids
        return "single"
    try:
        return "single" if leaks(model, partial(to_hf, dense=True)) else "dense"
    except (RuntimeError, ValueError, TypeError):
        return "single"


def measure_flash(name: str) -> str:
    with flash_in_torch() as attention:
        try:
            model = model_of(name, attention)
        except AttributeError:
            return "absent"
        except ValueError:
            return "no flash"
        except (
            ImportError,
            KeyError,
        ):  # this version only accepts known names, and the real kernel
            return "kernels"
        if not getattr(model, "_supports_flash_attn", False):
            return "no flash"
        try:
            return "single" if leaks(model, "hf_flash") else "apart"
        except ConfigError:  # it takes no position_ids
            return "single"
        except (
            ImportError,
            IndexError,
            NameError,
            RuntimeError,
            StopIteration,
            TypeError,
            ValueError,
        ):
            return "kernels"  # it imports the real kernel by name


def measure(name: str) -> tuple[str, str]:
    return measure_hf(name), measure_flash(name)


def model_type_of(name: str) -> str:
    return config_of(name).model_type


def measure_all() -> dict[str, Architecture]:
    """Results for the installed transformers, merged with the module's for other versions."""
    results = dict(architecture_results.RESULTS)
    for name, (_, layers, _) in FAMILIES.items():
        try:
            kind = model_type_of(name)
        except AttributeError:
            continue
        before = dict(results[kind].results) if kind in results else {}
        results[kind] = Architecture(name, layers, before | {VERSION: measure(name)})
    order = list(FAMILIES)
    by_name = sorted(results.items(), key=lambda item: order.index(item[1].name))
    return {
        kind: each._replace(results=dict(sorted(each.results.items()))) for kind, each in by_name
    }


TEXTS = {
    "apart": "no leak",
    "dense": "leaks: use the 4-D mask",
    "single": "leaks: one sample in a row",
    "no flash": "no flash attention",
    "kernels": "needs kernels, not run",
    "absent": "not in this version",
}


def table(results: dict[str, Architecture]) -> str:
    versions = sorted({version for each in results.values() for version in each.results})
    head = ["architecture", "layers"]
    head += [f"`{f}`, {v}" for f in ("hf", "hf_flash") for v in versions]
    lines = [head, ["---"] * len(head)]
    for each in results.values():
        cells = [each.results.get(v, ("absent", "absent"))[f] for f in (0, 1) for v in versions]
        lines.append([each.name, each.layers, *(TEXTS[cell] for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(kind: str, each: Architecture) -> str:
    results = (f"{version}: {', '.join(pair)}" for version, pair in each.results.items())
    return f"{' | '.join([kind, each.name, each.layers, *results])}\n"


def write_page() -> None:
    page = PAGE.read_text()
    new = f"<!-- results -->\n\n{table(dict(architecture_results.RESULTS))}\n\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- results -->.*<!-- end -->", new, page, flags=re.DOTALL))


def main() -> None:
    warnings.simplefilter("ignore")
    if "--page" not in sys.argv:
        rows = "".join(row(kind, each) for kind, each in measure_all().items())
        new = f'TABLE = """\\\n{rows}"""\n'
        text = re.sub(r'TABLE = """.*?"""\n', lambda _: new, MODULE.read_text(), flags=re.DOTALL)
        MODULE.write_text(text)
        importlib.reload(architecture_results)
    write_page()


if __name__ == "__main__":
    main()
