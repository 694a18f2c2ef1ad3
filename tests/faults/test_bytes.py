"""Damaged shards are refetched or refused; their tokens are never delivered.

Each row damages a shard at the store or in the cache. After an error the original is restored, and
the same cache must then work without any clean-up. Each takes a second or two.
"""

from __future__ import annotations

import json
import logging
import random
import shutil

import pytest

from streampack import Download
from streampack.errors import DataError, StreampackError
from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.caches import cache_of, cached, cached_shards
from tests.helpers.examples import crossed
from tests.helpers.faults import harness
from tests.helpers.faults.fuzz import changed_bytes
from tests.helpers.faults.harness import make_loader, run_epoch

WORKERS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
QUICK = {"timeout": 20.0, "retry": 1}
NUMBER = 3


def run(store, dataset, num_workers=0, **options):
    options = {**QUICK, **options}
    return run_epoch(lambda: make_loader(store.stream(**options), num_workers=num_workers), dataset)


def flip(path, place=0.5, bit=1):
    """Flip a bit of a file at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= bit
    path.write_bytes(content)


def cut(path, place=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * place)])


def flip_offsets(path):
    """Make the second sample of a raw shard begin after the third."""
    content = bytearray(path.read_bytes())
    content[8:12], content[12:16] = content[12:16], content[8:12]
    path.write_bytes(content)


def cut_last_value(path):
    path.write_bytes(path.read_bytes()[:-6])


HASHED = {"hashes": ("xxh64",), "num_samples": 600}
BARE = {"hashes": (), "lengths_file": False, "num_samples": 600}
REFUSED = {
    # row: options for writing, the damage to the shard, options for reading
    "bytes_empty_shard": (BARE, lambda path: path.write_bytes(b""), {}),
    "bytes_flip_hash": (HASHED, flip, {"hash": "xxh64"}),
    "bytes_flip_hash_1worker": (HASHED, flip, {"hash": "xxh64"}),
    "flip_hash_not_asked_for": (HASHED, flip, {}),
    "bytes_flip_offsets_nohash": (BARE, flip_offsets, {}),
    "bytes_flip_zstd_hash": (HASHED | {"compression": "zstd"}, flip, {"hash": "xxh64"}),
    "bytes_trunc_hash": (HASHED, cut, {"hash": "xxh64"}),
    "bytes_trunc_nohash": (BARE, cut, {}),
    "bytes_trunc_zstd_nohash": (BARE | {"compression": "zstd"}, cut, {}),
    "bytes_trunc_midsample_bytescol_nohash": (
        BARE | {"encoding": "bytes"},
        cut_last_value,
        {"tokens": "tokens:int32"},
    ),
    "longer_nohash": (BARE, lambda path: path.write_bytes(path.read_bytes() + b"0"), {}),
}
WORKERS_OF_A_ROW = {"bytes_flip_hash_1worker": (1,), "bytes_flip_hash": (0, 2)}
QUICK_ROWS = {*((row, 0) for row in REFUSED), ("bytes_flip_hash", 2)}


@pytest.mark.parametrize(
    ("row", "num_workers"),
    [
        pytest.param(
            row,
            num_workers,
            marks=[pytest.mark.slow] if (row, num_workers) not in QUICK_ROWS else [],
        )
        for row in REFUSED
        for num_workers in WORKERS_OF_A_ROW.get(row, (0, 1, 2))
    ],
)
def test_a_damaged_shard_is_a_typed_error_until_its_origin_is_mended(
    store, dataset, row, num_workers
):
    written, damage, options = REFUSED[row]
    ds = store.put(dataset(**written))
    path = ds.shards[NUMBER]
    whole = path.read_bytes()
    damage(path)
    assert path.read_bytes() != whole

    outcome = run(store, ds, num_workers, **options)

    error = outcome.assert_refused("shard.00003.mds")
    assert isinstance(error, DataError)
    assert outcome.wall_s < 40
    if row not in ("bytes_flip_offsets_nohash",):  # only that one looks complete by index.json
        assert error.uri == store.uri(path.name)
        # One download and three retries; a reader may try once more, until the first one fails.
        assert 4 <= store.server.count(path.name) <= 4 * (num_workers + 2)
        assert error.attempts == 4
        assert not list((store.caches / "ds").rglob("shard.00003.mds.????????"))
        # A terminated worker leaves its file for the next start to remove.
        assert num_workers or not harness.temporary_names(store.caches / "ds")

    path.write_bytes(whole)
    if row == "bytes_flip_offsets_nohash":
        # Only the contents of the shard can show this damage, so the bad copy was given its final
        # name; the message says to delete it.
        cached(store.caches / "ds", path.name).unlink()
    run(store, ds, num_workers, **options).assert_exact()


@pytest.mark.parametrize(
    ("row", "num_workers"),
    [
        ("bytes_missing_shard_0workers", 0),
        pytest.param("bytes_missing_shard_1worker", 1, marks=pytest.mark.slow),
        ("bytes_missing_shard", 2),
    ],
)
def test_a_missing_shard_is_a_typed_error_soon(store, dataset, row, num_workers):
    ds = store.put(dataset(**HASHED))
    store.put_in_cache(ds, but="shard.00003")
    ds.shards[NUMBER].unlink()
    outcome = run(store, ds, num_workers, timeout=60, retry=2)
    error = outcome.assert_refused(store.uri("shard.00003.mds"), within_s=40)
    assert error.uri == store.uri("shard.00003.mds"), row


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    ("written", "place"),
    crossed(
        [("bytes_flip_nohash", None), ("bytes_flip_zstd_nohash", "zstd"), ("br", "br")],
        [0.5, 0.999],
    ),
)
def test_a_flip_at_the_origin_without_hashes_is_an_error_once_the_stream_is_indexed(
    store, dataset, written, place, num_workers
):
    row, compression = written
    # MosaicML wrote no hash, but `streampack index` wrote a length file that has one.
    ds = store.put(dataset(**BARE | {"lengths_file": True}, compression=compression))
    path = ds.shards[NUMBER]
    whole = path.read_bytes()
    flip(path, place=place)
    error = run(store, ds, num_workers).assert_refused("shard.00003.mds")
    assert isinstance(error, DataError), row
    path.write_bytes(whole)
    run(store, ds, num_workers).assert_exact()


def test_bytes_flip_nohash_is_warned_of_at_start_and_is_the_documented_limit(
    store, dataset, caplog
):
    ds = store.put(dataset(**BARE))
    flip(ds.shards[NUMBER], place=0.5)
    with caplog.at_level(logging.WARNING, logger="streampack"):
        outcome = run(store, ds)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if "hash" in text and store.bucket in text]) == 1
    # No size, offset or shape is wrong, and there is nothing to compare the tokens with.
    assert outcome.error is None, str(outcome)
    assert not outcome.audit.missing
    assert not outcome.audit.twice
    assert len(set(outcome.audit.altered)) == 1


def test_bytes_hash_asked_not_present_is_refused_at_construction(store, dataset):
    store.put(dataset(**BARE))
    with pytest.raises(DataError, match="sha256") as caught:
        make_loader(store.stream(hash="sha256", **QUICK))
    assert store.uri("index.json") in str(caught.value)
    assert store.server.count("shard") == 0


def another_run_of(store, name, damage):
    """Copy a cache to a new folder, damage a shard there, and return the folder.

    A process does not repeat its checks, so this stands in for a cache found by the next run.
    """
    folder = store.caches / name
    shutil.copytree(store.caches / "ds", folder)
    damage(cached(folder, "shard.00003.mds"))
    return folder


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    ("row", "damage", "options"),
    [
        ("bytes_local_flip_between_runs_hash", flip, {"hash": "xxh64"}),
        ("flip_between_runs_not_asked_for", flip, {}),
        ("bytes_local_rot_between_runs", cut, {}),
        ("emptied_between_runs", lambda path: path.write_bytes(b""), {}),
    ],
)
def test_a_cached_shard_that_rots_between_runs_is_fetched_again(
    store, dataset, row, damage, options, num_workers
):
    ds = store.put(dataset(**HASHED))
    run(store, ds, **options).assert_exact()
    again = another_run_of(store, "again", damage)
    before = store.server.count("shard.00003")
    run(store, ds, num_workers, local=str(again), **options).assert_exact()
    assert store.server.count("shard.00003") == before + 1, row
    assert store.server.count("shard.00004") == 1


@pytest.mark.parametrize("hashes", [("xxh64",), ()])
def test_bytes_origin_replaced_same_names_is_refused_and_never_mixed(store, dataset, hashes):
    options = {"hashes": hashes, "num_samples": 600}
    old, new = dataset(**options), dataset(**options, seed=5)
    ds = store.put(old)
    stream = store.stream(**QUICK)
    for _ in make_loader(stream, shuffle=False):
        pass
    # Only the first two shards are in the cache when the origin changes.
    for path in cached_shards(store.caches / "ds")[2:]:
        path.unlink()

    def replace_and_make():
        shutil.rmtree(ds.folder)
        shutil.copytree(new.folder, ds.folder)
        return make_loader(store.stream(**QUICK), shuffle=False)

    outcome = run_epoch(replace_and_make, old)
    error = outcome.assert_refused("shard.", str(store.caches / "ds"))
    assert "delete" in str(error)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("num_mutations", [12, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_mutation_of_a_hashed_shard_is_ever_delivered(tmp_path, num_mutations, compression):
    path, samples = builders.write_stream_files(
        tmp_path / "origin", [30] * 12, hashes=("xxh64",), compression=compression, size_limit=None
    )
    file = next(path.glob("shard.00000*"))
    whole = file.read_bytes()
    rng = random.Random(f"{compression}:{num_mutations}")
    for number in range(num_mutations):
        changed = changed_bytes(whole, rng)
        if changed == whole:
            continue
        file.write_bytes(changed)
        local = tmp_path / f"cache-{number}"
        # A small budget, since waits between attempts are proportional to it.
        stream = open_stream(
            Stream(remote=str(path), local=str(local), download=Download(timeout=0.5)), 0
        )
        with pytest.raises(StreampackError):
            stream.open_shard(0)
        assert not cached_shards(local)
        shutil.rmtree(local)
    file.write_bytes(whole)
    opened = open_stream(Stream(remote=str(path), local=str(tmp_path / "ok")), 0).open_shard(0)
    assert [opened.tokens.read(opened.data, i).tolist() for i in range(12)] == [
        tokens.tolist() for tokens in samples
    ]


def test_the_record_of_a_cached_file_does_not_make_a_damaged_one_good(store, dataset):
    # A record is a file too: one with garbage, of another file, or empty must not be trusted.
    ds = store.put(dataset(**HASHED))
    run(store, ds).assert_exact()
    again = another_run_of(store, "again", flip)
    for record in (cache_of(again) / ".streampack").glob("*.json"):
        record.write_text(json.dumps({"size": 0}) if "00003" in record.name else "no JSON")
    run(store, ds, local=str(again)).assert_exact()
