"""The tables "Delivery and resume", "Mixtures" and "Faults" of docs/guarantees.md, in every format.

A stream of the same samples in each format, and one of MDS beside it. What costs a process or a
server is done once, for a dataset with a stream of each format.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from streampack import (
    Balance,
    Buffers,
    Chapter,
    DataError,
    Download,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    ResumeError,
    World,
    at,
    where,
)
from streampack.flat import token_file
from streampack.index.token_index import index_files
from streampack.testing import assert_exactly_once, assert_resumes, assert_same_in_every_world
from streampack.testing.shown import all_rows, rows, show, worlds
from tests.helpers.examples import crossed
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.flat import Documents
from tests.helpers.stream_formats import (
    FORMATS,
    LOCAL_FILES,
    SHARD_BYTES,
    documents_of,
    stream_of,
    write_format,
)

METHODS = ("random", "per_stream")
MANY = {"num_workers": 2}
LONGEST = 89


@pytest.fixture(scope="module", autouse=True)
def small_cells():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "CELL_BYTES", SHARD_BYTES)
        yield


@dataclass(frozen=True, kw_only=True)
class Written:
    """Streams on disk, and their documents."""

    options: list[dict[str, Any]]
    documents: list[Documents]

    def dataset(self, *, weights: Any = None, world: World | None = None, **options: Any) -> Any:
        weights = weights or [{}] * len(self.options)
        mixing = {"global_batch_size": 8} | options.pop("mixing", {})
        defaults = {"packing": Packing(max_seq_len=64, overflow="split"), "batch_size": 2}
        return PackedStreamingDataset(
            [stream_of(**own, **of) for own, of in zip(self.options, weights, strict=True)],
            mixing=Mixing(**mixing),
            order=Order(seed=3, **{"num_lanes": 2, **options.pop("order", {})}),
            world=world or World(),
            **{**defaults, **options},
        )

    def lengths(self) -> list[list[int]]:
        return [[len(each) for each in documents] for documents in self.documents]

    def check_tokens(self, batches: Any) -> Counter[tuple[int, int]]:
        """Check each segment against its document; return the uses of samples, in tokens."""
        used: Counter[tuple[int, int]] = Counter()
        for batch in batches:
            place: Counter[int] = Counter()
            for row, stream, _, sample, start, count in batch["segments"].tolist():
                own = batch["tokens"][row, place[row] : place[row] + count].tolist()
                assert own == self.documents[stream][sample][start : start + count].tolist()
                place[row] += count
                used[stream, sample] += count
        return used


@pytest.fixture(scope="module", params=FORMATS)
def form(request):
    return request.param


@pytest.fixture(scope="module")
def written(form, tmp_path_factory) -> Written:
    folder, documents = tmp_path_factory.mktemp(form), [documents_of(1, 80), documents_of(2, 40)]
    options = [
        {"local": folder / name, "name": name, **write_format(kind, folder / name, own)}
        for name, kind, own in zip("ab", (form, "mds"), documents, strict=True)
    ]
    return Written(options=options, documents=documents)


@pytest.fixture(scope="module")
def all_formats(tmp_path_factory) -> Written:
    folder = tmp_path_factory.mktemp("all")
    documents = [documents_of(1 + number % 2, 60) for number in range(len(FORMATS))]
    options = [
        {"local": folder / kind, "name": kind, **write_format(kind, folder / kind, own)}
        for kind, own in zip(FORMATS, documents, strict=True)
    ]
    return Written(options=options, documents=documents)


def loader_at(dataset: Any, state: Any) -> PackedDataLoader:
    loader = PackedDataLoader(dataset, prefetch_threads=0, check_ranks=False)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


# Delivery and resume


@pytest.mark.parametrize(("form", "method"), crossed(FORMATS, METHODS), indirect=["form"])
def test_every_world_delivers_each_token_once_in_the_same_packs(written, method):
    mixing = {"batching_method": method}
    dataset = written.dataset(mixing=mixing)
    batches = list(PackedDataLoader(dataset))
    assert_exactly_once(batches, written.lengths())
    used = written.check_tokens(batches)
    wanted = [(s, n) for s, lengths in enumerate(written.lengths()) for n in range(len(lengths))]
    assert used == {(s, n): written.lengths()[s][n] for s, n in wanted}
    assert_same_in_every_world(lambda world: written.dataset(mixing=mixing, world=world))


def test_a_run_resumes_after_batches_in_any_world_with_and_without_snapshots(written):
    def dataset(world: World | None = None) -> Any:
        weights = [{"proportion": 0.7}, {"proportion": 0.3}]
        return written.dataset(weights=weights, mixing={"weight_unit": "tokens"}, world=world)

    assert_resumes(lambda: PackedDataLoader(dataset()), every=25)
    two = worlds(2, 2)
    loaders = [PackedDataLoader(dataset(world), check_ranks=False) for world in two]
    for loader in loaders:
        list(loader)  # the first epoch
    second = [[(show(b), json.dumps(ld.state_dict())) for b in ld] for ld in loaders]
    alone = PackedDataLoader(dataset())
    alone.dataset.set_epoch(1)
    whole = [row for batch in alone for row in rows(batch)]
    for place in (4,):
        state = json.loads(second[0][place][1])
        for own in (state, {key: state[key] for key in state if key != "snapshots"}):
            for rank, world in enumerate(two):
                rest = [show(batch) for batch in loader_at(dataset(world), own)]
                assert rest == [each for each, _ in second[rank][place + 1 :]]
            rest = [row for batch in loader_at(dataset(), own) for row in rows(batch)]
            assert rest == whole[state["position"] :]
    assert len(second[0]) == len(second[1]) > 5  # as many steps on each rank


def test_a_failed_start_changes_nothing_and_the_state_is_of_what_was_delivered(form, tmp_path):
    options = write_format(form, tmp_path / "a", documents_of(1))
    own = Written(options=[{"local": tmp_path / "a", **options}], documents=[documents_of(1)])
    loader = PackedDataLoader(own.dataset())
    (tmp_path / "a").rename(tmp_path / "b")
    before = loader.state_dict()
    with pytest.raises(DataError):
        list(loader)
    assert loader.state_dict() == before
    (tmp_path / "b").rename(tmp_path / "a")
    batches = list(islice(loader, 5))
    state = loader.state_dict()  # more were read ahead
    assert state["position"] == batches[-1]["position"]
    batches += loader_at(own.dataset(), state)
    assert_exactly_once(batches, own.lengths())
    assert sum(own.check_tokens(batches).values()) == sum(own.lengths()[0])


def test_a_state_of_other_data_is_refused(form, written, tmp_path):
    loader = PackedDataLoader(written.dataset())
    next(iter(loader))
    documents = written.documents[0]
    changed = [documents[n] for n in np.random.default_rng(0).permutation(len(documents))]
    options = write_format(form, tmp_path / "a", changed)
    first = {"local": tmp_path / "a", "name": "a", **options}
    other = Written(options=[first, written.options[1]], documents=[])
    with pytest.raises(ResumeError, match=r"stream 'a' \(streams\[0\]\) has changed since"):
        loader_at(other.dataset(), loader.state_dict())


RESUME = """
import json, sys
from streampack import *
from streampack.flat import token_file
from streampack.testing.shown import rows
from tests.helpers.stream_formats import stream_of
token_file.CELL_BYTES = 1024
options = json.loads(sys.argv[1])
loader = PackedDataLoader(PackedStreamingDataset(
    [stream_of(**own) for own in options], packing=Packing(max_seq_len=64, overflow="split"),
    mixing=Mixing(global_batch_size=8), order=Order(seed=3, num_lanes=2), batch_size=2,
    world=World()))
loader.load_state_dict(json.load(open(sys.argv[2])))
print(*(row[1].hex() for batch in loader for row in rows(batch)))
"""


@pytest.mark.processes
def test_a_fresh_process_with_another_hash_seed_goes_on_in_all_formats(all_formats, tmp_path):
    batches = list(PackedDataLoader(all_formats.dataset()))
    assert_exactly_once(batches, all_formats.lengths())
    all_formats.check_tokens(batches)
    loader = PackedDataLoader(all_formats.dataset())
    list(islice(loader, 8))
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    texts = [{key: str(value) for key, value in own.items()} for own in all_formats.options]
    done = subprocess.run(
        [sys.executable, "-c", RESUME, json.dumps(texts), str(tmp_path / "state.json")],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [row[1].hex() for batch in batches[8:] for row in rows(batch)]


@pytest.mark.processes
def test_workers_deliver_all_formats_and_resume_where_they_were_left(all_formats):
    wanted = [show(batch) for batch in PackedDataLoader(all_formats.dataset())]
    loader = PackedDataLoader(all_formats.dataset(), **MANY)
    found = [show(batch) for batch in islice(loader, 7)]
    resumed = PackedDataLoader(all_formats.dataset(), **MANY)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [*found, *(show(batch) for batch in resumed)] == wanted


# Mixtures


@pytest.mark.parametrize(("form", "method"), crossed(FORMATS, METHODS), indirect=["form"])
def test_weights_are_exact_by_samples_and_by_tokens(written, method):
    mixing = {"batching_method": method}
    weights = [{"repeat": 0.5}, {"repeat": 2}]
    epochs = [
        b
        for _ in range(2)
        for b in PackedDataLoader(written.dataset(weights=weights, mixing=mixing))
    ]
    assert_exactly_once(epochs[: len(epochs) // 2], written.lengths(), (40, 80))
    total = 4 * sum(map(sum, written.lengths()))
    halves = written.dataset(
        weights=[{"proportion": 0.5}] * 2,
        mixing={**mixing, "weight_unit": "tokens", "epoch_size": total},
    )
    tokens: Counter[int] = Counter()
    for (stream, _), count in written.check_tokens(PackedDataLoader(halves)).items():
        tokens[stream] += count
    assert sum(tokens.values()) == pytest.approx(total, abs=4 * LONGEST)
    assert tokens[0] == pytest.approx(total / 2, abs=2 * LONGEST)


def test_each_share_is_kept_within_one_pack_after_every_global_batch(written):
    mixing = {"batching_method": "stratified", "weight_unit": "tokens"}
    weights = [{"proportion": 0.75}, {"proportion": 0.25}]
    packs: Counter[int] = Counter()
    batches = list(PackedDataLoader(written.dataset(weights=weights, mixing=mixing)))
    for number, batch in enumerate(batches[:40], 1):
        for row in batch["segments"][:, 0].unique().tolist():  # rows of padding have none
            packs[int(batch["segments"][batch["segments"][:, 0] == row][0, 1])] += 1
        if number % 4 == 0:
            assert abs(packs[0] - 0.75 * packs.total()) <= 1.5


def test_carried_epochs_use_samples_as_often_but_for_two(written):
    dataset = written.dataset(mixing={"epoch_end": "carry"}, order={"num_lanes": 1})
    uses: Counter[tuple[int, int]] = Counter()
    for _ in range(3):
        for batch in PackedDataLoader(dataset):
            begins = batch["segments"][batch["segments"][:, 4] == 0]
            uses.update(map(tuple, begins[:, [1, 3]].tolist()))
            for stream, lengths in enumerate(written.lengths()):
                counts = [uses[stream, sample] for sample in range(len(lengths))]
                assert max(counts) - min(counts) <= 3


def test_a_run_of_chapters_keeps_shares_and_resumes_in_any_world(written):
    chapters = [Chapter(weights={"a": part, "b": 1 - part}, steps=3) for part in (0.75, 0.25)]
    mixing = {"batching_method": "stratified"}
    ranks = [
        PackedDataLoader(
            written.dataset(chapters=chapters, mixing=mixing, world=world), check_ranks=False
        )
        for world in worlds(2, 2)
    ]
    got = [[(rows(b), json.dumps(ld.state_dict())) for b in ld] for ld in ranks]
    alone = list(PackedDataLoader(written.dataset(chapters=chapters, mixing=mixing)))
    written.check_tokens(alone)
    whole = [row for batch in alone for row in rows(batch)]
    streams = [
        int(batch["segments"][batch["segments"][:, 0] == row][0, 1])
        for batch in alone
        for row in range(2)
    ]
    assert (sum(streams[:24]), sum(streams[24:])) == (6, 18)
    resumed = loader_at(written.dataset(chapters=chapters, mixing=mixing), json.loads(got[0][7][1]))
    assert [row for batch in resumed for row in rows(batch)] == whole[2 * 16 :]


OPTIONS: dict[str, dict[str, Any]] = {
    "balance": {"order": {"pack_shuffle": 16}, "balance": Balance(within="batch")},
    "knapsack": {"packing": Packing(max_seq_len=64, method="knapsack", overflow="truncate")},
    "next_fit": {"packing": Packing(max_seq_len=64, method="next_fit", overflow="drop")},
}


@pytest.mark.parametrize(("form", "name"), crossed(FORMATS, list(OPTIONS)), indirect=["form"])
def test_packs_of_other_options_are_those_of_every_world_and_resume(written, name):
    options = OPTIONS[name]
    assert_same_in_every_world(
        lambda world: written.dataset(**options, world=world), [(2, 1), (4, 2)]
    )
    assert_resumes(lambda: PackedDataLoader(written.dataset(**options)), every=25)


def test_a_step_held_what_the_ranks_got(written):
    dataset = written.dataset()
    batches = list(islice(PackedDataLoader(dataset), 8))
    second = [segment[1:] for batch in batches[4:] for segment in batch["segments"].tolist()]
    found = [
        segment[:5] for row in at(written.dataset(), 1).rows for segment in row.segments.tolist()
    ]
    assert sorted(found) == sorted(second)
    stream, _, sample, *_ = second[0]
    steps = {each.step for each in where(written.dataset(), "ab"[stream], sample, upto=1)}
    assert 1 in steps


# Faults


def test_a_stream_gives_the_version_that_it_was_opened_with_or_an_error(form, tmp_path):
    one, two = documents_of(1), documents_of(2)
    options = {"local": tmp_path / "a", **write_format(form, tmp_path / "a", one)}
    old = Written(options=[options], documents=[one])
    dataset = old.dataset()
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "a-index", ignore_errors=True)
    write_format(form, tmp_path / "a", two)
    with pytest.raises(DataError):
        old.check_tokens(PackedDataLoader(dataset))
    new = Written(options=[options], documents=[two])
    assert_exactly_once(new.dataset(), new.lengths())
    new.check_tokens(PackedDataLoader(new.dataset()))


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_files_are_refused_or_give_the_tokens(form, damage, tmp_path):
    documents = documents_of(1)
    options = {"local": tmp_path / "a", **write_format(form, tmp_path / "a", documents)}
    own = Written(options=[options], documents=[documents])
    path = sorted((tmp_path / "a").glob(LOCAL_FILES[form]))[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    if damage == "cut" or form in ("mds", "indexed"):  # these have hashes
        with pytest.raises(DataError):
            list(PackedDataLoader(own.dataset()))


def to_store(form: str, own: dict[str, Any], cache: Path) -> dict[str, Any]:
    """Return the options of a stream whose files were copied into a store, and its cache."""
    if form == "arrow":  # its boundaries are between the tokens, so a store needs an index
        own = own | {"index": cache.with_name(f"{cache.name}-index")}
        list(index_files(str(own["local"]), own["index"]))
    return own | {"local": cache}


@pytest.mark.parametrize("form", ["olmo", "indexed"])  # MDS and a limit: tests/faults/test_disk.py
def test_a_cache_within_a_limit_gives_exact_epochs(form, tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 999, n).astype("uint16") for n in rng.integers(2, 9, 9000)]
    own = {"local": tmp_path / "a", **write_format(form, tmp_path / "a", documents)}
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/a/", f"/{form}/a/", recursive=True)
    own = to_store(form, own, tmp_path / "cache") | {"remote": f"memory://{form}/a/"}
    limit = sum(each.nbytes for each in documents)
    written = Written(options=[own], documents=[documents])
    order = {"num_lanes": 1, "shuffle_block_size": 1, "pack_shuffle": 1}
    dataset = written.dataset(order=order, buffers=Buffers(cache_limit=limit))
    batches = list(PackedDataLoader(dataset))
    assert_exactly_once(batches, written.lengths())
    written.check_tokens(batches)
    shards = [path for path in (tmp_path / "cache").rglob("*.????????") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in shards) <= limit
    store.rm(f"/{form}", recursive=True)


@pytest.mark.processes
def test_faults_of_a_store_that_pass_lose_nothing_and_others_are_errors(all_formats, tmp_path):
    bucket, tokens = tmp_path / "root" / "bucket", r"\.(mds|bin|npy|ds|arrow)"
    options = []
    for form, own in zip(FORMATS, all_formats.options, strict=True):
        shutil.copytree(own["local"], bucket / form)
        own = to_store(form, own, tmp_path / "cache" / form)
        options.append(own | {"remote": f"s3://bucket/{form}/"})
    remote = Written(options=options, documents=all_formats.documents)
    order = {"num_lanes": 1}  # litData's lengths are in the chunks alone
    with (
        servers.s3_server(tmp_path / "root") as s3,
        FaultServer(upstream=s3.url) as server,
        servers.s3_environment(server.url),
    ):
        fault = server.add("status", path=tokens, share=0.1, seed=1, status=503)
        # Shards of local and remote files are the same, and so are their packs.
        wanted = all_rows([all_formats.dataset(order=order)])
        assert all_rows([remote.dataset(order=order)]) == wanted
        assert fault.given > 1
        server.clear()
        server.add("status", path=tokens, status=403)
        for form, own in list(zip(FORMATS, options, strict=True))[::3]:
            elsewhere = own | {"local": tmp_path / "none" / form}
            lost = stream_of(download=Download(retry=0), **elsewhere)
            with pytest.raises(DataError):
                list(PackedStreamingDataset([lost], packing=Packing(max_seq_len=64)))
