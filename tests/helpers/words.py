"""A tokenizer of whole words."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = {"[UNK]": 0, "a": 1, "text": 2, "more": 3}


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer
