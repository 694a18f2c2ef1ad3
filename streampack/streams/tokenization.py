"""Batched conversion of texts to token ids, for any tokenizer.

No special tokens are added; `special_ids.py` says where BOS and EOS are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.types import Int64Array


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse an object that cannot encode a list of whole texts, with a ConfigError."""
    if isinstance(tokenizer, str):  # str.encode is unrelated
        raise ConfigError(
            f"tokenizer={tokenizer!r} is a name; load it and pass the tokenizer itself: "
            "AutoTokenizer.from_pretrained(...) or Tokenizer.from_file(...)"
        )
    if not any(hasattr(tokenizer, name) for name in ("is_fast", "encode_batch", "encode")):
        raise ConfigError(
            f"tokenizer=<{type(tokenizer).__name__}> has no encode; pass a tokenizers.Tokenizer, "
            "a transformers tokenizer, or an object whose encode(texts) returns lists of token ids"
        )
    # A tokenizers.Tokenizer does what its tokenizer.json says; transformers' do neither unless
    # asked.
    for option, off in (("truncation", "no_truncation"), ("padding", "no_padding")):
        value = getattr(tokenizer, option, None)
        if value and hasattr(tokenizer, off):
            raise ConfigError(
                f"tokenizer=<{type(tokenizer).__name__}> has {option}={value}, which would change "
                f"the ids of texts; call tokenizer.{off}() before passing it"
            )


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Int64Array]:
    """Return the token ids of each text, shape (num_tokens,).

    >>> class Letters:
    ...     def encode(self, texts):
    ...         return [[ord(letter) - 96 for letter in text] for text in texts]
    >>> [ids.tolist() for ids in encode_texts(Letters(), ["ab", "c"])]
    [[1, 2], [3]]
    """
    encoded = _encode(tokenizer, list(texts))
    if len(encoded) != len(texts):
        raise DataError(
            f"tokenizer {type(tokenizer).__name__} returned {len(encoded)} results for "
            f"{len(texts)} texts; it must encode a list of texts to as many lists of ids"
        )
    return [np.array(getattr(ids, "ids", ids), np.int64).reshape(-1) for ids in encoded]


def _encode(tokenizer: Any, texts: list[str]) -> Any:
    if hasattr(tokenizer, "is_fast"):  # transformers: its encode() takes one text
        return tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    if hasattr(tokenizer, "encode_batch_fast"):
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    if hasattr(tokenizer, "encode_batch"):
        return tokenizer.encode_batch(texts)
    return tokenizer.encode(texts)
