"""The sample behind a segment: its tokens, its other columns, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streampack.errors import ConfigError
from streampack.mds.columns import plain_value, sample_values
from streampack.streams import TokenStream
from streampack.streams.mds_shards import MdsShards
from streampack.streams.text_shards import TextShards
from streampack.types import PASS, SAMPLE, STREAM


def read_document(
    streams: Sequence[TokenStream], segment: Sequence[int], tokenizer: Any
) -> dict[str, Any]:
    """Return the columns of a segment's sample; see `PackedStreamingDataset.document`."""
    number, _, sample = [int(segment[column]) for column in (STREAM, PASS, SAMPLE)]
    if not 0 <= number < len(streams) or not 0 <= sample < streams[number].num_samples:
        raise ConfigError(
            f"segment={list(map(int, segment))} is of no sample of this dataset; it begins with "
            "stream, pass and sample, as a row of batch['segments'] does after its first column"
        )
    stream = streams[number]
    shard = int(np.searchsorted(stream.first_sample, sample, "right")) - 1
    inside = sample - int(stream.first_sample[shard])
    opened = stream.open_shard(shard)
    document: dict[str, Any] = {}
    row = inside if stream.part is None else int(stream.part.rows(shard)[inside])
    if isinstance(stream.shards, TextShards):
        document = stream.shards.row_of(shard, row)
    elif isinstance(stream.shards, MdsShards) and (layout := stream.shards.row_layout(shard)):
        for name, encoding, value in sample_values(opened.data, row, layout):
            document[name] = plain_value(encoding, value, errors="replace")
    dtype = np.dtype(opened.tokens.dtype)
    begin, count = int(opened.tokens.begins[inside]), int(opened.tokens.counts[inside])
    values = opened.data[begin : begin + count * dtype.itemsize].tobytes()
    document["tokens"] = np.frombuffer(values, dtype)
    if tokenizer is not None:
        document["text"] = tokenizer.decode(document["tokens"].tolist())
    return document
