"""Packing only changes the speed: models of transformers, and training step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from examples.demo.model import SmallDecoder
from streampack.formats import to_hf, to_hf_flash, to_llama_factory
from streampack.testing import assert_no_leak
from tests.helpers.examples import crossed, examples
from tests.helpers.flash import flash_in_torch
from tests.helpers.packs import ROWS_OF_4, VOCABULARY, native_batch, samples_of

SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = SHAPE | {"num_key_value_heads": 2}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=None),
    "mistral-sliding": transformers.MistralConfig(**GROUPED, sliding_window=6),
    "gpt-neox": transformers.GPTNeoXConfig(**SHAPE),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(name: str, attention: str = "sdpa") -> Any:
    """A tiny model with random weights, large enough that a leak shows."""
    torch.manual_seed(5)
    config = CONFIGS[name]
    config.initializer_range = 0.2
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def apart(model: Any, batch: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The logits of each sample in a separate forward pass, and the mean loss over all targets."""
    logits, losses, targets = [], torch.zeros(()), 0
    for row, first, length in samples_of(batch):
        inside = slice(first, first + length)
        out = model(input_ids=batch["tokens"][row, inside][None], use_cache=False).logits[0]
        labels = batch["labels"][row, inside]
        losses = losses + functional.cross_entropy(out, labels, reduction="sum")
        targets += int((labels != -100).sum())
        logits.append(out)
    return logits, losses / targets


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


@pytest.mark.parametrize(
    ("name", "attention", "num_rows"), crossed(list(CONFIGS), ["sdpa", "eager"], [4, 1])
)
def test_logits_loss_and_gradients_of_packs_are_those_of_their_samples(
    name: str, attention: str, num_rows: int
) -> None:
    model, batch = model_of(name, attention), native_batch(ROWS_OF_4[:num_rows], 24)
    expected, mean_loss = apart(model, batch)

    packed = model(**to_hf(batch))

    assert not packed.logits.isnan().any()
    for (row, first, length), alone in zip(samples_of(batch), expected, strict=True):
        there = packed.logits[row, first : first + length]
        assert float((there - alone).detach().abs().max()) <= 1e-5
    assert float((packed.loss - mean_loss).detach().abs()) <= 1e-5
    wanted = gradients(model, mean_loss)
    for key, gradient in gradients(model, packed.loss).items():
        assert float((gradient - wanted[key]).abs().max()) <= 1e-5, key


def test_the_target_at_a_cut_is_kept_by_shift_labels_and_left_out_without() -> None:
    model, batch = model_of("llama"), native_batch([[7, 5]], 16, cuts=[(0, 1)])
    model.requires_grad_(False)
    _, mean_loss = apart(model, batch)
    without = {**batch, "labels": batch["labels"].clone()}
    without["labels"][0, 11] = -100

    assert float((model(**to_hf(batch, shift_labels=True)).loss - mean_loss).abs()) <= 1e-5
    assert float((model(**to_hf(batch)).loss - apart(model, without)[1]).abs()) <= 1e-5
    assert float((model(**to_hf(batch)).loss - mean_loss).abs()) > 1e-3


def packs_of(size: int) -> st.SearchStrategy[list[list[int]]]:
    """Rows of 24 tokens with two or more segments, some of them full."""
    lengths = st.lists(st.integers(2, 8), min_size=2, max_size=3)
    full = lengths.map(lambda row: [*row, 24 - sum(row)] if sum(row) < 24 else row)
    return st.lists(lengths | full, min_size=size, max_size=size)


@examples(8, many=15)
@given(rows=packs_of(1), seed=st.integers(0, 9))
def test_flash_attention_keeps_documents_of_one_pack_apart_in_every_format(
    rows: list[list[int]], seed: int
) -> None:
    batch = native_batch(rows, 24, seed=seed)
    with flash_in_torch() as attention:
        model = model_of("llama", attention)
        for convert in (to_llama_factory, to_hf, to_hf_flash):
            assert_no_leak(lambda b, convert=convert: model(**convert(b)).logits, batch)


@examples(4, many=8)
@given(rows=packs_of(3), seed=st.integers(0, 9))
def test_several_packs_are_kept_apart_by_all_formats_that_say_so(
    rows: list[list[int]], seed: int
) -> None:
    batch = native_batch(rows, 24, seed=seed)
    for attention in ("sdpa", "eager"):
        model = model_of("llama", attention)
        assert_no_leak(lambda b, model=model: model(**to_hf(b)).logits, batch)
        for dense in (to_hf, to_llama_factory):
            convert = partial(dense, dense=True)
            assert_no_leak(lambda b, c=convert, m=model: m(**c(b)).logits, batch)
    with flash_in_torch() as attention:
        model = model_of("llama", attention)
        assert_no_leak(lambda b: model(**to_hf_flash(b)).logits.view(*b["tokens"].shape, -1), batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_with_a_cache_transformers_leaks_and_is_caught(name: str) -> None:
    model = model_of(name)

    def with_cache(batch: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = model(**(to_hf(batch) | {"use_cache": True})).logits
        return logits

    with pytest.raises(AssertionError, match=r"the segment saw row 0: tokens 0 to 7 .* sample 0"):
        assert_no_leak(with_cache, native_batch(ROWS_OF_4, 24))


STEPS = 60


def test_training_on_packs_is_training_on_their_samples_step_by_step() -> None:
    generator = torch.Generator().manual_seed(9)
    torch.manual_seed(1)
    packed = SmallDecoder(VOCABULARY, dim=16, num_layers=2, num_heads=2).double()
    single = SmallDecoder(VOCABULARY, dim=16, num_layers=2, num_heads=2).double()
    single.load_state_dict(packed.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (packed, single)]
    losses: list[tuple[float, float]] = []
    for step in range(STEPS):
        first = torch.randint(1, 12, (2,), generator=generator).tolist()
        rows = [[length, 24 - length - 4, 3] for length in first]
        batch = native_batch(rows, 24, seed=step % 5, cuts=[(1, 2)])

        logits = packed(batch["tokens"], batch["input_pos"], batch["document_ids"])
        together = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        sums, targets = torch.zeros((), dtype=torch.float64), 0
        for row, begin, length in samples_of(batch):
            inside = slice(begin, begin + length)
            tokens = batch["tokens"][row, inside][None]
            out = single(tokens, torch.arange(length)[None], torch.ones_like(tokens))
            labels = batch["labels"][row, inside]
            sums = sums + functional.cross_entropy(out[0], labels, reduction="sum")
            targets += int((labels != -100).sum())
        for optimizer, loss in zip(optimizers, (together, sums / targets), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((together.item(), (sums / targets).item()))

    assert max(abs(a - b) for a, b in losses) < 1e-9
    assert losses[-1][0] < losses[0][0] - 0.5, "it learnt nothing, so nothing was compared"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dense", [to_hf, to_llama_factory])
def test_a_dense_mask_keeps_documents_of_one_pack_apart(attention: str, dense: Any) -> None:
    model, batch = model_of("qwen3", attention), native_batch(ROWS_OF_4, 24)
    assert_no_leak(lambda b: model(**dense(b, dense=True)).logits, batch)
