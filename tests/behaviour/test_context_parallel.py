"""Context parallelism: each rank reads its slice, and the slices make up the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _context_parallel_shard,
)
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from streampack import (
    Balance,
    IterableStream,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    Payloads,
    World,
    expand,
    merge_slices,
)
from streampack.batch.compact import expand_on
from streampack.formats import to_compact
from tests.helpers import conformance
from tests.helpers.batches import same
from tests.helpers.conformance import show
from tests.helpers.examples import crossed, examples
from tests.helpers.slices import LAYOUTS, PER_TOKEN, context_worlds, cut

LENGTHS = [[1 + number**2 % 90 for number in range(90)], [5, 200, 64] * 10]
PACKERS: list[dict[str, Any]] = [
    {},
    {"method": "next_fit"},
    {"method": "knapsack"},
    {"method": "concat"},
    {"method": "two_tiers", "short_seq_len": 24},
    {"overflow": "truncate", "positions": "continue"},
    {"bos_id": 3, "eos_id": 4, "padding_id": 9, "positions": "continue"},
]
DTYPES = ["uint16", "int32", "int64"]
FORMATS = ["native", "torchtitan", "torchtitan_flat"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    rng = np.random.default_rng(3)
    masks = [[rng.integers(0, 2, length).astype(np.uint8) for length in own] for own in LENGTHS]
    longest = {"loss_mask": [*masks[0], *masks[1]]}
    masked = conformance.write_streams(
        folder / "masked",
        [[*LENGTHS[0], *LENGTHS[1]]],
        columns={"loss_mask": "ndarray:uint8"},
        values=longest,
    )
    return {"masked": masked} | {
        dtype: conformance.write_streams(folder / dtype, LENGTHS, dtype=dtype) for dtype in DTYPES
    }


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A layout, its number of ranks, and a packing with rows that split evenly across them."""
    layout, num_ranks = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([2, 3, 4]))
    packing = dict(draw(st.sampled_from(PACKERS)))
    multiple = 2 * num_ranks if layout.startswith("zigzag") else num_ranks
    if layout.endswith("per_document") or draw(st.booleans()):
        packing["pad_to_multiple"] = multiple
    return {
        "layout": layout,
        "num_ranks": num_ranks,
        "kind": (kind := draw(st.sampled_from(["masked", *DTYPES]))),
        "options": {
            "weights": [{"loss_mask": "loss_mask"}] if kind == "masked" else None,
            "max_seq_len": draw(st.sampled_from([48, 96])),
            "packing": packing,
            "batch_size": (batch_size := draw(st.integers(1, 3))),
            "mixing": {
                "epoch_end": draw(st.sampled_from(["pad", "drop", "carry"])),
                "batching_method": draw(st.sampled_from(["random", "stratified", "per_stream"])),
                "global_batch_size": 4 * batch_size,
            },
            "order": {"num_lanes": draw(st.sampled_from([1, 2]))},
            "balance": draw(st.sampled_from([None, Balance(within="node")])),
        },
    }


def loaded(dataset: Any, num_workers: int = 0) -> Any:
    return PackedDataLoader(dataset, num_workers=num_workers)


@examples(4, many=30)
@given(case=cases())
def test_merged_slices_are_the_whole_batch_and_each_is_what_trainers_cut_of_it(written, case):
    streams, options, num_ranks = written[case["kind"]], case["options"], case["num_ranks"]
    whole = conformance.make(streams, **options)
    ranks = [
        conformance.make(streams, world=world, **options)
        for world in context_worlds(num_ranks, case["layout"])
    ]
    assert {len(rank) for rank in ranks} == {len(whole)}
    steps = zip(loaded(whole), *map(loaded, ranks), strict=True)
    for number, (expected, *slices) in enumerate(steps):
        assert show(merge_slices(slices[::-1])) == show(expected)
        for rank, own in enumerate(slices):
            plain = cut(expected, case["layout"], num_ranks, rank)
            assert all(torch.equal(own[key], plain[key]) for key in PER_TOKEN)
            if number < 3:
                assert show(expand(to_compact(own))) == show(own)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *crossed(LAYOUTS, FORMATS),
        ("zigzag_per_document", "megatron"),
    ],
)
def test_a_format_of_a_slice_is_the_slice_of_the_format(written, name, layout):
    options = {"packing": {"pad_to_multiple": 4}, "batch_format": name, "batch_size": 3}
    uncut = conformance.make(written["int32"], packing={"pad_to_multiple": 4}, batch_size=3)
    whole = list(islice(uncut, 4))
    is_flat = name == "torchtitan_flat"
    for rank, world in enumerate(context_worlds(2, layout)):
        dataset = conformance.make(written["int32"], world=world, **options)
        for batch, expected in zip(islice(dataset, 4), whole, strict=True):
            own = cut(expected, layout, 2, rank, flat=is_flat)
            if name.startswith("torchtitan"):
                shape = (-1,) if is_flat else own["tokens"].shape
                inputs = {"input": own["tokens"], "positions": own["input_pos"]}
                inputs = {key: value.reshape(shape) for key, value in inputs.items()}
                assert same(batch, (inputs, own["labels"].reshape(shape)))
                continue
            assert all(
                torch.equal(batch[key], own[other])
                for key, other in (("tokens", "tokens"), ("labels", "labels"))
            )
            if name == "megatron":
                assert torch.equal(batch["position_ids"], own["input_pos"])
                assert torch.equal(batch["loss_mask"], (own["labels"] != -100).float())


@contextmanager
def mesh_of(rank: int, num_ranks: int) -> Iterator[DeviceMesh]:
    """A rank's mesh for torch's context parallelism; slicing buffers needs no communication."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_slices_are_what_torch_cuts_of_whole_batches(written, layout, num_ranks):
    whole = next(iter(conformance.make(written["int32"])))
    buffers = [whole[key].clone() for key in PER_TOKEN]
    is_balanced = layout == "zigzag"
    for rank, world in enumerate(context_worlds(num_ranks, layout)):
        own = next(iter(conformance.make(written["int32"], world=world)))
        with mesh_of(rank, num_ranks) as mesh:
            balancer = _HeadTailLoadBalancer(64, num_ranks, "cpu") if is_balanced else None
            cut_by_torch = _context_parallel_shard(mesh, buffers, [1] * 4, load_balancer=balancer)
        for key, expected in zip(PER_TOKEN, cut_by_torch, strict=True):
            assert torch.equal(own[key], expected)


@pytest.mark.parametrize(("layout", "kind"), crossed(LAYOUTS, ["masked", "uint16"]))
def test_compact_slices_expand_to_native_ones(written, layout, kind):
    options = {
        "packing": {"pad_to_multiple": 8, "positions": "continue"},
        "weights": [{"loss_mask": "loss_mask"}] if kind == "masked" else None,
        "batch_size": 3,
    }
    for world in context_worlds(4, layout):
        native = conformance.make(written[kind], world=world, **options)
        compact = conformance.make(written[kind], world=world, batch_format="compact", **options)
        batches = PackedDataLoader(compact)
        for own, expected in zip(batches, native, strict=True):
            assert own["tokens"].dtype == (torch.uint16 if kind == "uint16" else torch.int32)
            assert own["tokens"].shape == (3, 16)
            assert same(expand(own), expected)
            assert same(expand_on(own, torch.device("cpu")), expected)


@pytest.mark.parametrize(("first", "second"), crossed([1, 2, 4], [2, 4, 1]))
def test_a_run_resumes_with_another_context_parallel_byte_for_byte(written, first, second):
    options = {"packing": {"pad_to_multiple": 8}, "mixing": {"global_batch_size": 8}}
    layouts = {1: "zigzag", 2: "zigzag", 4: "zigzag_per_document"}

    def ranks(size: int) -> list[Any]:
        worlds = context_worlds(size, layouts[size]) if size > 1 else [World()]
        return [
            PackedDataLoader(conformance.make(written["int32"], world=world, **options))
            for world in worlds
        ]

    def merged(loaders: list[Any]) -> Any:
        for slices in zip(*loaders, strict=True):
            yield show(merge_slices(slices) if len(slices) > 1 else slices[0])

    expected = list(merged(ranks(1)))
    before = ranks(first)
    assert list(islice(merged(before), 8)) == expected[:8]
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    after = ranks(second)
    for loader in after:
        loader.load_state_dict(states[0])
    assert list(merged(after)) == expected[8:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_iterables_merge_into_the_whole_batch(layout):
    rng = np.random.default_rng(5)
    samples = [
        {"tokens": rng.integers(1, 99, length), "weight": rng.random(length), "name": str(length)}
        for length in rng.integers(1, 90, 60)
    ]

    def batches(world: World) -> Any:
        stream = IterableStream(
            samples, token_fields={"weight": "float32"}, payloads=Payloads({"name": None})
        )
        packing = Packing(max_seq_len=96, pad_to_multiple=8, overflow="drop")
        dataset = PackedIterableDataset([stream], packing=packing, batch_size=2, world=world)
        return PackedDataLoader(dataset)

    for expected, *slices in zip(
        batches(World()), *map(batches, context_worlds(4, layout)), strict=True
    ):
        assert same(merge_slices(slices), expected)
        assert all(own["weight"].shape == own["tokens"].shape == (2, 24) for own in slices)


@pytest.mark.parametrize(
    ("layout", "name"), crossed(LAYOUTS, ["native", "compact", "torchtitan_flat"])
)
def test_rows_of_several_lengths_are_cut_each_by_its_own(written, layout, name):
    options = {
        "weights": [{}, {"max_seq_len": 192}],
        "packing": {"pad_to_multiple": 8},
        "mixing": {"batching_method": "device_per_stream"},
        "batch_size": 6,
    }
    whole = list(conformance.make(written["int32"], **options))
    assert {batch["tokens"].shape for batch in whole} == {(6, 64), (2, 192)}
    for rank, world in enumerate(context_worlds(4, layout)):
        own = conformance.make(written["int32"], world=world, batch_format=name, **options)
        for batch, expected in zip(PackedDataLoader(own), whole, strict=True):
            plain = cut(expected, layout, 4, rank, flat=name == "torchtitan_flat")
            if name == "torchtitan_flat":
                assert torch.equal(batch[0]["input"], plain["tokens"].flatten())
                assert torch.equal(batch[1], plain["labels"].flatten())
                continue
            native = expand(batch) if name == "compact" else batch
            assert all(torch.equal(native[key], plain[key]) for key in PER_TOKEN)
