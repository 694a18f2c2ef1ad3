"""Character spans of the responses in a conversation's rendered text.

A template with ``{% generation %}`` markers states them. For others, a response is the text that a
message adds to the prompt that a model would answer::

    messages[:1] and the generation prompt    <|user|>Hi<|end|><|assistant|>
    messages[:2]                              <|user|>Hi<|end|><|assistant|>Hello!<|end|>
                                                                            '-----------'

Each text must be a prefix of the next one, and the last one of the whole conversation; otherwise
the template is refused.

Cost: two renderings with markers, else two for each response, of about 50 us each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from streampack.errors import ConfigError, DataError

Messages: TypeAlias = list[dict[str, Any]]
TargetSpans: TypeAlias = list[tuple[int, int]]

logger = logging.getLogger(__name__)

RESPONSE = "assistant"
MARKER = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
BEGIN, END = "\ue000begin\ue001", "\ue000end\ue001"  # private use area: not in real text


class Rendering:
    """One conversation as text, and the spans of its responses.

    `options` are more arguments for `apply_chat_template`. A DataError is raised if the template
    rejects the conversation.
    """

    def __init__(self, tokenizer: Any, messages: Messages, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._options = options
        self.text = self._render(len(messages))

    def _render(self, num_messages: int, **options: Any) -> str:
        try:
            # As a batch of one: otherwise transformers rejects an empty conversation.
            [text] = self._tokenizer.apply_chat_template(
                [self._messages[:num_messages]], tokenize=False, **{**self._options, **options}
            )
        except Exception as error:  # a template can raise anything
            raise DataError(
                f"the chat template cannot render {num_messages} of {len(self._messages)} messages "
                f"({type(error).__name__}: {error}); fix the conversation or leave it out"
            ) from error
        return str(text)

    def spans(self, *, last_only: bool) -> TargetSpans:
        """Return the first character and one past the last of each response, or of the last one.

        A ConfigError says that the template does not reveal a position.
        """
        responses = [i for i, m in enumerate(self._messages) if m.get("role") == RESPONSE]
        if not responses:
            return []
        template = self._tokenizer.get_chat_template(
            self._options.get("chat_template"), self._options.get("tools")
        )
        first = responses[-1 if last_only else 0]
        if MARKER.search(template):
            spans = self._marked(MARKER.sub(_with_sign, template), first if last_only else 0)
        else:
            # The last one first: if it cannot be located, the error must not propose it.
            spans = [self._added_by(each) for each in reversed(responses) if each >= first][::-1]
        self._check_end(self._messages[responses[-1]], spans[-1], template)
        return spans

    def _check_end(self, response: dict[str, Any], span: tuple[int, int], template: str) -> None:
        """Warn if the last response's span ends with its content."""
        content = response.get("content")
        if isinstance(content, str) and content.strip() and not response.get("tool_calls"):
            _, found, end = self.text[slice(*span)].rpartition(content.strip())
            if found and not end.strip(" "):
                _warn_of_no_end(template)

    def _marked(self, template: str, first: int) -> TargetSpans:
        # Not `return_assistant_tokens_mask`, which in transformers 4.57 has two defects. If the
        # last character of a span has several tokens, as an emoji may, all but the first are left
        # out. If it is in no token, everything after the span is unmasked.
        text, spans = _cut_signs(self._render(len(self._messages), chat_template=template))
        if text != self.text:
            raise ConfigError(
                "the chat template changes text that it marked with {% generation %}, so its "
                "position is unknown; put the markers around text that is printed unchanged"
            )
        if first:
            earlier = _cut_signs(self._render(first, chat_template=template))[1]
            spans = spans[len(earlier) :]
        if not spans:
            raise ConfigError(
                f"the chat template has {{% generation %}} markers, but none in messages {first} "
                f"to {len(self._messages) - 1}, which hold responses to train on; put them around "
                "what it prints for each"
            )
        return spans

    def _added_by(self, response: int) -> tuple[int, int]:
        """Return the span that a message adds after the previous text and its response header."""
        before = self._render(response, add_generation_prompt=True)
        later = self._messages[response + 1 :]
        until = self._render(response + 1) if later else self.text
        if not (until.startswith(before) and self.text.startswith(until)):
            has_later = any(m.get("role") == RESPONSE for m in later)
            raise ConfigError(
                f"message {response} of {len(self._messages)}: the chat template prints it, or the "
                "messages before it, differently at the end of a conversation or with a generation "
                "prompt (as templates do that strip reasoning or begin it), so its position is "
                "unknown; pass chat_template= with {% generation %} markers"
                f"{', or train_on=' + repr('last_response') if has_later else ''}"
            )
        added = self.text[len(before) : len(until)]
        self._check_header(response, before, added)
        return len(before), len(before) + self._num_to_learn(added)

    def _check_header(self, response: int, before: str, added: str) -> None:
        """Refuse templates that print a header but have no generation prompt with it."""
        content = self._messages[response].get("content")
        begins = not isinstance(content, str) or added.lstrip().startswith(content.strip())
        if not begins and before == self._render(response):
            raise ConfigError(
                f"message {response} of {len(self._messages)}: the chat template prints "
                f"{added[:40]!r} for it, but nothing for add_generation_prompt=True, so the end "
                "of its header is unknown; pass chat_template= with {% generation %} markers or a "
                "generation prompt"
            )

    def _num_to_learn(self, added: str) -> int:
        """Return the characters up to the end-of-turn token, without line breaks after it."""
        tokens = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        ends = tuple(token.content for token in tokens if token.special and token.content)
        kept = added.rstrip()
        return len(kept if kept.endswith(ends) else added)


@cache  # once for each template
def _warn_of_no_end(template: str) -> None:
    logger.warning(
        "the chat template %r... ends targets with the response, so the model will not learn to "
        "stop; pass chat_template= with an end-of-turn token (inside its {%% generation %%} "
        "markers, if it has any), or add one to each conversation with Packing(eos_id=...)",
        template[:60],
    )


def _with_sign(marker: re.Match[str]) -> str:
    """Return a marker with a sign next to it; its white space control stays the same."""
    left, name, right = marker.groups()
    if name == "generation":
        return f"{{%{left} if true %}}{BEGIN}{{% endif %}}{{% generation {right}%}}"
    return f"{{%{left} endgeneration %}}{{% if true %}}{END}{{% endif {right}%}}"


def _cut_signs(marked: str) -> tuple[str, TargetSpans]:
    """Remove the signs from a text; return it and the spans between them."""
    text, spans, start = "", [], 0
    for piece in re.split(f"({BEGIN}|{END})", marked):
        if piece == BEGIN:
            start = len(text)
        elif piece == END:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, spans
