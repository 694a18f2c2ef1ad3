"""Which models of transformers keep the samples of a pack apart, as `architectures.py` measured.

Results are of transformers 4.57 and 5, in the formats "hf" (sdpa, or eager) and "hf_flash":

    apart     no leak
    dense     leaks; not with the 4-D mask
    single    leaks or cannot be told where samples begin: one sample in a row
    no flash  the model has no flash attention
    kernels   it needs a kernel that a CPU has not, so it was not run
    absent    this version does not have it

`make architectures` measures them again, and writes this file and docs/architectures.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Architecture(NamedTuple):
    """What was measured of a family of models."""

    name: str
    layers: str
    """What its layers are: attention, sliding windows, state space, or a hybrid."""
    results: Mapping[str, tuple[str, str]]
    """By version of transformers, the results in "hf" and "hf_flash"."""


# Written by `make architectures`: model_type, name, layers, results by version.
TABLE = """\
llama | Llama 2 and 3 | attention | 4.57: apart, apart | 5: apart, apart
llama4_text | Llama 4 | attention | 4.57: apart, no flash | 5: apart, no flash
mistral | Mistral | sliding windows | 4.57: apart, apart | 5: apart, apart
mixtral | Mixtral | attention | 4.57: apart, apart | 5: apart, apart
qwen2 | Qwen2 | attention | 4.57: apart, apart | 5: apart, apart
qwen2_moe | Qwen2-MoE | attention | 4.57: dense, kernels | 5: apart, apart
qwen3 | Qwen3 | attention | 4.57: apart, apart | 5: apart, apart
qwen3_moe | Qwen3-MoE | attention | 4.57: apart, apart | 5: apart, apart
qwen3_next | Qwen3-Next | hybrid | 4.57: single, no flash | 5: single, kernels
gemma | Gemma | attention | 4.57: apart, apart | 5: apart, apart
gemma2 | Gemma 2 | sliding windows | 4.57: apart, apart | 5: apart, kernels
gemma3_text | Gemma 3 | sliding windows | 4.57: apart, apart | 5: apart, apart
phi | Phi | attention | 4.57: apart, apart | 5: apart, apart
phi3 | Phi-3 and 4 | sliding windows | 4.57: apart, apart | 5: apart, apart
gpt2 | GPT-2 | attention | 4.57: apart, kernels | 5: apart, kernels
gpt_neo | GPT-Neo | sliding windows | 4.57: dense, kernels | 5: apart, kernels
gpt_neox | GPT-NeoX | attention | 4.57: apart, apart | 5: apart, apart
gptj | GPT-J | attention | 4.57: dense, kernels | 5: apart, kernels
codegen | CodeGen | attention | 4.57: dense, no flash | 5: apart, no flash
gpt_oss | gpt-oss | sliding windows | 4.57: dense, apart | 5: dense, kernels
starcoder2 | StarCoder 2 | sliding windows | 4.57: apart, apart | 5: apart, apart
stablelm | StableLM | attention | 4.57: dense, kernels | 5: apart, apart
olmo2 | OLMo 2 | attention | 4.57: apart, apart | 5: apart, apart
olmo3 | OLMo 3 | sliding windows | 4.57: apart, apart | 5: apart, apart
olmoe | OLMoE | attention | 4.57: dense, kernels | 5: apart, apart
granite | Granite | attention | 4.57: apart, apart | 5: apart, apart
granitemoe | GraniteMoE | attention | 4.57: dense, kernels | 5: apart, apart
granitemoehybrid | GraniteMoeHybrid | hybrid | 4.57: single, kernels | 5: single, single
cohere | Cohere | attention | 4.57: apart, apart | 5: apart, apart
smollm3 | SmolLM3 | attention | 4.57: apart, apart | 5: apart, apart
glm4 | GLM-4 | attention | 4.57: apart, apart | 5: apart, apart
deepseek_v3 | DeepSeek-V3 | attention | 4.57: apart, apart | 5: apart, apart
seed_oss | Seed-OSS | attention | 4.57: apart, apart | 5: apart, apart
exaone4 | EXAONE 4 | sliding windows | 4.57: apart, apart | 5: apart, apart
nemotron | Nemotron | attention | 4.57: dense, kernels | 5: apart, apart
persimmon | Persimmon | attention | 4.57: dense, kernels | 5: apart, apart
falcon | Falcon | attention | 4.57: dense, kernels | 5: dense, kernels
opt | OPT | attention | 4.57: dense, kernels | 5: dense, apart
bloom | Bloom | attention | 4.57: single, no flash | 5: single, no flash
mpt | MPT | attention | 4.57: single, no flash | 5: single, no flash
bamba | Bamba | hybrid | 4.57: single, kernels | 5: single, single
falcon_h1 | Falcon-H1 | hybrid | 4.57: single, kernels | 5: single, single
jamba | Jamba | hybrid | 4.57: single, kernels | 5: single, single
lfm2 | LFM2 | hybrid | 4.57: single, single | 5: single, single
mamba | Mamba | state space | 4.57: single, no flash | 5: single, no flash
mamba2 | Mamba-2 | state space | 4.57: single, no flash | 5: single, no flash
rwkv | RWKV | state space | 4.57: single, no flash | 5: single, no flash
"""


def _read(row: str) -> Architecture:
    name, layers, *results = row.split(" | ")
    by_version = (result.partition(": ")[::2] for result in results)
    pairs = ((version, result.split(", ")) for version, result in by_version)
    return Architecture(name, layers, {version: (hf, flash) for version, (hf, flash) in pairs})


RESULTS: Mapping[str, Architecture] = {
    kind: _read(row) for kind, _, row in (line.partition(" | ") for line in TABLE.splitlines())
}
