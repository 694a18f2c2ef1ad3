"""`Stream` has MosaicML's arguments and a few more, and refuses those that cannot work."""

from __future__ import annotations

import inspect

import pytest
import streaming
from streaming import StreamingDataset

from streampack import (
    Chats,
    ConfigError,
    Download,
    PackedStreamingDataset,
    Packing,
    Shards,
    Stream,
    Texts,
)

MOVED = {"download_retry", "download_timeout", "validate_hash", "keep_zip"}


@pytest.mark.parametrize("kind", [Texts, Chats])
def test_texts_have_no_options_for_files_that_are_fetched_whole(kind):
    with pytest.raises(ConfigError, match=f"download=.* not an argument of {kind.__name__}"):
        kind("rows.jsonl", "tokenizer", download=Download())


def test_mosaicmls_words_have_their_defaults_in_the_short_form():
    theirs = inspect.signature(streaming.Stream).parameters
    ours = {**inspect.signature(Shards).parameters, **inspect.signature(Stream).parameters}
    for name in theirs.keys() - MOVED:
        assert ours[name].default == theirs[name].default, name
    for name in MOVED:
        with pytest.raises(ConfigError, match=r"write download=Download\("):
            Stream(local="a", **{name: 1})
        with pytest.raises(ConfigError, match=r"write download=Download\(\w+=1\)"):
            PackedStreamingDataset(local="a", packing=Packing(max_seq_len=8), **{name: 1})


def test_an_unset_option_is_what_mosaicmls_dataset_would_make_it():
    theirs = inspect.signature(StreamingDataset).parameters
    ours = {"download_retry": "retry", "download_timeout": "timeout", "validate_hash": "hash"}
    for name, own in ours.items():
        assert getattr(Download(), own) == theirs[name].default, name


def test_a_tilde_is_the_users_home_in_paths_and_stays_in_urls(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    stream = Stream(remote="~/far", local="~/near")
    assert (stream.source.remote, stream.source.local) == (f"{tmp_path}/far", f"{tmp_path}/near")
    stream = Stream(remote="s3://bucket/~/far", local=f"{tmp_path}/a~")
    assert (stream.source.remote, stream.source.local) == ("s3://bucket/~/far", f"{tmp_path}/a~")
