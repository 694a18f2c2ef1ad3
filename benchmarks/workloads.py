"""Seeded workloads that every bench shares: lengths of samples, their tokens, and their shards.

::

    name     samples   tokens of a sample                               mean
    web      200,000   lognormal, median 400, clipped to 100,000        about 900
    sft       52,002   lognormal, sigma 0.6                             about 125
    code      60,000   lognormal, median 2,500, clipped to 100,000      about 5,400
    long      20,000   90 % as web up to 8,192, 10 % of 8,192 - 65,536  about 3,600
    uniform  100,000   1 to 2,048                                       about 1,024
    chat     100,000   lognormal, median 1,200, clipped to 2,048        about 1,220

Token ids are uniform below 50,000, so zstd about halves int32 shards. Shards are written
once and stay in the data folder for the next bench.

Cost: about 5 s to write web raw, 10 s as zstd. On disk: 730 MB and 370 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["NUM_SAMPLES", "VOCABULARY", "lengths", "tokens", "write"]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

NUM_SAMPLES = {
    "web": 200_000,
    "sft": 52_002,
    "code": 60_000,
    "long": 20_000,
    "uniform": 100_000,
    "chat": 100_000,
}
VOCABULARY = 50_000
TOKENS_AT_ONCE = 1 << 22

WEB_MEDIAN, WEB_MEAN, WEB_LONGEST = 400, 900, 100_000
WEB_SIGMA = float((2 * np.log(WEB_MEAN / WEB_MEDIAN)) ** 0.5)  # a lognormal's mean / median
CODE_MEDIAN = 2500
SFT_MEAN, SFT_SIGMA = 125, 0.6
CHAT_MEDIAN, CHAT_SIGMA, CHAT_LONGEST = 1200, 0.6, 2048
LONG_SHARE, LONG_SHORTEST, LONG_LONGEST = 0.1, 8192, 65_536


def _generator(*place: int) -> np.random.Generator:
    return np.random.Generator(
        np.random.Philox(key=np.random.SeedSequence(place).generate_state(2))
    )


def _web(num_samples: int, longest: int, median: int = WEB_MEDIAN) -> Int64Array:
    normal = _generator(0).standard_normal(num_samples)
    return np.exp(np.log(median) + WEB_SIGMA * normal).clip(1, longest).astype(np.int64)


def _sft(num_samples: int) -> Int64Array:
    normal = _generator(1).standard_normal(num_samples)
    median = np.log(SFT_MEAN) - SFT_SIGMA**2 / 2
    return np.exp(median + SFT_SIGMA * normal).clip(1, None).astype(np.int64)


def _long(num_samples: int) -> Int64Array:
    made = _web(num_samples, LONG_SHORTEST)
    is_long, where = _generator(2).random((2, num_samples))
    drawn = LONG_SHORTEST * (LONG_LONGEST / LONG_SHORTEST) ** where
    return np.where(is_long < LONG_SHARE, drawn, made).astype(np.int64)


def _chat(num_samples: int) -> Int64Array:
    normal = _generator(1).standard_normal(num_samples)
    drawn = np.exp(np.log(CHAT_MEDIAN) + CHAT_SIGMA * normal)
    return drawn.clip(1, CHAT_LONGEST).astype(np.int64)


def lengths(name: str, num_samples: int | None = None) -> Int64Array:
    """Return the tokens of each sample, shape (num_samples,); by default, of all samples.

    >>> [round(lengths(name).mean() / 100) for name in ("web", "sft", "long")]
    [9, 1, 36]
    """
    count = NUM_SAMPLES[name] if num_samples is None else num_samples
    if name == "web":
        return _web(count, WEB_LONGEST)
    if name == "code":
        return _web(count, WEB_LONGEST, CODE_MEDIAN)
    if name == "chat":
        return _chat(count)
    if name == "uniform":
        return _generator(4).integers(1, CHAT_LONGEST, count, endpoint=True)
    return _sft(count) if name == "sft" else _long(count)


def tokens(name: str, num_samples: int | None = None) -> Iterator[Int32Array]:
    """Yield the token ids of each sample, shape (its length,).

    >>> [sample.shape for sample in tokens("sft", 2)] == [(n,) for n in lengths("sft", 2)]
    True
    """
    drawn, generator = np.empty(0, np.int32), _generator(3)
    first = 0
    for length in lengths(name, num_samples).tolist():
        if first + length > len(drawn):
            more = max(TOKENS_AT_ONCE, length)
            drawn, first = generator.integers(0, VOCABULARY, more, dtype=np.int32), 0
        yield drawn[first : first + length]
        first += length


def _masked(samples: Iterator[Int32Array]) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield samples with a loss mask that omits the first third, as if it were a prompt."""
    for sample in samples:
        mask = np.ones(len(sample), np.uint8)
        mask[: len(sample) // 3] = 0
        yield {"tokens": sample, "loss_mask": mask}


def write(
    name: str,
    folder: Path,
    compression: str | None = None,
    num_samples: int | None = None,
    *,
    is_masked: bool = False,
) -> Path:
    """Write a workload as int32 MDS shards, unless an earlier bench has; return the stream's path.

    Args:
        name: The workload.
        folder: The data folder of all benches.
        compression: The name that MosaicML's writer uses, such as "zstd"; by default raw.
        num_samples: How many samples; by default all.
        is_masked: Whether each sample has a loss mask, too.
    """
    from streampack.write import write_stream  # peers read lengths where it is not installed

    count = NUM_SAMPLES[name] if num_samples is None else num_samples
    kind = (compression or "raw").replace(":", "") + "-masked" * is_masked
    out = Path(folder) / f"{name}-{count}-{kind}"
    if not out.exists():  # the writer names it once it is whole
        samples = tokens(name, count)
        rows = _masked(samples) if is_masked else samples
        write_stream(rows, out, tokens_dtype="int32", compression=compression)
    return out
