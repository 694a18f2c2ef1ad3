"""`Stream` has MosaicML's arguments and a few more, and refuses what cannot work."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from decimal import Decimal
from unittest.mock import ANY

import pytest
import streaming
from streaming import StreamingDataset

from streampack.errors import ConfigError
from streampack.storage.filesystem import private_root
from streampack.storage.location import StreamLocation
from streampack.streams import Stream


def test_a_stream_keeps_what_was_said_and_nothing_else(tmp_path):
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
    assert (stream.remote, stream.local) == (str(tmp_path / "r"), str(tmp_path / "l"))
    assert (stream.proportion, stream.split, stream.keep_zip) == (0.5, "train", True)
    assert (stream.download_retry, stream.download_timeout) == (3, 7.5)
    assert stream.validate_hash == "xxh64"
    assert stream.repeat is stream.choose is None
    assert vars(pickle.loads(pickle.dumps(stream))) == vars(stream)


def test_the_arguments_of_mosaicmls_stream_have_their_names_and_defaults():
    ours, theirs = (inspect.signature(kind).parameters for kind in (Stream, streaming.Stream))
    assert {name: ours[name].default for name in theirs} == {
        name: parameter.default for name, parameter in theirs.items()
    }


def test_an_unset_argument_is_what_mosaicmls_dataset_would_make_it(tmp_path):
    theirs = inspect.signature(StreamingDataset).parameters
    stream = StreamLocation.of(Stream(local=str(tmp_path))).stream
    for name in ("download_retry", "download_timeout", "validate_hash", "keep_zip"):
        assert getattr(stream, name) == theirs[name].default, name


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
            r"proporton=1: not an argument of Stream - did you mean 'proportion'\?; it takes begin",
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


def test_an_unset_local_follows_from_the_remote_in_a_folder_of_this_users_alone(tmp_path):
    remote = str(tmp_path / "r")
    stream = Stream(remote=remote, split="train")
    location = StreamLocation.of(stream)
    assert stream.local is None
    assert location.folder.is_relative_to(private_root())
    assert location.plain_folder.name == "train"
    assert location.temporary_root == private_root()
    assert StreamLocation.of(Stream(remote=f"file://{remote}", split="train")) == replace(
        location, stream=ANY
    )
    assert StreamLocation.of(Stream(remote=f"{remote}2", split="train")).folder != location.folder


def test_a_tilde_is_the_users_home_in_paths_and_stays_in_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    stream = Stream(remote="~/far", local="~/near")
    assert (stream.remote, stream.local) == (f"{tmp_path}/far", f"{tmp_path}/near")
    stream = Stream(remote="s3://bucket/~/far", local=f"{tmp_path}/a~")
    assert (stream.remote, stream.local) == ("s3://bucket/~/far", f"{tmp_path}/a~")


@pytest.mark.parametrize("remote", ["gopher://x/y", "http2://x/y", "c:/books"])
def test_a_url_that_nothing_speaks_is_refused_with_those_that_work(remote):
    scheme = remote.partition(":")[0]
    message = (
        rf"remote='{remote}': nothing can fetch from {scheme}:; a remote is a folder, or a url "
        r"of abfs:, .* hf:, .* s3:, sftp:, ssh: or file:; copy the files to one of them"
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
