"""Arguments of the wrong kind are refused at construction."""

from __future__ import annotations

import pytest
import streaming

from streampack import (
    BucketedIterableDataset,
    ConfigError,
    IterableStream,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
)
from streampack.runtime.arguments import check_configs
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


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            PackedStreamingDataset,
            {"shuffle": True},
            r"shuffle=True: no argument of PackedStreamingDataset, set it with Order\(shuffle=\.",
        ),
        (
            PackedStreamingDataset,
            {"epoch_size": 9},
            r"=9: .* set it with Mixing\(epoch_size=\.\.\.\)",
        ),
        (PackedStreamingDataset, {"num_workers": 2}, r"set it with PackedDataLoader; it takes str"),
        (PackedIterableDataset, {"max_seq_len": 8}, r"set it with Packing\(max_seq_len=\.\.\.\)"),
        (BucketedIterableDataset, {"bukceting": 8}, r"Dataset - did you mean 'bucketing'\?; it"),
        (PackedDataLoader, {"batch_size": 4}, r"PackedDataLoader, set it with the dataset's batc"),
        (PackedDataLoader, {"shuffle": True}, r"set it with Order\(shuffle=\.\.\.\); it takes dat"),
        (PackedDataLoader, {"drop_last": True}, r"set it with Mixing\(epoch_end='drop'\)"),
        (PackedDataLoader, {"collate_fn": list}, r"collate_fn=list: .* the dataset's batch_format"),
        (
            PackedDataLoader,
            {"sampler": None},
            r"sampler=None: no argument of .*; it takes dataset,",
        ),
    ],
)
def test_an_argument_of_another_library_is_refused_with_its_place_here(make, arguments, message):
    with pytest.raises(ConfigError, match=message):
        make([], **arguments)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("packing", 2048, r"packing=2048 is not a Packing; .*Packing\(max_seq_len=2048\)"),
        (
            "packing",
            {"max_seq_len": 8},
            r"packing=\{'max_seq_len': 8\} is not a Packing; pass pack",
        ),
        ("packing", None, r"packing=None is not a Packing; pass packing=.*Packing\(max_seq_len="),
        ("packing", Packing, r"packing=Packing is not a Packing; pass"),
        ("mixing", Order(), r"mixing=<Order> is not a Mixing; pass mixing=streampack.Mixing\("),
        ("mixing", "per_stream", r"mixing='per_stream' is not a Mixing"),
        ("order", 17, r"order=17 is not an Order; pass order=streampack.Order"),
        ("order", False, r"order=False is not an Order"),
        ("buffers", 65_536, r"buffers=65536 is not a Buffers; pass buffers=streampack.Buffers"),
        ("world", 8, r"world=8 is not a World; pass world=streampack.World"),
        ("world", {}, r"world=\{\} is not a World"),
    ],
)
def test_a_config_of_another_class_is_refused_with_the_one_it_takes(key, value, message):
    with pytest.raises(ConfigError, match=message):
        check_configs(**{key: value})
