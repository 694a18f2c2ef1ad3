"""Texts to token ids with every kind of tokenizer."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from streampack.errors import ConfigError
from streampack.texts.tokenization import check_tokenizer, encode_texts
from tests.helpers.words import WORDS, words


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


def test_a_tokenizer_that_takes_one_text_only_is_named():
    class OneText:
        def encode(self, text):
            return [1, 2, 3, *text]

    assert "OneText returned 4 results for 1 texts" in encode_texts(OneText(), ["a"])[0]


@pytest.mark.parametrize(
    ("enable", "disable"),
    [
        (lambda tokenizer: tokenizer.enable_truncation(2), "no_truncation"),
        (lambda tokenizer: tokenizer.enable_padding(length=9), "no_padding"),
    ],
)
def test_a_tokenizer_that_would_cut_or_pad_texts_is_refused(enable, disable):
    tokenizer = words()
    enable(tokenizer)
    with pytest.raises(ConfigError, match=rf"call tokenizer\.{disable}\(\) before"):
        check_tokenizer(tokenizer)
    getattr(tokenizer, disable)()
    check_tokenizer(tokenizer)
    assert encode_texts(tokenizer, ["a more a"])[0].tolist() == [1, 3, 1]
