"""Chat samples: real tokenizers and templates, and every label in the resulting packs."""

from __future__ import annotations

import json
import pickle
from functools import cache
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from streampack import (
    Chats,
    IterableStream,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    chat_dataset,
)
from streampack.errors import ConfigError, DataError
from streampack.texts import ChatEncoder, ChatSamples
from streampack.write import write_stream
from tests.helpers.chats import CALL, TOOL, learned, say
from tests.helpers.examples import examples

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}" + PROMPT
)
# As people write them, with lines, indents, and markers that trim the surrounding white space.
MARKED = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- m.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
INST = (  # no header: the end of the prompt asks for the response
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
STRIPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
TOOLS = (  # consecutive tool results share a turn, as in Qwen's template
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}{% endif %}"
    "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)
END = {"chatml": "<|im_end|>", "marked": "<|im_end|>", "llama_3": "<|eot|>", "inst": "</s>"}
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "llama_3": LLAMA_3, "inst": INST}


def byte_level(trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "user assistant system hello world, how are you?\n\n\nfine  thanks\n"
    tokenizer.train_from_iterator([text] * 4, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2: spaces are letters, each text gets one in front, unknown letters are bytes."""
    letters = "▁abcdefghijklmnopqrstuvwxyz[]/INST<>|_"
    words = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁h", "us"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("u", "s")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS = ("byte_level", "trimmed", "byte_fallback")


@cache
def tokenizer_of(template: str | None = CHATML, kind: str = "byte_level") -> Any:
    made = byte_fallback() if kind == "byte_fallback" else byte_level(kind == "trimmed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


# A text that begins with a space could share its first token with the header: see below.
LETTERS = "abhu 5?\n[]<|é漢😀"
texts = st.text(LETTERS, max_size=12).map(str.lstrip)
chats = st.builds(
    lambda system, messages: system + messages,
    st.just([]) | texts.map(lambda text: [{"role": "system", "content": text}]),
    st.lists(
        st.builds(
            lambda r, c: {"role": r, "content": c}, st.sampled_from(["user", "assistant"]), texts
        ),
        min_size=1,
        max_size=6,
    ),
)


@examples(50, many=150)
@given(chat=chats, name=st.sampled_from([*TEMPLATES]), kind=st.sampled_from(KINDS))
def test_the_targets_are_the_responses_and_their_end_of_turn_tokens(chat, name, kind):
    if name == "llama_3":
        chat = [message | {"content": message["content"].strip()} for message in chat]
    tokenizer = tokenizer_of(TEMPLATES[name], kind)
    responses = [m["content"] + END[name] for m in chat if m["role"] == "assistant"]

    sample = ChatEncoder(tokenizer)(chat)
    assert sample["tokens"].tolist() == tokenizer.apply_chat_template(chat, return_dict=False)
    assert (sample["tokens"].dtype, sample["loss_mask"].dtype) == (np.int32, np.uint8)
    assert without_put_in_spaces(learned(sample, tokenizer), kind) == without_put_in_spaces(
        "".join(responses), kind
    )
    last = ChatEncoder(tokenizer, "last_response")(chat)
    assert without_put_in_spaces(learned(last, tokenizer), kind) == without_put_in_spaces(
        "".join(responses[-1:]), kind
    )
    everything = ChatEncoder(tokenizer, "all")(chat)
    assert everything["tokens"].tolist() == sample["tokens"].tolist()
    assert everything["loss_mask"].all()


def without_put_in_spaces(text: str, kind: str) -> str:
    return text.replace(" ", "") if kind == "byte_fallback" else text


@examples(50, many=150)
@given(
    chat=chats,
    spaces=st.sampled_from(["", " ", "\n", "\n\n "]),
    train_on=st.sampled_from(["responses", "last_response"]),
    kind=st.sampled_from(KINDS),
)
def test_markers_and_prefixes_agree_and_transformers_where_it_is_right(
    chat, spaces, train_on, kind
):
    chat = [message | {"content": spaces + message["content"]} for message in chat]
    by_prefixes = ChatEncoder(tokenizer_of(CHATML, kind), train_on)(chat)
    by_markers = ChatEncoder(tokenizer_of(MARKED, kind), train_on)(chat)
    given = ChatEncoder(tokenizer_of(CHATML, kind), train_on, chat_template=MARKED)(chat)
    for sample in (by_markers, given):
        assert sample["tokens"].tolist() == by_prefixes["tokens"].tolist()
        assert sample["loss_mask"].tolist() == by_prefixes["loss_mask"].tolist()

    if train_on == "responses" and kind == "byte_level":  # its spans end at token boundaries
        theirs = tokenizer_of(MARKED, kind).apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        assert by_markers["loss_mask"].tolist() == theirs["assistant_masks"]


LINES = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "contents", "expected"),
    [
        (LINES, ("hello", "fine", "how", "well"), "fine\nwell\n"),
        (BARE, ("hello", "fine", "how", "well"), "fine<|end|>well<|end|>"),
        # The header's line break and the response's first share a token.
        (CHATML, ("hello", "\n\nfine"), "\n\n\nfine<|im_end|>"),
    ],
    ids=["lines", "no header and no prompt", "a token over the edge"],
)
def test_what_ends_a_turn_and_a_token_over_its_edge_are_learned(template, contents, expected):
    tokenizer = tokenizer_of(template)
    assert learned(ChatEncoder(tokenizer)(say(*contents)), tokenizer) == expected


def test_white_space_that_is_in_no_token_unmasks_nothing_after_it():
    words = Tokenizer(models.WordLevel({"?": 0, "hello": 1, "fine": 2, "bye": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    )
    template += "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    sample = ChatEncoder(tokenizer, chat_template=template)(say("hello", " fine \n", "bye"))
    assert sample["tokens"].tolist() == [1, 2, 3]
    assert sample["loss_mask"].tolist() == [0, 1, 0]


def test_calls_of_tools_are_responses_and_their_results_are_not():
    tokenizer = tokenizer_of(TOOLS)
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "2"}]
    messages = [*say("1 + 1?"), asked, *results, {"role": "assistant", "content": "two"}]
    sample = ChatEncoder(tokenizer)({"messages": messages, "tools": [TOOL]})

    call = f"<call>{json.dumps(CALL['function'])}</call>"
    assert learned(sample, tokenizer) == f"{call}{call}<|im_end|>two<|im_end|>"
    assert "Adds." in tokenizer.decode(sample["tokens"])


def test_json_text_of_messages_and_tools_is_read():
    encode = ChatEncoder(tokenizer_of(TOOLS))
    expected = encode({"messages": say("hello", "fine"), "tools": [TOOL]})["tokens"].tolist()
    messages, tools = json.dumps(say("hello", "fine")), json.dumps([TOOL])

    assert encode({"messages": messages, "tools": tools})["tokens"].tolist() == expected
    for without in ("", "[]", "null"):
        row = {"messages": messages, "tools": without}
        assert encode(row)["tokens"].tolist() == encode(messages)["tokens"].tolist()
    with pytest.raises(DataError, match=r"tools='add\(a, b\)' is not JSON; write the tools as a"):
        encode({"messages": messages, "tools": "add(a, b)"})


CHAT = say("hello", "fine")
FIRST = {"role": "system", "content": "Be brief."}
FORMS: list[tuple[Any, list[dict[str, Any]]]] = [
    (tuple(CHAT), CHAT),
    ([message | {"tool_calls": None} for message in CHAT], CHAT),
    ({"messages": CHAT}, CHAT),
    ({"messages": CHAT, "system": ""}, CHAT),
    ([{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}], CHAT),
    ({"conversations": [FIRST, *CHAT], "tools": None, "id": 7}, [FIRST, *CHAT]),
    ({"prompt": "hello", "completion": "fine"}, CHAT),
    ({"prompt": CHAT[:1], "completion": CHAT[1:], "prompt_id": "a"}, CHAT),
    ({"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}, CHAT),
    ({"prompt": "other", "messages": CHAT}, CHAT),
    ({"instruction": "hello", "input": "", "output": "fine"}, CHAT),
    ({"instruction": "hello", "input": None, "output": "fine", "messages": None}, CHAT),
    ({"instruction": "hello", "output": "fine"}, CHAT),
    ({"instruction": "Add.", "input": "1 1", "output": "2"}, say("Add.\n1 1", "2")),
    ({"instruction": "Square.", "input": 0, "output": "0"}, say("Square.\n0", "0")),
    ({"messages": CHAT, "system": "Be brief."}, [FIRST, *CHAT]),
    ({"messages": [FIRST, *CHAT], "system": "Be brief."}, [FIRST, *CHAT]),
    ({"prompt": "hello", "completion": "fine", "system": "Be brief."}, [FIRST, *CHAT]),
    ({"instruction": "hello", "output": "fine", "system": "Be brief."}, [FIRST, *CHAT]),
    (
        {"conversations": [{"from": "human", "value": "hello"}, CHAT[1]], "system": "Be brief."},
        [FIRST, *CHAT],
    ),
]


@pytest.mark.parametrize(("row", "chat"), FORMS)
def test_rows_of_any_form_are_the_conversation_that_they_hold(row, chat):
    encode = ChatEncoder(tokenizer_of(TOOLS))
    assert_equal(encode(row), encode(chat))
    assert_equal(pickle.loads(pickle.dumps(encode))(row), encode(chat))


def test_a_prompt_of_several_messages_is_not_learned():
    turns = say("hello", "fine", "how", "well")
    tokenizer = tokenizer_of()
    sample = ChatEncoder(tokenizer)({"prompt": turns[:3], "completion": turns[3:], "system": "so"})
    assert learned(sample, tokenizer) == "well<|im_end|>"


def test_a_system_text_that_differs_from_the_first_message_is_refused():
    with pytest.raises(DataError, match=r"system='Be long.' differs from its first message"):
        ChatEncoder(tokenizer_of())({"messages": [FIRST, *CHAT], "system": "Be long."})


def test_options_reach_the_template():
    tokenizer = tokenizer_of(CHATML + "{{ closing }}")
    sample = ChatEncoder(tokenizer, "all", template_kwargs={"closing": "bye"})(say("hello"))
    assert tokenizer.decode(sample["tokens"]).endswith("<|im_end|>\nbye")


def test_a_template_that_strips_earlier_reasoning_has_a_sample_for_each_response():
    tokenizer = tokenizer_of(STRIPS_REASONING)
    chat = say("hello", "<think>no</think>fine", "how", "<think>yes</think>well")
    with pytest.raises(ConfigError, match=r"message 1 of 4: .*train_on='each_response' or 'last_"):
        ChatEncoder(tokenizer)(chat)
    last = ChatEncoder(tokenizer, "last_response")(chat)
    assert learned(last, tokenizer) == "<think>yes</think>well<|im_end|>"
    assert "no" not in tokenizer.decode(last["tokens"])
    single = ChatEncoder(tokenizer)(chat[:2])
    assert learned(single, tokenizer) == "<think>no</think>fine<|im_end|>"
    first, second = ChatEncoder(tokenizer, "each_response").samples(chat)
    assert_equal(first, single)
    assert_equal(second, last)


def assert_equal(sample: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert sample["tokens"].tolist() == other["tokens"].tolist()
    assert sample["loss_mask"].tolist() == other["loss_mask"].tolist()


@examples(50, many=150)
@given(chat=chats, name=st.sampled_from([*TEMPLATES]), kind=st.sampled_from(KINDS))
def test_each_response_is_the_last_one_of_its_prefix(chat, name, kind):
    tokenizer = tokenizer_of(TEMPLATES[name], kind)
    responses = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    samples = ChatEncoder(tokenizer, "each_response").samples(chat)
    last = ChatEncoder(tokenizer, "last_response")
    expected = [last(chat[: i + 1]) for i in responses] or [last(chat)]
    for sample, other in zip(samples, expected, strict=True):
        assert_equal(sample, other)


@pytest.mark.parametrize("train_on", ["responses", "each_response"])
def test_a_conversation_is_cut_and_may_keep_no_target(train_on):
    chat = say("hello", "fine", "how", "well")
    whole = ChatEncoder(tokenizer_of(), train_on).samples(chat)
    for most in (1, 5, 12, 20, 1000):
        cut = ChatEncoder(tokenizer_of(), train_on, max_seq_len=most).samples(chat)
        for sample, other in zip(cut, whole, strict=True):
            assert_equal(sample, {name: values[:most] for name, values in other.items()})


@pytest.mark.parametrize("train_on", ["responses", "last_response", "each_response"])
def test_a_response_begins_where_it_parts_from_the_generation_prompt(train_on):
    # The prompt begins the reasoning that the template then omits, at the end too.
    tokenizer = tokenizer_of(CHATML.replace("assistant\n{%", "assistant\n<think>{%"))
    samples = ChatEncoder(tokenizer, train_on).samples(say("hello", "fine", "<how>", "</think>w"))
    texts = {
        "responses": ["fine<|im_end|></think>w<|im_end|>"],
        "last_response": ["</think>w<|im_end|>"],
        "each_response": ["fine<|im_end|>", "</think>w<|im_end|>"],
    }
    assert [learned(sample, tokenizer) for sample in samples] == texts[train_on]


def test_instructions_at_the_end_of_every_text_are_not_learned():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "<|im_start|>system\nBe brief.<|im_end|>" + PROMPT
    )
    encode = ChatEncoder(tokenizer_of(template), "each_response")
    with pytest.raises(ConfigError, match="message 1 of 2: the chat template prints it, or the me"):
        encode.samples(say("hello", "fine"))


def test_a_header_that_is_asked_for_elsewhere_is_learned_where_it_is_not():
    """After a tool's result, this template has no generation prompt: a model prints the header."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<|im_start|>assistant\n"
        "{% endif %}"
    )
    chat = [*say("hello", "fine"), {"role": "tool", "content": "ok"}, *say("", "there")[1:]]
    encode = ChatEncoder(tokenizer_of(template), "each_response")
    found = [learned(sample, encode.tokenizer) for sample in encode.samples(chat)]
    assert found == ["fine<|im_end|>", "<|im_start|>assistant\nthere<|im_end|>"]


def test_what_a_template_fails_at_in_every_form_is_the_error_of_the_first_form():
    template = "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}"
    chat = [*say("hello"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    with pytest.raises(DataError, match=r"cannot render 2 of 2 messages \((Undefined|Type)Error: "):
        ChatEncoder(tokenizer_of(template))(chat)


def test_a_template_for_some_conversations_only_is_warned_of_an_end_too(caplog):
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} {% endfor %}" + PROMPT
    )
    chat = [{"role": "system", "content": "a"}, *say("hello", "fine")]
    encode = ChatEncoder(tokenizer_of(template))
    assert learned(encode(chat), encode.tokenizer) == "fine "
    assert "ends a target with 'fine '" in caplog.text


@pytest.mark.parametrize("header", ["<|im_start|>assistant\n", "<|assistant|>", "assistant: "])
@pytest.mark.parametrize("train_on", ["responses", "last_response", "each_response"])
def test_a_generation_prompt_that_ends_every_text_is_not_learned(header, train_on):
    turn = header.replace("assistant", "{{ m.role }}") + "{{ m.content }}<|im_end|>\n"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    encode = ChatEncoder(tokenizer_of(template + header), train_on)
    for chat in (say("hello", "fine"), say("hello", "fine", "how", "well")):
        with pytest.raises(ConfigError, match="ends every text with its generation prompt, so"):
            encode.samples(chat)
    asks = template + "{% if add_generation_prompt %}" + header + "{% endif %}"
    encode = ChatEncoder(tokenizer_of(asks), train_on)
    [*_, sample] = encode.samples(say("hello", "fine"))
    assert learned(sample, encode.tokenizer) == "fine<|im_end|>"


class Counting:
    """A tokenizer that counts the renderings of its template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_renderings = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.tokenizer(*texts, **options)

    def apply_chat_template(self, *chats: Any, **options: Any) -> Any:
        self.num_renderings += 1
        return self.tokenizer.apply_chat_template(*chats, **options)


@pytest.mark.parametrize("train_on", ["responses", "last_response", "each_response"])
@pytest.mark.parametrize("marks", [{}, {"train": True}, {"train": False}])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_response_costs_a_constant_number_of_renderings(name, marks, train_on):
    chat = say(*["hello", "fine"] * 20)
    chat[1] |= marks
    tokenizer = Counting(tokenizer_of(TEMPLATES[name]))
    ChatEncoder(tokenizer, train_on).samples(chat)
    assert 0 < tokenizer.num_renderings <= 4 * (1 if train_on == "last_response" else 20) + 2


WITHDRAWN = [("weight", 0), ("train", False), ("training", 0), ("mask", True), ("masked", 1)]
WITHDRAWN += [("is_masked", True), ("no_loss", 1), ("learnable", False), ("do_train", False)]
WITHDRAWN += [("ignore", True), ("supervise", 0), ("trainable", False)]


@pytest.mark.parametrize(("key", "mark"), WITHDRAWN)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "markers"])
def test_a_response_that_is_marked_is_not_learned(key, mark, template):
    tokenizer = tokenizer_of(template)
    chat = say("hello", "fine", "how", "well", "so", "there")
    chat[3][key] = mark
    sharegpt = [
        {"from": m["role"].replace("assistant", "gpt"), "value": m["content"], key: m.get(key)}
        for m in chat
    ]
    expected = {"responses": ["fine<|im_end|>there<|im_end|>"]}
    expected["last_response"] = ["there<|im_end|>"]
    expected["each_response"] = ["fine<|im_end|>", "there<|im_end|>"]
    for train_on, texts in expected.items():
        encode = ChatEncoder(tokenizer, train_on)
        for row in (chat, sharegpt):
            assert [learned(sample, tokenizer) for sample in encode.samples(row)] == texts
        [last] = encode.samples(chat[:2] + chat[3:4])[-1:]
        assert learned(last, tokenizer) == ("" if train_on == "last_response" else texts[0][:14])
    assert len(ChatEncoder(tokenizer)(chat)["tokens"]) == len(
        tokenizer.apply_chat_template(chat, return_dict=False)
    )
    with pytest.raises(DataError, match="message 3 is not to be learned, but train_on='all'"):
        ChatEncoder(tokenizer, "all")(chat)


def test_marks_that_say_what_is_done_anyway_are_no_obstacle():
    encode = ChatEncoder(tokenizer_of())
    chat = say("hello", "fine")
    expected = encode(chat)["loss_mask"].tolist()
    for marks in ({"weight": 1}, {"weight": None}, {"train": None}, {"mask": False}):
        assert encode([m | marks for m in chat])["loss_mask"].tolist() == expected
    marked = [chat[0] | {"train": False}, chat[1] | {"train": True}]
    assert encode(marked)["loss_mask"].tolist() == expected
    with pytest.raises(DataError, match=r"message 0 should be learned, but has role 'user'"):
        encode([chat[0] | {"train": True}, chat[1]])
    with pytest.raises(DataError, match=r"message 1 has weight=0.5, and .* write 0 or 1"):
        encode([chat[0], chat[1] | {"weight": 0.5}])


def test_contents_in_parts_are_read_by_every_template():
    parts = CHATML.replace("m.content +", "m.content[0].text + m.content[1].text +")
    both = CHATML.replace(
        "m.content +",
        "(m.content if m.content is string else m.content | map(attribute='text') | join) +",
    )
    prints = CHATML.replace("m.content +", "m.content | string +")
    chat = say("hello", "fine")
    expected = ChatEncoder(tokenizer_of())(chat)
    listed = [
        {
            "role": m["role"],
            "content": [
                {"type": "text", "text": m["content"][:2], "image": None},
                {"type": "text", "text": m["content"][2:]},
            ],
        }
        for m in chat
    ]
    for template in (CHATML, parts, both, prints):
        assert_equal(ChatEncoder(tokenizer_of(template))(listed), expected)
    one_part = CHATML.replace("m.content +", "m.content[0].text +")
    assert_equal(ChatEncoder(tokenizer_of(one_part))(chat), expected)
    listed[0]["content"].append({"type": "image"})
    with pytest.raises(DataError, match="message 0 has a content of type 'image', and only text"):
        ChatEncoder(tokenizer_of())(listed)


def test_arguments_of_calls_are_objects_or_text_as_the_template_reads_them():
    encode = ChatEncoder(tokenizer_of(TOOLS))
    expected = encode(call_of({"a": 1}))
    assert_equal(encode(call_of(json.dumps({"a": 1}))), expected)
    row = call_of({"a": 1})
    row["messages"][1]["tool_calls"] = json.dumps(row["messages"][1]["tool_calls"])
    assert_equal(encode(row), expected)
    as_text = TOOLS.replace(
        "call.function | tojson", "call.function.name + call.function.arguments"
    )
    encode = ChatEncoder(tokenizer_of(as_text))
    for arguments in ({"a": 1}, '{"a": 1}'):
        sample = encode(call_of(arguments))
        assert learned(sample, encode.tokenizer) == '<call>f{"a": 1}</call><|im_end|>'


def call_of(arguments: Any, **more: Any) -> dict[str, Any]:
    """A conversation in which the response is a tool call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "?"}, asked]}


def test_nulls_that_a_table_adds_to_structs_are_removed():
    encode = ChatEncoder(tokenizer_of(TOOLS))
    calls = [call_of({"city": "Rome"}, id="1"), call_of({"x": "1", "y": {"z": ["a"]}})]
    tools = [[TOOL | {"function": {"name": "f", "parameters": {p: {"type": p}}}}] for p in "ab"]
    rows = [call | {"tools": each} for call, each in zip(calls, tools, strict=True)]
    table = datasets.Dataset.from_list(rows)
    for read, row in zip((*table, *table.to_pandas().to_dict("records")), rows * 2, strict=True):
        sample = encode(read)
        assert_equal(sample, encode(row))
        assert encode.tokenizer.decode(sample["tokens"]).count("null") == 0
    as_text = [call_of(json.dumps({"city": "Rome"}), id="1"), call_of(json.dumps({"x": None}))]
    for row, call in zip(datasets.Dataset.from_list(as_text), as_text, strict=True):
        assert_equal(encode(row), encode(call))  # the id is null in one, and is not printed
    assert '{"x": null}' in learned(encode(as_text[1]), encode.tokenizer)


CHANGED = "{% set x %}" + MARKED + "{% endset %}{{ x | upper }}"


@pytest.mark.parametrize(
    ("template", "train_on", "message"),
    [
        (CHATML.replace("<|im_start|>assistant\n{%", "<|start|>{%"), "responses", "message 1 of 2"),
        (CHATML.removesuffix(PROMPT), "responses", "nothing for add_generation_prompt=True"),
        (CHANGED, "responses", "changes text that it marked"),
        (MARKED.replace("== 'assistant'", "== 'model'"), "responses", "none in messages 1 to 1"),
        (
            MARKED.replace("'assistant' %}", "'assistant' and not loop.last %}"),
            "last_response",
            "1 to 1",
        ),
    ],
)
def test_templates_that_hide_where_a_response_lies_are_refused(template, train_on, message):
    with pytest.raises(ConfigError, match=message):
        ChatEncoder(tokenizer_of(template), train_on)(say("hello", "fine"))


@pytest.mark.parametrize("role", ["model", "Assistant", "bot", "", None, 7])
@pytest.mark.parametrize("train_on", ["responses", "last_response"])
def test_a_role_that_nobody_knows_is_refused_not_left_unlearned(role, train_on):
    chat = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    message = (
        rf"message 1 has role {role!r}, which is not one of assistant\|.*; rename it to 'assis"
    )
    with pytest.raises(DataError, match=message):
        ChatEncoder(tokenizer_of(), train_on)(chat)


def test_roles_of_ones_own_are_read_and_not_learned():
    tokenizer = tokenizer_of()
    chat = [*say("a", "b"), {"role": "critic", "content": "c"}, *say("d", role="assistant")]
    sample = ChatEncoder(tokenizer, context_roles=["critic"])(chat)
    assert learned(sample, tokenizer) == "b<|im_end|>d<|im_end|>"
    assert ChatEncoder(tokenizer, "all")(chat)["loss_mask"].all()


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
def test_arguments_for_prompts_are_refused(name):
    with pytest.raises(ConfigError, match=f"template_kwargs has {name}=True.*; omit it"):
        ChatEncoder(tokenizer_of(), "all", template_kwargs={name: True})
    with pytest.raises(ConfigError, match=f"template_kwargs has {name}=True"):
        Chats([], "tokenizer", template_kwargs={name: True})
    row = {"messages": say("a", "b"), "chat_template_kwargs": {name: True}}
    with pytest.raises(DataError, match=f"chat_template_kwargs has {name}=True.*; remove it"):
        ChatEncoder(tokenizer_of(), "all")(row)
    row["chat_template_kwargs"] = {name: False}
    assert_equal(ChatEncoder(tokenizer_of())(row), ChatEncoder(tokenizer_of())(say("a", "b")))


def test_the_role_of_responses_is_no_context():
    with pytest.raises(ConfigError, match="has 'assistant', the role that is learned; omit it"):
        ChatEncoder(tokenizer_of(), context_roles=["critic", "assistant"])


@pytest.mark.parametrize("content", [{"answer": 5}, 5, True])
def test_a_response_that_is_no_text_is_refused(content):
    chat = [
        {"role": "user", "content": {"of": "a tool"}},
        {"role": "assistant", "content": content},
    ]
    with pytest.raises(DataError, match=r"message 1 has the content .* write it as text"):
        ChatEncoder(tokenizer_of())(chat)


def test_conversations_without_a_response_are_written_and_counted(tmp_path):
    encode = ChatEncoder(tokenizer_of())
    written = write_stream(map(encode, [say("a", "b"), say("a"), say("c")]), tmp_path / "s")
    assert (written.num_samples, written.num_without_targets) == (3, 2)
    assert write_stream([[0, 0], [0]], tmp_path / "t").num_without_targets == 0


def labels_of(dataset: Any) -> dict[tuple[int, int], int]:
    """Return the label of every token of an epoch, by sample and position."""
    found: dict[tuple[int, int], int] = {}
    for batch in dataset:
        ends: dict[int, int] = {}
        for row, _, _, sample, start, length in batch["segments"].tolist():
            at = ends.get(row, 0)
            ends[row] = at + length
            for i in range(length):
                assert (sample, start + i) not in found
                found[sample, start + i] = int(batch["labels"][row, at + i])
    return found


@pytest.mark.parametrize("max_seq_len", [16, 64])
def test_packs_of_a_stream_and_on_the_fly_have_labels_at_the_responses_alone(tmp_path, max_seq_len):
    rng = np.random.default_rng(5)
    words = ["hello", "world,", "fine 😀", "how are you?"]
    rows = [
        {"messages": say(*(" ".join(rng.choice(words, n)) for n in rng.integers(0, 5, turns)))}
        for turns in rng.integers(1, 7, 30)
    ]
    encode = ChatEncoder(tokenizer_of())
    expected = {}
    for number, row in enumerate(rows):
        sample = encode(row)
        targets = np.where(sample["loss_mask"] == 1, sample["tokens"], -100)
        expected |= {(number, i): t for i, t in enumerate([*targets[1:].tolist(), -100])}

    written = write_stream(map(encode, rows), tmp_path / "chats")
    assert written.num_samples == len(rows)
    packing = Packing(max_seq_len=max_seq_len)
    stream = Stream(local=str(tmp_path / "chats"), loss_mask="loss_mask")
    planned = labels_of(PackedStreamingDataset([stream], packing=packing, batch_size=2))
    source = IterableStream(ChatSamples(rows, encode), loss_mask="loss_mask")
    on_the_fly = labels_of(PackedIterableDataset([source], packing=packing, batch_size=2))
    assert max(place for _, place in expected) > max_seq_len, "no sample is cut"
    assert planned == on_the_fly == expected


@pytest.mark.parametrize("options", [{}, {"chat": "messages"}, {"train_on": "each_response"}])
def test_prompts_that_are_cut_before_a_target_are_left_out_not_packed(tmp_path, options):
    rows = [{"messages": say("hello " * 40, "fine")}, {"messages": say("hello", "fine")}]
    found = {}
    for overflow in ("truncate", "split"):
        packing = Packing(max_seq_len=32, overflow=overflow)  # type: ignore[arg-type]
        dataset = chat_dataset(
            rows, tokenizer_of(), packing=packing, local=tmp_path, batch_size=1, **options
        )
        found[overflow] = {sample for sample, _ in labels_of(dataset)}
    assert found == {"truncate": {1}, "split": {0, 1}}


def test_hugging_face_datasets_map_their_rows(tmp_path):
    rows = [{"messages": say("hello", "fine", *["you", "well"] * (i % 2))} for i in range(6)]
    encode = ChatEncoder(tokenizer_of())
    table = datasets.Dataset.from_list(rows)
    mapped = table.map(encode, remove_columns=table.column_names)
    write_stream(mapped.with_format("numpy", dtype="int32"), tmp_path / "chats")
    packing = Packing(max_seq_len=32)
    stream = Stream(local=str(tmp_path / "chats"), loss_mask="loss_mask")
    written = labels_of(PackedStreamingDataset([stream], packing=packing, batch_size=1))
    listed = IterableStream(ChatSamples(rows, encode), loss_mask="loss_mask")
    assert written == labels_of(PackedIterableDataset([listed], packing=packing))

    iterable = IterableStream(table.to_iterable_dataset().map(encode), loss_mask="loss_mask")
    assert written == labels_of(PackedIterableDataset([iterable], packing=packing))
