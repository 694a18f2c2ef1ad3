"""`IterableStream`: any iterable of samples as a stream, packed online without a plan.

::

    IterableStream(rows, proportion=0.3)               rows: [5, 6, 7], {"tokens": [5, 6, 7]}, ...
    IterableStream(texts, tokenizer=tokenizer)         "a text", {"text": "a text"}
    IterableStream(rows, payloads=Payloads({"images": "spans"}))

Cost: about 0.5 us per sample for arrays, 10 ns per token for lists, and 10 us per sample with extra
fields. The source is read on demand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from reprlib import repr as short_repr
from typing import Any, Literal, NamedTuple

import numpy as np

from streampack._checks import MAX_ID, read_integer
from streampack.config.moved import with_known_options
from streampack.errors import ConfigError, DataError
from streampack.padding import PADDING_MASK, is_padded, padded_range
from streampack.streams.label_columns import TARGET_COLUMNS, warn_unused_label_column
from streampack.streams.sample_fields import (
    ENCODE_CHATS,
    Extras,
    cast_values,
    invalid_labels,
    invalid_token_ids,
    is_chat,
    is_mask,
    payloads_of,
    plain_row,
    token_ids,
    values_per_token,
)
from streampack.texts.source_traits import MapStyle, check_not_table, has_index
from streampack.texts.tokenization import check_tokenizer
from streampack.types import Int64Array

# Reserved keys of a batch: no field may have one of these names.
BATCH_KEYS = {"tokens", "labels", "input_pos", "document_ids", "cu_seqlens", "max_seqlen"}
BATCH_KEYS |= {"segments", "epoch", "position", "chunks", "seq_lens"}


class IterableSample(NamedTuple):
    """One sample of an iterable, as arrays of integers of shape (num_tokens,)."""

    tokens: Any
    labels: Any = None
    """None if the stream has no labels."""
    loss_mask: Any = None
    """1 for a target; None if the stream has no mask."""
    extras: Extras | None = None


@with_known_options
@dataclass(frozen=True, slots=True)
class Payloads:
    """Objects that samples of an iterable have in addition to tokens, such as images.

    >>> Payloads({"images": "spans"}, split=True).split
    True
    """

    payloads: Mapping[str, str | None] = field(default_factory=dict)
    """For each field with objects of a sample, the field with their token spans: pairs of the first
    token and one past the last. If it is None, the objects belong to the whole sample."""
    cost: Callable[[Any], int] | None = None
    """Returns the token slots that an item's objects take beyond its tokens. The slots follow the
    tokens as padding."""
    split: bool = False
    """Whether a sample with payloads may be split between spans if it is longer than a pack."""


@with_known_options
@dataclass(frozen=True, slots=True, eq=False)
class IterableStream:
    """A weighted iterable of samples: token lists, arrays, texts, or dicts of these.

    Raises:
        ConfigError: If a value is invalid. The dataset checks the weights.

    >>> IterableStream([[5, 6], [7]], proportion=0.3).sample([5, 6], 0).tokens.tolist()
    [5, 6]
    """

    source: Iterable[Any] | MapStyle
    """The iterable of samples."""
    proportion: float | None = None
    """Share of the samples (or tokens), relative to the other streams."""
    name: str | None = None
    """Name of the stream in messages and reports."""
    tokens: str = "tokens"
    """Field of the tokens in dicts; for the default, "input_ids" is accepted too."""
    labels: str | None = None
    """Field of labels, one per token."""
    labels_shifted: bool | None = None
    """Whether labels[i] is tokens[i + 1] (True) or tokens[i] (False), or None to detect it."""
    loss_mask: str | None = None
    """Field that marks the targets, 1 or 0 for each token."""
    _: KW_ONLY
    repeat: float | None = None
    """Passes through the source per epoch; a source without a size is counted first."""
    choose: int | None = None
    """Samples (or tokens, by weight_unit) per epoch."""
    tokenizer: Any = None
    """Encodes texts: a tokenizers.Tokenizer, a transformers tokenizer, or an object with
    encode(list[str])."""
    text: str = "text"
    """Field of the text in dicts, with a tokenizer."""
    token_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields with one value per token, and the dtypes of their arrays in a batch."""
    payloads: Payloads = Payloads()
    """Objects of a sample in addition to its tokens, such as images."""
    sharded: bool | None = None
    """Whether the source gives each worker of each rank its own samples. None: it does not, and is
    refused if it asks which worker it is in. False: it is told that it is in none."""
    replay: bool = False
    """Whether to resume by replaying the source, even if it has a state_dict."""
    on_bad_row: Literal["error", "skip"] | int = "error"
    """What a sample that is malformed or cannot be tokenized does: raise an error, or be skipped
    and counted. "skip": up to 100 per worker and epoch; a number: as many."""

    def __post_init__(self) -> None:
        self._check_source()
        if self.on_bad_row not in ("error", "skip"):
            way_out = "write 'error', 'skip', or how many samples may be skipped"
            read_integer("on_bad_row", self.on_bad_row, way_out, least=0)
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        self._check_fields()

    def _check_source(self) -> None:
        if isinstance(self.source, str | bytes | os.PathLike):
            raise ConfigError(
                f"source={short_repr(self.source)} is a path or one text, but must yield samples; "
                "pass what reads the file, such as datasets.load_dataset('parquet', "
                "data_files=path, split='train'), or a list of texts: [text]"
            )
        if isinstance(self.source, Mapping):
            names = short_repr(list(self.source))
            raise ConfigError(
                f"source=<{type(self.source).__name__}> is a dict, and iterating over it yields "
                f"its keys {names}; pass one of its values, such as source['train'], or a list "
                "of rows"
            )
        check_not_table(self.source, "source")
        if not isinstance(self.source, Iterable) and not has_index(self.source):
            raise ConfigError(
                f"source={self.source!r} cannot be iterated; give a list, a generator or a dataset"
            )

    def _check_fields(self) -> None:
        if not isinstance(self.payloads, Payloads):
            raise ConfigError(
                f"payloads={short_repr(self.payloads)} is not a Payloads; write "
                "Payloads({'images': 'spans'}), for example"
            )
        given = {"token_fields": self.token_fields, "payloads": self.payloads.payloads}
        for name, value in given.items():
            if not isinstance(value, Mapping):
                example = "{'weight': 'float32'}" if name == "token_fields" else "{'images': None}"
                raise ConfigError(f"{name}={value!r} is not a dict; write {name}={example}")
            taken = sorted(BATCH_KEYS & set(value))
            if taken:
                raise ConfigError(
                    f"{name} has a field {taken[0]!r}, which is a key of batches already; "
                    "give it another name in the source"
                )
        for name, dtype in self.token_fields.items():
            try:
                np.dtype(dtype)
            except TypeError:
                raise ConfigError(
                    f"token_fields: {name!r} has {dtype!r}, which is not a dtype; "
                    "write 'int64' or 'float32', for example"
                ) from None

    @property
    def most_bad(self) -> int | None:
        """Bad samples that a worker skips per epoch before one is an error. None: each is one."""
        given = self.on_bad_row
        return {"error": None, "skip": 100}[given] if isinstance(given, str) else int(given)

    def where(self, number: int) -> str:
        """Return a sample's description for messages."""
        return f"stream {self.name or 'of an iterable'!r}, sample {number}"

    def text_of(self, item: Any, number: int) -> str:
        """Return the text of an item of the source; raise a DataError if there is none."""
        text = item.get(self.text) if isinstance(item, Mapping) else item
        if isinstance(text, str):
            return text
        what = f"is {type(text).__name__}"
        way_out = "give texts, or dicts with a field of text"
        if isinstance(item, Mapping):
            fields = [name for name, value in item.items() if isinstance(value, str)]
            what = f"has {', '.join(map(repr, item))}, and no text in {self.text!r}"
            if fields:
                way_out = f"set text= to the field that has it: {' or '.join(map(repr, fields))}"
        if is_chat(item):
            way_out = ENCODE_CHATS
        elif plain_row(self._field_of(item) if isinstance(item, Mapping) else item) is not None:
            way_out = "omit tokenizer=, as its samples are token ids"
        raise DataError(f"{self.where(number)}: {what}, but a tokenizer takes text; {way_out}")

    def sample(self, item: Any, number: int, encoded: Int64Array | None = None) -> IterableSample:
        """Convert item `number` of the source to arrays; `encoded` are the token ids of its text.

        A DataError says that a field is missing, is not a row of integers, or differs in length
        from the tokens, or that it has a value that a token id, a label or a mask cannot have.
        """
        where = self.where(number)
        if not isinstance(item, Mapping):
            item = {self.tokens: item}
        tokens = token_ids(item, self.tokens, where) if encoded is None else encoded
        if encoded is None and is_padded(item.get(PADDING_MASK)):
            item, tokens = self._without_padding(item, tokens, where)
        if len(tokens) == 0:
            raise DataError(
                f"{where}: 0 tokens, but a sample needs 1 or more; drop it from the source, or "
                "set on_bad_row='skip'"
            )
        labels, loss_mask = (
            None if name is None else values_per_token(tokens, item, name, where)
            for name in (self.labels, self.loss_mask)
        )
        self.check_values(number, tokens, labels)
        if loss_mask is not None and not is_mask(loss_mask):
            value = loss_mask[(loss_mask != 0) & (loss_mask != 1)][0]
            raise DataError(
                f"{where}: {self.loss_mask!r} has the value {value}, but a loss mask is 1 for a "
                "target and 0 for any other token; token ids and -100 belong in labels="
            )
        extras = self._extras(item, len(tokens), where) if self.has_extras else None
        return IterableSample(tokens, labels, loss_mask, extras)

    def _without_padding(
        self, item: Mapping[str, Any], tokens: Int64Array, where: str
    ) -> tuple[Mapping[str, Any], Int64Array]:
        try:
            kept = padded_range(item[PADDING_MASK], len(tokens))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        if kept is None:
            return item, tokens
        if kept.start and any(self.payloads.payloads.values()):
            raise DataError(
                f"{where}: its {PADDING_MASK!r} marks padding before the tokens, which the spans "
                "of payloads would count; pad on the right, or not at all"
            )
        names = item.keys() & {self.labels, self.loss_mask, *self.token_fields}
        rows = {name: np.asarray(item[name]).reshape(-1) for name in names}
        cut = {name: row[kept] for name, row in rows.items() if len(row) == len(tokens)}
        return {**item, **cut}, tokens[kept]

    def check_values(self, number: int, tokens: Int64Array, labels: Int64Array | None) -> None:
        """Refuse invalid token ids and labels with a DataError that names the first."""
        if len(wrong := invalid_token_ids(tokens)):
            what = f"is not a token id; they go from 0 to {MAX_ID}; tokenize the sample again"
            if wrong[0] < 0:
                what = (
                    "is negative; token ids count from 0; mark tokens that are not targets in "
                    "labels or a loss mask"
                )
            raise DataError(f"{self.where(number)}: token {wrong[0]} {what}")
        if labels is not None and len(wrong := invalid_labels(labels)):
            raise DataError(
                f"{self.where(number)}: {self.labels!r} has the value {wrong[0]}, outside int32, "
                f"+-{MAX_ID}; a label is a token id, or -100 for a token that is not a target"
            )

    def warn_unused_label_column(self, item: Any) -> None:
        """Warn about unread fields of a first item that look like labels or a loss mask."""
        if self.tokenizer is not None or not self._is_tokens_only or not isinstance(item, Mapping):
            return
        for name in sorted(set(TARGET_COLUMNS) & set(item) - set(self.token_fields)):
            if name == self.tokens:
                continue
            with suppress(DataError):  # not one integer per token, so it is something else
                values_per_token(token_ids(item, self.tokens, ""), item, name, "")
                warn_unused_label_column("IterableStream", self.name or "of an iterable", name)

    def plain(self, item: Any) -> tuple[Any, Any, Any] | None:
        """Return tokens, labels and mask of an item that needs no further checks, else None.

        These are the items that `sample` accepts unchanged, except that token ids are not checked.
        The returned arrays may belong to the item and must be copied.

        >>> IterableStream([]).plain(np.array([5, 6])), IterableStream([]).plain([0.5])
        ((array([5, 6]), None, None), None)
        """
        # Runs once per sample, so it avoids properties and repeated lookups.
        is_dict = type(item) is dict
        if self.has_extras or not (is_dict or self._is_tokens_only):
            return None
        tokens = plain_row(self._field_of(item) if is_dict else item)
        if tokens is None or not len(tokens) or (is_dict and is_padded(item.get(PADDING_MASK))):
            return None
        if self._is_tokens_only:
            return tokens, None, None
        labels, mask = (
            None if name is None else plain_row(item.get(name))
            for name in (self.labels, self.loss_mask)
        )
        for name, row in ((self.labels, labels), (self.loss_mask, mask)):
            if name is not None and (row is None or len(row) != len(tokens)):
                return None
        return None if mask is not None and not is_mask(mask) else (tokens, labels, mask)

    def _field_of(self, item: Mapping[str, Any]) -> Any:
        if self.tokens == "tokens" and "tokens" not in item:
            return item.get("input_ids")
        return item.get(self.tokens)

    @property
    def has_labels(self) -> bool:
        """Whether a sample's labels may differ from the next tokens."""
        return not self._is_tokens_only or self.payloads.cost is not None

    @property
    def has_extras(self) -> bool:
        """Whether samples have more than tokens and targets: fields, payloads or their length."""
        given = self.payloads
        return bool(given.cost is not None or self.token_fields or given.payloads)

    @property
    def _is_tokens_only(self) -> bool:
        return self.labels is None and self.loss_mask is None

    def _extras(self, item: Mapping[str, Any], num_tokens: int, where: str) -> Extras:
        fields = {
            name: cast_values(item, name, np.dtype(dtype), num_tokens, where)
            for name, dtype in self.token_fields.items()
        }
        payloads = {
            name: payloads_of(item, name, span_field, num_tokens, where)
            for name, span_field in self.payloads.payloads.items()
        }
        cost = 0 if self.payloads.cost is None else self.payloads.cost(item)
        if not isinstance(cost, int | np.integer) or cost < 0:
            raise DataError(
                f"{where}: the cost of payloads is {cost!r}, but must be the token slots that "
                "they take beyond the tokens: a whole number of 0 or more"
            )
        return Extras(token_fields=fields, payloads=payloads, num_slots=int(cost))
