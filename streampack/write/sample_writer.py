"""Writing of samples that fit the columns of a stream, into shards and two arrays.

::

    samples --add--> shard.00000.mds.zstd ...    finish --> lengths, edges
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from streampack.mds.encoder import EncodedShard, ShardEncoder, ShardLayout
from streampack.texts.inputs.values import BadValueError
from streampack.texts.samples import SampleSchema
from streampack.types import UInt32Array


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was read and written so far."""

    num_bytes: int = 0
    """Bytes of the input at rest that were read."""
    num_samples: int = 0
    num_tokens: int = 0
    num_shards: int = 0
    num_skipped: int = 0
    """Samples without tokens."""
    num_without_targets: int = 0
    """Samples with a `loss_mask` of zeros."""
    num_dropped: int = 0
    """Samples of conversations that were skipped because nothing in them is learned."""
    num_bad_rows: int = 0
    num_special_tokens: int = 0
    """Special tokens that texts spell."""

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        each = list(counts)
        names = [field.name for field in fields(cls)]
        return cls(**{name: sum(getattr(one, name) for one in each) for name in names})


class SampleWriter:
    """Puts samples into shards, and records their lengths and edges."""

    def __init__(
        self, schema: SampleSchema, layout: ShardLayout, put: Callable[[str, bytes], None]
    ) -> None:
        self.schema = schema
        self._encoder = ShardEncoder(layout)
        self._put = put  # writes a file of this name
        self._lengths = array("I")
        self._edges = array("I")
        self.counts = Counts()
        self.entries: list[dict[str, Any]] = []  # of index.json, one for each shard

    def add(self, sample: Mapping[str, Any]) -> None:
        """Write a sample that has tokens; a BadValueError says that it does not fit the columns."""
        try:
            shard = self._encoder.add(sample)
        except (TypeError, ValueError) as error:
            columns = dict(self.schema.columns)
            raise BadValueError(
                f"does not fit columns {columns} ({type(error).__name__}: {error})"
            ) from error
        self._keep(shard)  # not in the try: an error of the output is not one of the sample
        tokens = sample[self.schema.column]
        self._lengths.append(len(tokens))
        self._edges.extend((int(tokens[0]), int(tokens[-1])))
        self.counts.num_samples += 1
        self.counts.num_tokens += len(tokens)
        self.counts.num_without_targets += "loss_mask" in sample and not np.any(sample["loss_mask"])

    def finish(self) -> tuple[UInt32Array, UInt32Array]:
        """Write the last shard; return all lengths, and edges of shape (num_samples, 2)."""
        self._keep(self._encoder.finish())
        lengths, edges = (np.frombuffer(each, np.uint32) for each in (self._lengths, self._edges))
        return lengths, edges.reshape(-1, 2)

    def _keep(self, shard: EncodedShard | None) -> None:
        if shard is not None:
            self._put(shard.name, shard.data)
            self.entries.append(shard.entry)
            self.counts.num_shards += 1
