"""Remedies of formats, masks, checks of models, classes of other libraries and worlds, applied.

::

    refuse() --> message --a regular expression--> the remedy's words --> apply(words) --> no error

The expressions hold on to options and values, not to prose.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import streampack
from streampack import (
    BucketedIterableDataset,
    Bucketing,
    IterableStream,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
    block_causal_mask,
    loss_weights,
    merge_slices,
)
from streampack.batch.compact import expand, to_compact
from streampack.cli.config import read_config
from streampack.compat.torchdata import MaxTokenBucketizer
from streampack.compat.torchtune import PackedDataset
from streampack.formats import (
    additive_mask,
    block_mask,
    fixed_cu_seqlens,
    global_units,
    to_hf,
    to_hf_flash,
    to_llama_factory,
    to_megatron,
)
from streampack.testing import assert_no_leak
from streampack.write import write_stream
from tests.helpers.remedies import PACKING, ROWS, Remedy, mds, packed, untried
from tests.helpers.slices import context_worlds

COMPLETE = ("batch/masks.py", "batch/compact.py", "compat/torchdata.py", "compat/torchtune.py")
COMPLETE += ("batch/formats/huggingface.py", "cli/config.py", "formats.py", "testing.py")
COMPLETE += ("batch/slices.py",)


def batch_of(*samples: Any, batch_format: Any = "native", **options: Any) -> Any:
    """Return the first batch of some samples."""
    packing = options.pop("packing", PACKING)
    size = options.pop("batch_size", 1)
    stream = IterableStream(list(samples or ROWS), **options)
    dataset = PackedIterableDataset(
        [stream], packing=packing, batch_size=size, batch_format=batch_format
    )
    return next(iter(dataset))


def with_labels(*labels: int) -> dict[str, list[int]]:
    return {"tokens": [1, 2, 3], "labels": list(labels)}


def with_weight(batch_format: Any) -> Any:
    """Return a batch of samples with a field of their own."""
    row = {"tokens": [1, 2, 3], "w": [1, 1, 1]}
    return batch_of(*[row] * 9, token_fields={"w": "int64"}, batch_format=batch_format)


def without_weight(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "w"}


def in_worker(make: Any) -> Any:
    """Make a batch of the native one in a worker of torch's loader."""
    dataset = PackedIterableDataset(
        [IterableStream(ROWS)], packing=PACKING, batch_format=lambda batch: make(batch)
    )
    return next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))


FORMATS = {
    "a dense mask of flash attention": Remedy(
        lambda _: batch_of(batch_format=functools.partial(to_hf_flash, dense=True)),
        r"dense=True: .*leave dense out, or use batch_format='(\w+)' ",
        lambda _, name: [batch_of(batch_format=to_hf_flash), batch_of(batch_format=name)],
    ),
    "several packs that are numbered": Remedy(
        lambda _: batch_of(batch_format="llama_factory", batch_size=2),
        r"batch_size=2: .*batch_size=(1)\b.*batch_format='(\w+)'.*, (dense)=True\)$",
        lambda _, one, name, option: [
            batch_of(batch_format="llama_factory", batch_size=int(one)),
            batch_of(batch_format=name, batch_size=2),
            batch_of(
                batch_format=functools.partial(to_llama_factory, **{option: True}), batch_size=2
            ),
        ],
    ),
    "labels that are not the tokens": Remedy(
        lambda _: batch_of(
            *[with_labels(9, 9, 9)] * 9,
            labels="labels",
            labels_shifted=False,
            batch_format="olmo_core",
        ),
        r"'olmo_core' .*use another format ",
        lambda _: batch_of(
            *[with_labels(9, 9, 9)] * 9, labels="labels", labels_shifted=False, batch_format="hf"
        ),
    ),
    "a field that a trainer does not take": Remedy(
        lambda _: with_weight("olmo_core"),
        r"field 'w'.*'(native)', '(hf)' or '(llama_factory)'.* convert a batch without it$",
        lambda _, *names: [
            *(with_weight(name) for name in names),
            to_hf(without_weight(with_weight("native"))),
        ],
    ),
    "positions that continue in a batch": Remedy(
        lambda _: to_hf_flash(cut_batch("continue")),
        r"position \d+; set Packing\(positions='(\w+)'\)$",
        lambda _, word: to_hf_flash(cut_batch(word)),
    ),
    "ids that a compact batch cannot hold": Remedy(
        lambda _: compacted(2**31 - 1 + 1),
        r"token id 2147483648 .*batch_format='(native)'$",
        lambda _, name: batch_of(batch_format=name),
    ),
    "a native batch to expand": Remedy(
        lambda _: expand(batch_of()),
        r"batch_format='(compact)'",
        lambda _, name: expand(batch_of(batch_format=name)),
    ),
    "a step without targets": Remedy(
        lambda _: loss_weights(batch_of(), average="tokens", units=0),
        r"units=0 must be at least (1)",
        lambda _, least: loss_weights(batch_of(), average="tokens", units=int(least)),
    ),
    "no micro-batches": Remedy(
        lambda _: global_units([], average="tokens"),
        r"batches=\[\] .*pass the micro-batches",
        lambda _: global_units([batch_of()], average="tokens"),
    ),
    "a mask of integers": Remedy(
        lambda _: additive_mask(batch_of()["document_ids"], dtype=torch.int64),
        r"dtype=torch\.int64 .*use a bool mask$",
        lambda _: [
            additive_mask(batch_of()["document_ids"], dtype=torch.bfloat16),
            block_causal_mask(batch_of()["document_ids"]),
        ],
    ),
    "a block mask in a worker": Remedy(
        lambda _: in_worker(lambda batch: block_mask(batch["document_ids"])),
        r"worker 0 of 1; .* block_mask\(batch\['(document_ids)'\]\) in the training loop$",
        lambda _, key: block_mask(in_worker(lambda batch: batch)[key]),
    ),
    "more segments than the capacity": Remedy(
        lambda _: fixed_cu_seqlens(batch_of()["cu_seqlens"], 2),
        r"capacity=2; raise it: B \* S is always enough$",
        lambda _: fixed_cu_seqlens(batch_of()["cu_seqlens"], batch_of()["tokens"].numel()),
    ),
}


def compacted(token: int) -> Any:
    """Make a compact batch of a native one with this token."""
    batch = batch_of()
    batch["tokens"][0, 0] = token
    return to_compact(batch)


def cut_batch(positions: str) -> Any:
    """Return a batch of one sample that is cut into three."""
    packing = Packing(max_seq_len=16, positions=positions)
    return batch_of(list(range(1, 40)), packing=packing, batch_size=3)


# Models.


class Model(torch.nn.Module):
    """Adds up the tokens before each within a document; its head may be zero."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(scale * torch.randn(64, 8, generator=generator))

    def forward(self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: Any) -> torch.Tensor:
        del input_pos
        seen: torch.Tensor = mask.reshape(len(tokens), *mask.shape[-2:]).to(self.table.dtype)
        return seen @ self.table[tokens]


class Unplaced(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor) -> Any:
        raise NotImplementedError


def of_batch(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = block_causal_mask(batch["document_ids"])
    return Model()(batch["tokens"], mask=mask, input_pos=batch["input_pos"]).detach()


def odd(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


MODELS = {
    "a model with a head of zeros": Remedy(
        lambda _: assert_no_leak(Model(0.0), batch_of(), style="decoder"),
        r"weights.* model\.(double)\(\)$",
        lambda _, finer: [
            assert_no_leak(Model(), batch_of(), style="decoder"),
            assert_no_leak(getattr(Model(), finer)(), batch_of(), style="decoder"),
        ],
    ),
    "a batch of one long sample": Remedy(
        lambda _: assert_no_leak(Model(), batch_of(list(range(1, 17))), style="decoder"),
        r"shorter samples or a larger max_seq_len$",
        lambda _: [
            assert_no_leak(Model(), batch_of([1, 2, 3], [4, 5, 6]), style="decoder"),
            assert_no_leak(
                Model(),
                batch_of(*[list(range(1, 17))] * 2, packing=Packing(max_seq_len=32)),
                style="decoder",
            ),
        ],
    ),
    "a batch of single tokens": Remedy(
        lambda _: assert_no_leak(Model(), batch_of(*[[1]] * 16), style="decoder"),
        r"longer samples$",
        lambda _: assert_no_leak(Model(), batch_of(), style="decoder"),
    ),
    "a model without positions": Remedy(
        lambda _: assert_no_leak(Unplaced(), batch_of()),
        r"style='(batch)' with a function ",
        lambda _, style: assert_no_leak(of_batch, batch_of(), style=style),
    ),
    "a model of unknown arguments": Remedy(
        lambda _: assert_no_leak(odd, batch_of()),
        r"pass a function that takes the (batch) and returns logits$",
        lambda _, __: assert_no_leak(of_batch, batch_of()),
    ),
}

# Classes of other libraries, configs and streams.

SHORT = [[1, 2], [3, 4, 5]] * 4


def bucketizer(**options: Any) -> int:
    return len(list(MaxTokenBucketizer(SHORT, max_token_count=8, **options)))


def tune(*, labels: int = 2, **options: Any) -> int:
    rows = [{"tokens": [1, 2], "labels": [1] * labels}] * 4
    return len(PackedDataset(rows, max_seq_len=8, **options))


def yaml_of(folder: Path, *lines: str) -> Path:
    path = folder / "run.yaml"
    text = "\n".join(("streams: [{local: data/a}]", "packing: {max_seq_len: 16}", *lines))
    path.write_text(text)
    return path


def multiplied(key: str) -> list[str]:
    """Return the lines of lists of aliases, each ten of the one before."""
    lines = [f"{key}: ", "  - &a0 [1]"]
    return lines + [f"  - &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]" for n in range(1, 7)]


def two_remotes(folder: Path, *local: str) -> int:
    remotes = [mds(folder), folder / "other"]
    if not remotes[1].exists():
        write_stream(ROWS, remotes[1])
    return packed(
        [
            Stream(remote=str(remote), local=folder / name)
            for remote, name in zip(remotes, local, strict=True)
        ]
    )


def rank_of(folder: Path, **variables: str) -> int:
    return packed([Stream(local=mds(folder))], world=World.from_env(variables))


OTHERS = {
    "a shortest sample that is too long": Remedy(
        lambda _: bucketizer(min_len=9),
        r"min_len=9 and max_len=(\d+); lower min_len, or leave it out$",
        lambda _, most: [bucketizer(min_len=min(2, int(most))), bucketizer()],
    ),
    "a longest sample that fits no batch": Remedy(
        lambda _: bucketizer(max_len=9),
        r"max_token_count=(\d+) and max_len=9: .*lower max_len, or leave it out$",
        lambda _, most: [bucketizer(max_len=int(most)), bucketizer()],
    ),
    "a buffer of nothing": Remedy(
        lambda _: bucketizer(buffer_size=0),
        r"buffer_size.* is 0; (1) ",
        lambda _, least: bucketizer(buffer_size=int(least)),
    ),
    "an age of nothing": Remedy(
        lambda _: bucketizer(max_age=0),
        r"max_age=0 must be at least (1); (None) ",
        lambda _, least, __: [bucketizer(max_age=int(least)), bucketizer(max_age=None)],
    ),
    "fewer than no packs": Remedy(
        lambda _: tune(max_packs=-1),
        r"max_packs=-1 must be at least (0); (None) ",
        lambda _, least, __: [tune(max_packs=int(least)), tune(max_packs=None)],
    ),
    "labels of another number": Remedy(
        lambda _: tune(labels=1),
        r"2 tokens, but 1 labels; give one for each token$",
        lambda _: tune(labels=2),
    ),
    "a sample without labels": Remedy(
        lambda _: PackedDataset([{"tokens": [1, 2]}], max_seq_len=8),
        r"give dicts with (tokens) and (labels)$",
        lambda _, *keys: PackedDataset([{key: [1, 2] for key in keys}], max_seq_len=8),
    ),
    "a sample that is too long": Remedy(
        lambda _: PackedDataset([{"tokens": [1] * 9, "labels": [1] * 9}], max_seq_len=8),
        r"9 tokens, but max_seq_len=8; set (split_across_pack)=True, or raise max_seq_len$",
        lambda _, option: [
            PackedDataset(
                [{"tokens": [1] * 9, "labels": [1] * 9}], max_seq_len=8, **{option: True}
            ),
            PackedDataset([{"tokens": [1] * 9, "labels": [1] * 9}], max_seq_len=9),
        ],
    ),
    "a config that is not there": Remedy(
        lambda folder: read_config(folder / "none.yaml"),
        r"none\.yaml: .*name a YAML file$",
        lambda folder: read_config(yaml_of(folder)),
    ),
    "a config that is nested without end": Remedy(
        lambda folder: read_config(yaml_of(folder, "batch_size: " + 60 * "[")),
        r"line 3: is nested more than 50 deep; no key needs that$",
        lambda folder: read_config(yaml_of(folder, "batch_size: 1")),
    ),
    "an alias for what it is part of": Remedy(
        lambda folder: read_config(yaml_of(folder, "batch_size: &a [*a]")),
        r"line 3: the alias stands for what it is part of; write a value$",
        lambda folder: read_config(yaml_of(folder, "batch_size: 1")),
    ),
    "aliases of aliases": Remedy(
        lambda folder: read_config(yaml_of(folder, *multiplied("batch_size"))),
        r"values, aliases included; write fewer$",
        lambda folder: read_config(yaml_of(folder, "batch_size: 1")),
    ),
    "an integer of many digits": Remedy(
        lambda folder: read_config(yaml_of(folder, f"batch_size: 1{200 * '0'}")),
        r"is an integer of 201 characters; write fewer digits$",
        lambda folder: read_config(yaml_of(folder, f"batch_size: {'1' * 3}")),
    ),
    "a config of many bytes": Remedy(
        lambda folder: read_config(yaml_of(folder, "#" * (1 << 20))),
        r"has more than 1048576 bytes; name the YAML file of a run$",
        lambda folder: read_config(yaml_of(folder)),
    ),
    "a config that is not YAML": Remedy(
        lambda folder: read_config(yaml_of(folder, "batch_size: [")),
        r"is not YAML: .*; fix it, or name a YAML file$",
        lambda folder: read_config(yaml_of(folder)),
    ),
    "a key that is written twice": Remedy(
        lambda folder: read_config(yaml_of(folder, "batch_size: 1", "batch_size: 2")),
        r"'batch_size' .*keep one of them$",
        lambda folder: read_config(yaml_of(folder, "batch_size: 1")),
    ),
    "two remotes in one folder": Remedy(
        lambda folder: two_remotes(folder, "here", "here"),
        r"set another (local)= for one of them$",
        lambda folder, _: two_remotes(folder, "here", "there"),
    ),
    "arguments of one stream beside streams": Remedy(
        lambda folder: PackedStreamingDataset(
            [Stream(local=mds(folder))], local=mds(folder), packing=PACKING
        ),
        r"streams and (local)=.* were passed",
        lambda folder, name: [
            packed([Stream(local=mds(folder))]),
            list(PackedStreamingDataset(**{name: mds(folder)}, packing=PACKING)),
        ],
    ),
    "a class of streams that is not registered": Remedy(
        lambda folder: PackedStreamingDataset(
            local=mds(folder), stream_name="mine", packing=PACKING
        ),
        r"stream_name='mine' .* streampack\.(register_stream)\(",
        lambda folder, name: registered(folder, name),
    ),
    "an argument that is said twice": Remedy(
        lambda folder: PackedStreamingDataset(
            local=mds(folder), stream_config={"local": "elsewhere"}, packing=PACKING
        ),
        r"stream_config\['(local)'\]='elsewhere' differ",
        lambda folder, name: [
            list(PackedStreamingDataset(local=mds(folder), packing=PACKING)),
            list(PackedStreamingDataset(stream_config={name: mds(folder)}, packing=PACKING)),
        ],
    ),
    "a weight that no float can hold": Remedy(
        lambda folder: packed([Stream(local=mds(folder), proportion=10**400)]),
        r"such as (0\.5)",
        lambda folder, weight: packed([Stream(local=mds(folder), proportion=float(weight))]),
    ),
}


def registered(folder: Path, name: str) -> None:
    getattr(streampack, name)("mine_of_remedies", Stream)
    dataset = PackedStreamingDataset(
        local=mds(folder), stream_name="mine_of_remedies", packing=PACKING
    )
    assert list(dataset)


def sliced(
    num_ranks: int = 2, layout: str = "zigzag", batch_format: Any = "native", **packing: Any
) -> list[Any]:
    """Return the first batch of each rank, whose slices divide its rows."""
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
    "a format that finds the documents itself": Remedy(
        lambda _: sliced(batch_format="hf_flash"),
        r"leave (context_parallel) out",
        lambda _, __: batch_of(batch_format="hf_flash"),
    ),
    "segments that the format pads": Remedy(
        lambda _: sliced(
            layout="zigzag_per_document",
            batch_format=functools.partial(to_megatron, pad_segments_to=4),
            pad_to_multiple=4,
        ),
        r"set Packing\((pad_to_multiple)=",
        lambda _, name: sliced(layout="zigzag_per_document", batch_format="megatron", **{name: 4}),
    ),
    "edges for a layout that does not follow them": Remedy(
        lambda _: sliced(batch_format="megatron"),
        r"set context_layout='(\w+)', or use batch_format='(\w+)'$",
        lambda _, layout, name: [
            sliced(layout=layout, batch_format="megatron", pad_to_multiple=4),
            sliced(batch_format=name),
        ],
    ),
    "documents that are not a multiple": Remedy(
        lambda _: sliced(layout="zigzag_per_document"),
        r"set Packing\(pad_to_multiple=(\d+)\)",
        lambda _, size: sliced(layout="zigzag_per_document", pad_to_multiple=int(size)),
    ),
    "rows that are not a multiple": Remedy(
        lambda _: sliced(3),
        r"max_seq_len=16 is not a multiple; set it to (\d+)$",
        lambda _, size: sliced(3, max_seq_len=int(size)),
    ),
    "rows of many lengths": Remedy(
        lambda _: BucketedIterableDataset(
            [IterableStream(ROWS)], bucketing=Bucketing(max_tokens=16), world=context_worlds(2)[0]
        ),
        r"use (PackedIterableDataset), or leave context_parallel out",
        lambda _, __: sliced(),
    ),
    "a view of whole rows": Remedy(
        lambda _: to_hf(sliced()[0]),
        r"with streampack\.(merge_slices), or leave context_parallel out",
        lambda _, __: to_hf(merge_slices(sliced())),
    ),
    "weights of samples": Remedy(
        lambda _: loss_weights(sliced()[0], average="samples"),
        r"set average='(\w+)', or put the slices .* streampack\.merge_slices$",
        lambda _, average: [
            loss_weights(sliced()[0], average=average),
            loss_weights(merge_slices(sliced()), average="samples"),
        ],
    ),
    "no slices to merge": Remedy(
        lambda _: merge_slices([]),
        r"pass those of all context-parallel ranks$",
        lambda _: merge_slices(sliced()),
    ),
    "a slice that is missing": Remedy(
        lambda _: merge_slices(sliced()[:1]),
        r"pass the slices of all context-parallel ranks, each once$",
        lambda _: merge_slices(sliced()),
    ),
    "slices of two steps": Remedy(
        lambda _: merge_slices([sliced()[0], {**sliced()[1], "position": 9}]),
        r"position differs; pass the slices of one step",
        lambda _: merge_slices(sliced()),
    ),
    "a whole batch among slices": Remedy(
        lambda _: merge_slices([batch_of()]),
        r"set World\((context_parallel)=",
        lambda _, __: merge_slices(sliced()),
    ),
}


GROUPS = {"formats": FORMATS, "models": MODELS, "others": OTHERS, "slices": CUT}
TABLE = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


@pytest.mark.parametrize("remedy", TABLE.values(), ids=TABLE)
def test_what_a_message_of_a_batch_says_to_do_works(remedy: Remedy, tmp_path: Path):
    remedy.check(tmp_path)


def test_every_remedy_of_the_complete_modules_of_batches_is_in_the_table(tmp_path: Path):
    assert untried(COMPLETE, TABLE.values(), tmp_path) == [], "add a row that applies the remedy"
