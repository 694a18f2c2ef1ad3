"""`Stream` has MosaicML's arguments and a few more, and refuses those that cannot work."""

from __future__ import annotations

import inspect

import streaming
from streaming import StreamingDataset

from streampack.storage.location import StreamLocation
from streampack.streams import Stream


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


def test_a_tilde_is_the_users_home_in_paths_and_stays_in_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    stream = Stream(remote="~/far", local="~/near")
    assert (stream.remote, stream.local) == (f"{tmp_path}/far", f"{tmp_path}/near")
    stream = Stream(remote="s3://bucket/~/far", local=f"{tmp_path}/a~")
    assert (stream.remote, stream.local) == ("s3://bucket/~/far", f"{tmp_path}/a~")
