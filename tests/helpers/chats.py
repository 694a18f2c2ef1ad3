"""Conversations, and a tokenizer with a template for those of single letters."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streampack import Packing
from tests.helpers.words import word_tokenizer

LETTERS = "abcdefghij"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PACKING = Packing(max_seq_len=32)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def say(*contents: str, role: str = "user") -> list[dict[str, Any]]:
    """Return a conversation in which user and assistant take turns."""
    roles = [role, "assistant" if role == "user" else "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def learned(sample: dict[str, np.ndarray], tokenizer: Any) -> str:
    return str(tokenizer.decode(sample["tokens"][sample["loss_mask"] == 1]))


def words() -> Tokenizer:
    made = word_tokenizer("?", "<system>", "<user>", "<assistant>", "<end>", *LETTERS)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<end>"])
    return made


def chat_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="?")
    tokenizer.chat_template = template
    return tokenizer


def chats(num: int, seed: int = 0, most_words: int = 9) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(rng.choice(list(LETTERS), int(rng.integers(1, most_words))))

    return [
        {"messages": [{"role": role, "content": text()} for role in ("user", "assistant")]}
        for _ in range(num)
    ]
