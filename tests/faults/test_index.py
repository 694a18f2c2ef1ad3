"""Every claim of index.json is checked, and nothing in a stream is ever executed.

Faults that are visible in index.json are refused at construction, naming the URI and the field.
Faults that are only visible in a shard's bytes are refused before any sample of that shard is
delivered. Each test takes well under a second, except for the bomb.
"""

from __future__ import annotations

import pickle
import resource
import shutil

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.streams import Stream
from tests.helpers import builders
from tests.helpers.faults import harness
from tests.helpers.faults.harness import edit_index, make_loader, run_epoch
from tests.helpers.faults.pickles import Payload, pickled_column

NUMBER = 3
SMALL = {"num_samples": 400, "lengths_file": False}
WORKERS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


def shard_of(document):
    return document["shards"][NUMBER]


def set_field(*path_and_value):
    *path, value = path_and_value

    def change(document):
        entry = shard_of(document)
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value

    return change


def text_of(change):
    """Return a function that rewrites index.json as bytes."""

    def write(folder):
        path = folder / "index.json"
        path.write_bytes(change(path.read_bytes()))
        (folder / "lengths.bin").unlink(missing_ok=True)

    return write


def field_of(change):
    return lambda folder: edit_index(folder, change)


AT_CONSTRUCTION = {
    # row: the change to the folder, the words in the message
    "index_cut": (text_of(lambda text: text[: len(text) // 2]), "not JSON"),
    "index_empty": (text_of(lambda _: b""), "not JSON"),
    "index_html": (text_of(lambda _: b"<html><body>Sign in</body></html>"), "not JSON"),
    "index_list": (text_of(lambda _: b"[1, 2]"), "an object"),
    "index_no_shards": (text_of(lambda _: b'{"version": 2}'), "shards"),
    "index_version": (field_of(lambda document: document.update(version=3)), "version"),
    "index_dup_basename": (
        field_of(lambda d: d["shards"][4]["raw_data"].update(d["shards"][3]["raw_data"])),
        "basename",
    ),
    "index_encoding_unknown": (
        field_of(set_field("column_encodings", ["wat"])),
        "wat",
    ),
    "index_samples_1e12": (field_of(set_field("samples", 10**12)), "shards.3.samples"),
    "index_samples_negative": (field_of(set_field("samples", -5)), "shards.3.samples"),
    "index_samples_str": (field_of(set_field("samples", "70")), "shards.3.samples"),
    "format_other": (field_of(set_field("format", "csv")), "shards.3.format"),
    "index_traversal_read": (
        field_of(set_field("raw_data", "basename", "/etc/passwd")),
        "shards.3.raw_data.basename",
    ),
    "index_traversal_write": (
        field_of(set_field("raw_data", "basename", "../evil.mds")),
        "shards.3.raw_data.basename",
    ),
    "traversal_hidden": (
        field_of(set_field("raw_data", "basename", "a/../../evil.mds")),
        "shards.3.raw_data.basename",
    ),
    "traversal_own_folder": (
        field_of(set_field("raw_data", "basename", ".streampack/x.mds")),
        "shards.3.raw_data.basename",
    ),
}


@pytest.mark.parametrize("kind", ["remote", "local"])
@pytest.mark.parametrize("row", AT_CONSTRUCTION)
def test_a_hostile_index_is_refused_at_construction(dataset, tmp_path, row, kind):
    damage, word = AT_CONSTRUCTION[row]
    origin = tmp_path / "above" / "origin"
    shutil.copytree(dataset(**SMALL).folder, origin)
    damage(origin)
    stream = (
        Stream(local=str(origin))
        if kind == "local"
        else Stream(remote=str(origin), local=str(tmp_path / "above" / "cache"))
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"index\.json|stream 'origin'") as caught:
        make_loader(stream)
    assert word in str(caught.value)
    assert str(origin) in str(caught.value) or "stream 'origin'" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
    assert {path.name for path in (tmp_path / "above").iterdir()} <= {"origin", "cache"}


@pytest.mark.parametrize("kind", ["remote", "local"])
@pytest.mark.parametrize(
    ("row", "field"),
    [("index_traversal_delete", "raw_data"), ("index_traversal_delete_zip", "zip_data")],
)
@pytest.mark.parametrize("name", ["absolute", "relative"])
def test_no_index_makes_a_file_outside_the_cache_vanish(dataset, tmp_path, row, field, kind, name):
    above = tmp_path / "above"
    origin, precious = above / "origin", above / "precious.txt"
    shutil.copytree(dataset(**SMALL, compression="zstd").folder, origin)
    precious.write_text("not yours")
    basename = str(precious) if name == "absolute" else "../precious.txt"
    edit_index(origin, set_field(field, "basename", basename))
    stream = (
        Stream(local=str(origin))
        if kind == "local"
        else Stream(remote=str(origin), local=str(above / "cache"))
    )
    with pytest.raises(DataError, match=rf"shards\.3\.{field}\.basename"):
        make_loader(stream)
    assert precious.read_text() == "not yours", row


def two_columns(folder, num_samples=300):
    """Write a stream of two columns of one type; both could be the tokens."""
    lengths = harness.lengths_of(num_samples)
    others = [builders.tokens_of(9, i, length) for i, length in enumerate(lengths)]
    builders.write_stream_files(
        folder,
        lengths,
        columns={"others": "ndarray:int32"},
        values={"others": others},
        size_limit=harness.SHARD_BYTES,
        lengths_file=False,
    )
    return harness.DataSet(folder=folder, lengths=tuple(lengths))


def one_more_or_less(by):
    def change(document):
        shard_of(document)["samples"] += by

    return change


BY_THE_SHARD = {
    "index_samples_less": one_more_or_less(-5),
    "index_samples_more": one_more_or_less(+5),
    "index_encoding_swapped": lambda d: shard_of(d).update(
        column_names=["tokens", "others"], column_encodings=["ndarray:int32"] * 2
    ),
    "encoding_of_other_width": lambda d: shard_of(d).update(
        column_encodings=["ndarray:int16", "ndarray:int16"]
    ),
    "encoding_of_same_width": lambda d: shard_of(d).update(
        column_encodings=["ndarray:uint32", "ndarray:uint32"]
    ),
    "index_bytes_wrong": lambda d: shard_of(d)["raw_data"].update(
        bytes=shard_of(d)["raw_data"]["bytes"] + 8
    ),
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("row", BY_THE_SHARD)
def test_what_only_the_shard_can_tell_is_refused_before_a_sample_of_it(tmp_path, row, num_workers):
    ds = two_columns(tmp_path / "origin")
    numbers = np.cumsum([0] + [shard["samples"] for shard in ds.index["shards"]])
    assert ds.index["shards"][0]["column_names"] == ["others", "tokens"]
    edit_index(ds.folder, BY_THE_SHARD[row])

    def make():
        stream = Stream(remote=str(ds.folder), local=str(tmp_path / "cache"))
        return make_loader(stream, num_workers=num_workers, shuffle_block_size=50)

    outcome = run_epoch(make, ds)

    outcome.assert_refused("shard.00003.mds")
    delivered = {sample for _, _, sample, _, _ in outcome.audit.order}
    assert not delivered & set(range(numbers[NUMBER], numbers[NUMBER + 1]))


@pytest.mark.parametrize(("row", "encoding"), [("pickle_default", "pkl")])
@pytest.mark.parametrize("option", ["tokens", "labels", "loss_mask"])
def test_a_pickled_column_is_refused_at_construction(tmp_path, row, encoding, option):
    ds = pickled_column(tmp_path / "s", tmp_path / "ran", encoding)
    with pytest.raises(DataError, match=r"'meta'.*pkl"):
        make_loader(Stream(local=str(ds.folder), **{option: "meta"}))
    assert not (tmp_path / "ran").exists(), row


def test_pickle_colon_bypass_is_refused_at_construction(tmp_path):
    ds = pickled_column(tmp_path / "s", tmp_path / "ran", "pkl:ndarray:int32")
    with pytest.raises(DataError, match=r"'meta'.*pkl:ndarray:int32"):
        make_loader(Stream(local=str(ds.folder), tokens="meta"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_pickle_opt_in_there_is_none_and_what_lies_beside_the_tokens_is_never_read(
    tmp_path, num_workers
):
    ran = tmp_path / "ran"
    ds = pickled_column(tmp_path / "s", ran)
    stream = Stream(local=str(ds.folder))
    run_epoch(lambda: make_loader(stream, num_workers=num_workers), ds).assert_exact()
    assert not ran.exists()
    pickle.loads(pickle.dumps(Payload(ran)))  # shows that the payload works
    assert ran.exists()
