"""Texts to token ids: by a tokenizer that a user made, or that a file or folder names.

::

    texts --any tokenizer--> tokens, or why a text has none
          --gigatoken------> tokens, about 20 times as fast, reading included
                               '--> a text of each added token, and some texts of each part, also
                                    through Hugging Face's: other ids end the job

A document is never truncated or padded, and no special tokens are added; `special_ids.py` says
where BOS and EOS are. A text that spells a special token gets its id, unless `special_tokens` is
"text".

Cost: docs/preparing-data.md has measured rates. The comparison with Hugging Face takes up to 4 % of
gigatoken's time.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

import numpy as np

from streampack._extras import import_extra, is_from
from streampack._paths import local_path
from streampack.errors import ConfigError, DataError
from streampack.types import IntArray, UInt32Array

Backend = Literal["huggingface", "gigatoken"]
SpecialTokens = Literal["ids", "text"]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?(?<!\.json)")
HUB_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "*.jinja",
    "vocab.*",
    "*.model",
)
SLOW_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "merges.txt")
CONVERSION = (
    "transformers.AutoTokenizer.from_pretrained('{path}').save_pretrained('FOLDER'), and pass "
    "'FOLDER'"
)
FIRST_COMPARED = 16  # texts of a part's first batch that both backends encode ...
COMPARED_EVERY = 64  # ... and one text of every so many batches


def tokenizer_file(path: Path) -> Path:
    """Return the path of a tokenizer's tokenizer.json, which may be given by its folder."""
    file = local_path(path, "tokenizer")
    return file / TOKENIZER_FILE if file.is_dir() else file


def tokenizer_folder(tokenizer: Any, folder: Path) -> Path | None:
    """Return the path of a tokenizer; one in memory is saved into the folder.

    A name of Hugging Face's hub, such as "org/name" or "org/name@revision", is resolved to the
    folder of its revision in the cache of the hub.

    Raises:
        ConfigError: If it is not a fast tokenizer, or the hub and its cache do not have it.
    """
    if tokenizer is None or isinstance(tokenizer, os.PathLike):
        return None if tokenizer is None else Path(tokenizer)
    if isinstance(tokenizer, str):
        is_name = HUB_NAME.fullmatch(tokenizer) and not local_path(tokenizer, "tokenizer").exists()
        return _hub_folder(tokenizer) if is_name else Path(tokenizer)
    if is_from(tokenizer, "tiktoken", "Encoding"):
        raise ConfigError(
            "tokenizer=<Encoding> is of tiktoken; convert it once: "
            "transformers.integrations.tiktoken.convert_tiktoken_to_fast(encoding, 'FOLDER'), and "
            "pass 'FOLDER'"
        )
    file = folder / TOKENIZER_FILE
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif hasattr(tokenizer, "to_str"):
        file.write_text(tokenizer.to_str())
    if not file.exists():
        raise ConfigError(
            f"tokenizer=<{type(tokenizer).__name__}> has no {TOKENIZER_FILE}; pass a fast "
            "tokenizer of transformers, a tokenizers.Tokenizer, or the path of one. A slow "
            f"one may have a fast form: {CONVERSION.format(path='NAME')}"
        )
    # A call with padding=True or truncation=True leaves its options there.
    _without(file, "padding", "truncation")
    _without(file.with_name(CONFIG_FILE), "name_or_path", "is_local", "local_files_only")
    return folder


def _hub_folder(name: str) -> Path:
    hub = import_extra("huggingface_hub", "hf", f"tokenizer={name!r}, a name of the hub")
    repository, _, revision = name.partition("@")
    try:
        # Offline, or if the hub cannot be reached, it is the revision that was fetched last.
        folder = hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(HUB_FILES)
        )
    except Exception as error:  # it raises many kinds
        raise ConfigError(
            f"tokenizer={name!r} is not a path here, and cannot be fetched from the hub "
            f"({type(error).__name__}: {error!s:.200}); check the name, or give the folder that a "
            "tokenizer's save_pretrained() wrote"
        ) from error
    return Path(folder)


def _without(path: Path, *names: str) -> None:
    if path.exists():
        fields = json.loads(path.read_bytes())
        path.write_text(json.dumps({k: v for k, v in fields.items() if k not in names}))


def load_tokenizer(path: Path, special_tokens: SpecialTokens = "ids") -> Any:
    """Load a tokenizer file, once per process and contents; refuse one that varies its ids."""
    file = tokenizer_file(path)
    if not file.is_file():
        slow = next((name for name in SLOW_FILES if file.with_name(name).is_file()), None)
        if slow is not None:
            raise ConfigError(
                f"tokenizer={str(path)!r} is that of a slow tokenizer ({slow}, and no "
                f"{TOKENIZER_FILE}); convert it once: {CONVERSION.format(path=path)}"
            )
        raise ConfigError(
            f"tokenizer={str(path)!r} cannot be loaded (there is no {file}); give a "
            "tokenizer.json, or the folder that a tokenizer's save_pretrained() wrote"
        )
    return _loaded(path, file.read_bytes(), special_tokens)


@lru_cache(maxsize=2)
def _loaded(path: Path, data: bytes, special_tokens: SpecialTokens) -> Any:
    try:
        # By name: most processes that read a stream tokenize nothing.
        loaded = import_module("tokenizers").Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(
            f"tokenizer={str(path)!r} cannot be loaded ({error}); give a tokenizer.json file"
        ) from error
    if getattr(loaded.model, "dropout", None):
        raise ConfigError(
            f"tokenizer={str(path)!r} has dropout={loaded.model.dropout:g}, so a text gets "
            f"other ids each time; set dropout to null in {TOKENIZER_FILE}"
        )
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = special_tokens == "text"
    return loaded


def describe_tokenizer(path: Path) -> dict[str, Any]:
    """Return a tokenizer's name, size, BOS and EOS, and the tokens that its template adds."""
    tokenizer = load_tokenizer(path)
    encoded = tokenizer.encode("a")
    is_added = [*map(bool, encoded.special_tokens_mask), False]
    first = is_added.index(False)
    before = encoded.tokens[:first]
    after = [token for token, added in zip(encoded.tokens, is_added, strict=False) if added][first:]
    file = tokenizer_file(path).with_name(CONFIG_FILE)
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    facts = {"name": str(path), "size": tokenizer.get_vocab_size()}
    for name, added in (("bos", before[:1]), ("eos", after[-1:])):
        token = config.get(f"{name}_token") or next(iter(added), None)
        token = token["content"] if isinstance(token, dict) else token
        facts |= {name: token, f"{name}_id": token and tokenizer.token_to_id(token)}
    return {**facts, "before": before, "after": after}


def num_ids(tokenizer: Any) -> int:
    """Return the largest id of a tokenizer plus 1; there may be fewer ids."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_ids_of(tokenizer: Any) -> UInt32Array:
    """Return the ids of special tokens that a text can spell, sorted."""
    tokens = tokenizer.get_added_tokens_decoder()
    unknown = getattr(tokenizer.model, "unk_token", None)  # also the id of other words
    ids = [i for i, token in tokens.items() if token.special and token.content != unknown]
    return np.array(sorted(ids), np.uint32)


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


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[IntArray | str]:
    """Return the token ids of each text, shape (num_tokens,), or why it has none.

    >>> class Letters:
    ...     def encode(self, texts):
    ...         return [[ord(letter) - 96 for letter in text] for text in texts]
    >>> [ids.tolist() for ids in encode_texts(Letters(), ["ab", "c"])]
    [[1, 2], [3]]
    """
    try:
        encoded = _encode(tokenizer, list(texts))
        if len(encoded) != len(texts):
            raise DataError(
                f"{type(tokenizer).__name__} returned {len(encoded)} results for {len(texts)} "
                "texts; it must encode a list of texts to as many lists of ids"
            )
        return list(map(_as_array, encoded))
    except Exception as error:  # tokenizers raises bare Exception, others several kinds
        if len(texts) == 1:
            return [f"cannot be tokenized ({type(error).__name__}: {error})"]
        # One of them, such as a lone surrogate, fails all.
        return [encode_texts(tokenizer, [text])[0] for text in texts]


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


def _as_array(ids: Any) -> IntArray:
    if hasattr(ids, "ids"):  # a third of the time that numpy takes for a list
        return np.frombuffer(array("I", ids.ids), np.uint32)
    return np.array(ids, np.int64).reshape(-1)


def text_encoder(
    path: Path, backend: Backend, special_tokens: SpecialTokens = "ids"
) -> Callable[[Sequence[str]], list[IntArray | str]]:
    """Return what encodes texts as `encode_texts` does, by the tokenizer of a path."""
    exact = load_tokenizer(path, special_tokens)
    return _Gigatoken(path) if backend == "gigatoken" else partial(encode_texts, exact)


class _Gigatoken:
    def __init__(self, path: Path) -> None:
        self._tokenizer = _gigatoken(path, tokenizer_file(path).read_bytes())
        self._exact = load_tokenizer(path)
        self._path = path
        self._num_batches = 0

    def __call__(self, texts: Sequence[str]) -> list[IntArray | str]:
        ids = encode_texts(self, texts)
        if self._num_batches % COMPARED_EVERY == 0:
            num_compared = 1 if self._num_batches else FIRST_COMPARED
            for text, own in zip(texts[:num_compared], ids, strict=False):
                self.compare(text, own)
        self._num_batches += 1
        return ids

    def encode(self, texts: list[str]) -> list[UInt32Array]:
        """Return the token ids of each text."""
        # One thread: every process of a job has a core.
        batch = self._tokenizer.encode_batch(texts, parallel=False).layout
        tokens, ends = batch.content.data, batch.offsets.data.tolist()
        return [tokens[begin:end] for begin, end in pairwise(ends)]

    def compare(self, text: str, own: IntArray | str) -> None:
        """Raise a ConfigError if these ids of a text are not those of Hugging Face's tokenizers."""
        exact = encode_texts(self._exact, [text])[0]
        if not isinstance(own, str) and not np.array_equal(exact, own):
            raise ConfigError(
                f"backend='gigatoken' gives {len(own)} ids and Hugging Face's tokenizers "
                f"{len(exact)}, or other ones, for the text {text!r:.80}; tokenizer="
                f"{str(self._path)!r} needs backend='huggingface', and another folder for it"
            )


def compare_added_tokens(path: Path) -> None:
    """Refuse gigatoken where it gives other ids for a text with an added token."""
    # With each token: alone, twice, in words, and over another one.
    encoder, tokenizer = _Gigatoken(path), load_tokenizer(path)
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if tokenizer.normalizer is not None:
        changes = (tokenizer.normalizer.normalize_str, partial(normalize, "NFD"))
        tokens += [change(token) for token in tokens for change in changes]
    begins = {token[:end]: token for token in tokens for end in range(1, len(token))}
    tails = ((token, end) for token in tokens for end in range(1, len(token)))
    over = (token[:end] + begins[token[end:]] for token, end in tails if token[end:] in begins)
    alone = (text for t in tokens for text in (t, t + t, f"a{t}b", f" {t} ", f"a {t}. b"))
    texts = list(dict.fromkeys((*alone, *over)))
    for text, own in zip(texts, encoder(texts), strict=True):
        encoder.compare(text, own)


@lru_cache(maxsize=2)
def _gigatoken(path: Path, data: bytes) -> Any:
    library = import_extra(
        "gigatoken", "gigatoken", "backend='gigatoken'", "set backend='huggingface'"
    )
    try:
        return library.Tokenizer.from_json(data)
    except Exception as error:  # it raises several kinds
        raise ConfigError(
            f"tokenizer={str(path)!r} is of a kind that gigatoken cannot load "
            f"({str(error).partition(chr(10))[0]}); set backend='huggingface'"
        ) from error
