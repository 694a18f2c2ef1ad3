"""Compare packers on the same lengths: fill, cuts, waiting, cost.

::

    lengths --in chunks----> packs that close       fill, cuts, ns per sample
            --one by one---> packs as they leave    packs that leave while a sample waits

A packer of windows gets all samples of a window together.

Cost: two passes of each packer. The second takes 30 us per sample, for at most 20,000 samples.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.config import Order, Packing
from streampack.pack import fit_samples, make_packer
from streampack.types import LENGTH, SAMPLE, START, TOTAL, Int64Array, Packs

KINDS = ("web", "sft", "code", "long", "uniform", "chat")

CHUNK = 4096
NUM_WATCHED = 20_000  # samples that are timed
COLUMNS = ("fill %", "cuts/pack", "wait mean", "p99", "max", "ns/sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerResult:
    """A packer's measurements on some lengths."""

    fill: float
    """Real tokens over token slots, in the packs that closed before the end."""
    cuts_per_pack: float
    """Cuts per pack, without the unavoidable ones in samples longer than a pack."""
    wait: tuple[float, float, float]
    """Packs that left while a sample waited: mean, 99th percentile, maximum."""
    sample_ns: float
    """Nanoseconds of CPU time per sample."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The result as text, in the order of the table's columns."""
        mean, p99, most = self.wait
        return (
            f"{100 * self.fill:.3f}" if self.fill else "-",  # no pack closed
            f"{self.cuts_per_pack:.3f}",
            f"{mean:.1f}",
            f"{p99:.0f}",
            f"{most:.0f}",
            f"{self.sample_ns:,.0f}",
        )


def synthetic_lengths(kind: str, num_samples: int, seed: int = 0) -> Int64Array:
    """Return synthetic lengths in tokens, shape (num_samples,).

    Args:
        kind: web (lognormal, median 400, mean 900), sft (median 90, mean 130), code (70 % of
            median 250, 30 % of median 3,000), long (web, and a tenth from 8k to 64k), uniform (1 to
            2,048) or chat (lognormal, median 1,200, at most 2,048).
        num_samples: Number of lengths.
        seed: Random seed.

    >>> synthetic_lengths("sft", 3).tolist() == synthetic_lengths("sft", 3).tolist()
    True
    """
    bits = np.random.Generator(np.random.Philox(key=seed))
    normal, uniform = bits.standard_normal(num_samples), bits.random(num_samples)
    web = np.exp(np.log(400) + (2 * np.log(900 / 400)) ** 0.5 * normal)
    by_kind = {
        "web": web,
        "sft": np.exp(np.log(90) + (2 * np.log(130 / 90)) ** 0.5 * normal),
        "code": np.where(
            uniform < 0.7,
            np.exp(np.log(250) + 0.8 * normal),
            np.exp(np.log(3000) + 0.9 * normal),
        ),
        "long": np.where(uniform < 0.9, web, 8192 * 8 ** (10 * (uniform - 0.9))),
        "uniform": 1 + np.floor(2048 * uniform),
        "chat": np.minimum(np.exp(np.log(1200) + 0.6 * normal), 2048),
    }
    lengths: Int64Array = np.maximum(by_kind[kind], 1).astype(np.int64)
    return lengths


def packings_to_compare(max_seq_len: int) -> dict[str, Packing]:
    """Return packings by name: one per method, the default first, and exact fit with cuts."""
    short = max(min(4096, max_seq_len // 8), 1)
    options: dict[str, dict[str, Any]] = {
        "best_fit_decreasing": {},
        "exact_fit": {},
        "exact_fit, split_gap=0.01": {"method": "exact_fit", "split_gap": 0.01},
        "best_fit": {},
        "first_fit": {},
        "knapsack": {},
        "next_fit": {},
        "concat": {},
        f"two_tiers, short_seq_len={short}": {"method": "two_tiers", "short_seq_len": short},
    }
    return {
        name: Packing(max_seq_len=max_seq_len, **{"method": name, **values})
        for name, values in options.items()
    }


def packer_result(lengths: Int64Array, packing: Packing) -> PackerResult:
    """Measure a packer on samples of these lengths in arrival order, shape (n,)."""
    samples = np.zeros((len(lengths), 4), np.int64)
    samples[:, SAMPLE] = np.arange(len(lengths))
    samples[:, 3] = lengths
    segments = fit_samples(samples, packing.max_seq_len, packing.overflow, ["lengths"])
    _closed(segments[:CHUNK], packing)  # compiles the kernels
    begin = time.thread_time()  # CPU time, so that other programs do not count
    packs = _closed(segments, packing)
    seconds = time.thread_time() - begin
    num_packs = max(len(packs), 1)
    found = packs.segments
    stops = found[:, START] + found[:, LENGTH]
    # Neither the end of the sample nor that of a whole piece of it.
    is_cut = (stops < found[:, TOTAL]) & (stops % packing.max_seq_len > 0)
    return PackerResult(
        fill=int(found[:, LENGTH].sum()) / (num_packs * packing.max_seq_len),
        cuts_per_pack=int(is_cut.sum()) / num_packs,
        wait=_waiting(segments[:NUM_WATCHED], packing),
        sample_ns=1e9 * seconds / len(lengths),
    )


def samples_at_once(segments: Int64Array, packing: Packing) -> int:
    """Return how many of these segments a planner in one lane passes to its packer together."""
    if not packing.packs_windows:
        return CHUNK
    num_packs, num_samples = Order().pack_window
    mean = segments[:, LENGTH].mean()
    return max(min(num_samples, int(num_packs * packing.max_seq_len / mean)), CHUNK)


def _closed(segments: Int64Array, packing: Packing) -> Packs:
    packer = make_packer(packing)
    size = samples_at_once(segments, packing)
    parts = [packer.add(segments[i : i + size]) for i in range(0, len(segments), size)]
    return Packs.join(parts)


def _waiting(segments: Int64Array, packing: Packing) -> tuple[float, float, float]:
    packer = make_packer(packing)
    arrived = np.zeros(len(segments), np.int64)  # packs that had left when each sample arrived
    waits: list[Int64Array] = []
    number = segments.copy()
    number[:, SAMPLE] = np.arange(len(segments))
    num_packs = 0
    size = len(segments) if packing.packs_windows else 1
    for row in range(0, len(segments), size):
        arrived[row : row + size] = num_packs
        packs = packer.add(number[row : row + size])
        sizes = np.diff(packs.ends, prepend=0)
        left = num_packs + np.repeat(np.arange(len(packs)), sizes)
        waits.append(left - arrived[packs.segments[:, SAMPLE]])
        num_packs += len(packs)
    waited = np.sort(np.concatenate(waits)) if num_packs else np.zeros(1, np.int64)
    p99 = waited[int(np.ceil(0.99 * len(waited))) - 1]
    return float(waited.mean()), float(p99), float(waited[-1])
