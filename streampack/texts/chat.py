"""Conversion of conversations to token ids and a loss mask, through a tokenizer's chat template.

Every response of a conversation is a target, in one pass over it::

    rendered    <|user|> Hi <|end|> <|assistant|> Hello ! <|end|> <|user|> Bye <|end|> ...
    loss_mask      0     0     0          0         1   1    1       0      0     0

`chat_spans` locates the responses in the text. The tokenizer's offsets map characters to tokens: a
token is a target if any of its characters is.

Templates that print a turn otherwise once another follows have no such mask. There, every response
becomes a sample that ends with it.

Cost: one tokenizer call a sample, and a few renderings of the template for each response, see
`chat_spans`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from streampack._checks import check_choice, check_names, read_count
from streampack.errors import ConfigError, DataError, suggest
from streampack.texts.chat_rows import OF_PROMPTS, RESPONSE, Conversation, is_target, read_row
from streampack.texts.chat_spans import Rendering, TargetSpans, rendered
from streampack.types import IntArray

TrainOn = Literal["responses", "last_response", "each_response", "all"]

# Roles of context messages (not targets) in templates of known models: "developer" is gpt-oss',
# "environment" OLMo's, "function" Functionary's, "ipython" Llama 3's, "observation" GLM's.
OF_TEMPLATES = ("developer", "environment", "function", "ipython", "observation")
CONTEXT_ROLES = ("system", "user", "tool", *OF_TEMPLATES)


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Turns a conversation into samples: `tokens`, and the `loss_mask` of its responses.

    A conversation is a list of messages, ``{"role": ..., "content": ...}`` as in transformers or
    ``{"from": ..., "value": ...}`` as in ShareGPT; or a row that contains one under "messages" or
    "conversations", a "prompt" and its "completion", or Alpaca's "instruction", "input" and
    "output". A row may also have "system" and "tools". Lists may be JSON text.

    A message with ``weight=0``, ``train=False`` or ``mask=True`` is not learned, nor is an
    assistant's without content and calls.

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
    """Targets: every response of a conversation, only the last one, or all tokens. For
    "each_response", every response is the only target of a sample that ends with it."""
    chat_template: str | None = None
    """A template, or the name of one of the tokenizer's, or None for the tokenizer's default."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More template arguments, such as ``{"enable_thinking": False}``."""
    context_roles: Sequence[str] = ()
    """More roles of the template that are not targets, such as "documents"."""
    ignore_fields: Sequence[str] = ()
    """Fields of rows and messages that are as if they were not there, such as "score"."""
    max_seq_len: int | None = None
    """Tokens that a sample is cut to, or None if it is never cut."""

    def __post_init__(self) -> None:
        check_chat_options(self)
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
        """Return the sample of one conversation: messages, or a row that contains them.

        Returns:
            `tokens`, int32, and `loss_mask`, uint8: 1 for targets; both of shape (num_tokens,).
            Without any response the mask is all 0.

        Raises:
            ConfigError: If the template does not reveal the position of a response or omits
                a part of it or the tools, or if `train_on` makes several samples of a conversation.
            DataError: If this is not a conversation, the template rejects it, it has an unknown
                role that would not be learned, or a field that would be ignored.
        """
        if self.train_on == "each_response":
            raise ConfigError(
                "train_on='each_response' makes several samples of a conversation; call "
                "encoder.samples(conversation), which returns a list"
            )
        return self.samples(conversation)[0]

    def samples(self, conversation: Any) -> list[dict[str, IntArray]]:
        """Return the samples of one conversation: one for each response, or one in other modes.

        Samples are as `__call__` returns them, and so are errors. For a conversation with nothing
        to learn, and for one that `max_seq_len` cuts before its first target, the mask is all 0:
        ``streampack write`` and `chat_dataset` skip such samples and count them.
        """
        chat = read_row(conversation, self.ignore_fields)
        chosen = self._chosen(chat)
        options = {"chat_template": self.chat_template, **self.template_kwargs, **chat.options}
        whole = rendered(self.tokenizer, chat.messages, options)
        learned = [n for n in chosen if is_target(whole.messages[n])]
        whole.check_fields(chosen, located=() if self.train_on == "all" else learned)
        if self.train_on == "each_response" and learned:
            return [self._sample(whole.until(n), [n]) for n in learned]
        return [self._sample(whole, learned)]

    def _sample(self, rendering: Rendering, learned: Sequence[int]) -> dict[str, IntArray]:
        wants_spans = self.train_on != "all"
        is_prompted = self.train_on == "each_response"
        spans = rendering.spans(learned, is_prompted=is_prompted) if wants_spans else []
        encoded = self.tokenizer(
            rendering.text,
            add_special_tokens=False,
            return_offsets_mapping=wants_spans,
            verbose=False,
        )
        tokens = encoded["input_ids"]
        mask = np.ones(len(tokens), np.uint8)
        if wants_spans:
            mask = target_tokens(encoded["offset_mapping"], spans, len(rendering.text))
        kept = slice(self.max_seq_len)
        return {"tokens": np.array(tokens[kept], np.int32), "loss_mask": mask[kept]}

    def _chosen(self, chat: Conversation) -> list[int]:
        if self.train_on == "all":
            if chat.withheld:
                raise DataError(
                    f"message {min(chat.withheld)} is not to be learned, but train_on='all' learns "
                    "every token; choose train_on='responses', or remove weight, train and mask"
                )
            return chat.responses
        known = (RESPONSE, *CONTEXT_ROLES, *self.context_roles)
        for number, message in enumerate(chat.messages):
            role = message.get("role")
            if role not in known:
                raise DataError(
                    f"message {number} has role {role!r}, which is not one of {'|'.join(known)}"
                    f"{suggest(str(role), known)}; rename it to {RESPONSE!r} if it should "
                    f"be learned, or pass context_roles=[{role!r}] if it is not"
                )
        first = -1 if self.train_on == "last_response" else 0
        return [n for n in chat.responses[first:] if n not in chat.withheld]


def check_chat_options(options: Any) -> None:
    """Refuse invalid options of a `ChatEncoder`, which need no tokenizer for that."""
    check_choice("train_on", options.train_on, TrainOn)
    if options.max_seq_len is not None:
        read_count("max_seq_len", options.max_seq_len)
    for name in ("context_roles", "ignore_fields"):
        check_names(name, getattr(options, name))
    if RESPONSE in options.context_roles:
        raise ConfigError(
            f"context_roles={options.context_roles!r} has {RESPONSE!r}, the role that is learned; "
            "omit it, and give messages that are not to be learned train=False",
            option="context_roles",
        )
    if name := next((each for each in OF_PROMPTS if options.template_kwargs.get(each)), ""):
        raise ConfigError(
            f"template_kwargs has {name}={options.template_kwargs[name]!r}, which is for the "
            "prompt of an inference, and would change how conversations end; omit it",
            option="template_kwargs",
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

    `offsets` contains the first character of each token and one past its last, (num_tokens, 2); so
    do `spans`, in the same text of `num_chars` characters. A token that
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
