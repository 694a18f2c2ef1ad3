"""Conversations of single letters, and a tokenizer with a template for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streampack import Packing

LETTERS = "abcdefghij"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PACKING = Packing(max_seq_len=32)


def words() -> Tokenizer:
    known = ["?", "<system>", "<user>", "<assistant>", "<end>", *LETTERS]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<end>"])
    return made


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="?")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chats(num: int, seed: int = 0, most_words: int = 9) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(rng.choice(list(LETTERS), int(rng.integers(1, most_words))))

    return [
        {"messages": [{"role": role, "content": text()} for role in ("user", "assistant")]}
        for _ in range(num)
    ]
