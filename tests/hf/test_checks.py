"""What PackedTrainer refuses, names and keeps of a run, around Trainer's own loop."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer

from streampack import Order, Packing, chat_dataset
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.hf import last_checkpoint
from tests.helpers.fine_tuning import (
    MAX_SEQ_LEN,
    VOCABULARY,
    make_dataset,
    make_samples,
    make_trainer,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES = make_samples(40)


def trainer_of(tmp_path, samples=SAMPLES, **options):
    order = options.pop("order", None)
    dataset = make_dataset(tmp_path / "train", samples, order=order)
    return make_trainer(tmp_path / "out", train_dataset=dataset, num_train_epochs=1, **options)


def weights(trainer):
    return [value for each in trainer.model.parameters() for value in each.flatten().tolist()]


# transformers 4.57 takes two checkpoints within a second for a filesystem without times.
@pytest.mark.filterwarnings("ignore:mtime may not be reliable")
def test_a_finished_run_that_is_started_again_ends(tmp_path):
    options = {"save_strategy": "epoch", "save_total_limit": 1}
    first = trainer_of(tmp_path, **options)
    first.train()
    kept = last_checkpoint(tmp_path / "out")
    again = trainer_of(tmp_path, **options)

    again.train(resume_from_checkpoint=kept)

    assert weights(again) == weights(first)
    assert (again.state.global_step, again.state.epoch) == (first.state.global_step, 1)
    assert last_checkpoint(tmp_path / "out") == kept
    more = trainer_of(tmp_path, **options)
    more.args.num_train_epochs = 2
    more.train(resume_from_checkpoint=kept)
    assert more.state.epoch == 2


def test_a_resume_with_another_global_batch_is_refused_and_with_the_same_it_continues(tmp_path):
    first = trainer_of(tmp_path, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1)
    first.train()
    kept = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(ResumeError, match=r"with 4 packs in each step, but .* give 2, so"):
        trainer_of(tmp_path).train(resume_from_checkpoint=kept)
    again = trainer_of(tmp_path, per_device_train_batch_size=4)
    again.train(resume_from_checkpoint=kept)
    assert (again.state.global_step, again.state.epoch) == (first.state.global_step, 1)


@pytest.mark.parametrize("is_path", [False, True])
def test_a_checkpoint_has_the_tokenizer_of_the_rows(tmp_path, is_path):
    words = ["?", "<user>", "<assistant>", "<end>", "one", "two"]
    vocabulary = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="?"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two " * (n % 5 + 1)},
            ]
        }
        for n in range(20)
    ]
    packing = Packing(max_seq_len=MAX_SEQ_LEN, overflow="truncate")
    if is_path:
        tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = str(tmp_path / "tokenizer") if is_path else tokenizer
    dataset = chat_dataset(rows, given, packing=packing, local=tmp_path / "rows")
    trainer = make_trainer(
        tmp_path / "out", train_dataset=dataset, max_steps=1, save_strategy="steps", save_steps=1
    )
    eos_before = trainer.model.config.eos_token_id

    trainer.train()

    loaded = AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint-1")
    assert loaded("one two")["input_ids"] == [4, 5]
    assert loaded.chat_template == tokenizer.chat_template
    assert trainer.model.config.eos_token_id == eos_before


@pytest.mark.parametrize(
    ("order", "options", "seed"),
    [
        (None, {"seed": 3}, 3),
        (None, {"seed": 3, "data_seed": 4}, 4),
        (Order(seed=5), {"seed": 3, "data_seed": 4}, 5),
    ],
)
def test_the_seed_of_the_arguments_sets_the_order_unless_order_does(tmp_path, order, options, seed):
    trainer = trainer_of(tmp_path, order=order, **options)
    wanted = make_trainer(
        tmp_path / "out",
        train_dataset=make_dataset(tmp_path / "train", SAMPLES, order=Order(seed=seed)),
    )
    first, second = (next(iter(each.get_train_dataloader())) for each in (trainer, wanted))
    assert first["input_ids"].tolist() == second["input_ids"].tolist()


def test_options_without_effect_are_named_once(tmp_path, caplog):
    trainer = trainer_of(tmp_path, dataloader_drop_last=True, ignore_data_skip=True, max_steps=1)
    trainer.train()
    said = [each for each in caplog.messages if "without effect" in each]
    assert len(said) == 1
    assert "dataloader_drop_last=True, ignore_data_skip=True are without effect" in said[0]
    caplog.clear()
    trainer_of(tmp_path)
    assert "without effect" not in caplog.text


@pytest.mark.parametrize("check_leaks", [True, False])
def test_ids_beyond_the_vocabulary_are_refused_before_a_step(tmp_path, check_leaks):
    samples = [dict(each) for each in SAMPLES]
    for sample in samples:
        sample["tokens"] = sample["tokens"] + VOCABULARY
    trainer = trainer_of(tmp_path, samples, check_leaks=check_leaks)
    with pytest.raises(DataError, match=r"has token \d+, but the model's vocabulary has 99 ids"):
        trainer.train()
    assert not trainer.state.global_step
    trainer.model.resize_token_embeddings(2 * VOCABULARY)
    trainer.train()


@pytest.mark.parametrize("batch_format", ["hf", "native"])
def test_trainer_itself_refuses_a_packed_dataset_and_names_ours(tmp_path, batch_format):
    dataset = make_dataset(tmp_path / "train", SAMPLES, batch_format=batch_format)
    trainer = make_trainer(tmp_path / "out", cls=Trainer, train_dataset=dataset, max_steps=1)
    with pytest.raises(ConfigError, match=r"use streampack.hf.PackedTrainer in its place"):
        trainer.train()


@pytest.mark.parametrize("counts", ["all", "non_padding"])
def test_tokens_are_counted_with_and_without_padding(tmp_path, counts):
    trainer = trainer_of(tmp_path, include_num_input_tokens_seen=counts)
    trainer.train()
    seen = trainer.state.num_input_tokens_seen
    if counts == "all":
        assert seen == trainer.state.global_step * 2 * MAX_SEQ_LEN
    else:
        assert seen == sum(len(each["tokens"]) for each in SAMPLES)
    assert trainer.args.include_num_input_tokens_seen == counts
