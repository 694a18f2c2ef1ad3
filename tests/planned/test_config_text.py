"""A dataset survives a round trip through YAML, and options that YAML cannot express are named."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    AttentionCost,
    Balance,
    Buffers,
    Chapter,
    ConfigError,
    Download,
    HeldOut,
    Mixing,
    Order,
    PackCost,
    PackedStreamingDataset,
    Packing,
    Ramp,
    Stream,
    TokenFiles,
    World,
    from_config,
)
from streampack.planned.config_text import config_text
from tests.helpers.builders import write_stream_files


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    return [
        write_stream_files(folder / name, [number % 30 + 1 for number in range(120)], seed=seed)[0]
        for seed, name in enumerate(["web", "ünïcode: 1"])
    ]


WEIGHTS = [
    ({}, {}),
    ({"proportion": 0.4}, {"proportion": 3}),
    ({"repeat": 1.5}, {"choose": 70}),
]
STREAMS = st.fixed_dictionaries(
    {},
    optional={
        "bos_id": st.just(5),
        "only": st.sampled_from([slice(0, 1), slice(None, 2), slice(1, None)]),
        "download": st.builds(
            Download, timeout=st.sampled_from([1e-5, 7, 2.5]), keep_zip=st.booleans()
        ),
        "held_out": st.just(HeldOut("train", 0.1, by="row")),
    },
)
SHARED = {
    "packing": st.builds(
        Packing,
        max_seq_len=st.just(64),
        overflow=st.sampled_from(["split", "drop"]),
        padding_id=st.sampled_from([0, 9]),
    ),
    "order": st.none() | st.builds(Order, seed=st.integers(0, 9), num_lanes=st.just(2)),
    "buffers": st.none() | st.just(Buffers(cache_limit="3gb")),
    "batch_size": st.sampled_from([None, 1, 2]),
    "batch_format": st.sampled_from([None, "native", "hf"]),
    "balance": st.none() | st.just(Balance(within="rank", cost=AttentionCost(hidden_size=64))),
}
MIXINGS = st.builds(
    Mixing,
    batching_method=st.sampled_from(["random", "stratified", "device_per_stream"]),
    epoch_end=st.sampled_from(["pad", "carry"]),
    weight_unit=st.sampled_from(["samples", "tokens"]),
    global_batch_size=st.just(4),
)
VALUES = [1, 0.25, Decimal("0.29"), Fraction(1, 8)]
CHAPTERS = st.lists(
    st.builds(
        Chapter,
        weights=st.fixed_dictionaries({"a": st.sampled_from(VALUES), "b": st.just(1)})
        | st.just({"a": Ramp(0.75, 0.25), "b": Ramp(0.25, 0.75)}),
        steps=st.integers(1, 3),
        packing=st.none() | st.just(Packing(max_seq_len=32)),
    ),
    min_size=1,
    max_size=3,
)


def said(stream):
    return {**vars(stream), "source": repr(stream.source)}


def check_round_trip(dataset, path):
    text = dataset.to_config(path)
    again = from_config(path, world=dataset.world)

    assert path.read_text(encoding="utf-8") == text == again.to_config()
    assert again.digest == dataset.digest
    assert list(map(said, again.streams)) == list(map(said, dataset.streams))
    assert again.buffers == dataset.buffers
    written, own = again.arguments, dataset.arguments
    assert written["batch_size"] == own["batch_size"]
    assert written["batch_format"] == own["batch_format"]
    assert written["balance"] == own["balance"]


@given(
    weights=st.sampled_from(WEIGHTS),
    streams=st.tuples(STREAMS, STREAMS),
    mixing=MIXINGS,
    options=st.fixed_dictionaries(SHARED),
)
def test_a_dataset_of_epochs_is_made_again_of_its_yaml(
    folders, tmp_path_factory, weights, streams, mixing, options
):
    named = [
        Stream(local=folder, **weight, **own)
        for folder, weight, own in zip(folders, weights, streams, strict=True)
    ]
    dataset = PackedStreamingDataset(named, mixing=mixing, world=World(), **options)

    check_round_trip(dataset, tmp_path_factory.mktemp("run") / "run.yaml")


@given(
    chapters=CHAPTERS, skip=st.sampled_from([(), [(0, 1)]]), options=st.fixed_dictionaries(SHARED)
)
def test_a_run_of_chapters_is_made_again_of_its_yaml(
    folders, tmp_path_factory, chapters, skip, options
):
    named = [Stream(name=name, local=path) for name, path in zip("ab", folders, strict=True)]
    dataset = PackedStreamingDataset(
        named,
        chapters=chapters,
        skip=skip,
        mixing=Mixing(global_batch_size=4),
        world=World(),
        **options,
    )

    check_round_trip(dataset, tmp_path_factory.mktemp("run") / "run.yaml")


def test_how_ranks_share_rows_is_written_and_their_number_is_not(folders):
    world = World(rank=1, num_ranks=4, replication=2, context_parallel=2)
    packing = Packing(max_seq_len=64, pad_to_multiple=4)
    dataset = PackedStreamingDataset(local=folders[0], packing=packing, world=world)

    text = dataset.to_config()

    assert "world:\n  replication: 2\n  context_parallel: 2\n" in text
    assert "rank" not in text.replace("replication", "")


def test_rows_of_a_file_are_written_as_they_were_asked_for(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [4, 5]}\n')
    stream = Stream(TokenFiles(tmp_path / "rows.jsonl", local=tmp_path / "cache"))
    dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=8), world=World())

    text = dataset.to_config(tmp_path / "run.yaml")

    assert f"token_files:\n    files: {tmp_path / 'rows.jsonl'}" in text
    assert from_config(tmp_path / "run.yaml", world=World()).digest == dataset.digest


class Mine(Stream):
    """A user's stream class."""


def cost(lengths):
    return lengths * 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_format": dict}, "batch_format=<class 'dict'>"),
        ({"balance": Balance(cost=cost)}, "balance.cost=<function cost"),
    ],
)
def test_what_yaml_cannot_hold_is_named(folders, options, named):
    dataset = PackedStreamingDataset(
        local=folders[0],
        packing=Packing(max_seq_len=64),
        mixing=Mixing(global_batch_size=4),
        world=World(),
        **options,
    )

    with pytest.raises(ConfigError, match=named):
        dataset.to_config()


def test_rows_in_memory_and_classes_of_streams_are_named(folders, tmp_path):
    rows = Stream(TokenFiles([{"tokens": [1, 2]}], local=tmp_path))
    for stream, named in [
        (rows, r"streams\.0\.files=<list> is in memory"),
        (Mine(local=folders[0]), r"streams\.0 is a Mine"),
    ]:
        dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=64), world=World())
        with pytest.raises(ConfigError, match=named):
            dataset.to_config()


def test_the_cost_of_packs_is_a_mapping():
    packing = Packing(max_seq_len=64, cost=PackCost(100, window=9))

    written = yaml.safe_load(config_text([], {"packing": packing}))

    assert written["packing"] == {"max_seq_len": 64, "cost": {"max_cost": 100, "window": 9}}
