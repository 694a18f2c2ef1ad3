"""One worker's samples of one stream: tokenized some at a time, counted, bad ones skipped.

::

    SourcePart --items--> texts of up to 64 items are encoded together --> ready --next()--> samples
                          (items with tokens: one by one)                    | bad ones: raise, skip

Where a pass ends, the next begins if the epoch wants more of the stream than that. The state is a
place in the source and never a token: whoever resumes reads the samples that were held again.

Cost: about 2 us a sample beside the source and the tokenizer. Memory: the texts encoded together,
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
from streampack.load.held import NO_VALUES
from streampack.load.prepared import Key
from streampack.read.targets import NUM_LOOKED_AT, labels_are_shifted, unclear_shift
from streampack.streams import IterableSample, IterableStream
from streampack.streams.iterable import Plain, no_ids, no_labels
from streampack.streams.part import Item, SourcePart
from streampack.streams.source_kinds import num_items
from streampack.streams.text import encode_texts
from streampack.types import Int64Array, State

__all__ = ["SAME_SAMPLES", "Intake", "Quota", "Taken"]

SAME_SAMPLES = (
    "; a source must give the same samples in the same order each time: pass it, and its "
    "tokenizer, as they were, or start anew without the state"
)
NEAR = 64  # items that may lie between the last sample and the place: no more are read again for it
TEXTS_TOGETHER = 64
CHARACTERS_TOGETHER = 65_536

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How much of its part of a stream a worker takes in an epoch."""

    amount: int | None = None
    """Samples, or tokens; None: a pass, or passes without end."""
    by_tokens: bool = False
    skipped: int = 0
    """Samples of the part's endless sequence of passes that belong to earlier epochs."""
    endless: bool = False
    """Whether a pass is followed by another although no amount asks for it."""


class Taken(NamedTuple):
    """A sample of a stream, and where it came from; a tuple, because one is made for each."""

    pass_: int
    number: int
    plain: Plain | None
    """Its arrays, where it needs no second look but for what is no token id."""
    sample: IterableSample | None
    """All of it, otherwise."""


class _Pulled(NamedTuple):
    """An item that is not taken yet."""

    item: Item
    ids: Int64Array | DataError | None
    """Token ids of its text, if it has one, or what is wrong with that."""
    result: IterableSample | DataError | None = None
    """What it is, where that was looked at already."""


class Intake:
    """Samples of one stream in the order that this worker takes them.

    Args:
        stream: Says what an item holds.
        name: What messages call the stream.
        part: This worker's items.
    """

    def __init__(self, stream: IterableStream, name: str, part: SourcePart) -> None:
        self._stream = stream
        self._name = name
        self._part = part
        self._quota = Quota()
        self._ready: deque[_Pulled] = deque()
        # The place of the next sample: items of the pass that came before it.
        self._pass, self._taken = 0, 0
        self._is_text = stream.tokenizer is not None
        self._skips = stream.on_bad_sample == "skip"
        self._has_ended = False
        self._looks = False  # whether to tell of what is not read of the next item
        self._num_in_pass = 0  # items pulled in this pass; a pass of none ends the stream
        self.amount_taken = 0
        self.num_bad = 0
        # labels_shifted: whether labels[i] speaks of token i + 1; None until the first samples.
        self.labels_shifted = stream.labels_shifted if stream.labels else False

    def begin(self, epoch: int, quota: Quota) -> None:
        """Begin an epoch."""
        self._quota = quota
        self._looks = epoch == 0 and self._part.is_first  # not in every worker and epoch
        self._ready.clear()
        self._has_ended = quota.amount == 0
        self.amount_taken = self.num_bad = self._num_in_pass = 0
        pass_, taken = epoch, 0
        if quota.skipped:
            per_pass = self._part.count()
            pass_, taken = divmod(quota.skipped, per_pass) if per_pass else (epoch, 0)
        elif quota.amount is not None and not quota.by_tokens and self._part.num_items is not None:
            pass_ = 0
        if not self._has_ended:
            self._part.begin(pass_, taken)
        self._pass, self._taken = pass_, taken

    def next(self) -> Taken | None:
        """Return the next sample; None once the epoch has all that it takes of the stream.

        Raises:
            DataError: If the source fails or is empty, or a sample is bad and not to be skipped.
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
            # Only what is skipped must be known at once: the next sample takes its place.
            if plain is not None and not (self._skips and _is_wrong(plain)):
                self.amount_taken += len(plain[0]) if self._quota.by_tokens else 1
                return Taken(item.pass_, item.number, plain, None)
            result = result or self._sample(item, ids)
            if isinstance(result, DataError):
                self.amount_taken += not self._quota.by_tokens
                self.skip(result)
                continue
            self.amount_taken += len(result.tokens) if self._quota.by_tokens else 1
            return Taken(item.pass_, item.number, None, result)
        return None

    def closely(self, taken: Taken) -> IterableSample:
        """Return all of a sample whose arrays were taken as they are."""
        tokens, labels, mask = taken.plain or (NO_VALUES, None, None)
        tokens = np.array(tokens, np.int64)
        labels, mask = (None if row is None else np.array(row, np.int64) for row in (labels, mask))
        self._stream.check_ids(taken.number, tokens)
        self._stream.check_labels(taken.number, labels)
        return IterableSample(tokens=tokens, labels=labels, loss_mask=mask)

    def skip(self, error: DataError) -> None:
        """Count a bad sample, or raise what is wrong with it."""
        if self._stream.on_bad_sample == "raise":
            raise error
        self.num_bad += 1
        if self.num_bad > self._stream.max_bad_samples:
            raise DataError(
                f"stream {self._name!r}: more than max_bad_samples={self._stream.max_bad_samples} "
                f"bad samples in a worker; the last one: {error}"
            ) from error
        log.warning("skipped bad sample %d: %s", self.num_bad, error)

    # From items to samples.

    def _pull(self) -> Item | None:
        """Return the next item, in the next pass if this one is over and more is wanted."""
        while not self._has_ended:
            item = self._part.next()
            if item is not None:
                self._num_in_pass += 1
                if self._looks:
                    self._looks = False
                    self._stream.tell_of_unread(item.value)
                return item
            if self._part.gave_nothing:
                raise DataError(
                    f"stream {self._name!r}: its source "
                    f"({type(self._stream.source).__name__}) is empty; leave the stream out"
                )
            wants_more = self._quota.endless or self._quota.amount is not None
            # Nothing in this pass, whole or from where it was begun: a part without samples.
            if not wants_more or not (self._num_in_pass or self._part.taken):
                self._has_ended = True
                break
            self._part.begin(self._part.pass_ + 1)
            self._num_in_pass = 0
        return None

    def _refill(self) -> bool:
        items: list[Item] = []
        num_characters = 0
        # Payloads beside texts would all be here at once, whatever their bytes.
        is_alone = self._stream.tokenizer is None or self._stream.payloads
        most = 1 if is_alone else TEXTS_TOGETHER
        if self._quota.amount is not None and not self._quota.by_tokens:
            most = min(most, self._quota.amount - self.amount_taken)
        while len(items) < most and num_characters < CHARACTERS_TOGETHER:
            item = self._pull()
            if item is None:
                break
            items.append(item)
            text = _text(item, self._stream) if most > 1 else ""
            num_characters += len(text) if isinstance(text, str) else 0
        self._ready.extend(self._encoded(items))
        return bool(items)

    def _encoded(self, items: list[Item]) -> list[_Pulled]:
        """Return items that are not taken at once; a source may use their arrays again."""
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
        except Exception:  # one of the texts: which one, is told when each is encoded alone
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
        """Tell from the first samples whether labels are shifted."""
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

    def state_dict(self, held: Iterable[Key]) -> State:
        """Return where the stream stands, as places in its source.

        Args:
            held: Samples of it that did not leave yet.
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
        """Samples of a source with an index, of which each that is left out moves others."""
        return num_items(self._part.source) if self._part.has_index else None

    def is_near(self, key: Key) -> bool:
        """Tell whether a sample costs little to be read again: by its number, or soon before."""
        if self._part.has_index:
            return True
        return (self._pass, self._taken - NEAR) <= (key[1], key[2] // self._part.num_parts)

    def _oldest(self, held: Iterable[Key]) -> tuple[int, int]:
        """Return the place of the oldest sample that is held, or of the next one."""
        # Numbers are places, times the parts, plus which part.
        places = [(pass_, number // self._part.num_parts) for _, pass_, number in held]
        return min([(self._pass, self._taken), *places])

    def _check_place(self, epoch: int, base: State | None, held: Iterable[Key]) -> None:
        """Refuse a place that nobody can have come to: the way there may have no end."""
        # Of every pass at least a sample was taken, but for the one that the epoch began in.
        skipped = self._quota.skipped
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
        self, state: State, epoch: int, quota: Quota, held: Iterable[Key]
    ) -> dict[Key, IterableSample]:
        """Go on where the stream stood whose state this is, and read again what was held.

        Returns:
            The samples that were held.

        Raises:
            DataError: If the source does not give again what it gave before.
            ResumeError: If nobody can have come to such a place.
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

    def _by_index(self, wanted: dict[tuple[int, int], Key]) -> list[Item]:
        self._part.begin(self._pass, self._taken)
        return [self._part.get(pass_, 0, number) for pass_, number in wanted]

    def _again(self, state: State, wanted: dict[tuple[int, int], Key]) -> list[Item]:
        """Go through the source again up to the state's place; return what is wanted of it."""
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
                items.append(item)
        return items


def _is_wrong(plain: Plain) -> bool:
    """Tell whether a sample holds what is no token id, or no label."""
    tokens, labels, _ = plain
    return bool(len(no_ids(tokens)) or (labels is not None and len(no_labels(labels))))


def _text(item: Item, stream: IterableStream) -> str | DataError:
    """Return an item's text, or what is wrong with it."""
    if isinstance(item.value, DataError):
        return item.value
    try:
        return stream.text_of(item.value, item.number)
    except DataError as error:
        return error
