"""Arguments of the wrong kind are refused at construction."""

from __future__ import annotations

import pytest
import streaming

from streampack import (
    ConfigError,
    IterableStream,
    Stream,
)
from streampack.streams.registry import check_streams

PLAIN = streaming.Stream(local="nowhere")
OURS = Stream(local="nowhere")
ITERABLE = IterableStream([[1, 2]])


@pytest.mark.parametrize(
    ("streams", "kind", "message"),
    [
        (OURS, Stream, r"streams=<Stream> is not a list of streams; pass a list: \[Stream"),
        (
            ITERABLE,
            IterableStream,
            r"=<IterableStream> is not a list of streams; pass a list: \[It",
        ),
        (
            "data/c4",
            Stream,
            r"streams='data/c4' is not a list .* a path as remote= or local=",
        ),
        ("data/c4", IterableStream, r"streams='data/c4' .*; IterableStream takes samples"),
        ({"c4": OURS}, Stream, r"is not a list of streams; pass a list of Stream"),
        (iter([OURS]), Stream, r"streams=<list_iterator> is not a list of streams"),
        (7, Stream, r"streams=7 is not a list of streams; pass a list of Stream"),
        (None, IterableStream, r"streams=None is not a list of streams"),
        ([], Stream, r"streams=\[\] is empty; pass at least one Stream"),
        (
            [OURS, ITERABLE],
            Stream,
            r"streams\[1\]=<IterableStream> is not of type Stream; PackedIterableDataset takes it, "
            r"PackedStreamingDataset takes Stream objects",
        ),
        (
            [OURS],
            IterableStream,
            r"\[0\]=<Stream> is not of type IterableStream; PackedStreamingDataset takes it, "
            r"PackedIterableDataset takes IterableStream objects",
        ),
        ([PLAIN], IterableStream, r"streams\[0\]=<Stream> .* PackedStreamingDataset takes it"),
        (["data/c4"], Stream, r"streams\[0\]='data/c4' is not of type Stream; .*\(local="),
        ([[1, 2]], IterableStream, r"streams\[0\]=<list> .*; wrap it: IterableStream"),
        ([Stream], Stream, r"\[0\]=Stream is not of type Stream; pass an object of a class"),
    ],
)
def test_streams_of_another_kind_are_refused_with_what_takes_them(streams, kind, message):
    with pytest.raises(ConfigError, match=message):
        check_streams(streams, kind)
