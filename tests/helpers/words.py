"""Tokenizers of whole words."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = {"[UNK]": 0, "a": 1, "text": 2, "more": 3}


def word_tokenizer(*known: str, unknown: str = "") -> Tokenizer:
    """Return a tokenizer of these words, the first of which stands for others by default."""
    vocabulary = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=unknown or known[0]))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def words() -> Tokenizer:
    return word_tokenizer(*WORDS)
