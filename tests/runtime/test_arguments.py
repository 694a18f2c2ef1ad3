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
        ("data/c4", Stream, r"streams='data/c4' is not a list .* a path as remote= or local="),
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
        ([[1, 2]], IterableStream, r"streams\[0\]=<list> .*; wrap it: IterableStream"),
    ],
)
def test_streams_of_another_kind_are_refused_with_what_takes_them(streams, kind, message):
    with pytest.raises(ConfigError, match=message):
        check_streams(streams, kind)
