"""A stream with a pickled column that runs a command when it is read."""

from __future__ import annotations

import os

from tests.helpers import builders
from tests.helpers.faults import harness
from tests.helpers.faults.harness import edit_index


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickled_column(folder, ran, encoding="pkl"):
    """Write a stream with a column of pickled values that run a command when they are read."""
    lengths = harness.lengths_of(300)
    builders.write_stream_files(
        folder,
        lengths,
        columns={"meta": "pkl"},
        values={"meta": [Payload(ran)] * len(lengths)},
        size_limit=harness.SHARD_BYTES,
        lengths_file=False,
    )

    def change(document):
        for shard in document["shards"]:
            place = shard["column_names"].index("meta")
            shard["column_encodings"][place] = encoding

    if encoding != "pkl":
        edit_index(folder, change)
    return harness.DataSet(folder=folder, lengths=tuple(lengths))
