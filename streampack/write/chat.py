"""Conversion of conversations to token ids and a loss mask, through a tokenizer's chat template.

Every response of a conversation is a target, in one pass over it::

    rendered    <|user|> Hi <|end|> <|assistant|> Hello ! <|end|> <|user|> Bye <|end|> ...
    loss_mask      0     0     0          0         1   1    1       0      0     0

`chat_spans` locates the responses in the text. The tokenizer's offsets map characters to tokens: a
token is a target if any of its characters is.

Cost: one tokenizer call, and two or more renderings of the template, see `chat_spans`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from streampack._checks import check_choice
from streampack.errors import ConfigError, DataError, suggest
from streampack.types import IntArray
from streampack.write.chat_spans import RESPONSE, Messages, Rendering, TargetSpans

TrainOn = Literal["responses", "last_response", "all"]

FIELDS = ("messages", "conversations")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": RESPONSE,
    "assistant": RESPONSE,
    "observation": "tool",
    "tool": "tool",
}
# Roles of context messages (not targets) in templates of known models: "developer" is gpt-oss',
# "environment" OLMo's, "function" Functionary's, "ipython" Llama 3's, "observation" GLM's.
OF_TEMPLATES = ("developer", "environment", "function", "ipython", "observation")
CONTEXT_ROLES = ("system", "user", "tool", *OF_TEMPLATES)
MARKS = ("weight", "train", "training")  # by which others choose what is learned of a message


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Turns a conversation into a sample: `tokens`, and the `loss_mask` of its responses.

    A conversation is a list of messages, ``{"role": ..., "content": ...}`` as in transformers or
    ``{"from": ..., "value": ...}`` as in ShareGPT; or a row that holds one under "messages" or
    "conversations", and perhaps "tools". Messages and tools may also be JSON text.

    Raises:
        ConfigError: If the tokenizer has no chat template or no offsets, or `train_on` is unknown.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = "? <user> <assistant> <end> Hi Hello".split()
    >>> words = Tokenizer(models.WordLevel(dict(zip(words, range(6))), unk_token="?"))
    >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    >>> tokenizer.chat_template = (
    ...     "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    ...     "{% if add_generation_prompt %}<assistant> {% endif %}")
    >>> encode = ChatEncoder(tokenizer)
    >>> sample = encode([{"role": "user", "content": "Hi"},
    ...                  {"role": "assistant", "content": "Hello"}])
    >>> sample["tokens"].tolist(), sample["loss_mask"].tolist()
    ([1, 4, 3, 2, 5, 3], [0, 0, 0, 0, 1, 1])
    """

    tokenizer: Any
    """A fast tokenizer of transformers."""
    train_on: TrainOn = "responses"
    """Targets: every response, only the last one, or all tokens."""
    chat_template: str | None = None
    """A template, or the name of one of the tokenizer's; None: the tokenizer's default."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More template arguments, such as ``{"enable_thinking": False}``."""
    context_roles: Sequence[str] = ()
    """More roles of the template whose messages are not targets, such as "documents"."""

    def __post_init__(self) -> None:
        check_choice("train_on", self.train_on, TrainOn)
        if isinstance(self.context_roles, str):
            raise ConfigError(
                f"context_roles={self.context_roles!r} is one text; write [{self.context_roles!r}]"
            )
        kind = type(self.tokenizer).__name__
        if not hasattr(self.tokenizer, "apply_chat_template"):
            raise ConfigError(
                f"tokenizer=<{kind}> has no apply_chat_template; pass a tokenizer of transformers"
            )
        if not (self.chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise ConfigError(
                f"tokenizer=<{kind}> has no chat template; set tokenizer.chat_template, pass "
                "chat_template=, or use the tokenizer of a chat model"
            )
        if self.train_on != "all" and not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"tokenizer=<{kind}> does not say which characters a token stands for; pass a "
                "fast tokenizer (AutoTokenizer gives one), or train_on='all'"
            )

    def __call__(self, conversation: Any) -> dict[str, IntArray]:
        """Return the sample of one conversation: messages, or a row that holds them.

        Returns:
            `tokens`, int32, and `loss_mask`, uint8: 1 for targets; both of shape (num_tokens,).
            Without any response the mask is all 0.

        Raises:
            ConfigError: If the template does not reveal the position of a response.
            DataError: If this is not a conversation, the template rejects it or prints nulls that
                it has inside, it has an unknown role, whose messages would not be learned, or a
                `system`, `weight` or `train` that would be ignored.
        """
        messages, tools = _read_row(conversation)
        wants_spans = self.train_on != "all"
        if wants_spans:
            self._check_roles(messages)
        self._check_marks(messages)
        options = {"chat_template": self.chat_template, "tools": tools, **self.template_kwargs}
        rendering = Rendering(self.tokenizer, messages, options)
        text = rendering.text
        self._check_nulls(messages, options, text)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=wants_spans, verbose=False
        )
        tokens = encoded["input_ids"]
        mask = np.ones(len(tokens), np.uint8)
        if wants_spans:
            spans = rendering.spans(last_only=self.train_on == "last_response")
            mask = target_tokens(encoded["offset_mapping"], spans, len(text))
        return {"tokens": np.array(tokens, np.int32), "loss_mask": mask}

    def _check_roles(self, messages: Messages) -> None:
        known = (RESPONSE, *CONTEXT_ROLES, *self.context_roles)
        for number, message in enumerate(messages):
            role = message.get("role")
            if role not in known:
                raise DataError(
                    f"message {number} has role {role!r}, which is not one of {'|'.join(known)}"
                    f"{suggest(str(role), known)}; rename it to {RESPONSE!r} if it is to be "
                    f"learned, or pass context_roles=[{role!r}] if it is not"
                )

    def _check_marks(self, messages: Messages) -> None:
        """Refuse messages whose own marks say something else about the loss than `train_on`."""
        responses = [n for n, message in enumerate(messages) if message.get("role") == RESPONSE]
        learned = responses[-1:] if self.train_on == "last_response" else responses
        for number, message in enumerate(messages):
            is_learned = self.train_on == "all" or number in learned
            for key in MARKS:
                mark = message.get(key, is_learned)
                # A weight is for responses; users also give it to the messages around them.
                if mark != is_learned and (key != "weight" or number in responses):
                    raise DataError(
                        f"message {number} has {key}={mark!r}, but train_on={self.train_on!r} "
                        f"{'learns it' if is_learned else 'does not learn it'}; choose another "
                        f"train_on=, or leave {key!r} out and set the sample's loss_mask yourself"
                    )

    def _check_nulls(self, messages: Messages, options: Mapping[str, Any], text: str) -> None:
        """Refuse messages if the template prints nulls that they have inside."""
        bare = [{key: _without_nulls(value) for key, value in m.items()} for m in messages]
        with suppress(DataError):  # a template may need the field: then it prints the null
            if bare == messages or Rendering(self.tokenizer, bare, options).text == text:
                return
        number = next(n for n, message in enumerate(messages) if message != bare[n])
        raise DataError(
            f"message {number} has a null inside, as tables add to structs, and the chat template "
            "prints it, so it could be learned; store the arguments of calls as JSON text, or "
            "remove their nulls before encoding"
        )


@dataclass(frozen=True, slots=True)
class ChatSamples:
    """The conversations of a list or a map-style dataset, encoded on access.

    As a source for `IterableStream` it can be read in slices, and resumes without a replay.

    >>> samples = ChatSamples(["a", "b"], lambda text: {"tokens": np.array([ord(text)])})
    >>> len(samples), samples[1]["tokens"].tolist()
    (2, [98])
    """

    conversations: Sequence[Any]
    """Any object with a length and an index."""
    encode: Callable[[Any], dict[str, IntArray]]
    """A `ChatEncoder`."""

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, IntArray]:
        return self.encode(self.conversations[index])


def target_tokens(offsets: Any, spans: TargetSpans, num_chars: int) -> npt.NDArray[np.uint8]:
    """Return 1 for tokens that have a character in a span, else 0; shape (num_tokens,).

    `offsets` holds the first character of each token and one past its last, (num_tokens, 2); so do
    `spans`, in the same text of `num_chars` characters. A token that
    crosses an edge is marked. So are all tokens of one character, such as the bytes of an emoji:

    >>> target_tokens([(0, 2), (2, 5), (5, 6), (5, 6), (6, 8)], [(4, 6)], 8).tolist()
    [0, 1, 1, 1, 0]
    """
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    # Some tokenizers trim the offsets of white space to nothing. It then follows the previous
    # token. Without a gap, as for an inserted space, the next character decides.
    before = np.maximum.accumulate(np.append(0, ends))[:-1]
    starts = np.where(starts == ends, np.minimum(before, starts), starts)
    ends = np.where(starts == ends, ends + 1, ends)
    is_target = np.zeros(num_chars + 1, np.int64)
    for start, end in spans:
        is_target[start:end] = 1
    num_before = np.append(0, np.cumsum(is_target))
    return np.asarray(num_before[ends] > num_before[starts], np.uint8)


def _read_row(row: Any) -> tuple[Messages, Any]:
    """Return a conversation's messages in transformers' form, and its tools."""
    tools = None
    if isinstance(row, Mapping):
        name = next((name for name in FIELDS if row.get(name) is not None), None)
        if name is None:
            raise DataError(
                f"a row with {', '.join(map(repr, row))} holds no conversation; "
                f"name its field {' or '.join(FIELDS)}, or pass the messages alone"
            )
        system, tools, row = row.get("system"), row.get("tools") or None, row[name]
        if system:
            raise DataError(
                f"the row's system={repr(system)[:60]} would not be in the sample; make it the "
                f"first of {name}: {{'role': 'system', 'content': ...}}, and leave out 'system'"
            )
    row, tools = _parsed(row), _parsed(tools)
    if isinstance(tools, str):
        raise DataError(
            f"tools={tools[:60]!r} is not JSON; write the tools as a list, or as JSON text of one"
        )
    is_list = isinstance(row, Sequence) and not isinstance(row, str)
    if not is_list or not len(row) or not all(isinstance(message, Mapping) for message in row):
        raise DataError(
            f"{repr(row)[:60]} is not a conversation; it must be a list of 1 or more messages such "
            "as {'role': 'user', 'content': 'Hi'}"
        )
    return [_read_message(message, number) for number, message in enumerate(row)], tools


def _parsed(value: Any) -> Any:
    """Return the value of JSON text; any other value as it is."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(value) if isinstance(value, str) else value
    return value


def _read_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    if "role" in message:
        # A table has every field in every row, and templates test whether a message has tool_calls.
        return {
            key: value for key, value in message.items() if value is not None or key == "content"
        }
    if "from" not in message or "value" not in message:
        raise DataError(
            f"message {number} has {', '.join(map(repr, message))}, but must have role and "
            "content, or from and value"
        )
    sender = str(message["from"])
    if sender not in SHAREGPT_ROLES:
        raise DataError(
            f"message {number} is from {sender!r}, which is not one of "
            f"{'|'.join(SHAREGPT_ROLES)}{suggest(sender, SHAREGPT_ROLES)}; "
            "write it with role and content"
        )
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    return {"role": SHAREGPT_ROLES[sender], "content": message["value"], **marks}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
