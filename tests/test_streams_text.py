"""Texts to token ids with every kind of tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from streampack.errors import ConfigError, DataError
from streampack.streams.text import check_tokenizer, encode_texts

WORDS = {"[UNK]": 0, "a": 1, "text": 2, "more": 3}


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


class OwnEncode:
    def encode(self, texts):
        return [[WORDS[word] for word in text.split()] for text in texts]


@pytest.mark.parametrize(
    "tokenizer", [words(), PreTrainedTokenizerFast(tokenizer_object=words()), OwnEncode()]
)
def test_every_kind_of_tokenizer_encodes_a_list_of_texts(tokenizer):
    check_tokenizer(tokenizer)
    encoded = encode_texts(tokenizer, ["a text", "a more a", ""])

    assert [ids.tolist() for ids in encoded] == [[1, 2], [1, 3, 1], []]


def test_what_cannot_encode_is_refused():
    with pytest.raises(ConfigError, match="tokenizer=<dict> has no encode"):
        check_tokenizer({})
    with pytest.raises(ConfigError, match="tokenizer='gpt2' is a name; load it and pass"):
        check_tokenizer("gpt2")


def test_a_tokenizer_that_takes_one_text_only_is_named():
    class OneText:
        def encode(self, text):
            return [1, 2, 3, *text]

    with pytest.raises(DataError, match="returned 4 results for 1 texts"):
        encode_texts(OneText(), ["a"])
