"""The leak check, with a correct decoder and with incorrect ones."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from streampack.batch.batch import make_batches
from streampack.batch.masks import block_causal_mask
from streampack.errors import ConfigError
from streampack.gather.gather import Rows
from streampack.testing import assert_no_leak
from streampack.types import Packs
from tests.helpers.examples import crossed
from tests.helpers.packs import native_batch

VOCABULARY, DIM, HEADS, MAX_POSITION = 64, 32, 4, 64


class TinyDecoder(nn.Module):
    """A decoder that is essentially two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(MAX_POSITION, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(2))
        self.out = nn.Linear(DIM, VOCABULARY)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        mask = block_causal_mask(batch["document_ids"])
        return self.attend(batch["tokens"], mask=mask, input_pos=batch["input_pos"])

    def attend(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(input_pos)  # (B, S, DIM)
        for layer in self.layers:
            heads = layer(hidden).unflatten(-1, (3, HEADS, DIM // HEADS))
            query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, HEADS, S, DIM / HEADS)
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            hidden = hidden + seen.transpose(1, 2).flatten(2)
        return self.out(hidden)


class SeesAll(TinyDecoder):
    """Attends causally over the whole pack."""

    def attend(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        return super().attend(tokens, mask=torch.ones_like(mask).tril(), input_pos=input_pos)


class CountsOn(TinyDecoder):
    """Numbers positions in the pack instead of the segment."""

    def attend(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        on = torch.arange(tokens.shape[1]).expand_as(input_pos)
        return super().attend(tokens, mask=mask, input_pos=on)


class SeesFaintly(TinyDecoder):
    """Sees the rest of the pack, but a ten thousand times weaker than the segment."""

    def attend(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        own = super().attend(tokens, mask=mask, input_pos=input_pos)
        ones = torch.ones_like(mask).tril()
        return own + 1e-4 * (super().attend(tokens, mask=ones, input_pos=input_pos) - own)


def test_a_faint_leak_is_seen_where_multiplications_are_exact() -> None:
    with pytest.raises(
        AssertionError,
        match=r"row 0: tokens 0 to 12 of stream 1, sample 3 have logits that change by .* if "
        r"tokens of other segments are replaced, .*; the segment saw row 0: tokens 0 to 7 ",
    ):
        assert_no_leak(SeesFaintly(), packed("restart"))
    # In TF32, experts that receive other tokens have rounding errors of this size.
    torch.set_float32_matmul_precision("high")
    try:
        assert_no_leak(SeesFaintly(), packed("restart"))
        with pytest.raises(AssertionError, match="the segment saw row 0"):
            assert_no_leak(SeesAll(), packed("restart"))
    finally:
        torch.set_float32_matmul_precision("highest")


def packed(positions: str) -> dict[str, Any]:
    """Two packs of 24 tokens and one of padding, with whole samples and one that is cut."""
    segments = [[0, 0, 0, 0, 7, 7], [1, 0, 3, 0, 12, 12], [0, 0, 1, 0, 5, 14]]
    segments += [[0, 0, 1, 5, 9, 14], [1, 0, 4, 0, 1, 1]]
    packs = Packs(segments=np.array(segments), ends=np.array([3, 5]))
    tokens = np.random.Generator(np.random.Philox(3)).integers(1, VOCABULARY, (3, 24))
    tokens[1, 10:] = 0
    tokens[2] = 0
    next_tokens = np.array([-100, -100, tokens[1, 0], -100, -100])
    rows = Rows(tokens=tokens, next_tokens=next_tokens, labels=None)
    return make_batches(rows, packs, steps=[(0, 2)], positions=positions)[0]


@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_packed_logits_equal_unpacked_logits(positions: str) -> None:
    assert_no_leak(TinyDecoder(), packed(positions), atol=1e-5)


@pytest.mark.parametrize("model", [SeesAll(), CountsOn()])
def test_a_model_that_sees_over_the_edge_is_caught_at_the_first_segment_it_shows(
    model: TinyDecoder,
) -> None:
    with pytest.raises(AssertionError, match=r"row 0: tokens 0 to 12 of stream 1, sample 3 .*atol"):
        assert_no_leak(model, packed("restart"))


# Which segments leak, and models with other arguments.


class Drops(TinyDecoder):
    """A decoder with dropout, in training mode."""

    def attend(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        return functional.dropout(super().attend(tokens, mask=mask, input_pos=input_pos), 0.1)


def test_dropout_is_told_from_a_leak() -> None:
    with pytest.raises(
        AssertionError, match=r"two passes of the same batch differ.*model.eval\(\)"
    ):
        assert_no_leak(Drops(), packed("restart"))


def test_a_model_with_other_arguments_is_refused_with_the_function_to_pass() -> None:
    model = TinyDecoder()
    with pytest.raises(ConfigError, match="arguments tokens, mask, input_pos; pass a function"):
        assert_no_leak(model.attend, packed("restart"))

    def with_defaults(tokens, *, mask=None, input_pos=None):  # as in torchtune
        return model.attend(tokens, mask=mask, input_pos=input_pos)

    with pytest.raises(ConfigError, match="arguments tokens, mask, input_pos; pass a function"):
        assert_no_leak(with_defaults, packed("restart"))


def test_any_function_of_the_batch_is_a_model() -> None:
    model = TinyDecoder()

    def logits_of(batch: dict[str, Any]) -> torch.Tensor:
        mask = batch["document_ids"][:, None, :, None] == batch["document_ids"][:, None, None]
        return model.attend(batch["tokens"], mask=mask.tril(), input_pos=batch["input_pos"])

    assert_no_leak(logits_of, packed("restart"))

    def over_rows(batch: dict[str, Any]) -> torch.Tensor:
        # Joins all rows into one line, and ignores their boundaries.
        flat = {key: batch[key].flatten()[None] for key in ("tokens", "input_pos", "document_ids")}
        return logits_of(flat).view(*batch["tokens"].shape, -1)

    with pytest.raises(AssertionError, match=r"row 1: .* sample 1 .*; the segment saw row 0: "):
        assert_no_leak(over_rows, packed("restart"))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["peft", "peft without a task", "compiled", "DDP"])
def test_a_model_of_transformers_is_known_within_its_wrappers(tmp_path: Path, wrapper: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    if "peft" in wrapper:
        peft = pytest.importorskip("peft")
        task = None if "without" in wrapper else "CAUSAL_LM"
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type=task)).eval()
    is_distributed = "DDP" in wrapper
    if is_distributed:
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(model).eval()
    if "compiled" in wrapper:
        model = torch.compile(model, backend="eager")
    try:
        # The wrapper is what counts: to trace the model would take ten seconds.
        with torch.compiler.set_stance("force_eager"):
            assert_no_leak(model, packed("restart"))
    finally:
        if is_distributed:
            torch.distributed.destroy_process_group()


# A check is only conclusive if real changes are large enough.


class Scaled(TinyDecoder):
    """All weights are multiplied by a factor; if it leaks, the mask is all ones."""

    def __init__(self, scale: float, *, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks
        with torch.no_grad():
            for parameter in self.parameters():
                parameter *= scale

    def attend(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        seen = torch.ones_like(mask).tril() if self.leaks else mask
        return super().attend(tokens, mask=seen, input_pos=input_pos)


SCALES = [10.0, 0.1, 0.03, 1e-3, 1e-5, 0.0]


@pytest.mark.thorough
@pytest.mark.parametrize(("scale", "dtype"), crossed(SCALES, [torch.float32, torch.bfloat16]))
def test_a_leak_never_passes_and_a_clean_model_is_never_accused(
    scale: float, dtype: torch.dtype
) -> None:
    batch = packed("restart")
    with pytest.raises((AssertionError, ConfigError)):
        assert_no_leak(Scaled(scale, leaks=True).to(dtype), batch)
    with contextlib.suppress(ConfigError):  # inconclusive
        assert_no_leak(Scaled(scale, leaks=False).to(dtype), batch)


def test_weights_that_drown_in_rounding_are_an_error_whose_way_out_works() -> None:
    model = Scaled(0.1, leaks=True).to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"inconclusive: .* moves its logits by .*model\.float"):
        assert_no_leak(model, packed("restart"))
    with pytest.raises(AssertionError, match="the segment saw"):
        assert_no_leak(model.float(), packed("restart"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[20], [7]], r"no row of the batch has two segments \(2 segments in 2 rows\)"),
        ([[], []], r"no row of the batch has two segments \(0 segments in 2 rows\)"),
        ([[1, 1, 1]], "each of 3 segments has a single token"),
    ],
)
def test_a_batch_without_edges_tells_nothing(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"inconclusive: .*{message}"):
        assert_no_leak(SeesAll(), native_batch(rows, 24))
    with pytest.raises(AssertionError, match="the segment saw"):
        assert_no_leak(SeesAll(), native_batch([[5, 1, 7], []], 24))
