"""Fields of rows and messages that decide what is learned, in one table.

::

    {"messages": [...], "sample_weight": 0}           the row is not learned
    {"role": "assistant", "train": false, ...}        nor is this message
    {"prompt": "Hi", "completion": "Ho", "score": 1}  refused: it would be ignored
    {"role": "assistant", "thought": "two", ...}      refused if the template does not print it

Names that resemble one of these are refused too.

Cost: about 1 us a field.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import cache
from typing import Any

import numpy as np

from streampack.errors import DataError

logger = logging.getLogger(__name__)
_warned: set[str] = set()  # names of fields

LEARNS, WITHDRAWS, SAYS = "learns", "withdraws", "says"
REASONING = ("reasoning_content", "reasoning", "thinking")
TEXTS = (str, Mapping, Sequence, np.ndarray)
READ = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING}

_MARKS = "weight|train(ing|able)?|learnable|do_train|supervised?"
_SAID = "function_calls?|refusal|reasoning_(details|text)|thoughts?|thinking_blocks|cot|audio"
_LOSS = "loss|weights?|train(ing|able|ed)?|masks?|masked|learn(ed|able)?|supervised?|labels?"
_OF = "is|no|do|not|on|details?|scale|samples?|tokens?|turns?|messages?|rows?|responses?"
_OF += "|completions?|prompts?|assistant|user|attention|action|target"
TOKENIZED = (
    "which has a value for each token, and the text is tokenized again; pass the token ids "
    "without chat, and name the field with loss_mask= or labels="
)
PAIR = (
    "which is one of a preference, and only the better answer should be learned; rename 'chosen' "
    "to 'messages', or to 'completion' if it is a text, and leave the other out"
)
TABLE = tuple(
    (places, re.compile(names, re.I), meaning)
    for places, names, meaning in (
        ("row", "system|tools", None),
        ("row message", _MARKS, LEARNS),
        ("row message", "mask|(is_)?masked|no_loss|ignored?", WITHDRAWS),
        ("row", "sample_weight|label", LEARNS),
        ("row message", f"{_SAID}|{'|'.join(REASONING)}", SAYS),
        ("row message", r"labels|([a-z]+_)?masks?", TOKENIZED),
        ("row", "chosen|rejected", PAIR),
        ("row message", "scores?|rewards?", "which rates the answer; remove bad rows first"),
        (
            "row",
            "history(_?(list|s))?",
            "which has earlier turns; write all turns of the conversation as messages",
        ),
        (
            "row",
            "(system|sys|tools?|functions?)(_?(prompt|message|list|s))?",
            "which seems to hold a system text or tools; rename it to one of system, tools",
        ),
        (
            "row message",
            f"(({_OF})_)*({_LOSS})(_({_OF}|{_LOSS}))*",
            "which seems to concern the loss; rename it to one of weight, train, mask",
        ),
    )
)
# Names of texts about a message, which are not part of it.
ABOUT = re.compile(
    r"(.*_)?(id|uuid|hash|name|time|timestamp|date|at|by|url|model|version|lang|language|source|type)"
    r"|(finish|stop)_reason",
    re.I,
)


@cache
def meaning_of(name: str, place: str) -> str | None:
    """Return what a field means in a "row" or a "message".

    LEARNS and WITHDRAWS are marks: a false or a true value keeps a message from being learned.
    SAYS is a part of an answer. Another text says why the field is refused. None: nothing.

    >>> meaning_of("train", "message"), meaning_of("is_masked", "row"), meaning_of("id", "row")
    ('learns', 'withdraws', None)
    """
    return next((what for at, names, what in TABLE if place in at and names.fullmatch(name)), None)


def read_marks(fields: Mapping[str, Any], where: str, place: str) -> dict[str, bool]:
    """Return by name whether each mark lets a row or message be learned.

    A DataError refuses a mark that is neither 0 nor 1, and a field that would be ignored.

    >>> read_marks({"train": 0, "mask": False, "id": 7}, "message 1", "message")
    {'train': False, 'mask': True}
    """
    marks = {}
    for name, value in fields.items():
        meaning = meaning_of(name, place)
        if meaning is None or value is None or (isinstance(value, Sized) and not len(value)):
            continue
        if meaning == SAYS:
            if place == "message" or not isinstance(value, TEXTS):
                continue
            meaning = "which no template gets from a row; write it into one of its messages"
        elif meaning in (LEARNS, WITHDRAWS):
            is_bool = isinstance(value, bool | np.bool_)
            # A label of 0 or 1 may also be a class.
            if is_bool or (name != "label" and np.ndim(value) == 0 and value in (0, 1)):
                marks[name] = bool(value) == (meaning == LEARNS)
                continue
            numbers = "" if name == "label" else "0 or 1, or "
            meaning = f"and a {place} is either learned or not; write {numbers}true or false"
        raise DataError(
            f"{where} has {name}={repr(value)[:60]}, {meaning}, or pass ignore_fields=[{name!r}]"
        )
    return marks


def other_texts(message: Mapping[str, Any], *, named_only: bool = False) -> Iterator[Any]:
    """Yield the name and the longest text of each field that says more than what is known.

    With `named_only`, only those that the table names.

    >>> message = {"role": "assistant", "content": "4", "thought": "2 and 2", "id": "a", "n": 3}
    >>> list(other_texts(message))
    [('thought', '2 and 2')]
    """
    for name, value in message.items():
        is_named = meaning_of(name, "message") == SAYS
        is_about = isinstance(value, str) and ABOUT.fullmatch(name)
        if name in READ or not (is_named or not (named_only or is_about)):
            continue
        if isinstance(value, TEXTS) and len(value):
            yield name, max(_texts(value), key=len, default=repr(value))


def warn_of_unread(names: set[str], template: str) -> None:
    """Warn of fields of messages that a template does not read, once each."""
    new = {name for name in names - READ - _warned if meaning_of(name, "message") != SAYS}
    _warned.update(new)
    unread = sorted(name for name in new if not re.search(rf"\b{re.escape(name)}\b", template))
    if unread:
        logger.warning(
            "messages have %s, which the chat template does not read, so nothing of it is learned "
            "or shown; pass ignore_fields=%r if that is right",
            ", ".join(unread),
            unread,
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
