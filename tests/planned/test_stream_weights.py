"""`Stream(loss_weight=...)`: a factor for a stream's losses, in each format with loss weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from streampack import (
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
    expand,
    loss_weights,
)
from streampack.batch.compact import expand_on
from streampack.formats import to_megatron
from streampack.write import write_stream


def with_weights(tmp_path, weights, **options):
    """A dataset of streams with these loss weights, and the weight of each token id."""
    streams, of_token = [], {0: 0.0}
    for number, weight in enumerate(weights):
        tokens = [[10 * number + 1 + i % 5 for i in range(n)] for n in (3, 9, 5, 14, 7, 4)]
        write_stream(tokens, tmp_path / f"{number}")
        streams.append(Stream(local=tmp_path / f"{number}", loss_weight=weight))
        of_token |= dict.fromkeys(range(10 * number, 10 * number + 10), weight or 1.0)
    packing = Packing(max_seq_len=32, overflow="split")
    arguments = {"packing": packing, "batch_size": 2, "world": World(), **options}
    return PackedStreamingDataset(streams, **arguments), of_token


def expected(of_token, tokens, labels):
    own = torch.tensor([[of_token[t] for t in row] for row in tokens.tolist()])
    return torch.where(labels == -100, 0.0, own)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loss_weight_of_a_stream_is_one_more_factor_in_native_and_compact(
    tmp_path, num_workers
):
    native, of_token = with_weights(tmp_path, [2.0, None, 0.25])
    compact = native.with_arguments(batch_format="compact")
    loaders = [PackedDataLoader(each, num_workers=num_workers) for each in (native, compact)]
    for one, other in zip(*loaders, strict=True):
        wanted = expected(of_token, one["tokens"], one["labels"])
        torch.testing.assert_close(loss_weights(one, units=1), wanted)
        expanded = (expand(other), expand_on(other, torch.device("cpu")))
        for batch in expanded:
            torch.testing.assert_close(loss_weights(batch, units=1), wanted)
        plain = {key: value for key, value in one.items() if key != "loss_weight"}
        by_sample = loss_weights(plain, average="samples", units=3) * wanted
        torch.testing.assert_close(loss_weights(one, average="samples", units=3), by_sample)


def test_slices_of_rows_have_the_weights_of_their_tokens(tmp_path):
    for layout in ("zigzag", "contiguous"):
        shape = {"num_ranks": 2, "replication": 2, "context_parallel": 2, "context_layout": layout}
        for rank in (0, 1):
            world = World(rank=rank, **shape)
            dataset, of_token = with_weights(tmp_path / f"{layout}{rank}", [2.0, 0.5], world=world)
            for batch in dataset:
                wanted = expected(of_token, batch["tokens"], batch["labels"])
                torch.testing.assert_close(loss_weights(batch, units=1), wanted)


@pytest.mark.parametrize("options", [{}, {"pad_to": 8}])
def test_megatrons_loss_mask_has_the_weights(tmp_path, options):
    convert = partial(to_megatron, **options)
    dataset, of_token = with_weights(tmp_path, [2.0, 0.5], batch_format=convert)
    for batch in dataset:
        wanted = expected(of_token, batch["tokens"], batch["labels"])
        torch.testing.assert_close(batch["loss_mask"], wanted)
