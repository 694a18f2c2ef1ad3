"""One worker's samples of one stream: tokenized in groups, counted, with bad samples skipped.

::

    SourceSlice --items--> up to 64 texts are encoded together --> ready --next()--> samples
                           (items with tokens: one by one)          | bad ones: raise, skip

When a pass ends, the next one begins if the epoch's quota needs more. The state is a position in
the source and never holds tokens: on resume, buffered samples are read again.

Cost: about 2 us per sample, plus the source and the tokenizer. Memory: the texts encoded together,
at most 64 or 64 KiB of text, and one more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from streampack.errors import DataError, ResumeError
from streampack.online.sample_buffer import NO_VALUES
from streampack.online.samples import SampleKey
from streampack.online.source_slice import Item, SourceSlice
from streampack.streams import IterableSample, IterableStream
from streampack.streams.iterable_stream import Plain, invalid_labels, invalid_token_ids
from streampack.streams.label_shift import NUM_LOOKED_AT, labels_are_shifted, unclear_shift
from streampack.streams.source_traits import is_one_shot, num_items, own_copy
from streampack.streams.tokenization import encode_texts
from streampack.types import Int64Array, State

SAME_SAMPLES = (
    "; a source must give the same samples in the same order each time: pass it, and its "
    "tokenizer, as they were, or start anew without the state"
)
NEAR = 64  # most items that are read again only to verify the last sample
TEXTS_TOGETHER = 64
CHARACTERS_TOGETHER = 65_536

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerQuota:
    """How much of its slice of a stream a worker takes in an epoch."""

    amount: int | None = None
    """Samples, or tokens; None: one pass, or passes without end."""
    by_tokens: bool = False
    skipped: int | None = None
    """Samples of the slice's endless sequence of passes that belong to earlier epochs; None: every
    epoch starts a new pass."""
    endless: bool = False
    """Whether a pass is followed by another even if no amount requires it."""


class DrawnSample(NamedTuple):
    """A sample of a stream and its origin; a tuple, because creation is on the hot path."""

    pass_: int
    number: int
    plain: Plain | None
    """Its arrays, if only its token ids remain to be checked."""
    sample: IterableSample | None
    """The parsed sample otherwise."""


class _Pulled(NamedTuple):
    """An item that was read but not yet returned."""

    item: Item
    ids: Int64Array | DataError | None
    """Token ids of its text, if it has one, or the error."""
    result: IterableSample | DataError | None = None
    """The parsed sample or the error, if it was parsed already."""


class StreamSampler:
    """Samples of one stream in the order in which this worker takes them.

    Args:
        stream: The stream, which describes its items.
        name: The stream's name in messages.
        part: This worker's slice of the source.
    """

    def __init__(self, stream: IterableStream, name: str, part: SourceSlice) -> None:
        self._stream = stream
        self._name = name
        self._part = part
        self._quota = WorkerQuota()
        self._ready: deque[_Pulled] = deque()
        # Position of the next sample: its pass, and the number of items before it in that pass.
        self._pass, self._taken = 0, 0
        self._is_text = stream.tokenizer is not None
        self._skips = stream.on_bad_sample == "skip"
        self._has_ended = False
        self._looks = False  # whether to warn about unused label columns at the next item
        self._num_in_pass = 0  # items read in this pass; an empty pass ends the stream
        self.amount_taken = 0
        self.num_bad = 0
        # labels_shifted: whether labels[i] is the target of token i + 1; None until detected.
        self.labels_shifted = stream.labels_shifted if stream.labels else False

    def begin(self, epoch: int, quota: WorkerQuota) -> None:
        """Begin an epoch."""
        self._quota = quota
        self._looks = epoch == 0 and self._part.is_first  # once, not in every worker and epoch
        self._ready.clear()
        self._has_ended = quota.amount == 0
        self.amount_taken = self.num_bad = self._num_in_pass = 0
        pass_, taken = epoch, 0
        if quota.skipped:
            per_pass = self._part.count()
            pass_, taken = divmod(quota.skipped, per_pass) if per_pass else (epoch, 0)
        elif quota.skipped is not None:
            pass_ = 0
        if not self._has_ended:
            self._part.begin(pass_, taken)
        self._pass, self._taken = pass_, taken

    def next(self) -> DrawnSample | None:
        """Return the next sample; None once the epoch's quota is reached or the stream ends.

        Raises:
            DataError: If the source fails or is empty, or a bad sample may not be skipped.
        """
        if self.labels_shifted is None:
            self._look_at_labels()
        limit = self._quota.amount
        while limit is None or self.amount_taken < limit:
            ids = result = None
            if self._ready or (self._is_text and self._refill()):
                item, ids, result = self._ready.popleft()
            else:
                pulled = None if self._is_text else self._pull()
                if pulled is None:
                    return None
                item = pulled
            self._pass, self._taken = item.pass_, item.taken + 1
            plain = None
            if result is None and not isinstance(ids, DataError):
                plain = self._stream.plain(item.value, ids)
            # Skipping needs the check now, because the next sample takes this one's place.
            if plain is not None and not (self._skips and _is_wrong(plain)):
                self.amount_taken += len(plain[0]) if self._quota.by_tokens else 1
                return DrawnSample(item.pass_, item.number, plain, None)
            result = result or self._sample(item, ids)
            if isinstance(result, DataError):
                self.amount_taken += not self._quota.by_tokens
                self.skip(result)
                continue
            self.amount_taken += len(result.tokens) if self._quota.by_tokens else 1
            return DrawnSample(item.pass_, item.number, None, result)
        return None

    def closely(self, taken: DrawnSample) -> IterableSample:
        """Return the checked sample for one whose arrays were taken unchecked."""
        tokens, labels, mask = taken.plain or (NO_VALUES, None, None)
        tokens = np.array(tokens, np.int64)
        labels, mask = (None if row is None else np.array(row, np.int64) for row in (labels, mask))
        self._stream.check_ids(taken.number, tokens)
        self._stream.check_labels(taken.number, labels)
        return IterableSample(tokens=tokens, labels=labels, loss_mask=mask)

    def skip(self, error: DataError) -> None:
        """Count a bad sample, or raise its error if the stream does not skip."""
        if self._stream.on_bad_sample == "raise":
            raise error
        self.num_bad += 1
        if self.num_bad > self._stream.max_bad_samples:
            raise DataError(
                f"stream {self._name!r}: more than max_bad_samples={self._stream.max_bad_samples} "
                f"bad samples in a worker; the last one: {error}"
            ) from error
        log.warning("skipped bad sample %d: %s", self.num_bad, error)

    def tell_of_end(self) -> None:
        """Warn, once, that the stream has ended while others continue."""
        # In the first worker only.
        if self._stream.proportion is None or not self._part.is_first or self._part.has_told:
            return
        self._part.has_told = True
        again = "" if is_one_shot(self._part.source) else "stop='repeat' or epoch_size=, or "
        log.warning(
            "stream %r has ended in pass %d and others go on without it, so their shares are no "
            "longer the proportions asked for; to keep these to the epoch's end set Mixing(%s"
            "stop='first_exhausted')",
            self._name,
            self._pass,
            again,
        )

    # From items to samples.

    def _pull(self) -> Item | None:
        """Return the next item, from the next pass if this one is over and the quota needs it."""
        while not self._has_ended:
            item = self._part.next()
            if item is not None:
                self._num_in_pass += 1
                if self._looks:
                    self._looks = False
                    self._stream.warn_unused_label_column(item.value)
                return item
            if self._part.is_empty:
                raise DataError(
                    f"stream {self._name!r}: its source "
                    f"({type(self._stream.source).__name__}) is empty; leave the stream out"
                )
            wants_more = self._quota.endless or self._quota.amount is not None
            # No item was read or skipped in this pass: the slice is empty.
            if not wants_more or not (self._num_in_pass or self._part.taken):
                self._has_ended = True
                break
            self._part.begin(self._part.pass_ + 1)
            self._num_in_pass = 0
        return None

    def _refill(self) -> bool:
        items: list[Item] = []
        num_characters = 0
        # With payloads, one at a time: a group's payloads would all be in memory together.
        is_alone = self._stream.tokenizer is None or self._stream.payloads
        most = 1 if is_alone else TEXTS_TOGETHER
        if self._quota.amount is not None and not self._quota.by_tokens:
            most = min(most, self._quota.amount - self.amount_taken)
        while len(items) < most and num_characters < CHARACTERS_TOGETHER:
            item = self._pull()
            if item is None:
                break
            # A source may reuse the same object for its next item before this one is encoded.
            items.append(item._replace(value=own_copy(item.value)) if most > 1 else item)
            text = _text(item, self._stream) if most > 1 else ""
            num_characters += len(text) if isinstance(text, str) else 0
        self._ready.extend(self._encoded(items))
        return bool(items)

    def _encoded(self, items: list[Item]) -> list[_Pulled]:
        """Encode and parse items immediately, because a source may reuse their arrays."""
        ids: list[Any] = [None] * len(items)
        if self._stream.tokenizer is not None:
            ids = self._encode(items)
        if self._stream.is_text_only:
            return [_Pulled(item, each) for item, each in zip(items, ids, strict=True)]
        return [
            _Pulled(item, each, self._sample(item, each))
            for item, each in zip(items, ids, strict=True)
        ]

    def _sample(self, item: Item, ids: Int64Array | DataError | None) -> IterableSample | DataError:
        for failure in (item.value, ids):
            if isinstance(failure, DataError):
                return failure
        try:
            return self._stream.sample(item.value, item.number, ids)  # type: ignore[arg-type]
        except DataError as error:
            return error

    def _encode(self, items: list[Item]) -> list[Int64Array | DataError]:
        texts = [_text(item, self._stream) for item in items]
        good = [text for text in texts if isinstance(text, str)]
        try:
            ids: Iterator[Int64Array | DataError] = iter(encode_texts(self._stream.tokenizer, good))
        except Exception:  # encoding them one by one finds the text that fails
            ids = (
                self._encode_alone(item, text)
                for item, text in zip(items, texts, strict=True)
                if isinstance(text, str)
            )
        return [next(ids) if isinstance(text, str) else text for text in texts]

    def _encode_alone(self, item: Item, text: str) -> Int64Array | DataError:
        try:
            return encode_texts(self._stream.tokenizer, [text])[0]
        except Exception as error:
            return DataError(
                f"{self._stream.where(item.number)}: the tokenizer raised {type(error).__name__}: "
                f"{error}; mend the text or set on_bad_sample='skip'"
            )

    def _look_at_labels(self) -> None:
        """Detect from the first samples whether labels are shifted."""
        looked_at: list[tuple[Int64Array, Int64Array]] = []
        num_seen = 0
        while num_seen < NUM_LOOKED_AT:
            if num_seen == len(self._ready) and not self._refill():
                break
            result = self._ready[num_seen].result
            num_seen += 1
            if not isinstance(result, IterableSample) or result.labels is None:
                continue
            looked_at.append((result.tokens, result.labels))
            self.labels_shifted = labels_are_shifted(looked_at)
            if self.labels_shifted is not None:
                return
        if looked_at:
            raise unclear_shift(self._name, len(looked_at))

    # State.

    def state_dict(self, held: Iterable[SampleKey]) -> State:
        """Return the stream's position in its source.

        Args:
            held: Its samples that are still buffered.
        """
        return {
            "pass": self._pass,
            "taken": self._taken,
            "base": None if self._part.has_index else self._part.base(*self._oldest(held)),
            "amount_taken": self.amount_taken,
            "bad": self.num_bad,
            "labels_shifted": self.labels_shifted,
            "size": self._size,
        }

    @property
    def _size(self) -> int | None:
        """Length of an indexed source, which must not change: its samples would be renumbered."""
        return num_items(self._part.source) if self._part.has_index else None

    def is_near(self, key: SampleKey) -> bool:
        """Whether a sample is cheap to read again: by index, or within `NEAR` items."""
        if self._part.has_index:
            return True
        return (self._pass, self._taken - NEAR) <= (key[1], key[2] // self._part.num_parts)

    def _oldest(self, held: Iterable[SampleKey]) -> tuple[int, int]:
        """Return the position of the oldest buffered sample, or of the next one."""
        # A sample's number is its position times the number of slices, plus the slice's number.
        places = [(pass_, number // self._part.num_parts) for _, pass_, number in held]
        return min([(self._pass, self._taken), *places])

    def _check_place(self, epoch: int, base: State | None, held: Iterable[SampleKey]) -> None:
        """Refuse an impossible position: replaying up to it might never end."""
        # At least one sample was taken from every pass, except the one in which the epoch began.
        skipped = self._quota.skipped or 0
        most = max(epoch, skipped) + 1 + skipped + self.amount_taken + self.num_bad
        if max(self._pass, self._taken) > most:
            raise ResumeError(
                f"stream {self._name!r}: the state is {self._taken} samples into pass "
                f"{self._pass}, but took only {self.amount_taken} in epoch {epoch}; load what "
                "state_dict() returned, unchanged"
            )
        if base is None:
            return
        first, begin = self._oldest(held), (base["pass"], base["taken"])
        if begin > first or begin[0] != first[0]:
            raise ResumeError(
                f"stream {self._name!r}: the state goes on from {begin[1]} samples into pass "
                f"{begin[0]}, but its oldest sample is {first[1]} into pass {first[0]}; load what "
                "state_dict() returned, unchanged"
            )

    def load_state_dict(
        self, state: State, epoch: int, quota: WorkerQuota, held: Iterable[SampleKey]
    ) -> dict[SampleKey, IterableSample]:
        """Resume from a state, and read the buffered samples again.

        Returns:
            The buffered samples.

        Raises:
            DataError: If the source does not give the same samples again.
            ResumeError: If the state's position is impossible.
        """
        self._quota = quota
        self._ready.clear()
        self._pass, self._taken = int(state["pass"]), int(state["taken"])
        self.amount_taken, self.num_bad = int(state["amount_taken"]), int(state["bad"])
        self.labels_shifted = state["labels_shifted"]
        self._has_ended = quota.amount == 0
        self._num_in_pass = self._taken
        wanted = {(pass_, number): (stream, pass_, number) for stream, pass_, number in held}
        if self._has_ended:
            return {}
        if state["size"] != self._size:
            raise DataError(
                f"stream {self._name!r}: its source has {self._size} samples, but had "
                f"{state['size']} when the state was saved{SAME_SAMPLES}"
            )
        self._check_place(epoch, state["base"], held)
        items = self._by_index(wanted) if self._part.has_index else self._again(state, wanted)
        found = {}
        for item, ids, seen in self._encoded(items):
            result = seen or self._sample(item, ids)
            if isinstance(result, DataError):
                raise result
            found[wanted[item.pass_, item.number]] = result
        missing = sorted(set(wanted.values()) - set(found))
        if missing:
            raise DataError(
                f"stream {self._name!r}: the state holds sample {missing[0][2]} of pass "
                f"{missing[0][1]}, which the source does not give again{SAME_SAMPLES}"
            )
        return found

    def _by_index(self, wanted: dict[tuple[int, int], SampleKey]) -> list[Item]:
        self._part.begin(self._pass, self._taken)
        items = (self._part.get(pass_, 0, number) for pass_, number in wanted)
        return [item._replace(value=own_copy(item.value)) for item in items]

    def _again(self, state: State, wanted: dict[tuple[int, int], SampleKey]) -> list[Item]:
        """Replay the source up to the state's position; return the wanted items."""
        part = self._part
        part.resume(state["base"])
        items: list[Item] = []
        while (part.pass_, part.taken) < (self._pass, self._taken):
            item = part.next()
            if item is None:
                if part.pass_ >= self._pass:
                    raise DataError(
                        f"stream {self._name!r}: the state is {self._taken} samples into pass "
                        f"{self._pass}, but the source gave {part.taken}{SAME_SAMPLES}"
                    )
                part.begin(part.pass_ + 1)
            elif (item.pass_, item.number) in wanted:
                items.append(item._replace(value=own_copy(item.value)))
        return items


def _is_wrong(plain: Plain) -> bool:
    """Whether a sample holds an invalid token id or label."""
    tokens, labels, _ = plain
    return bool(
        len(invalid_token_ids(tokens)) or (labels is not None and len(invalid_labels(labels)))
    )


def _text(item: Item, stream: IterableStream) -> str | DataError:
    """Return an item's text, or its error."""
    if isinstance(item.value, DataError):
        return item.value
    try:
        return stream.text_of(item.value, item.number)
    except DataError as error:
        return error
