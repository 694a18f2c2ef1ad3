"""Token shards in the cache: made once, by name, within its limit, and never half."""

from __future__ import annotations

import gzip
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from streampack import (
    Buffers,
    Chapter,
    Chats,
    ConfigError,
    DataError,
    HeldOut,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Shards,
    Texts,
    World,
)
from streampack.storage.materialize import ShardMaterializer
from streampack.storage.sealed import SEAL_BYTES, seal
from streampack.streams import open_stream, text_opening, text_shards
from streampack.streams.stream import Stream
from streampack.streams.text_shards import TextShards
from streampack.testing.shown import show, steps, worlds
from streampack.texts import units
from streampack.texts.pool import tokenizer_pool
from streampack.texts.table import TextShard
from streampack.texts.token_shard import MAGIC, parse_token_shard
from streampack.write import write_stream
from tests.helpers import transforms
from tests.helpers.chats import TEMPLATE, chat_tokenizer, chats, say, words
from tests.helpers.texts import (
    PACKING,
    dataset_of,
    ids_of,
    source_of,
    texts,
    tokens_of,
    write_files,
    write_lines,
)

CARRY = {"mixing": {"epoch_end": "carry"}, "order": {"num_lanes": 2}}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> Path:
    """Return a cache with all token shards of the texts."""
    cache = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "SHARD_BYTES", 1000)
        open_stream(Stream(source_of(folder, "rows.jsonl", cache)), 0)
    return cache


def token_shards(cache: Path) -> list[Path]:
    return [path for path in (cache / "tokens").glob("??/*") if path.is_file()]


def bytes_in(cache: Path) -> int:
    total = 0
    for path in token_shards(cache):
        with suppress(FileNotFoundError):  # evicted meanwhile
            total += path.stat().st_size
    return total


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*.tmp*") if path.is_file()]


def shown(dataset: Any) -> list[Any]:
    return [show(batch) for batch in dataset]


def lazy(folder: Path, local: Path | None, **options: Any) -> Any:
    return source_of(folder, "rows.jsonl", local, lengths="lazy", **options)


OPTIONS: list[dict[str, Any]] = [
    {"order": {"seed": 11}},
    {"packing": Packing(max_seq_len=100, overflow="truncate", eos_id=4)},
    {"packing": Packing(max_seq_len=32, overflow="drop", bos_id=2)},
    {"stream": {"repeat": 2}},
    {"world": World(rank=1, num_ranks=4, ranks_per_node=2)},
    {
        "mixing": {"global_batch_size": 4},
        "chapters": [Chapter(weights={"rows": 1}, steps=5), Chapter(weights={"rows": 1}, steps=3)],
    },
    {"stream": {"held_out": HeldOut("train", 0.25, by="row")}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_what_no_id_depends_on_tokenizes_nothing(folder, made, options):
    before = token_shards(made)
    loader = PackedDataLoader(dataset_of(source_of(folder, "rows.jsonl", made), **options))
    assert list(loader)
    assert loader.stats()["shards"]["tokenized"] == 0
    assert token_shards(made) == before


def test_a_tokenizer_may_have_fewer_ids_than_the_largest(tmp_path):
    made = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 70_000}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    found = dataset_of(Texts(["a", "b", "?"], tmp_path / "tokenizer.json", local=tmp_path))
    assert sorted(tokens_of(found)) == [[0], [1], [70_000]]


@pytest.mark.parametrize("is_folder", [False, True], ids=["object", "folder"])
def test_a_chat_template_may_be_one_of_several_of_the_tokenizer(is_folder, tmp_path):
    tokenizer, rows = chat_tokenizer(), chats(20)
    for end in ("<end>", "a <end>"):
        plain = TEMPLATE.replace("<end>", end)
        wanted = dataset_of(Chats(rows, chat_tokenizer(plain), local=tmp_path / "plain"))
        tokenizer.chat_template = {"default": TEMPLATE, "other": plain}
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        named = tmp_path / "tokenizer" if is_folder else tokenizer
        source = Chats(rows, named, local=tmp_path / "cache", chat_template="other")
        assert shown(dataset_of(source)) == shown(wanted)


@pytest.mark.parametrize("is_shared", [False, True], ids=["nodes", "shared"])
def test_two_nodes_tokenize_each_row_once_over_both(is_shared, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 400)
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts(800)])
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaders, caches = [], [tmp_path / "0", tmp_path / str(int(not is_shared))]
    for world in worlds(4, 2):
        source = source_of(tmp_path, rows.name, caches[world.node], lengths="lazy")
        dataset = dataset_of(source, world, mixing=CARRY["mixing"], order={"num_lanes": 4})
        loaders.append(PackedDataLoader(dataset, check_ranks=False))
    assert len(list(steps(loaders))) > 20
    made = [path for cache in set(caches) for path in token_shards(cache)]
    counts = [parse_token_shard(np.fromfile(path, np.uint8), path.name).counts for path in made]
    num_rows = sum(each.num_samples for each in counts)
    assert num_rows == 800 if is_shared else 800 <= num_rows <= 1.1 * 800
    stats = [loader.stats()["shards"] for loader in loaders]
    assert sum(each["tokenized"] for each in stats) == len(made)
    assert sum(each["tokenized_again"] for each in stats) == 0


@pytest.mark.parametrize("way_out", [{"local": "here"}, {"cache_limit": 1 << 30}])
def test_much_text_without_a_folder_is_refused(folder, tmp_path, monkeypatch, way_out):
    monkeypatch.setattr(text_opening, "UNLIMITED_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^local=None: \d+ bytes of text .*Buffers\(cache_limit=\)"
    ):
        dataset_of(lazy(folder, None))
    local = tmp_path / way_out["local"] if "local" in way_out else None
    buffers = Buffers(cache_limit=way_out.get("cache_limit"))
    assert list(dataset_of(lazy(folder, local), buffers=buffers, **CARRY))


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_the_first_batch_waits_for_a_block_of_each_lane_and_one_shard_more(
    num_lanes, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(units, "SHARD_BYTES", 150)
    sources = [
        source_of(folder, name, tmp_path / name, lengths="lazy")
        for name in ("rows.jsonl", "chats.jsonl")
    ]
    dataset = PackedStreamingDataset(
        [Stream(source, proportion=0.5) for source in sources],
        packing=PACKING,
        batch_size=2,
        mixing=Mixing(epoch_end="carry", global_batch_size=2 * num_lanes),
        order=Order(seed=3, num_lanes=num_lanes),
    )
    loader = PackedDataLoader(dataset, prefetch_threads=0)
    batches = iter(loader)
    next(batches)
    num_first, bound = settled(loader), len(sources) * num_lanes * 9
    assert num_first <= bound < sum(stream.num_shards for stream in dataset.streams.opened)
    next(batches)  # now those of the next blocks are made ahead
    assert loader.stats()["shards"]["waiting"] > 0
    assert settled(loader) > num_first
    batches.close()
    assert loader.stats()["shards"]["waiting"] == 0


def settled(loader: PackedDataLoader) -> int:
    """Return how many shards were tokenized, once all that are planned were."""
    deadline = time.monotonic() + 60
    while (shards := loader.stats()["shards"])["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return shards["tokenized"]


@pytest.mark.parametrize(
    ("name", "lengths", "shard_bytes"),
    [
        ("rows.jsonl", "lazy", 1000),
        ("rows.jsonl", "eager", 1000),
        ("rows.parquet", "lazy", 200),  # whose row groups are decoded in the cache, too
    ],
)
def test_the_least_cache_limit_is_enough(
    name, lengths, shard_bytes, folder, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(units, "SHARD_BYTES", shard_bytes)
    other = tmp_path_factory.mktemp("other")
    wanted = shown(dataset_of(source_of(folder, name, other, lengths=lengths), **CARRY))

    def make(limit: int) -> PackedDataLoader:
        source = source_of(folder, name, tmp_path, lengths=lengths)
        buffers = Buffers(cache_limit=limit, tokenizing=1)
        return PackedDataLoader(dataset_of(source, buffers=buffers, **CARRY))

    with pytest.raises(ConfigError, match="set cache_limit to at least") as refused:
        make(1)
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    planned = int(re.findall(r"planned meanwhile \((\d+)\)", str(refused.value))[0])
    sizes: dict[bool, list[int]] = {False: [], True: [0]}
    for path in token_shards(other):
        sizes["-rows" in path.name].append(path.stat().st_size)
    assert least - planned >= sum(map(max, sizes.values()))  # a shard, with what it is made of
    for path in [*token_shards(tmp_path), *tmp_path.glob("lengths/*.npz")]:
        path.unlink()
    loader = make(least)
    assert bytes_in(tmp_path) <= least
    for batch, other in zip(loader, wanted, strict=True):
        assert show(batch) == other
        assert bytes_in(tmp_path) <= least


def test_units_are_decoded_once_at_the_least_cache_limit(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 200)
    publish, made = ShardMaterializer.publish, Counter()

    def count(of: ShardMaterializer, new: Path, path: Path, hash_: str) -> None:
        made[path.name] += 1
        publish(of, new, path, hash_)

    monkeypatch.setattr(ShardMaterializer, "publish", count)
    source = source_of(folder, "rows.parquet", tmp_path, lengths="eager")
    with pytest.raises(ConfigError, match="set cache_limit to at least") as refused:
        dataset_of(source, buffers=Buffers(cache_limit=1, tokenizing=1), **CARRY)
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    for path in [*token_shards(tmp_path), *tmp_path.glob("lengths/*.npz")]:
        path.unlink()
    made.clear()
    dataset_of(source, buffers=Buffers(cache_limit=least, tokenizing=1), **CARRY)
    found = {name: num for name, num in made.items() if "-rows" in name}
    assert len(found) == 11  # row groups
    assert set(found.values()) == {1}


def test_shards_that_are_made_again_are_counted_and_many_of_them_warn(folder, tmp_path, caplog):
    text_shards._warn_of_shards_again.cache_clear()
    [stream] = dataset_of(lazy(folder, tmp_path)).streams.opened
    stream.fetch(0)
    stream.fetch(1)
    for again in range(10):
        assert stream.num_made == (2 + again, again)
        assert ("retokenized" in caplog.text) == (again > text_shards.LEAST_AGAIN)
        token_shards(tmp_path)[0].unlink()
        stream.fetch(0)
        stream.fetch(1)


def test_texts_with_more_tokens_than_the_first_rows_stay_within_the_limit(tmp_path):
    rows = ["b" * 60 for _ in range(256)] + ["a b c d " * 8 for _ in range(500)]
    write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in rows])
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    wanted = shown(dataset_of(lazy(tmp_path, tmp_path / "other")))
    limit = 12_000  # of 32,000
    buffers = Buffers(cache_limit=limit, tokenizing=1)
    dataset = dataset_of(lazy(tmp_path, tmp_path / "cache"), buffers=buffers)
    for batch, other in zip(PackedDataLoader(dataset), wanted, strict=True):
        assert show(batch) == other
        assert bytes_in(tmp_path / "cache") <= limit


def test_the_room_of_a_token_shard_is_near_to_what_it_takes(folder, made):
    shards = dataset_of(lazy(folder, made)).streams.opened[0].shards
    sizes = [shards.cache.file(shards.entry(n)).state.num_bytes for n in range(len(shards.numbers))]
    assert sum(sizes) <= shards.raw_bytes.sum() <= 2 * sum(sizes)
    assert (shards.raw_bytes[:-1] >= sizes[:-1]).all()
    empty = shards.format.reserved_bytes(np.array([0]), np.array([1000]), 1.0)
    assert empty >= 4 * 1000  # rows without a token have a length, too


def test_a_full_disk_is_an_error_that_names_the_path_and_nothing_stays_half(folder, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    pool = tokenizer_pool(1)  # its only process gets the limit
    pool.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        pool.run(os.getpid)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    options = {"buffers": Buffers(tokenizing=1), **CARRY}
    with pytest.raises(DataError, match=rf"{tmp_path}/tokens/.*bytes are needed"):
        list(dataset_of(lazy(folder, tmp_path), **options))
    assert leftovers(tmp_path) == []
    assert all(path.stat().st_size <= 600 for path in token_shards(tmp_path))
    pool.close()
    assert shown(dataset_of(lazy(folder, tmp_path), **options))


def test_a_worker_that_is_killed_changes_nothing(folder, made, tmp_path, monkeypatch):
    monkeypatch.setenv(transforms.FLAG, str(tmp_path / "flag"))
    killed = {"transform": transforms.kill_once}
    options = {"buffers": Buffers(tokenizing=4), **CARRY}
    (tmp_path / "flag").touch()
    dataset = dataset_of(lazy(folder, tmp_path / "cache", **killed), **options)
    (tmp_path / "flag").unlink()
    assert shown(dataset) == shown(dataset_of(lazy(folder, made), **CARRY))
    assert (tmp_path / "flag").exists()


SCRIPT = """
import sys
from pathlib import Path
from streampack.texts import units
units.SHARD_BYTES = 1000
from tests.helpers import texts
slow = "tests.helpers.transforms:slow"
source = texts.source_of(Path(sys.argv[1]), "rows.jsonl", Path(sys.argv[2]), transform=slow)
print(texts.dataset_of(source).digest)
"""


@pytest.mark.processes
def test_a_run_that_is_killed_while_it_tokenizes_leaves_nothing_half(folder, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while len(token_shards(tmp_path)) < 2 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in token_shards(tmp_path)}
    assert len(before) >= 2
    assert not list(tmp_path.glob("lengths/*.npz"))
    source = source_of(folder, "rows.jsonl", tmp_path, transform=transforms.slow)
    opened = dataset_of(source)
    assert leftovers(tmp_path) == []
    assert before.items() <= {p: p.stat().st_mtime_ns for p in token_shards(tmp_path)}.items()
    assert sorted(tokens_of(opened)) == sorted(filter(None, ids_of(texts())))


def test_a_tokenizer_that_changes_after_it_was_planned_is_an_error(tmp_path):
    copied = write_files(tmp_path)
    dataset = dataset_of(lazy(copied, tmp_path / "cache"), buffers=Buffers(tokenizing=2), **CARRY)
    tokenizer_pool(2).close()  # a worker that has loaded the tokenizer keeps it
    other = chat_tokenizer()
    other.add_tokens(["word"])
    other.save_pretrained(copied / "tokenizer")
    with pytest.raises(ConfigError, match=r"tokenizer=.*has changed"):
        list(dataset)


def test_a_damaged_token_shard_is_made_again(folder, made, tmp_path):
    wanted = shown(dataset_of(lazy(folder, made), **CARRY))
    assert shown(dataset_of(lazy(folder, tmp_path), **CARRY)) == wanted
    for number, path in enumerate(token_shards(tmp_path)):
        data = bytearray(path.read_bytes())
        data[-1 - number % 20] ^= 1
        path.write_bytes(data if number % 2 else data[:-3])
    loader = PackedDataLoader(dataset_of(lazy(folder, tmp_path), **CARRY))
    assert shown(loader) == wanted
    assert loader.stats()["shards"]["tokenized"] == len(token_shards(tmp_path))


@pytest.mark.parametrize("lengths", ["eager", "lazy"])
def test_a_token_shard_that_does_not_match_its_header_is_made_again(
    lengths, folder, made, tmp_path
):
    def loader(local: Path) -> PackedDataLoader:
        source = source_of(folder, "rows.jsonl", local, lengths=lengths)
        return PackedDataLoader(dataset_of(source, **CARRY))

    shown(dataset_of(lazy(folder, tmp_path), **CARRY))
    for path in token_shards(tmp_path):
        # As a program that is wrong would write it: its hash is that of its contents.
        data = path.read_bytes()[SEAL_BYTES:]
        data = bytes([data[0] ^ 1]) + data[1:]
        path.write_bytes(seal(MAGIC, [data]) + data)
    again = loader(tmp_path)
    assert shown(again) == shown(loader(made))
    assert again.stats()["shards"]["tokenized"] == len(token_shards(tmp_path))


@pytest.fixture
def deleted(tmp_path, monkeypatch) -> Path:
    """Return a folder; the working directory was deleted."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    return tmp_path


def test_absolute_paths_need_no_working_directory(folder, deleted):
    source = source_of(folder, "rows.jsonl", deleted / "cache")
    assert open_stream(Stream(source), 0).num_samples == len(texts())
    write_stream([{"tokens": [1, 2]}], deleted / "mds")
    for shards in (
        Shards(local=deleted / "mds"),
        Shards(remote=deleted / "mds", local=deleted / "cache2"),
    ):
        assert open_stream(Stream(shards), 0).num_samples == 1


RELATIVE: dict[str, Any] = {
    "files": lambda at, tokenizer: Texts(".", tokenizer, local=at),
    "local of texts": lambda _, tokenizer: Texts(["a"], tokenizer, local="cache"),
    "shards": lambda *_: Shards(local="mds"),
    "remote": lambda at, _: Shards(remote="mds", local=at),
    "local of shards": lambda at, _: Shards(remote=at, local="mds"),
}


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_relative_path_in_a_deleted_directory_is_refused_with_a_way_out(kind, folder, deleted):
    source = RELATIVE[kind](deleted, folder / "tokenizer")
    with pytest.raises(ConfigError, match=r"is relative .* deleted; change to a folder that"):
        open_stream(Stream(source), 0)


def test_a_bad_row_is_named_and_may_be_skipped(tmp_path, caplog):
    rows = [{"text": text} for text in texts()]
    rows[151] = {"text": 5}
    path = write_lines(tmp_path / "rows.jsonl", rows)
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for lengths in ("lazy", "eager"):
        skipping = source_of(tmp_path, path.name, tmp_path, lengths=lengths, on_bad_row="skip")
        dataset = dataset_of(skipping)
        wanted = [ids for number, ids in enumerate(ids_of(texts())) if ids and number != 151]
        assert sorted(tokens_of(dataset)) == sorted(wanted)
        failing = source_of(tmp_path, path.name, tmp_path, lengths=lengths)
        with pytest.raises(DataError, match=rf"{path}, row 151: .*text.*on_bad_row='skip'"):
            list(dataset_of(failing))
    assert "31 rows give no tokens: 1 bad ones" in caplog.text


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_a_file_that_cannot_be_decoded_is_refused_by_name_whatever_a_bad_row_does(
    name, folder, tmp_path
):
    data = bytearray((folder / name.removesuffix(".gz")).read_bytes())
    if name.endswith(".gz"):
        data = bytearray(gzip.compress(data))[:-9]
    else:
        data[100:160] = bytes(60)
    (tmp_path / name).write_bytes(data)
    source = Texts(tmp_path / name, folder / "tokenizer", local=tmp_path, on_bad_row="skip")
    with pytest.raises(DataError, match=rf"{name}: .*make a new copy"):
        dataset_of(source)


def test_a_large_row_group_is_decoded_once(folder, made, tmp_path, monkeypatch):
    wanted = tokens_of(dataset_of(source_of(folder, "rows.parquet", made)))
    monkeypatch.setattr(units, "UNIT_BYTES", 1)
    monkeypatch.setattr(units, "SHARD_BYTES", 200)
    source = source_of(folder, "rows.parquet", tmp_path, lengths="eager")
    found = tokens_of(dataset_of(source))
    assert sorted(found) == sorted(wanted)
    names = Counter("-rows" in path.name for path in token_shards(tmp_path))
    assert names[True] == 11  # row groups
    assert names[False] > 11


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_a_decoded_file_that_is_not_whole_is_made_again(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 200)
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress((folder / "rows.jsonl").read_bytes()))
    else:
        pq.write_table(pq.read_table(folder / name), tmp_path / name)
    source = Texts(tmp_path / name, folder / "tokenizer", local=tmp_path, lengths="lazy")
    wanted = shown(dataset_of(source))
    for path in token_shards(tmp_path):
        if "-rows" in path.name:
            os.truncate(path, path.stat().st_size // 2)  # what a crash of the machine may leave
        else:
            path.unlink()
    assert shown(dataset_of(source)) == wanted


def test_a_decoded_file_that_another_process_makes_again_meanwhile_is_read_again(
    folder, made, tmp_path, monkeypatch
):
    wanted = tokens_of(dataset_of(source_of(folder, "rows.parquet", made)))
    monkeypatch.setattr(units, "SHARD_BYTES", 200)
    tokenize, replaced = TextShards._tokenize, []

    def race(shards: TextShards, shard: TextShard, to: Path, decoded: Path | None = None) -> None:
        if decoded is not None and not replaced:
            replaced.append(decoded.read_bytes())
            decoded.unlink()
            decoded.write_bytes(replaced[0])
            raise DataError(f"{decoded}: has changed since it was opened")
        tokenize(shards, shard, to, decoded)

    monkeypatch.setattr(TextShards, "_tokenize", race)
    found = tokens_of(dataset_of(source_of(folder, "rows.parquet", tmp_path)))
    assert sorted(found) == sorted(wanted)
    assert replaced


@pytest.mark.parametrize("side", ["train", "held_out"])
def test_the_samples_of_a_conversation_are_on_one_side_of_a_split(side, tmp_path):
    chats = [{"messages": say(*["a b", "c d"] * (1 + number % 3))} for number in range(60)]
    write_lines(tmp_path / "chats.jsonl", chats)
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source = source_of(tmp_path, "chats.jsonl", tmp_path, train_on="each_response")
    held = {"stream": {"held_out": HeldOut(side, 0.2, by="row")}}
    whole, part = dataset_of(source), dataset_of(source, **held)
    assert len(tokens_of(whole)) == 120
    rows = {"train": 48, "held_out": 12}[side]
    samples = {batch_row[3] for batch in part for batch_row in batch["segments"].tolist()}
    first = [0, *(sum(1 + n % 3 for n in range(number)) for number in range(1, 61))]
    chosen = [n for n in range(60) if samples & {*range(first[n], first[n + 1])}]
    assert len(chosen) == rows
    assert samples == {s for n in chosen for s in range(first[n], first[n + 1])}


def test_a_transform_changes_rows_and_leaves_some_out(folder, tmp_path):
    wanted = [ids for text, ids in zip(texts(), ids_of(texts()), strict=True) if "c" not in text]
    a, b = words().token_to_id("a"), words().token_to_id("b")
    wanted = [[b if token == a else token for token in ids] for ids in wanted if ids]
    for lengths in ("eager", "lazy"):
        name = "tests.helpers.transforms:shout_or_leave_out"
        changed = source_of(folder, "rows.jsonl", tmp_path, lengths=lengths, transform=name)
        assert sorted(tokens_of(dataset_of(changed))) == sorted(wanted)


def test_a_text_of_a_transform_that_no_file_can_have_is_a_bad_row(folder, tmp_path):
    wanted = [ids for text, ids in zip(texts(), ids_of(texts()), strict=True) if "c" not in text]
    options = {"transform": "tests.helpers.transforms:break_some", "local": tmp_path}
    found = dataset_of(source_of(folder, "rows.jsonl", on_bad_row="skip", **options))
    assert sorted(tokens_of(found)) == sorted(filter(None, wanted))
    with pytest.raises(DataError, match=r"row \d+: cannot be tokenized .*on_bad_row='skip'"):
        dataset_of(source_of(folder, "rows.jsonl", **options))
