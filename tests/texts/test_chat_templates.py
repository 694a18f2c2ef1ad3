"""Chat templates in the style of nine model families, with and without markers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from streampack.errors import ConfigError, DataError
from streampack.texts import ChatEncoder, chat_spans
from tests.helpers.chats import CALL, TOOL, learned, say

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<|call|>"),
    *("<|return|>", "<|channel|>", "<|message|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<think>", "</think>"),
)
ASKED = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
SPLIT = (
    "{% set said = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = (m.content or '').split('</think>')[0].split('<think>')[-1].strip()"
    " if '</think>' in (m.content or '') else '' %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
TOOLS = "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
BEGIN, END = "{% generation %}", "{% endgeneration %}"


def family(response: str, other: str, prompt: str, before: str = TOOLS, after: str = "") -> str:
    """Return a template, given those of a response, other messages and the generation prompt."""
    return (
        f"{before}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{SPLIT}{response}"
        f"{{% else %}}{other}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{after}{{% endif %}}"
    )


IM_OTHER = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
IM_PROMPT = "<|im_start|>assistant\n"
FAMILIES = {
    "mistral": family(  # the system text goes into the last message, if it is the user's
        f"{BEGIN} {{{{ m.content or '' }}}}{CALLS}</s>{END}",
        "{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% endif %}",
        "",
    ),
    "gemma": family(  # no tools, and the system text goes into the user's first message
        f"<start_of_turn>model\n{BEGIN}{{{{ m.content }}}}<end_of_turn>{END}\n",
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{% if m.role == 'user' %}<start_of_turn>user\n"
        "{% if messages[0].role == 'system' and loop.index0 == 1 %}{{ messages[0].content }}\n\n"
        "{% endif %}{{ m.content }}<end_of_turn>\n{% endif %}",
        "<start_of_turn>model\n",
        "",
    ),
    "qwen3": family(  # reasoning is only printed after the last question
        f"{IM_PROMPT}{BEGIN}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>"
        f"\n\n{{% endif %}}{{{{ said }}}}{CALLS}<|im_end|>{END}\n",
        IM_OTHER,
        IM_PROMPT,
        ASKED + TOOLS,
    ),
    "qwen3.5": family(  # the generation prompt begins the reasoning
        f"{IM_PROMPT}{{% if loop.index0 > ns.last %}}<think>\n{{% endif %}}{BEGIN}"
        "{% if loop.index0 > ns.last %}{{ thought }}\n</think>\n\n{% endif %}"
        f"{{{{ said }}}}{CALLS}<|im_end|>{END}\n",
        IM_OTHER,
        f"{IM_PROMPT}<think>\n",
        ASKED + TOOLS,
    ),
    "gpt-oss": family(  # channels, and a different end for the last response
        f"<|start|>assistant{BEGIN}"
        "{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
        "{% if thought and loop.last %}<|channel|>analysis<|message|>{{ thought }}<|end|>"
        "<|start|>assistant{% endif %}<|channel|>final<|message|>{{ said }}"
        f"{{{{ '<|return|>' if loop.last else '<|end|>' }}}}{{% endif %}}{END}",
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
        "<|start|>assistant",
    ),
    "phi3": family(  # without a generation prompt, the text ends differently
        f"<|assistant|>\n{BEGIN}{{{{ m.content or '' }}}}{CALLS}<|end|>{END}\n",
        "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n",
        "<|assistant|>\n",
        after="</s>",
    ),
    "deepseek": family(  # its prompt begins the reasoning, which it then deletes
        f"<|assistant|>{BEGIN}{{{{ said }}}}{CALLS}</s>{END}",
        "<|{{ m.role }}|>{{ m.content }}",
        "<|assistant|><think>\n",
        "{{ bos_token }}" + TOOLS,
    ),
    "nemotron": family(  # an empty reasoning is a single tag, and the prompt begins a longer one
        f"{IM_PROMPT}{BEGIN}"
        "{{ '<think>\n' + thought + '\n</think>' if thought and loop.last else '<think></think>' }}"
        f"{{{{ said }}}}{CALLS}<|im_end|>{END}\n",
        IM_OTHER,
        f"{IM_PROMPT}<think>\n",
    ),
    "glm": family(  # a turn ends with the next role
        f"<|assistant|>\n{BEGIN}{{{{ m.content or '' }}}}{CALLS}{END}",
        "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}",
        "<|assistant|>\n",
    ),
}


CHATS: dict[str, list[dict[str, Any]]] = {
    "single": say("hello", "fine 漢😀!"),
    "multi": say("hello", "fine", "how are you?", "well, bye", "so?", "\nyes"),
    "tools": [
        *say("one and one?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        *say("", "two", "ok?", "bye")[1:],
    ],
    "reasoning": say("a?", "<think>\nso\n</think>\n\nfine", "b?", "<think>\nhm\n</think>\n\nwell"),
    "empty system": [{"role": "system", "content": ""}, *say("hello", "fine", "how?", "well")],
    "system": [{"role": "system", "content": "Be brief."}, *say("hello", "fine", "how?", "well")],
}
DELETES = {"deepseek"}  # the response's own reasoning
DELETES_EARLIER = {"qwen3", "qwen3.5", "gpt-oss", "nemotron"}
NO_TOOLS = {"gemma"}
CASES = [(name, case) for name in FAMILIES for case in CHATS]


@cache
def tokenizer_of(template: str) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["hello world, how are you?\n\nfine  thanks\n"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def plain(name: str) -> Any:
    return tokenizer_of(FAMILIES[name].replace(BEGIN, "").replace(END, ""))


def row_of(case: str) -> dict[str, Any]:
    return {"messages": CHATS[case], "tools": [TOOL] if case == "tools" else None}


def is_refused(name: str, case: str, deletes: set[str]) -> type[Exception] | None:
    if name in NO_TOOLS and case == "tools":
        return DataError
    return ConfigError if name in deletes and case == "reasoning" else None


def responses_of(case: str) -> list[int]:
    return [i for i, message in enumerate(CHATS[case]) if message["role"] == "assistant"]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_marked_targets_are_those_of_transformers(name, case):
    tokenizer = tokenizer_of(FAMILIES[name])
    encode = ChatEncoder(tokenizer)
    if error := is_refused(name, case, DELETES | DELETES_EARLIER):
        with pytest.raises(error, match=r"no tools|message 1 of 4: .* omits its reasoning, 'so'"):
            encode(row_of(case))
        return
    sample = encode(row_of(case))
    theirs = tokenizer.apply_chat_template(
        **({"conversation": CHATS[case]} | ({"tools": [TOOL]} if case == "tools" else {})),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert sample["tokens"].tolist() == theirs["input_ids"]
    assert sample["loss_mask"].tolist() == theirs["assistant_masks"]
    assert sample["loss_mask"].any()


@pytest.mark.parametrize(("name", "case"), CASES)
def test_each_response_follows_the_prompt_of_an_inference(name, case):
    tokenizer = plain(name)
    encode = ChatEncoder(tokenizer, "each_response")
    if error := is_refused(name, case, DELETES):
        with pytest.raises(error, match=r"no tools|omits its reasoning, '(so|hm)'"):
            encode.samples(row_of(case))
        return
    samples = encode.samples(row_of(case))
    for number, sample in zip(responses_of(case), samples, strict=True):
        tools = row_of(case)["tools"]
        prompt = tokenizer.apply_chat_template(
            CHATS[case][:number], tools=tools, tokenize=False, add_generation_prompt=True
        )
        whole = tokenizer.apply_chat_template(
            CHATS[case][: number + 1], tools=tools, tokenize=False
        )
        text = str(tokenizer.decode(sample["tokens"]))
        if name == "glm":  # the next role's token ends a turn
            whole += next_role(case, number)
        if name == "mistral" and "system" in case:
            assert not whole.startswith(prompt)
            assert text == prompt + whole.rpartition("[/INST]")[2]
        else:
            assert text == whole
        target = learned(sample, tokenizer)
        before = text[: text.rindex(target)]
        assert text[len(before + target) :].strip() == "", "it ends the text"
        assert prompt.startswith(before)
        if name not in ("nemotron", "deepseek"):  # their prompts already begin the reasoning
            assert before == prompt


def next_role(case: str, number: int) -> str:
    later = CHATS[case][number + 1 : number + 2]
    names = {"user": "<|user|>", "tool": "<|observation|>"}
    return names[later[0]["role"]] if later else ""


CUT = {"mistral", "gemma", "glm", "deepseek"}  # at turns


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_one_sample_where_the_template_can_be_cut(name):
    encode = ChatEncoder(plain(name))
    if name in CUT | {"nemotron"}:
        targets = learned(encode(row_of("multi")), encode.tokenizer)
        each = ChatEncoder(encode.tokenizer, "each_response").samples(row_of("multi"))
        assert targets == "".join(learned(sample, encode.tokenizer) for sample in each)
    else:
        with pytest.raises(ConfigError, match=r"pass train_on='each_response' or 'last_response'"):
            encode(row_of("multi"))


def test_the_next_role_is_learned_where_it_ends_a_turn():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|observation|>'
    for mode in ("responses", "each_response"):
        encode = ChatEncoder(plain("glm"), mode)
        samples = encode.samples(row_of("tools"))
        found = [learned(sample, encode.tokenizer) for sample in samples]
        assert "".join(found) == call + "two<|user|>bye"
    [sample] = ChatEncoder(plain("glm"), "last_response").samples(say("a", "b", "c"))
    assert learned(sample, encode.tokenizer) == "b<|user|>"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_without_an_end_of_turn_is_warned_of(name, caplog):
    chat_spans._warned.clear()
    for case in ("single", "multi"):
        ChatEncoder(plain(name), "each_response").samples(row_of(case))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (name == "glm")
    assert all("'fine 漢😀!'" in record.getMessage() for record in caplog.records)
