"""`IterableStream`: any iterable of samples as a stream, for the buffered way.

::

    IterableStream(rows, proportion=0.3)               rows: [5, 6, 7], {"tokens": [5, 6, 7]}, ...
    IterableStream(texts, tokenizer=tokenizer)         "a text", {"text": "a text"}
    IterableStream(rows, payloads={"images": "spans"})

Lengths are known only once a sample is there, so nothing can be planned ahead. The weights are
MosaicML Streaming's: proportion (relative), or repeat or choose (absolute).

Cost: about 0.5 us a sample that is an array, 10 ns a token of a list; 10 us a sample with extra
fields. The source is read when the loader asks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from streampack.config import MAX_ID, check_choice, is_weight, read_integer
from streampack.errors import ConfigError, DataError
from streampack.streams.source_kinds import is_one_shot, num_items
from streampack.streams.text import check_tokenizer
from streampack.streams.unread import TARGET_COLUMNS, tell_of_unread
from streampack.types import Int64Array

__all__ = ["IterableSample", "IterableStream", "Plain", "no_ids", "no_labels"]

OnBadSample = Literal["raise", "skip"]
Plain: TypeAlias = tuple[Any, Any, Any]
"""Token ids, and labels and a loss mask if the stream has them, each of shape (num_tokens,)."""
PLAIN_TYPES = "?bBhHiIlq"  # integers whose every value is one of int64's
# What a batch holds anyway, so no field may be called so.
BATCH_KEYS = {"tokens", "labels", "input_pos", "document_ids", "cu_seqlens", "max_seqlen"}
BATCH_KEYS |= {"segments", "epoch", "position"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterableSample:
    """One sample of an iterable, as arrays."""

    tokens: Int64Array
    """Token ids, shape (num_tokens,)."""
    labels: Int64Array | None
    """Labels, shape (num_tokens,), if the stream has them."""
    loss_mask: Int64Array | None
    """Which tokens are targets, shape (num_tokens,), if the stream says so."""
    token_fields: dict[str, Any] = field(default_factory=dict)
    """Extra values, one array of shape (num_tokens,) for each field."""
    payloads: dict[str, list[Any]] = field(default_factory=dict)
    """Extra objects, such as images."""
    spans: dict[str, Int64Array] = field(default_factory=dict)
    """Which tokens each object stands for: first and one past the last, shape (num_objects, 2)."""
    extra_cost: int = 0
    """Token slots that the sample takes beyond its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class IterableStream:
    """A weighted iterable of samples: token lists, arrays, texts, or dicts that hold them.

    Raises:
        ConfigError: If a value cannot work, alone or with the source.

    >>> IterableStream([[5, 6], [7]], proportion=0.3).sample([5, 6], 0).tokens.tolist()
    [5, 6]
    """

    source: Iterable[Any]
    """Where the samples come from."""
    proportion: float | None = None
    """Its share of the samples (or tokens), relative to the other streams'."""
    name: str | None = None
    """What messages and reports call it."""
    tokens: str = "tokens"
    """Field of the tokens in dicts; as the default, "input_ids" is found too."""
    labels: str | None = None
    """Field of labels, as many as tokens."""
    labels_shifted: bool | None = None
    """Whether labels[i] is the target at token i (True) or is token i (False); None: look."""
    loss_mask: str | None = None
    """Field that says which tokens are targets, 1 or 0 for each token."""
    _: KW_ONLY
    repeat: float | None = None
    """Passes through the source in an epoch; a source that cannot say its size is counted first."""
    choose: int | None = None
    """Samples (or tokens, by weight_unit) of an epoch."""
    tokenizer: Any = None
    """Encodes texts: a tokenizers.Tokenizer, a transformers tokenizer, or an encode(list[str])."""
    text: str = "text"
    """Field of the text in dicts, with a tokenizer."""
    token_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields with a value for each token, and the dtypes of the batch's arrays of them."""
    payloads: Mapping[str, str | None] = field(default_factory=dict)
    """Fields with objects of a sample, such as images, and the field that says which tokens each
    stands for: pairs of first and one past the last; None: they belong to the whole sample."""
    length_fn: Callable[[Any], int] | None = None
    """Token slots that an item's payloads take beyond its tokens; they follow it as padding."""
    split_payloads: bool = False
    """Whether a sample with payloads that is longer than a pack may be split, between spans."""
    sharded: bool = False
    """The source gives each worker of each rank its own samples already."""
    replay: bool = False
    """Resume by going through the source again, even where it has a state_dict."""
    on_bad_sample: OnBadSample = "raise"
    """What becomes of a sample that is malformed or cannot be tokenized: raise or skip."""
    max_bad_samples: int = 100
    """How many each worker skips in an epoch before it gives up."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, Iterable) and not (
            hasattr(self.source, "__getitem__") and num_items(self.source) is not None
        ):
            raise ConfigError(
                f"source={self.source!r} cannot be iterated; give a list, a generator or a dataset"
            )
        if self.proportion is not None and not is_weight(self.proportion):
            raise ConfigError(
                f"proportion={self.proportion!r}: a weight must be a number of 0 or more; "
                "0 leaves the stream out"
            )
        for key in ("repeat", "choose"):
            if getattr(self, key) is not None and is_one_shot(self.source):
                raise ConfigError(
                    f"{key}={getattr(self, key)} needs a source that has a length or can be "
                    f"iterated again, and a {type(self.source).__name__} is neither; pass a list, "
                    "a dataset, or an object whose __iter__ makes a new generator"
                )
        check_choice("on_bad_sample", self.on_bad_sample, OnBadSample)
        most = read_integer("max_bad_samples", self.max_bad_samples, "write a whole number")
        if most < 0:
            raise ConfigError(f"max_bad_samples={most} is negative; 0 skips none")
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        self._check_fields()

    def _check_fields(self) -> None:
        for name, value in (("token_fields", self.token_fields), ("payloads", self.payloads)):
            if not isinstance(value, Mapping):
                example = "{'weight': 'float32'}" if name == "token_fields" else "{'images': None}"
                raise ConfigError(f"{name}={value!r} is no dict; write {name}={example}")
            taken = sorted(BATCH_KEYS & set(value))
            if taken:
                raise ConfigError(
                    f"{name} has a field {taken[0]!r}, which is a key of every batch already; "
                    "give it another name in the source"
                )
        for name, dtype in self.token_fields.items():
            try:
                np.dtype(dtype)
            except TypeError:
                raise ConfigError(
                    f"token_fields: {name!r} is to be {dtype!r}, which is no dtype; "
                    "write 'int64' or 'float32', for example"
                ) from None

    def where(self, number: int) -> str:
        """Return what messages call a sample."""
        return f"stream {self.name or 'of an iterable'!r}, sample {number}"

    def text_of(self, item: Any, number: int) -> str:
        """Return the text of an item of the source.

        Raises:
            DataError: If there is none.
        """
        found = item.get(self.text) if isinstance(item, Mapping) else item
        if not isinstance(found, str):
            raise DataError(
                f"{self.where(number)}: {self.text!r} holds {type(found).__name__}, but a "
                "tokenizer takes text; set text= to the field that holds it"
            )
        return found

    def sample(self, item: Any, number: int, encoded: Int64Array | None = None) -> IterableSample:
        """Turn one item of the source into arrays.

        Args:
            item: What the source gave.
            number: How many it gave before, for messages.
            encoded: Token ids of its text, if it has one.

        Raises:
            DataError: If a field is missing, holds no row of integers, or is not as long as the
                tokens, a label lies outside int32, or a loss mask holds other values than 0 and 1.
        """
        where = self.where(number)
        if not isinstance(item, Mapping):
            item = {self.tokens: item}
        tokens = self._tokens(item, where) if encoded is None else encoded
        if len(tokens) == 0:
            raise DataError(f"{where}: 0 tokens, but a sample needs 1 or more; leave it out")
        self.check_ids(number, tokens)
        labels, loss_mask = (
            None if name is None else _beside(tokens, item, name, where)
            for name in (self.labels, self.loss_mask)
        )
        self.check_labels(number, labels)
        if loss_mask is not None and not _is_mask(loss_mask):
            value = loss_mask[(loss_mask != 0) & (loss_mask != 1)][0]
            raise DataError(
                f"{where}: {self.loss_mask!r} holds {value}, but a loss mask holds 1 for a target "
                "and 0 for any other token; token ids and -100 belong into labels="
            )
        sample = IterableSample(tokens=tokens, labels=labels, loss_mask=loss_mask)
        return self._with_extras(sample, item, where) if self._has_extras else sample

    def check_ids(self, number: int, tokens: Int64Array) -> None:
        """Refuse what is no token id.

        Raises:
            DataError: Naming the first.
        """
        if len(wrong := no_ids(tokens)):
            what = f"is no token id; they go from 0 to {MAX_ID}; tokenize the sample anew"
            if wrong[0] < 0:
                what = (
                    "is negative; token ids count from 0, and what is no target belongs into "
                    "labels or a loss mask"
                )
            raise DataError(f"{self.where(number)}: token {wrong[0]} {what}")

    def check_labels(self, number: int, labels: Int64Array | None) -> None:
        """Refuse what is no label.

        Raises:
            DataError: Naming the first.
        """
        if labels is not None and len(wrong := no_labels(labels)):
            raise DataError(
                f"{self.where(number)}: {self.labels!r} holds {wrong[0]}, which lies outside "
                f"int32, +-{MAX_ID}; a label is a token id, or -100 for what is no target"
            )

    def tell_of_unread(self, item: Any) -> None:
        """Warn of fields of a first item that look like labels or a loss mask, and are not read."""
        if self.tokenizer is not None or not self._is_tokens_only or not isinstance(item, Mapping):
            return
        for name in sorted(set(TARGET_COLUMNS) & set(item) - set(self.token_fields)):
            if name == self.tokens:
                continue
            with suppress(DataError):  # no row of integers, one for each token: something else
                _beside(self._tokens(item, ""), item, name, "")
                tell_of_unread("IterableStream", self.name or "of an iterable", name)

    def plain(self, item: Any, encoded: Int64Array | None = None) -> Plain | None:
        """Return the arrays of an item that needs no second look; None: ask `sample`.

        That is what `sample` accepts without a change, but for what is no token id.

        Args:
            item: What the source gave; the arrays may be its own, and are to be copied.
            encoded: Token ids of its text, if it has one.

        >>> IterableStream([]).plain(np.array([5, 6]))[0].tolist(), IterableStream([]).plain([0.5])
        ([5, 6], None)
        """
        # Once a sample, so nothing is asked twice, or by a property.
        is_dict = type(item) is dict
        is_tokens_only = self.labels is None and self.loss_mask is None
        if self.length_fn is not None or self.token_fields or self.payloads:
            return None
        if not (is_dict or is_tokens_only):
            return None
        tokens = encoded
        if tokens is None:
            tokens = _plain_row(self._field_of(item) if is_dict else item)
        if tokens is None or not len(tokens):
            return None
        if is_tokens_only:
            return tokens, None, None
        labels, mask = (
            None if name is None else _plain_row(item.get(name))
            for name in (self.labels, self.loss_mask)
        )
        for name, row in ((self.labels, labels), (self.loss_mask, mask)):
            if name is not None and (row is None or len(row) != len(tokens)):
                return None
        return None if mask is not None and not _is_mask(mask) else (tokens, labels, mask)

    def _field_of(self, item: dict[str, Any]) -> Any:
        found = item.get(self.tokens)
        if found is None and self.tokens == "tokens" and "tokens" not in item:
            return item.get("input_ids")
        return found

    @property
    def has_labels(self) -> bool:
        """Whether its labels may say more than its tokens do."""
        return not self._is_tokens_only or self.length_fn is not None

    @property
    def is_text_only(self) -> bool:
        """Whether a tokenizer makes all that there is of its samples."""
        return self.tokenizer is not None and self._is_tokens_only and not self._has_extras

    @property
    def _is_tokens_only(self) -> bool:
        return self.labels is None and self.loss_mask is None

    @property
    def _has_extras(self) -> bool:
        return self.length_fn is not None or bool(self.token_fields) or bool(self.payloads)

    def _tokens(self, item: Mapping[str, Any], where: str) -> Int64Array:
        wanted = self.tokens
        if wanted == "tokens" and wanted not in item and "input_ids" in item:
            wanted = "input_ids"
        if isinstance(item.get(wanted), str):
            raise DataError(
                f"{where}: field {wanted!r} holds text, but must hold integers; set tokenizer="
            )
        return _integers(item, wanted, where)

    def _with_extras(
        self, sample: IterableSample, item: Mapping[str, Any], where: str
    ) -> IterableSample:
        fields = {
            name: _values(item, name, np.dtype(dtype), len(sample.tokens), where)
            for name, dtype in self.token_fields.items()
        }
        payloads = {name: _objects(item.get(name)) for name in self.payloads}
        spans = {
            name: _spans(item, span_field, len(payloads[name]), len(sample.tokens), where)
            for name, span_field in self.payloads.items()
            if span_field is not None
        }
        extra = 0 if self.length_fn is None else self.length_fn(item)
        if not isinstance(extra, int | np.integer) or extra < 0:
            raise DataError(
                f"{where}: length_fn says {extra!r}, but must return how many token slots the "
                "payloads take beyond the tokens: a whole number of 0 or more"
            )
        return IterableSample(
            tokens=sample.tokens,
            labels=sample.labels,
            loss_mask=sample.loss_mask,
            token_fields=fields,
            payloads=payloads,
            spans=spans,
            extra_cost=int(extra),
        )


def no_ids(tokens: Any) -> Any:
    """Return those of a row of integers that are no token ids.

    >>> no_ids(np.array([7, -1, 2**40])).tolist()
    [-1, 1099511627776]
    """
    return tokens[(tokens < 0) | (tokens > MAX_ID)]


def no_labels(labels: Any) -> Any:
    """Return those of a row of integers that lie outside int32.

    >>> no_labels(np.array([7, -100, 2**40])).tolist()
    [1099511627776]
    """
    return labels[(labels < -MAX_ID) | (labels > MAX_ID)]


def _plain_row(value: Any) -> Any:
    """Return a row of integers as something that numpy copies at once; None: look at it closely."""
    if type(value) is np.ndarray:
        return value if value.ndim == 1 and value.dtype.char in PLAIN_TYPES else None
    if type(value) is not list:
        return None
    try:
        # Refuses what is no integer, in half the time that numpy takes to look.
        return np.frombuffer(struct.pack(f"{len(value)}q", *value), np.int64)
    except (TypeError, struct.error):
        return None


def _is_mask(values: Any) -> bool:
    """Tell whether all are 0 or 1."""
    return not (values >> 1).any()  # in one look, also of bools


def _beside(tokens: Int64Array, item: Mapping[str, Any], name: str, where: str) -> Int64Array:
    values = _integers(item, name, where)
    _check_length(len(values), len(tokens), name, where)
    return values


def _check_length(num_values: int, num_tokens: int, name: str, where: str) -> None:
    if num_values != num_tokens:
        raise DataError(
            f"{where}: {num_tokens} tokens, but {num_values} values in {name!r}; "
            "give one for each token"
        )


def _integers(item: Mapping[str, Any], name: str, where: str, *, is_row: bool = True) -> Int64Array:
    _check_there(
        item, name, where, "set tokens=, labels= or loss_mask= to one of them, or tokenizer="
    )
    try:
        values = np.asarray(item[name])
    except ValueError as error:  # rows of unequal length
        raise DataError(f"{where}: field {name!r} is no row of integers: {error}") from error
    if values.size and values.dtype.kind not in "iub":
        raise DataError(
            f"{where}: field {name!r} holds {values.dtype}, but must hold integers; tokenize first"
        )
    if is_row and values.size and max(values.shape, default=1) != values.size:
        shape = " x ".join(map(str, values.shape))
        raise DataError(
            f"{where}: field {name!r} holds {shape} values, but a sample is one row; give each "
            "row as a sample of its own"
        )
    return values.reshape(-1).astype(np.int64)


def _check_there(item: Mapping[str, Any], name: str, where: str, way_out: str) -> None:
    if name not in item:
        raise DataError(
            f"{where}: no field {name!r}; it has {', '.join(map(repr, item))}; {way_out}"
        )


def _values(
    item: Mapping[str, Any], name: str, dtype: np.dtype[Any], num_tokens: int, where: str
) -> Any:
    _check_there(item, name, where, "set token_fields= to those it has")
    try:
        values = np.asarray(item[name]).reshape(-1).astype(dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: field {name!r} does not turn into {dtype}: {error}") from error
    _check_length(len(values), num_tokens, name, where)
    return values


def _objects(value: Any) -> list[Any]:
    """Return the payloads of a sample: none, one, or a list of them."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _spans(
    item: Mapping[str, Any], name: str, num_objects: int, num_tokens: int, where: str
) -> Int64Array:
    if not num_objects:
        return np.zeros((0, 2), np.int64)
    flat = _integers(item, name, where, is_row=False)
    spans = flat[: len(flat) // 2 * 2].reshape(-1, 2)
    if len(flat) % 2 or len(spans) != num_objects:
        raise DataError(
            f"{where}: {num_objects} payloads, but {len(spans)} spans in {name!r}; give each one"
        )
    bad = spans[(spans[:, 0] < 0) | (spans[:, 0] >= spans[:, 1]) | (spans[:, 1] > num_tokens)]
    if len(bad):
        raise DataError(
            f"{where}: {name!r} has a span {bad[0].tolist()}, which is no part of its {num_tokens} "
            "tokens; a span is its first token and one past its last"
        )
    return spans
