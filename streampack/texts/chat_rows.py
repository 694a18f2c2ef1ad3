"""Conversations as data sets store them, in the form that chat templates take.

::

    {"messages": [...], "tools": [...]}                 messages of transformers
    {"conversations": [{"from": "human", ...}, ...]}    ShareGPT
    {"prompt": "Hi", "completion": "Hello"}             texts, or lists of messages
    {"instruction": "Add", "input": "1 1", "output": "2"}    Alpaca

Each may have `system` and `tools`, and lists may be JSON text. Nulls inside structs are removed:
Arrow adds them because all rows of a table have the same fields. `chat_fields` reads marks, and
refuses fields that would be ignored.

Cost: a copy of the messages, about 5 us each.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import orjson

from streampack.errors import DataError, suggest
from streampack.texts.chat_fields import (
    LEARNS,
    REASONING,
    WITHDRAWS,
    meaning_of,
    other_texts,
    read_marks,
)

Messages: TypeAlias = list[dict[str, Any]]

RESPONSE = "assistant"
LISTS = ("messages", "conversations")
PAIRS = {"prompt": "completion", "instruction": "output"}
PREFERENCES = ("chosen", "rejected")
KEPT = ("role", "content", "value")  # even if they are null
OF_PROMPTS = ("add_generation_prompt", "continue_final_message")
"""Arguments of templates that change how a text ends, which is for prompts."""
FIELDS = (*LISTS, *PAIRS, *PAIRS.values(), "input", "system", "tools", "chat_template_kwargs")
FORMATS = "messages, conversations, prompt and completion, or instruction and output"
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": RESPONSE,
    "assistant": RESPONSE,
    "observation": "tool",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row that was read."""

    messages: Messages
    """Messages with `role` and `content`, without marks and nulls."""
    withheld: frozenset[int] = frozenset()
    """Numbers of the messages that their marks keep from being learned."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the template: `tools`, and those of `chat_template_kwargs`."""

    @property
    def responses(self) -> list[int]:
        """Numbers of the messages that are responses."""
        return [n for n, message in enumerate(self.messages) if message.get("role") == RESPONSE]


def read_row(row: Any, ignored: Collection[str] = ()) -> Conversation:
    """Return the conversation of a row, or of a list of messages; a DataError refuses others.

    Fields of the row and its messages that are `ignored` are as if they were not there.

    >>> chat = read_row({"instruction": "Add", "input": "1 1", "output": "2", "system": "So?"})
    >>> [(message["role"], message["content"]) for message in chat.messages]
    [('system', 'So?'), ('user', 'Add\\n1 1'), ('assistant', '2')]
    """
    if not isinstance(row, Mapping):
        return _conversation(_messages(row), {}, ignored=ignored)
    fields = {str(name): value for name, value in row.items() if not _is_null(value)}
    row = {name: value for name, value in fields.items() if name not in ignored}
    is_learned = all(read_marks(row, "the row", "row").values())
    withheld: set[int] = set()
    if name := next((name for name in LISTS if name in row), None):
        messages = _messages(row[name])
    elif "prompt" in row and "completion" in row:
        prompt = _turns(row["prompt"], "user")
        withheld |= set(range(len(prompt)))
        messages = prompt + _turns(row["completion"], RESPONSE)
    elif "instruction" in row and "output" in row:
        texts = [row["instruction"], row.get("input")]
        asked = "\n".join(str(text) for text in texts if text not in (None, ""))
        messages = [*_turns(asked, "user"), *_turns(row["output"], RESPONSE)]
    else:
        raise DataError(
            f"a row with {', '.join(map(repr, row))} has no conversation; "
            f"name its fields {FORMATS}, or pass the messages alone"
        )
    if first := _system(row.get("system"), messages[0]):
        messages, withheld = [first, *messages], {number + 1 for number in withheld}
    options = _clean(_parsed(row.get("chat_template_kwargs"))) or {}
    if not isinstance(options, dict):
        raise DataError(
            f"chat_template_kwargs={repr(options)[:60]} must be an object, such as "
            "{'enable_thinking': False}; write it so, or remove it"
        )
    if name := next((each for each in OF_PROMPTS if options.get(each)), None):
        raise DataError(
            f"chat_template_kwargs has {name}={options[name]!r}, which is for the prompt of an "
            "inference, and would change how the conversation ends; remove it"
        )
    tools = _parsed(row.get("tools"))
    if isinstance(tools, str) and tools:
        raise DataError(
            f"tools={tools[:60]!r} is not JSON; write the tools as a list, or as JSON text of one"
        )
    if tools := _clean(tools):
        options["tools"] = tools
    withheld = withheld if is_learned else set(range(len(messages)))
    return _conversation(messages, options, withheld, ignored)


def _system(text: Any, first: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the message of a row's system text, unless it has none, or its `first` one is it."""
    has_other = first.get("role", first.get("from")) == "system"
    if not text or (has_other and first.get("content", first.get("value")) == text):
        return None
    if has_other:
        raise DataError(
            f"the row's system={repr(text)[:60]} differs from its first message, which is a "
            "system message too; remove one of them"
        )
    return {"role": "system", "content": text}


def columns_of(names: Iterable[str], column: str) -> list[str]:
    """Return the columns of a table that `read_row` reads or refuses, and `column`."""
    return [name for name in names if name in (column, *FIELDS) or meaning_of(name, "row")]


def forms_of(messages: Messages) -> Iterator[Messages]:
    """Yield the messages in the forms that templates expect, the likeliest first.

    Arguments of calls are objects, as servers pass them to templates, or JSON text. Contents are as
    they are, or lists of text parts are texts, or texts are such lists.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    for as_text in (False, True) if has_calls else (False,):
        called = [_with_arguments(message, as_text=as_text) for message in messages]
        yield called
        has_lists = any(isinstance(message.get("content"), list) for message in messages)
        change = text_of if has_lists else _parts_of
        yield [
            {key: change(v) if key == "content" else v for key, v in message.items()}
            for message in called
        ]


def text_of(content: Any) -> Any:
    """Return a list of text parts as a text; any other content as it is."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def said_by(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of everything that a template must print of a response."""
    found = [message.get(name) for name in REASONING]
    content = text_of(message.get("content"))
    if isinstance(content, str):
        before, _, answer = content.rpartition("</think>")
        yield "content", answer
        found.append(before.partition("</think>")[0].rpartition("<think>")[2])
    for text in found:
        if isinstance(text, str) and text.strip():
            yield "reasoning", text.strip()
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        name = call.get("function", call).get("name") if isinstance(call, Mapping) else None
        if isinstance(name, str):
            yield "call", name
    for name, text in other_texts(message):
        yield name, text


def is_target(message: Mapping[str, Any]) -> bool:
    """Return whether a response has a content, which may be an empty text, or calls."""
    return message.get("content") not in (None, []) or bool(message.get("tool_calls"))


def _conversation(
    messages: Messages,
    options: Mapping[str, Any],
    withheld: Iterable[int] = (),
    ignored: Collection[str] = (),
) -> Conversation:
    read = [_read_message(message, number, ignored) for number, message in enumerate(messages)]
    marked = {n for n, (_, is_learned) in enumerate(read) if not is_learned}
    return Conversation([each for each, _ in read], frozenset(withheld) | marked, options)


def _messages(value: Any) -> Messages:
    value = _parsed(value)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not len(value) or not all(isinstance(message, Mapping) for message in value):
        raise DataError(
            f"{repr(value)[:60]} is not a conversation; it must be a list of 1 or more messages "
            "such as {'role': 'user', 'content': 'Hi'}"
        )
    return list(value)


def _turns(value: Any, role: str) -> Messages:
    parsed = _parsed(value)
    are_messages = isinstance(parsed, list) and all(
        isinstance(each, Mapping) and "role" in each for each in parsed
    )
    if isinstance(value, str) and not (parsed and are_messages):
        return [{"role": role, "content": value}]
    return _messages(parsed)


def _read_message(
    message: Mapping[str, Any], number: int, ignored: Collection[str]
) -> tuple[dict[str, Any], bool]:
    """Return a message with role and content, and whether its marks let it be learned."""
    read = {k: _clean(v) for k, v in message.items() if k not in ignored}
    read = {k: v for k, v in read.items() if v is not None or k in KEPT}
    if "role" not in read:
        if "from" not in read or "value" not in read:
            raise DataError(
                f"message {number} has {', '.join(map(repr, message))}, but must have role and "
                "content, or from and value"
            )
        sender = str(read.pop("from"))
        if sender not in SHAREGPT_ROLES:
            raise DataError(
                f"message {number} is from {sender!r}, which is not one of "
                f"{'|'.join(SHAREGPT_ROLES)}{suggest(sender, SHAREGPT_ROLES)}; "
                "write it with role and content"
            )
        read = {"role": SHAREGPT_ROLES[sender], "content": read.pop("value"), **read}
    marks = read_marks(read, f"message {number}", "message")
    # A weight of 1 is for responses; users also give it to the messages around them.
    chosen = [k for k, v in marks.items() if v and k != "weight" and _meaning(k) == LEARNS]
    if chosen and read["role"] != RESPONSE:
        raise DataError(
            f"message {number} should be learned, but has role {read['role']!r}, and only messages "
            f"of {RESPONSE!r} can be; rename its role, or remove {chosen[0]}"
        )
    # Templates test whether a message has tool_calls.
    read = {k: v for k, v in read.items() if _meaning(k) not in (LEARNS, WITHDRAWS)}
    if "tool_calls" in read:
        read["tool_calls"] = _parsed(read["tool_calls"])
    if not read.get("tool_calls"):
        read.pop("tool_calls", None)
    if isinstance(content := read.get("content"), list):
        read["content"] = [_text_part(part, number) for part in content]
    elif read["role"] == RESPONSE and not isinstance(content, str | None):
        raise DataError(
            f"message {number} has the content {repr(content)[:60]}, which would be learned as "
            "Python prints it; write it as text"
        )
    return read, all(marks.values())


def _meaning(name: str) -> str | None:
    return meaning_of(name, "message")


def _text_part(part: Any, number: int) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(
            f"message {number} has a content of type {kind!r}, and only text is read; remove the "
            "part, or omit the conversation"
        )
    return {"type": "text", "text": part["text"]}


def _parts_of(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_arguments(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(inner, Mapping) and "arguments" in inner:
            value = inner["arguments"] if as_text else _parsed(inner["arguments"])
            if as_text and not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            inner = {**inner, "arguments": value}
            call = {**call, "function": inner} if "function" in call else inner
        changed.append(call)
    return {**message, "tool_calls": changed}


def _parsed(value: Any) -> Any:
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(value) if isinstance(value, str) else value
    return value


def _clean(value: Any) -> Any:
    """Return a value without the nulls of its structs, and with lists for arrays."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items() if not _is_null(item)}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_clean(item) for item in value]
    return None if _is_null(value) else value


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # pandas writes NaN
