"""Remedies in messages about formats, models, configs and slices, applied as written.

::

    refuse() --> message --a regular expression--> the remedy's words --> apply(words) --> no error

The expressions match options and values rather than prose.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import (
    IterableStream,
    PackedIterableDataset,
    Packing,
    World,
)
from streampack.cli.config import read_config
from streampack.formats import (
    to_llama_factory,
)
from streampack.testing import assert_no_leak
from tests.helpers.remedies import PACKING, ROWS, Remedy
from tests.helpers.slices import context_worlds


def batch_of(*samples: Any, batch_format: Any = "native", **options: Any) -> Any:
    """Return the first batch of some samples."""
    packing = options.pop("packing", PACKING)
    size = options.pop("batch_size", 1)
    stream = IterableStream(list(samples or ROWS), **options)
    dataset = PackedIterableDataset(
        [stream], packing=packing, batch_size=size, batch_format=batch_format
    )
    return next(iter(dataset))


FORMATS = {
    "several packs that are numbered": Remedy(
        lambda _: batch_of(batch_format="llama_factory", batch_size=2),
        r"not 2: .*batch_size=(1)\b.*batch_format='(\w+)'.*, (dense)=True\)$",
        lambda _, one, name, option: [
            batch_of(batch_format="llama_factory", batch_size=int(one)),
            batch_of(batch_format=name, batch_size=2),
            batch_of(
                batch_format=functools.partial(to_llama_factory, **{option: True}), batch_size=2
            ),
        ],
    ),
}


# Models.


class Model(torch.nn.Module):
    """A model that sums the previous tokens of each document; its head may be zero."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(scale * torch.randn(64, 8, generator=generator))

    def forward(self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: Any) -> torch.Tensor:
        del input_pos
        seen: torch.Tensor = mask.reshape(len(tokens), *mask.shape[-2:]).to(self.table.dtype)
        return seen @ self.table[tokens]


MODELS = {
    "a model with a head of zeros": Remedy(
        lambda _: assert_no_leak(Model(0.0), batch_of(), style="decoder"),
        r"weights.* model\.(double)\(\)$",
        lambda _, finer: [
            assert_no_leak(Model(), batch_of(), style="decoder"),
            assert_no_leak(getattr(Model(), finer)(), batch_of(), style="decoder"),
        ],
    ),
}

# Classes of other libraries, configs and streams.


def yaml_of(folder: Path, *lines: str) -> Path:
    path = folder / "run.yaml"
    text = "\n".join(("streams: [{local: data/a}]", "packing: {max_seq_len: 16}", *lines))
    path.write_text(text)
    return path


OTHERS = {
    "a config that is not there": Remedy(
        lambda folder: read_config(folder / "none.yaml"),
        r"none\.yaml: .*name a YAML file$",
        lambda folder: read_config(yaml_of(folder)),
    ),
}


def sliced(
    num_ranks: int = 2, layout: str = "zigzag", batch_format: Any = "native", **packing: Any
) -> list[Any]:
    """Return the first batch of each rank of a context-parallel group."""
    return [
        next(
            iter(
                PackedIterableDataset(
                    [IterableStream(ROWS)],
                    packing=Packing(**{"max_seq_len": 16, **packing}),
                    batch_format=batch_format,
                    world=world,
                )
            )
        )
        for world in context_worlds(num_ranks, layout)
    ]


CUT: dict[str, Remedy] = {
    "context ranks that do not divide a replica": Remedy(
        lambda _: World(num_ranks=8, context_parallel=4),
        r"set replication to context_parallel .*, such as (\d+)$",
        lambda _, size: World(num_ranks=8, context_parallel=4, replication=int(size)),
    ),
    "a format of whole rows": Remedy(
        lambda _: sliced(batch_format="hf"),
        r"use '(\w+)', '(\w+)', 'megatron', '(\w+)' or '(\w+)'$",
        lambda _, *names: [sliced(batch_format=name) for name in names],
    ),
}


GROUPS = {"formats": FORMATS, "models": MODELS, "others": OTHERS, "slices": CUT}
TABLE = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


@pytest.mark.parametrize("remedy", TABLE.values(), ids=TABLE)
def test_what_a_message_of_a_batch_says_to_do_works(remedy: Remedy, tmp_path: Path):
    remedy.check(tmp_path)
