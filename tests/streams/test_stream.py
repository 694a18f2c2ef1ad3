"""`Stream` is MosaicML's with a few more arguments, and refuses what cannot work."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from decimal import Decimal
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from streampack.errors import ConfigError
from streampack.mds import mosaic
from streampack.storage.filesystem import private_root
from streampack.streams import Stream


def test_stream_is_mosaicmls_and_registered(tmp_path):
    stream = Stream(
        remote=str(tmp_path / "r"),
        local=str(tmp_path / "l"),
        split="train",
        proportion=0.5,
        download_retry=3,
        download_timeout=7.5,
        validate_hash="xxh64",
        keep_zip=True,
    )
    assert isinstance(stream, mosaic.Stream)
    assert mosaic.streams_registry.get("streampack") is Stream
    assert (stream.proportion, stream.split, stream.keep_zip) == (0.5, "train", True)
    assert (stream.download_retry, stream.download_timeout) == (3, 7.5)
    assert stream.validate_hash == "xxh64"
    assert not hasattr(stream, "repeat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "remote=None and local=None: set one of them"),
        (
            {"local": "x", "proportion": 1, "repeat": 2},
            "proportion=1, repeat=2: a stream has at mo",
        ),
        ({"local": "x", "repeat": 1, "choose": 2}, "repeat=1, choose=2: a stream has at most one"),
        (
            {"local": "x", "proportion": -0.5},
            "proportion=-0.5: a weight must be a number of 0 or m",
        ),
        ({"local": "x", "repeat": -1}, "repeat=-1: a weight must be"),
        ({"local": "x", "choose": -1}, "choose=-1: a weight must be"),
        ({"local": "x", "proportion": float("nan")}, "proportion=nan: a weight must be"),
        (
            {"local": "x", "proportion": Decimal("nan")},
            r"proportion=Decimal\('NaN'\): a weight must",
        ),
        ({"local": "x", "repeat": Decimal("sNaN")}, r"repeat=Decimal\('sNaN'\): a weight must"),
        ({"local": "x", "choose": Decimal("inf")}, r"choose=Decimal\('Infinity'\): a weight must"),
        ({"local": "x", "choose": Decimal(-1)}, r"choose=Decimal\('-1'\): a weight must"),
        ({"local": "x", "proportion": float("inf")}, "proportion=inf: a weight must be"),
        ({"local": "x", "proportion": "0.5"}, "proportion='0.5': a weight must be a number"),
        ({"local": "x", "proportion": True}, "proportion=True: a weight must be a number"),
        ({"local": "x", "repeat": False}, "repeat=False: a weight must be a number"),
        ({"local": "x", "choose": "1k"}, "choose='1k': a weight must be a number"),
        (
            {"local": "x", "tokens_dtype": "uint61"},
            r"tokens_dtype='uint61' is not one of int8\|.* - d",
        ),
        ({"local": "x", "tokens_dtype": "float32"}, "tokens_dtype='float32' is not one of"),
        ({"local": "x", "labels_dtype": "int46"}, "labels_dtype='int46' is not one of .* - did"),
        ({"local": "x", "loss_mask_dtype": "bool"}, "loss_mask_dtype='bool' is not one of"),
        ({"local": "x", "labels_shifted": True}, "labels_shifted=True describes a labels column"),
        (
            {"local": "x", "download_retry": -1},
            "download_retry=-1 is negative; 0 never tries again",
        ),
        (
            {"local": "x", "download_timeout": 0},
            "download_timeout=0 must be a number of seconds, more than 0",
        ),
        (
            {"remote": "nope://x", "local": "x"},
            "remote='nope://x': nothing can fetch from nope",
        ),
        (
            {"local": "x", "proporton": 1},
            r"proporton=1: not an argument of Stream - did you mean 'proportion'\?; it takes check",
        ),
        (
            {"local": "x", "lables": "y"},
            "lables='y': not an argument of Stream - did you mean 'labels'",
        ),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Stream(**arguments)


@pytest.mark.parametrize("remote", ["dbfs:/data/books", "dbfs:/Volumes/data/books"])
def test_a_store_whose_library_is_not_installed_is_refused_with_what_to_install(
    tmp_path, monkeypatch, remote
):
    monkeypatch.setitem(sys.modules, "databricks", None)
    message = (
        rf"remote='{remote}'\): dbfs: needs a library that is not installed; pip install "
        r"'mosaicml-streaming\[databricks\]'$"
    )
    with pytest.raises(ConfigError, match=message):
        Stream(remote=remote, local=str(tmp_path))


def test_an_unset_local_follows_from_the_remote_in_a_folder_of_this_users_alone(tmp_path):
    remote = str(tmp_path / "r")
    ours = Stream(remote=remote, split="train").local
    theirs = mosaic.Stream(remote=remote, local="x", split="train")._get_temporary_directory()
    root = Path(tempfile.gettempdir())
    assert Path(ours) == private_root() / Path(theirs).relative_to(root)
    assert Stream(remote=f"file://{remote}", split="train").local == ours


def test_mosaicmls_registry_finds_it_by_its_entry_point():
    [point] = entry_points(group=mosaic.streams_registry.entry_point_namespace, name="streampack")
    assert point.load() is Stream


@pytest.mark.processes
def test_mosaicmls_registry_finds_it_where_nobody_imported_it():
    # The registry alone, as MosaicML makes it: its package would need our door to be imported.
    code = (
        "import sys, catalogue; "
        "registry = catalogue.create('streaming', 'streams_registry', entry_points=True); "
        "assert 'streampack' in registry; print('streampack.streams' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_tilde_is_the_users_home_in_paths_and_stays_in_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    stream = Stream(remote="~/far", local="~/near")
    assert (stream.remote, stream.local) == (f"{tmp_path}/far", f"{tmp_path}/near")
    stream = Stream(remote="s3://bucket/~/far", local=f"{tmp_path}/a~")
    assert (stream.remote, stream.local) == ("s3://bucket/~/far", f"{tmp_path}/a~")


@pytest.mark.parametrize("remote", ["http://x/y", "https://x/y", "ftp://x/y", "c:/books"])
def test_a_url_that_nothing_speaks_is_refused_with_those_that_work(remote):
    scheme = remote.partition(":")[0]
    message = (
        rf"remote='{remote}': nothing can fetch from {scheme}:; a remote is a folder, or a url "
        r"of alipan:, .* hf:, .* s3:, sftp: or file:; copy the files to one of them"
    )
    with pytest.raises(ConfigError, match=message):
        Stream(remote=remote)


def test_a_stream_shows_where_it_is_and_what_it_weighs():
    stream = Stream(name="code", remote="s3://bucket/code", local="cache", proportion=0.5)
    assert (
        repr(stream)
        == "Stream(name='code', remote='s3://bucket/code', local='cache', proportion=0.5)"
    )
    assert repr(Stream(local="cache", repeat=0)) == "Stream(local='cache', repeat=0)"
