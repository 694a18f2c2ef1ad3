"""The two sides of a held-out split are disjoint, complete, and stable when data is appended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    Chapter,
    ConfigError,
    HeldOut,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Shards,
    TokenFiles,
    World,
)
from streampack.philox import held_out
from streampack.streams import Stream, open_stream
from streampack.write import write_stream
from tests.helpers import builders, flat
from tests.helpers.examples import crossed
from tests.helpers.verbs import call_verb

LENGTHS = [1 + (i * 37) % 90 for i in range(300)]
SIDES = ("train", "held_out")
EOS = 2**20


@given(
    fraction=st.floats(0.003, 0.97),
    stops=st.lists(st.integers(0, 20_000), min_size=2, max_size=4).map(sorted),
)
def test_each_block_holds_out_one_number_wherever_it_is_looked_up(fraction, stops):
    whole = held_out(0, stops[-1], fraction)
    blocks = np.floor(np.arange(int(stops[-1] * fraction) + 2) / fraction).astype(np.int64)
    counts = np.histogram(whole, blocks)[0][:-1]  # the last block may be incomplete
    complete = blocks[1:-1] <= stops[-1]
    assert (counts[complete] == 1).all()
    parts = [held_out(a, b, fraction) for a, b in zip([0, *stops], stops, strict=False)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def written(kind: str, folder: Path, num: int) -> Any:
    """Return the source of a stream with the first samples, and their tokens."""
    if kind in ("megatron", "olmo", "arrow"):
        documents = flat.make_documents(len(LENGTHS))[:num]
        if kind == "megatron":  # a file is appended
            flat.write(kind, folder, documents[:200], "a")
            if num > 200:
                flat.write(kind, folder, documents[200:], "b")
        else:
            flat.write(kind, folder, documents)
        return TokenFiles(folder, **flat.options_of(kind)), documents
    if kind == "split":
        # Of four tokens and more, so that no row begins with an EOS alone: pieces are distinct.
        documents = [
            [*builders.tokens_of(0, i, n // 4 * 4 + 3), EOS] for i, n in enumerate(LENGTHS)
        ]
        tokens = np.concatenate(documents[:num])
        rows = np.split(tokens, range(64, len(tokens), 64))
        if num < len(LENGTHS):
            rows.pop()  # it will grow
        write_stream(rows, folder / "rows", size_limit=2000)
        call_verb("index", folder / "rows", "--eos-id", EOS, "--out", folder / "index")
        pieces = [each for row in rows for each in np.split(row, np.flatnonzero(row == EOS) + 1)]
        source = Shards(local=folder / "rows", split_at=EOS, index=folder / "index")
        return source, [each for each in pieces if len(each)]
    if kind == "rows":
        samples = [builders.tokens_of(0, i, n).tolist() for i, n in enumerate(LENGTHS[:num])]
        folder.mkdir()
        return TokenFiles([{"tokens": row} for row in samples], local=folder), samples
    path, samples = builders.write_stream_files(
        folder,
        LENGTHS[:num],
        lengths_file=kind == "mds",
        compression="zstd" if kind == "zstd" else None,
    )
    return Shards(local=path), samples


def read(stream: Stream) -> list[tuple[int, ...]]:
    """Return the tokens of each sample, after checking the stream's metadata for them."""
    opened = open_stream(stream, 0)
    samples = []
    for shard in range(opened.num_shards):
        data = opened.open_shard(shard)
        own = [data.tokens.read(data.data, n) for n in range(len(data.tokens.counts))]
        assert opened.shard_lengths(shard).tolist() == [len(tokens) for tokens in own]
        assert len(own) == opened.first_sample[shard + 1] - opened.first_sample[shard]
        samples += [tuple(tokens.tolist()) for tokens in own]
    if (tokens := opened.shard_tokens()) is not None:
        assert opened.total_tokens() == sum(map(len, samples)) == tokens.sum()
    return samples


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        *crossed(["mds", "zstd", "megatron", "olmo", "arrow"], ["row", "shard"]),
        ("split", "row"),
        ("split", "shard"),
    ],
)
def test_the_sides_are_disjoint_and_complete_and_appending_moves_nothing(
    tmp_path, monkeypatch, kind, by
):
    monkeypatch.setattr("streampack.flat.token_file.CELL_BYTES", 2000)
    sides = []
    for num in (200, 300):
        source, samples = written(kind, tmp_path / f"{num}", num)
        train, kept = (set(read(Stream(source, held_out=HeldOut(side, 0.2, by)))) for side in SIDES)
        assert not train & kept
        assert train | kept == {tuple(np.asarray(each).tolist()) for each in samples}
        assert 0.1 * len(samples) < len(kept) < 0.3 * len(samples)
        sides.append((train, kept))
    assert sides[0][0] < sides[1][0]
    assert sides[0][1] <= sides[1][1]


@pytest.mark.parametrize("side", [None, *SIDES])
def test_an_epoch_delivers_each_sample_of_its_side_once(tmp_path, side):
    source, samples = written("rows", tmp_path / "rows", 300)
    held = None if side is None else HeldOut(side, 0.1, by="row")
    places = held_out(0, 300, 0.1).tolist()
    own = {None: range(300), "held_out": places, "train": set(range(300)) - set(places)}[side]
    dataset = PackedStreamingDataset(
        [Stream(source, held_out=held)],
        packing=Packing(max_seq_len=128, overflow="split"),
        order=Order(num_lanes=2),
        world=World(),
    )
    delivered = []
    for batch in PackedDataLoader(dataset, num_workers=2):
        delivered += batch["tokens"][batch["document_ids"] > 0].tolist()
    assert sorted(delivered) == sorted(token for n in own for token in samples[n])


def test_a_run_of_chapters_resumes_on_one_side_of_a_stream_that_grew(tmp_path):
    runs, shards = [], None
    for num in (200, 300):
        path, _ = builders.write_stream_files(tmp_path / f"{num}", LENGTHS[:num])
        # The last shard grows too.
        shards = shards or slice(0, open_stream(Stream(local=path), 0).num_shards - 1)
        side = HeldOut("train", 0.1, by="row")
        stream = Stream(local=path, only=shards, name="web", held_out=side)
        dataset = PackedStreamingDataset(
            [stream],
            packing=Packing(max_seq_len=64),
            chapters=[Chapter(weights={"web": 1}, steps=9)],
            mixing=Mixing(global_batch_size=2, batching_method="stratified"),
            batch_size=2,
            world=World(),
        )
        runs.append(PackedDataLoader(dataset))
    old, grown = runs
    batches = iter(old)
    for _ in range(4):
        next(batches)
    grown.load_state_dict(old.state_dict())
    for one, other in zip(batches, grown, strict=True):
        assert one["tokens"].tolist() == other["tokens"].tolist()


def test_a_side_without_samples_is_refused_and_samples_are_the_way_out(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "s", LENGTHS)
    num_shards = open_stream(Stream(local=path), 0).num_shards
    assert not len(held_out(0, num_shards, 0.01))
    with pytest.raises(ConfigError, match=rf"none of its {num_shards} shards .* set by='row'"):
        open_stream(Stream(local=path, held_out=HeldOut("held_out", 0.01, "shard")), 0)
    by_row = Stream(local=path, held_out=HeldOut("held_out", 0.01, "row"))
    assert open_stream(by_row, 0).num_samples == 3
    with pytest.raises(ConfigError, match=r"by='row'.*; set another fraction on both"):
        open_stream(Stream(local=path, held_out=HeldOut("held_out", 1e-4, "row")), 0)


def test_any_lists_of_token_files_agree_on_the_sides(tmp_path, monkeypatch):
    monkeypatch.setattr("streampack.flat.token_file.CELL_BYTES", 2000)
    for name in ("a/one", "a/two", "b/three"):
        folder, name = tmp_path / Path(name).parent, Path(name).name
        documents = [[*map(ord, name[:3]), *each.tolist()] for each in flat.make_documents(200)]
        flat.write("megatron", folder, [np.array(each, "uint16") for each in documents], name)
    files = [tmp_path / "a/two.bin", tmp_path / "a/one.bin", tmp_path / "b/three.bin"]
    for by in ("row", "shard"):
        side = HeldOut("held_out", 0.2, by)
        held = [set(read(Stream(TokenFiles(each), held_out=side))) for each in files]
        assert len({frozenset(tokens[3:] for tokens in kept) for kept in held}) == 3
        for each in (files, tmp_path, f"{tmp_path}/*/*.bin"):
            assert set(read(Stream(TokenFiles(each), held_out=side))) == set.union(*held)
        for only in (slice(150, 470), slice(7, 333)):  # of 600, across borders of cells and files
            whole = read(Stream(TokenFiles(tmp_path)))[only]
            some = Stream(TokenFiles(tmp_path, only=only), held_out=side)
            assert read(some) == [each for each in whole if each in set.union(*held)]


def test_the_sides_of_mds_are_those_of_earlier_releases(tmp_path):
    path, samples = builders.write_stream_files(tmp_path / "s", LENGTHS)
    kept = read(Stream(local=path, held_out=HeldOut("held_out", 0.02, by="row")))
    assert kept == [tuple(samples[n].tolist()) for n in (36, 88, 124, 186, 211, 277)]
