"""The same fine-tuning in TRL and here, in an environment that has TRL.

``python trl_job.py FOLDER`` writes FOLDER/seen.json: of each, the optimizer steps, and the tokens
and labels of each sample that the model received.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

from streampack import Packing, chat_dataset
from streampack.hf import PackedTrainer
from tests.helpers.words import word_tokenizer

NUM_CHATS = 2000
MAX_SEQ_LEN = 128
WORDS = ["<pad>", "?", "<user>", "<assistant>", "<end>", *(f"w{n}" for n in range(200))]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {% generation %}"
    "{{ m.content }} <end>{% endgeneration %} {% else %}<user> {{ m.content }} <end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer() -> Any:
    words = word_tokenizer(*WORDS, unknown="?")
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )


def make_chats() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)

    def text() -> str:
        return " ".join(f"w{n}" for n in rng.integers(0, 200, rng.integers(1, 12)))

    return [
        {
            "messages": [
                {"role": role, "content": text()}
                for _ in range(rng.integers(1, 4))
                for role in ("user", "assistant")
            ]
        }
        for _ in range(NUM_CHATS)
    ]


def make_model() -> Any:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def recording(trainer: Any) -> list[Any]:
    """Return the samples that a trainer was trained on, as (tokens, labels)."""
    samples: list[Any] = []

    def record(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        ids, labels = inputs["input_ids"].flatten(), inputs["labels"].flatten()
        positions = inputs["position_ids"].flatten().tolist()
        edges = [at for at, position in enumerate(positions) if position == 0] + [len(positions)]
        for begin, end in pairwise(edges):
            sample = ids[begin:end].tolist(), labels[begin:end].tolist()
            if any(sample[0]):
                samples.append(sample)

    trainer.model.register_forward_pre_hook(
        lambda module, arguments, inputs: (
            record(module, arguments, inputs) if module.training else None
        ),
        with_kwargs=True,
    )
    return samples


def main() -> None:
    folder = Path(sys.argv[1])
    chats, tokenizer = make_chats(), make_tokenizer()
    common = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "use_cpu": True}
    common |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    theirs = SFTTrainer(
        model=make_model(),
        args=SFTConfig(
            str(folder / "trl"),
            max_length=MAX_SEQ_LEN,
            packing=True,
            assistant_only_loss=True,
            **common,
        ),
        train_dataset=Dataset.from_list(chats),
        processing_class=tokenizer,
    )
    packing = Packing(max_seq_len=MAX_SEQ_LEN, overflow="truncate")
    ours = PackedTrainer(
        model=make_model(),
        args=TrainingArguments(str(folder / "ours"), **common),
        train_dataset=chat_dataset(chats, tokenizer, packing=packing, local=folder / "rows"),
    )
    seen = {}
    for name, trainer in (("trl", theirs), ("ours", ours)):
        samples = recording(trainer)
        trainer.train()
        seen[name] = {"steps": trainer.state.global_step, "samples": sorted(samples)}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
