"""On a GPU: batches arrive there unchanged, samples stay apart under its kernels, trainers train.

Skipped on machines without one, so no other test can tell you anything about a GPU.

Cost: half a minute.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from streampack import (
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    block_causal_mask,
    expand,
)
from streampack.formats import to_hf
from streampack.testing import assert_no_leak
from streampack.write import write_stream
from tests.helpers.packs import ROWS_OF_4, VOCABULARY, native_batch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    # Of torch and transformers, from their own calls.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter"),
]

MAX_SEQ_LEN = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": rng.integers(1, VOCABULARY, int(length)).astype(np.int32)}
        for length in rng.integers(2, 200, 400)
    ]
    out = tmp_path_factory.mktemp("streams") / "web"
    write_stream(samples, out)
    return out


def make_dataset(folder, batch_format="native"):
    return PackedStreamingDataset(
        [Stream(local=str(folder))],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        batch_size=4,
        batch_format=batch_format,
    )


def assert_same(one, other):
    for key, value in other.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(one[key].cpu(), value, rtol=0, atol=0)
        else:
            assert one[key] == value


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches_are_copied_while_the_loader_goes_on(folder, num_workers):
    plain = list(PackedDataLoader(make_dataset(folder)))
    loader = PackedDataLoader(make_dataset(folder), num_workers=num_workers, pin_memory=True)

    copies = []
    for batch in loader:
        assert all(value.is_pinned() for value in batch.values() if torch.is_tensor(value))
        copies.append(
            {
                key: value.to("cuda", non_blocking=True) if torch.is_tensor(value) else value
                for key, value in batch.items()
            }
        )
        torch.cuda.current_stream().synchronize()  # before the loader reuses its memory

    for copy, batch in zip(copies, plain, strict=True):
        assert_same(copy, batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_compact_batches_expand_there_to_the_native_ones(folder, num_workers):
    native = list(PackedDataLoader(make_dataset(folder)))
    loader = PackedDataLoader(
        make_dataset(folder, "compact"), num_workers=num_workers, pin_memory=True
    )

    expanded = []
    for batch in loader:
        expanded.append(expand(batch, "cuda"))
        torch.cuda.current_stream().synchronize()

    assert all(batch["labels"].is_cuda for batch in expanded)
    for one, other in zip(expanded, native, strict=True):
        assert_same(one, other)


def on_gpu(batch):
    return {key: value.cuda() if torch.is_tensor(value) else value for key, value in batch.items()}


def heads(batch, dtype):
    torch.manual_seed(0)
    rows, row_tokens = batch["tokens"].shape
    return [
        torch.randn(rows, 4, row_tokens, 32, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]


def test_flex_attention_and_the_varlen_kernel_see_what_the_dense_mask_shows(folder):
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.attention.varlen import varlen_attn

    from streampack.batch.masks import block_mask

    batch = on_gpu(next(iter(PackedDataLoader(make_dataset(folder)))))
    query, key, value = heads(batch, torch.bfloat16)
    rows, _, row_tokens, _ = query.shape

    dense = scaled_dot_product_attention(
        query, key, value, attn_mask=block_causal_mask(batch["document_ids"])
    )
    flex = torch.compile(flex_attention)(
        query, key, value, block_mask=block_mask(batch["document_ids"])
    )
    flat = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    edges, longest = batch["cu_seqlens"], batch["max_seqlen"]
    varlen = varlen_attn(*flat, edges, edges, longest, longest, window_size=(-1, 0))
    varlen = varlen.unflatten(0, (rows, row_tokens)).transpose(1, 2)

    real = (batch["document_ids"] > 0)[:, None, :, None]
    for seen in (flex, varlen):
        torch.testing.assert_close(seen * real, dense * real, rtol=0.02, atol=0.02)


def tiny_llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQ_LEN,
        initializer_range=0.2,
    )
    return LlamaForCausalLM._from_config(config, **options).cuda().eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch_format", ["hf", partial(to_hf, dense=True)], ids=["ids", "mask"])
def test_a_model_keeps_samples_apart(attention, batch_format):
    model = tiny_llama(attn_implementation=attention)

    assert_no_leak(model, on_gpu(native_batch(ROWS_OF_4, 24)), batch_format=batch_format)


def lora_of(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def losses_of(model, folder, out, **options):
    from transformers import TrainingArguments

    from streampack.hf import PackedTrainer

    args = TrainingArguments(
        output_dir=str(out),
        bf16=True,
        per_device_train_batch_size=4,
        max_steps=30,
        learning_rate=0.01,
        logging_steps=5,
        dataloader_num_workers=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    dataset = PackedStreamingDataset(
        [Stream(local=str(folder))], packing=Packing(max_seq_len=MAX_SEQ_LEN)
    )
    trainer = PackedTrainer(model=model, args=args, train_dataset=dataset)
    trainer.train()
    assert trainer.model.device.type == "cuda"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_packed_trainer_trains_in_bfloat16(folder, tmp_path, checkpointing, lora):
    model = tiny_llama(attn_implementation="sdpa")
    if lora:
        model.enable_input_require_grads()
        model = lora_of(model)

    losses = losses_of(model, folder, tmp_path, gradient_checkpointing=checkpointing)

    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.2


def test_packed_trainer_trains_adapters_of_a_model_in_four_bits(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_llama().save_pretrained(tmp_path / "base")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=four_bits, device_map={"": 0}
    )

    model = lora_of(peft.prepare_model_for_kbit_training(model))
    losses = losses_of(model, folder, tmp_path / "out")

    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.2
