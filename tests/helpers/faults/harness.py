"""A data set in which every token can be checked, and an epoch over it with a deadline.

`Audit` maps every part of a batch to the tokens of a sample, and compares each with the one that
was written.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streampack import (
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
)
from streampack.errors import StreampackError
from streampack.streams import Stream
from streampack.world import World
from tests.helpers import builders
from tests.helpers.locations import with_download

NUM_SAMPLES = 2000
SHARD_BYTES = 64 * 1024
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A stream on disk, together with all of its tokens."""

    folder: Path
    lengths: tuple[int, ...]
    """Tokens of each sample."""
    seed: int = 0
    dtype: str = "int32"

    @property
    def index(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / "index.json").read_bytes())
        return document

    @property
    def shards(self) -> list[Path]:
        """The files that are fetched, in order; the compressed ones if the stream has them."""
        return [
            self.folder / (shard.get("zip_data") or shard["raw_data"])["basename"]
            for shard in self.index["shards"]
        ]

    def tokens_of(self, sample: int) -> np.ndarray:
        return builders.tokens_of(self.seed, sample, self.lengths[sample], self.dtype)


def lengths_of(num_samples: int, seed: int = 0) -> list[int]:
    """Return tokens of each sample: about 230 each, so that 2,000 fill 29 shards of 64 KB."""
    return [200 + (i * 37 + seed * 11) % 61 for i in range(num_samples)]


def write_dataset(
    folder: Path,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    hashes: Sequence[str] = ("xxh64",),
    compression: str | None = None,
    encoding: str | None = None,
    lengths_file: bool = True,
    size_limit: int = SHARD_BYTES,
) -> DataSet:
    lengths = lengths_of(num_samples, seed)
    builders.write_stream_files(
        folder,
        lengths,
        seed=seed,
        hashes=hashes,
        compression=compression,
        encoding=encoding,
        lengths_file=lengths_file,
        size_limit=size_limit,
    )
    return DataSet(folder=folder, lengths=tuple(lengths), seed=seed)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a stream's index.json in place, and drop the length file, which would be stale."""
    path = folder / "index.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    (folder / "lengths.bin").unlink(missing_ok=True)


class Audit:
    """The tokens received from data sets, checked one by one."""

    def __init__(self, datasets: Sequence[DataSet]) -> None:
        self.datasets = datasets
        self._begins = [np.cumsum([0, *dataset.lengths]) for dataset in datasets]
        self._counts = [np.zeros(begins[-1], np.int64) for begins in self._begins]
        self.altered: list[tuple[int, int]] = []
        """(stream, sample) of segments with wrong tokens."""
        self.order: list[tuple[int, ...]] = []
        """Segments as they came: (stream, pass, sample, start, length)."""

    def add(self, batch: Mapping[str, Any]) -> None:
        tokens = batch["tokens"].numpy()  # (B, S)
        row, column = -1, 0
        for segment in batch["segments"].tolist():
            column = column if segment[0] == row else 0
            row, stream, _, sample, start, length = segment
            self.add_segment(stream, sample, start, tokens[row, column : column + length])
            column += length
            self.order.append(tuple(segment[1:]))

    def add_segment(self, stream: int, sample: int, start: int, tokens: np.ndarray) -> None:
        truth = self.datasets[stream].tokens_of(sample)[start : start + len(tokens)]
        if not np.array_equal(truth, tokens):
            self.altered.append((stream, sample))
        begin = self._begins[stream][sample] + start
        self._counts[stream][begin : begin + len(truth)] += 1

    def add_order(self, segments: Iterable[Sequence[int]]) -> None:
        """Count segments of another process, which has checked their tokens itself."""
        for stream, _, sample, start, length in segments:
            begin = self._begins[stream][sample] + start
            self._counts[stream][begin : begin + length] += 1

    def _samples_with(self, condition: Callable[[np.ndarray], np.ndarray]) -> list[tuple[int, int]]:
        found = []
        for stream, (begins, counts) in enumerate(zip(self._begins, self._counts, strict=True)):
            each = np.logical_or.reduceat(condition(counts), begins[:-1])
            found += [(stream, int(sample)) for sample in np.flatnonzero(each)]
        return found

    @property
    def missing(self) -> list[tuple[int, int]]:
        return self._samples_with(lambda counts: counts == 0)

    @property
    def twice(self) -> list[tuple[int, int]]:
        return self._samples_with(lambda counts: counts > 1)

    @property
    def is_exact(self) -> bool:
        """Whether every token came exactly once and as written."""
        return not (self.missing or self.twice or self.altered)

    def __str__(self) -> str:
        return f"missing {len(self.missing)}, twice {len(self.twice)}, altered {len(self.altered)}"


class Hang(BaseException):
    """Raised when a deadline has passed; `except Exception` does not catch it by mistake."""


@contextmanager
def deadline(limit_s: float) -> Iterator[None]:
    """Raise `Hang` in the main thread if the block takes longer, then each second until it ends."""

    def ring(*_: object) -> None:
        raise Hang(f"no end within {limit_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    audit: Audit
    error: BaseException | None
    wall_s: float
    num_batches: int

    @property
    def kind(self) -> str:
        """Return "ok", "error" (streampack's own), "alien" (another's) or "hang"."""
        if self.error is None:
            return "ok"
        if isinstance(self.error, Hang):
            return "hang"
        return "error" if isinstance(self.error, StreampackError) else "alien"

    def assert_exact(self) -> None:
        """Fail unless every token came exactly once and as written."""
        if self.error is not None:
            raise AssertionError(f"{self}") from self.error
        assert self.audit.is_exact, f"{self}"

    def assert_refused(self, *words: str, within_s: float | None = None) -> StreampackError:
        """Fail unless it ended with a typed error containing `words`, and without wrong tokens."""
        if self.kind != "error":
            raise AssertionError(f"{self}") from self.error
        assert not self.audit.altered, f"{self}"
        assert not self.audit.twice, f"{self}"
        absent = [word for word in words if word not in str(self.error)]
        assert not absent, f"the message lacks {absent}: {self.error}"
        assert within_s is None or self.wall_s <= within_s, f"{self}, allowed are {within_s} s"
        assert isinstance(self.error, StreampackError)
        return self.error

    def __str__(self) -> str:
        error = f": {type(self.error).__name__}: {self.error}" if self.error else ""
        return (
            f"{self.kind} after {self.wall_s:.1f} s and {self.num_batches} batches "
            f"({self.audit}){error}"
        )


def make_loader(
    streams: Stream | Sequence[Stream],
    *,
    num_workers: int = 0,
    shuffle_block_size: int = 500,
    shuffle: bool = True,
    **loader: Any,
) -> PackedDataLoader:
    """Make a loader of streams; 2,000 samples are about 57 batches of 4 packs."""
    dataset = PackedStreamingDataset(
        [streams] if isinstance(streams, Stream) else list(streams),
        packing=Packing(max_seq_len=2048),
        order=Order(
            seed=9176, shuffle=shuffle, shuffle_block_size=shuffle_block_size if shuffle else None
        ),
        batch_size=4,
        world=World(),
    )
    return PackedDataLoader(dataset, num_workers=num_workers, **loader)


def run_epoch(
    make: Callable[[], Iterable[Mapping[str, Any]]],
    datasets: DataSet | Sequence[DataSet],
    *,
    limit_s: float = LIMIT_S,
    on_batch: Callable[[int], None] | None = None,
) -> Outcome:
    """Make a loader, iterate one epoch of it, and check all that comes."""
    known = [datasets] if isinstance(datasets, DataSet) else list(datasets)
    audit = Audit(known)
    error: BaseException | None = None
    num_batches = 0
    begin = time.monotonic()
    try:
        with deadline(limit_s):
            loader = make()
            for batch in loader:
                audit.add(batch)
                num_batches += 1
                if on_batch is not None:
                    on_batch(num_batches)
    except (Exception, Hang) as raised:
        error = raised
    wall_s = time.monotonic() - begin
    loader = None
    return Outcome(audit=audit, error=error, wall_s=wall_s, num_batches=num_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A folder in a store for a single test, and the local folders of its streams."""

    server: Any
    root: Path
    """What the store serves; its first level are the buckets."""
    folder: Path
    caches: Path
    """Where `local=` folders go."""

    @property
    def bucket(self) -> str:
        return self.folder.relative_to(self.root).as_posix()

    def put(self, dataset: DataSet, name: str = "ds") -> DataSet:
        shutil.copytree(dataset.folder, self.folder / name)
        return DataSet(
            folder=self.folder / name,
            lengths=dataset.lengths,
            seed=dataset.seed,
            dtype=dataset.dtype,
        )

    def put_in_cache(self, dataset: DataSet, but: str) -> None:
        shutil.copytree(
            dataset.folder, self.caches / "ds", ignore=shutil.ignore_patterns(f"{but}*")
        )

    def stream(self, name: str = "ds", **options: Any) -> Stream:
        options = {"local": str(self.caches / name), **options}
        return Stream(remote=f"s3://{self.bucket}/{name}", **with_download(options))

    def uri(self, basename: str) -> str:
        return f"s3://{self.bucket}/ds/{basename}"


def temporary_names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        return sorted(name for name in names if ".tmp" in name or ".partial" in name)
    return []
