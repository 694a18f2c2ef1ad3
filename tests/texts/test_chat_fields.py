"""Fields of rows and messages: marks, parts of answers that no template prints, and metadata."""

from __future__ import annotations

import re
from typing import Any

import pytest

from streampack import PackedStreamingDataset, Stream, TokenFiles, chat_dataset
from streampack.errors import ConfigError, DataError
from streampack.texts import ChatEncoder, chat_fields
from tests.helpers.chats import CALL, PACKING, TEMPLATE, TOOL, chat_tokenizer, learned, say

HI = {"role": "user", "content": "a b"}
SAID = "{{ m.content or '' }}"
PRINTED = TEMPLATE.replace("{{ m.content }}", SAID)  # neither calls nor reasoning
MARKED = PRINTED.replace(
    f"{SAID} <end>",
    "{% if m.role == 'assistant' %}{% generation %}"
    f"{SAID} <end>{{% endgeneration %}}{{% else %}}{SAID} <end>{{% endif %}}",
)
TEMPLATES = pytest.mark.parametrize("template", [PRINTED, MARKED], ids=["prefixes", "markers"])
MODES = pytest.mark.parametrize("train_on", ["responses", "last_response", "each_response", "all"])


@pytest.fixture(autouse=True)
def forget_warnings():
    chat_fields._warned.clear()


def answer(content: Any = "c", **more: Any) -> list[dict[str, Any]]:
    return [HI, {"role": "assistant", "content": content, **more}]


tokenizer = chat_tokenizer()


def targets(row: Any, template: str = PRINTED, **options: Any) -> list[str]:
    samples = ChatEncoder(tokenizer, chat_template=template, **options).samples(row)
    return [learned(sample, tokenizer) for sample in samples]


# Marks.


@pytest.mark.parametrize(
    ("name", "no", "yes"),
    [
        ("weight", 0, 1),
        ("sample_weight", 0.0, 1.0),
        ("train", False, True),
        ("label", False, True),
        ("is_masked", True, False),
        ("ignore", True, False),
        ("no_loss", 1, 0),
    ],
)
def test_a_row_that_is_marked_is_not_learned_and_left_out(tmp_path, name, no, yes):
    rows = [{"prompt": "a", "completion": text, name: no} for text in "bc"]
    rows.append({"prompt": "a", "completion": "d", name: yes})
    assert [targets(row) for row in rows] == [[""], [""], ["d <end>"]]
    dataset = chat_dataset(rows, chat_tokenizer(), packing=PACKING, local=tmp_path)
    assert sum(len(batch["segments"]) for batch in dataset) == 1
    assert targets(rows[0], ignore_fields=[name]) == ["b <end>"]


TOKEN_IDS = "pass the token ids without chat, and name the field with loss_mask= or labels="
UNCLEAR = [
    ("weights", 0, "rename it to one of weight, train, mask"),
    ("loss", False, "rename it to one of weight, train, mask"),
    ("train_on", 1, "rename it to one of weight, train, mask"),
    ("token_weights", [1, 0], "rename it to one of weight, train, mask"),
    ("loss_mask", [1], TOKEN_IDS),
    ("completion_mask", [0, 1], TOKEN_IDS),
    ("assistant_masks", [0, 1], TOKEN_IDS),
    ("labels", [-100, 5], TOKEN_IDS),
    ("score", 0.2, "remove bad rows first"),
    ("reward", -1, "remove bad rows first"),
    ("weight", 0.5, "write 0 or 1, or true or false"),
    ("is_masked", [1, 0], "write 0 or 1, or true or false"),
]


@pytest.mark.parametrize(("name", "value", "way_out"), UNCLEAR)
def test_a_field_like_a_mark_is_refused_wherever_it_is(name, value, way_out):
    rows = {"the row": {"messages": answer(), name: value}, "message 1": answer(**{name: value})}
    for where, row in rows.items():
        shown = re.escape(f"{where} has {name}={value!r}, ") + rf".*{way_out}, or pass ignore_f"
        with pytest.raises(DataError, match=shown):
            targets(row)
        assert targets(row, ignore_fields=[name]) == ["c <end>"]
    for empty in (None, []):
        assert targets({"messages": answer(**{name: empty}), name: empty}) == ["c <end>"]


OF_ROWS = [
    ("label", 0, "write true or false"),
    ("label", "bad", "write true or false"),
    ("sample_weight", 0.5, "write 0 or 1"),
    ("system_prompt", "b", "rename it to one of system, tools"),
    ("SystemPrompt", "b", "rename it to one of system, tools"),
    ("functions", [TOOL], "rename it to one of system, tools"),
    ("tool", "b", "rename it to one of system, tools"),
    ("history", [["a", "b"]], "write all turns of the conversation as messages"),
    ("chosen", "b", "rename 'chosen' to 'messages', or to 'completion'"),
    ("rejected", "b", "rename 'chosen' to 'messages', or to 'completion'"),
    ("thought", "b", "write it into one of its messages"),
    ("reasoning", "b", "write it into one of its messages"),
    ("function_call", {"name": "f"}, "write it into one of its messages"),
]


@pytest.mark.parametrize(("name", "value", "way_out"), OF_ROWS)
@pytest.mark.parametrize("kind", ["ChatEncoder", "chat_dataset"])
def test_a_field_of_a_row_is_refused_with_a_way_out_that_fits(tmp_path, kind, name, value, way_out):
    def read(**options: Any) -> Any:
        rows = [{"prompt": "a", "completion": "c", "id": "7", "system_id": 7, name: value}]
        if kind == "ChatEncoder":
            return targets(rows[0], **options)
        return chat_dataset(rows, chat_tokenizer(), packing=PACKING, local=tmp_path, **options)

    with pytest.raises(DataError, match=rf"the row has {name}=.*{way_out}.*, or pass ignore_f"):
        read()
    assert read(ignore_fields=[name])


def test_preferences_are_refused_and_the_chosen_answer_can_be_named(tmp_path):
    rows = [{"prompt": "a", "chosen": answer("b"), "rejected": answer("c")}]

    def read(**options: Any) -> PackedStreamingDataset:
        return chat_dataset(rows, chat_tokenizer(), packing=PACKING, local=tmp_path, **options)

    with pytest.raises(DataError, match=r"the row has chosen=.* one of a preference"):
        read()
    with pytest.raises(DataError, match=r"the row has chosen=.* one of a preference"):
        targets(rows[0])
    [batch] = read(chat="chosen", ignore_fields=["rejected"])
    labels = batch["labels"][batch["labels"] >= 0]
    assert tokenizer.decode(labels) == "b <end>"
    assert targets({"messages": rows[0]["chosen"]}) == ["b <end>"]


def test_tokens_with_a_mask_are_a_stream_of_their_own(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}]
    stream = Stream(TokenFiles(rows, loss_mask="assistant_masks", local=tmp_path))
    [batch] = PackedStreamingDataset([stream], packing=PACKING)
    assert batch["labels"][0, :3].tolist() == [6, 7, -100]


# Parts of answers.

LOST: list[tuple[str, Any]] = [
    ("function_call", {"name": "add", "arguments": "{}"}),
    ("refusal", "i j"),
    ("reasoning_details", [{"type": "reasoning.text", "text": "i j"}]),
    ("thought", "i j"),
    ("thinking_blocks", [{"thinking": "i j"}]),
]
UNKNOWN: list[tuple[str, Any]] = [("answer", "i j"), ("notes", ["i j"]), ("more", {"n": 5})]


@TEMPLATES
@MODES
@pytest.mark.parametrize(("name", "value"), [*LOST, *UNKNOWN])
@pytest.mark.parametrize("content", ["c", None])
def test_a_part_of_an_answer_that_no_template_prints_is_refused(
    template, train_on, name, value, content
):
    options = {"template": template, "train_on": train_on}
    for row in (
        answer(content, **{name: value}),
        [{"from": "human", "value": "a"}, {"from": "gpt", "value": content, name: value}],
    ):
        with pytest.raises(DataError, match=rf"message 1 of 2 has {name}=.*reasoning_content or t"):
            targets(row, **options)
        assert targets(row, **options, ignore_fields=[name])
    earlier = [*answer(content, **{name: value}), *say("d", "e")]
    if train_on != "last_response":
        with pytest.raises(DataError, match=rf"message 1 of [24] has {name}="):
            targets(earlier, **options)
    empty = answer("c", **{name: type(value)(), f"{name}_id": "7"})
    assert targets(empty, **options)[0].endswith("c <end>")


@TEMPLATES
@pytest.mark.parametrize(("name", "value"), LOST)
def test_those_that_are_named_are_refused_where_they_are_not_learned_too(template, name, value):
    withheld = [*answer(**{name: value}, train=False), *say("d", "e")]
    for row in (withheld, [{**HI, name: value}, *answer()[1:]]):
        with pytest.raises(DataError, match=rf"message [01] of [24] has {name}="):
            targets(row, template)
    for name, value in UNKNOWN:
        withheld = [*answer(**{name: value}, train=False), *say("d", "e")]
        assert targets(withheld, template) == ["e <end>"]


@TEMPLATES
def test_a_part_that_the_template_prints_is_learned(template):
    thought = "{{ m.thought[0].text if m.thought else '' }}"
    template = template.replace(f"{SAID} <end>", f"{SAID} {thought} <end>")
    row = answer(thought=[{"type": "t", "text": "i  j"}])
    assert targets(row, template) == ["c i j <end>"]


@TEMPLATES
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"content": "", "tool_calls": [CALL]}, "call, 'add'"),
        ({"content": "c", "reasoning_content": "i j"}, "reasoning, 'i j'"),
    ],
)
def test_every_learned_response_must_be_printed_whole(template, said, kind):
    first = [HI, {"role": "assistant", **said}]
    later = [*first, *say("d", "e", "f", "g")]
    for mode in ("responses", "each_response", "all"):
        for row in (first, later):
            with pytest.raises(ConfigError, match=rf"message 1 of [26]: .*omits its {kind}"):
                targets(row, template, train_on=mode)
    assert targets(later, template, train_on="last_response") == ["g <end>"]
    later[1] |= {"train": False}
    assert targets(later, template) == ["e <end> g <end>"]


@pytest.mark.parametrize("of_last", [True, False])
def test_markers_around_a_part_of_a_response_are_refused(of_last):
    template = MARKED.replace(f"{{% generation %}}{SAID}", f"{SAID}{{% generation %}}")
    if of_last:  # markers in the last response alone
        template = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ConfigError, match=r"message 1 of 4: .*omits its content, 'b'"):
        targets(say("a", "b", "c", "d"), template)


@TEMPLATES
@MODES
def test_a_response_without_content_and_calls_is_no_target(template, train_on):
    row = [HI, {"role": "assistant"}, *say("a", "c")]
    found = targets(row, template, train_on=train_on)
    assert found == (["c <end>"] if train_on != "all" else found)
    assert targets(answer(None), template) == targets(answer([]), template) == [""]
    assert targets(answer(""), template) == ["<end>"]


@MODES
def test_tools_that_the_template_does_not_print_are_refused(train_on):
    row = {"messages": answer(), "tools": [TOOL]}
    with pytest.raises(ConfigError, match=r"omits the tools of this row.*ignore_fields=.'tools'"):
        targets(row, train_on=train_on)
    assert targets(row, train_on=train_on, ignore_fields=["tools"])
    assert targets(row, "{{ tools }}" + PRINTED, train_on=train_on)
    assert targets({**row, "tools": []}, train_on=train_on)


# Other fields.


def test_fields_that_say_nothing_are_named_once(caplog):
    row = answer(id="x 7", timestamp="1 May", url="https://a", n=3, good=True)
    row[0] = {**HI, "topic": "a b", "extra": {"a": 1}}
    for _ in range(2):
        assert targets(row) == ["c <end>"]
    [record] = caplog.records
    names = "extra, good, id, n, timestamp, topic, url"
    assert f"messages have {names}, which the chat template does not read" in record.getMessage()
    caplog.clear()
    chat_fields._warned.clear()
    assert targets(row, ignore_fields=names.split(", ")) == ["c <end>"]
    reads = PRINTED.replace(SAID, SAID + "{% if m.id %}{% endif %}")
    assert targets(answer(id="7"), reads) == ["c <end>"]
    assert not caplog.records


def test_one_text_is_no_list_of_fields():
    with pytest.raises(ConfigError, match=r"ignore_fields='id' is one text; write \['id'\]"):
        ChatEncoder(chat_tokenizer(), ignore_fields="id")
