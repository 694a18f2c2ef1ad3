"""Character spans of the responses in a conversation's rendered text.

A template with ``{% generation %}`` markers states them. For others, a response is the text that a
message adds to the prompt that a model would answer::

    messages[:1] and the generation prompt    <|user|>Hi<|end|><|assistant|>
    messages[:2]                              <|user|>Hi<|end|><|assistant|>Hello!<|end|>
                                                                            '-----------'

Each text must be a prefix of the next one, and the last one of the whole conversation; otherwise
the template is refused. But what the generation prompt itself adds may differ, as "<think>" does
from "<think></think>": the response then begins where the two texts part.

Either way, everything that a response says must be in its span.

Cost: three renderings or fewer for each response, of about 50 us each, and one or two more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeAlias

from streampack.errors import ConfigError, DataError
from streampack.texts.chat_fields import other_texts, warn_of_unread
from streampack.texts.chat_rows import RESPONSE, Messages, forms_of, said_by, text_of

TargetSpans: TypeAlias = list[tuple[int, int]]

logger = logging.getLogger(__name__)

MARKER = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
BEGIN, END = "\ue000begin\ue001", "\ue000end\ue001"  # private use area: not in real text
_warned: set[str] = set()  # templates
TAG = re.compile(r"<[^<>\s]*$")
KINDS = ("content", "reasoning", "call")
ANSWER = "Fine."
SHORT_CHAT = [{"role": "user", "content": "Well?"}, {"role": RESPONSE, "content": ANSWER}]


def rendered(tokenizer: Any, messages: Messages, options: Mapping[str, Any]) -> Rendering:
    """Return the rendering of messages in the form that the template prints: see `forms_of`.

    If it prints no form whole, they are as they were. A DataError says that it rejects all.
    """
    found: list[Rendering] = []
    first_error = None
    for form in forms_of(messages):
        try:
            rendering = Rendering(tokenizer, form, options)
        except DataError as error:
            if type(error.__cause__).__name__ == "TemplateError":  # its own raise_exception()
                raise
            first_error = first_error or error
            continue
        if _has_contents(rendering.text, form):
            return rendering
        found.append(rendering)
    if not found and first_error:
        raise first_error
    return found[0]


def _has_contents(text: str, messages: Messages) -> bool:
    """Return whether a text has what users say, and no list of parts as Python prints it."""
    said = [text_of(m.get("content")) for m in messages if m.get("role") == "user"]
    is_printed = all(one.strip() in text for one in said if isinstance(one, str))
    has_lists = any(isinstance(message.get("content"), list) for message in messages)
    return is_printed and not (has_lists and "{'type': 'text'" in text)


class Rendering:
    """One conversation as text, and the spans of its responses.

    `options` are more arguments for `apply_chat_template`. A DataError is raised if the template
    rejects the conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Messages,
        options: Mapping[str, Any],
        following: Messages | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.messages = messages
        self._options = options
        self._following = following or []
        self.text = self._render(len(messages))

    def until(self, response: int) -> Rendering:
        """Return the rendering that ends with a response."""
        prefix, later = self.messages[: response + 1], self.messages[response + 1 :]
        return Rendering(self._tokenizer, prefix, self._options, later[:1])

    def check_fields(self, chosen: Sequence[int], located: Sequence[int]) -> None:
        """Refuse tools that the template omits, and what it omits of messages.

        Of the `chosen` ones, it must print everything, and of others what `chat_fields` names.
        Those that are `located` are left to `spans`. Other fields that it does not read are named
        in a warning, once.
        """
        if self._options.get("tools"):
            options = {k: v for k, v in self._options.items() if k != "tools"}
            with suppress(DataError):
                if Rendering(self._tokenizer, self.messages, options).text == self.text:
                    raise ConfigError(
                        "the chat template omits the tools of this row, "
                        f"{repr(self._options['tools'])[:60]}, so calls would be learned without "
                        "them; pass chat_template= with one that prints them, or "
                        "ignore_fields=['tools']"
                    )
        for number, message in enumerate(self.messages):
            if number not in located:
                named = None if number in chosen else other_texts(message, named_only=True)
                self._check_printed(number, self.text, named)
        warn_of_unread({name for message in self.messages for name in message}, self._template)

    @cached_property
    def _template(self) -> str:
        return str(
            self._tokenizer.get_chat_template(
                self._options.get("chat_template"), self._options.get("tools")
            )
        )

    def _render(self, num_messages: int, **options: Any) -> str:
        try:
            # As a batch of one: otherwise transformers rejects an empty conversation.
            [text] = self._tokenizer.apply_chat_template(
                [self.messages[:num_messages]], tokenize=False, **{**self._options, **options}
            )
        except Exception as error:  # a template can raise anything
            raise DataError(
                f"the chat template cannot render {num_messages} of {len(self.messages)} messages "
                f"({type(error).__name__}: {error}); fix the conversation or omit it"
            ) from error
        return str(text)

    def spans(self, learned: Sequence[int], *, is_prompted: bool = False) -> TargetSpans:
        """Return the first character and one past the last of each of these responses.

        With `is_prompted`, the last message is the one to learn. Then the text may change: it is
        the prompt of an inference and what the template prints for the response.

        A ConfigError says that the template does not reveal a position, or omits reasoning or
        a call.
        """
        if not learned:
            return []
        spans = self._located(learned, is_prompted)
        target = self.text[slice(*spans[-1])]
        if not target.rstrip().endswith(self._special_tokens):
            end = _end_of_turn(self._tokenizer, self._options)
            if not (end and target.endswith(end)):
                _warn_of_no_end(self._template, target[-40:])
        return spans

    def _located(self, learned: Sequence[int], is_prompted: bool = False) -> TargetSpans:
        if MARKER.search(self._template):
            return self._marked(MARKER.sub(_with_sign, self._template), learned)
        # The last one first: if it cannot be located, the error must not propose it.
        return [self._added_by(each, is_prompted) for each in reversed(learned)][::-1]

    def _marked(self, template: str, learned: Sequence[int]) -> TargetSpans:
        # Not `return_assistant_tokens_mask`, which in transformers 4.57 has two defects. If the
        # last character of a span has several tokens, as an emoji may, all but the first are left
        # out. If it is in no token, everything after the span is unmasked.
        text, spans = _cut_signs(self._render(len(self.messages), chat_template=template))
        if text != self.text:
            at = _num_shared(text, self.text)
            raise ConfigError(
                "the chat template changes text that it marked with {% generation %}, here "
                f"{text[at : at + 40]!r}, so its position is unknown; put the markers around text "
                "that is printed unchanged"
            )
        responses = [n for n, m in enumerate(self.messages) if m.get("role") == RESPONSE]
        is_each = learned == responses and len(spans) == len(responses)
        if is_each and not any(map(self._omitted, responses, map(self._printed_at, spans))):
            return spans
        ends = dict(pairwise([*responses, len(self.messages)]))
        count = partial(self._num_marked, template=template, total=len(spans))
        found = {n: spans[count(n) : count(ends[n])] for n in learned}
        if not any(found.values()):
            raise ConfigError(
                "the chat template has {% generation %} markers, but none in messages "
                f"{learned[0]} to {len(self.messages) - 1}, which hold responses to train on; put "
                "them around what it prints for each"
            )
        for number, own in found.items():
            self._check_printed(number, "".join(map(self._printed_at, own)))
        return spans if learned == responses else [span for n in learned for span in found[n]]

    def _printed_at(self, span: tuple[int, int]) -> str:
        return self.text[slice(*span)]

    def _num_marked(self, num_messages: int, template: str, total: int) -> int:
        if num_messages in (0, len(self.messages)):
            return total if num_messages else 0
        return len(_cut_signs(self._render(num_messages, chat_template=template))[1])

    def _added_by(self, response: int, is_prompted: bool) -> tuple[int, int]:
        before = self._render(response, add_generation_prompt=True)
        later = self.messages[response + 1 :]
        until = self._render(response + 1) if later else self.text
        begin = self._begin_of(response, before, until, is_prompted)
        if begin is None and is_prompted and (added := self._after_prompt(response, before)):
            begin, until = len(before), before + added
            self.text = until
        if begin is None or not self.text.startswith(until):
            is_last = not any(m.get("role") == RESPONSE for m in later)
            way_out = "pass chat_template= with {% generation %} markers"
            if not is_last:
                way_out = f"pass train_on='each_response' or 'last_response', or {way_out[5:]}"
            raise ConfigError(
                f"message {response} of {len(self.messages)}: the chat template prints it, or the "
                "messages before it, differently at the end of a conversation or with a generation "
                "prompt (as templates do that strip the reasoning of earlier turns), so its "
                f"position is unknown; {way_out}"
            )
        added = until[begin:]
        self._check_printed(response, added)
        kept = added.rstrip()
        end = begin + len(kept if kept.endswith(self._special_tokens) else added)
        return begin, end + self._num_of_next_turn(until[begin:end], end)

    def _num_of_next_turn(self, target: str, end: int) -> int:
        """Return the characters of the next role's token where it ends this turn, as GLM's does."""
        if target.endswith(self._special_tokens):
            return 0
        longer = self.text
        if self._following:
            with suppress(DataError):
                messages = [*self.messages, *self._following]
                longer = Rendering(self._tokenizer, messages, self._options).text
        tokens = [token for token in self._special_tokens if longer.startswith(token, end)]
        if not tokens or not longer.startswith(self.text[:end]):
            return 0
        token = max(tokens, key=len)
        self.text += token if self._following else ""
        return len(token)

    def _begin_of(self, response: int, before: str, until: str, is_prompted: bool) -> int | None:
        """Return where a response begins in the text until its end, or None if it is unknown.

        `before` is the prompt. It may part from `until` in what the generation prompt adds.
        """
        begin = _num_shared(before, until)
        content = text_of(self.messages[response].get("content"))
        is_text = isinstance(content, str)
        if begin == len(before) and (not is_text or _begins(until[begin:], content)):
            if before[-1:] == until[-1:] and before == self._render(response):
                self._check_end(response, before, until)
            return begin
        bare = self._render(response)
        prompt = _num_shared(bare, before)  # where the generation prompt begins
        if before == bare == until[:begin]:
            # Where a template asks for other responses, a model prints this header itself.
            if is_prompted and self._render(1) != self._render(1, add_generation_prompt=True):
                return begin
            raise ConfigError(
                f"message {response} of {len(self.messages)}: the chat template prints "
                f"{until[begin:][:40]!r} for it, but nothing for add_generation_prompt=True, so "
                "the end of its header is unknown; pass chat_template= with {% generation %} "
                "markers or a generation prompt"
            )
        if prompt <= begin < len(before):  # not within a tag: </think> where <think> was expected
            tag = TAG.search(until, prompt, begin)
            begin = tag.start() if tag else begin
        is_shared = begin > prompt or (begin == prompt and _begins(until[begin:], content))
        return begin if is_shared else None

    def _check_end(self, response: int, before: str, until: str) -> None:
        """Refuse a template that ends every text with a generation prompt, asked for or not."""
        asked = [*SHORT_CHAT, SHORT_CHAT[0]]
        with suppress(DataError):
            short, longer = (
                Rendering(self._tokenizer, chat, self._options).text for chat in (asked[:2], asked)
            )
            appended = short[_num_shared(short, longer) :]
            if appended and before.endswith(appended):
                raise ConfigError(
                    f"message {response} of {len(self.messages)}: the chat template ends every "
                    f"text with its generation prompt, so {until[-40:]!r} would be learned; pass "
                    "chat_template= with one that prints it only if add_generation_prompt is true"
                )

    def _after_prompt(self, response: int, before: str) -> str:
        """Return what follows the prompt's end where its beginning changes with the response.

        So do templates that print the system text in the last user message, if it ends the
        conversation. The end is what a generation prompt adds, or the last message; "": unknown.
        """
        end = before[_num_shared(self._render(response), before) :]
        asked, content = (
            text_of(self.messages[number].get("content")) for number in (response - 1, response)
        )
        if not end and isinstance(asked, str) and asked.strip():
            end = "".join(before.rpartition(asked.strip())[1:])
        added = self.text.rpartition(end)[2] if end and response else self.text
        is_whole = not isinstance(content, str) or content.strip() in added
        # Another turn after it, as of a template that ends each text with instructions.
        turns = [token for token in self._special_tokens if token in end and token in added]
        return added if is_whole and not turns and added != self.text else ""

    def _omitted(self, response: int, target: str, parts: Any = None) -> tuple[str, str] | None:
        """Return the kind and text of what a response says and a target lacks, or None."""
        printed = "".join(target.split())  # templates trim and join white space
        said = said_by(self.messages[response]) if parts is None else parts
        return next((each for each in said if "".join(each[1].split()) not in printed), None)

    def _check_printed(self, number: int, target: str, parts: Any = None) -> None:
        if (omitted := self._omitted(number, target, parts)) is None:
            return
        kind, text = omitted
        where = f"message {number} of {len(self.messages)}"
        if kind not in KINDS:
            raise DataError(
                f"{where} has {kind}={text[:40]!r}, which the chat template does not print, so it "
                "would be lost; write it as content, reasoning_content or tool_calls, pass "
                f"chat_template= with one that prints it, or ignore_fields=[{kind!r}]"
            )
        way_out = "set an option of the template that keeps it with template_kwargs="
        if any(m.get("role") == RESPONSE for m in self.messages[number + 1 :]):
            way_out = "pass train_on='each_response' if it is printed at the end of a conversation"
        raise ConfigError(
            f"{where}: the chat template omits its {kind}, {text[:40]!r}, so it would not be "
            f"learned; {way_out}, pass chat_template= with one that prints it, or remove the "
            f"{kind} from the data"
        )

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        tokens = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return tuple(token.content for token in tokens if token.special and token.content)


def _end_of_turn(tokenizer: Any, options: Mapping[str, Any]) -> str:
    with suppress(ConfigError, DataError):
        short = rendered(tokenizer, SHORT_CHAT, options)
        begin, end = short._located([1])[-1]
        return short.text[begin:end].rpartition(ANSWER)[2].lstrip(" ")
    return ""


def _begins(text: str, content: Any) -> bool:
    return isinstance(content, str) and text.lstrip().startswith(content.strip())


def _num_shared(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _warn_of_no_end(template: str, target: str) -> None:
    if template in _warned:
        return
    _warned.add(template)
    logger.warning(
        "the chat template %r... ends a target with %r, which is neither a special token nor what "
        "it puts after every response, so the model will not learn to stop; pass chat_template= "
        "with an end-of-turn token (inside its {%% generation %%} markers, if it has any), or add "
        "one to each conversation with Packing(eos_id=...)",
        template[:60],
        target,
    )


def _with_sign(marker: re.Match[str]) -> str:
    """Return a marker with a sign next to it; its white space control stays the same."""
    left, name, right = marker.groups()
    if name == "generation":
        return f"{{%{left} if true %}}{BEGIN}{{% endif %}}{{% generation {right}%}}"
    return f"{{%{left} endgeneration %}}{{% if true %}}{END}{{% endif {right}%}}"


def _cut_signs(marked: str) -> tuple[str, TargetSpans]:
    text, spans, start = "", [], 0
    for piece in re.split(f"({BEGIN}|{END})", marked):
        if piece == BEGIN:
            start = len(text)
        elif piece == END:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, spans
