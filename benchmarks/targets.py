"""Targets compared with the measurements; every ratio is between results of one run.

::

    Target("threads, raw, web: over StreamingDataset's reading", ">=", 30, value=...) --> a row

Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from results import Results

__all__ = ["Target", "rows", "targets"]

OURS, LITDATA = "peers/streampack/", "peers/litdata/"
AS_RAW = 0.9  # what counts as the same speed, of two measurements that take turns


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target for one measured value."""

    what: str
    sign: str
    bound: float
    value: Callable[[Results], float | None]
    unit: str = "x"

    def row(self, results: Results) -> list[str]:
        """Return the row of the table."""
        value = self.value(results)
        target = f"{self.sign} {self.show(self.bound)}"
        if value is None:
            return [self.what, target, "not measured", ""]
        holds = value >= self.bound if self.sign == ">=" else value <= self.bound
        return [self.what, target, self.show(value), "yes" if holds else "**no**"]

    def show(self, value: float) -> str:
        """Return a value with its unit."""
        if self.unit == "%":
            return f"{100 * value:.5g} %"
        digits = f"{value:.2f}" if self.unit == "x" and value < 10 else f"{value:,.3g}"
        digits = f"{value:,.0f}" if value >= 1000 else digits
        return digits + ("x" if self.unit == "x" else f" {self.unit}")


def _field(bench: str, field: str, **params: Any) -> Callable[[Results], float | None]:
    """Return what reads a field of one line."""

    def read(results: Results) -> float | None:
        line = results.one(bench, **params)
        return None if line is None else line.get(field)

    return read


def _over(bench: str, others: list[str], **params: Any) -> Callable[[Results], float | None]:
    """Return what divides one rate by the highest of others."""

    def read(results: Results) -> float | None:
        ours = results.one(bench, **params)
        found = [results.one(other, **params) for other in others]
        rates = [line["median"] for line in found if line is not None]
        return ours["median"] / max(rates) if ours and rates else None

    return read


def _over_zephon(workload: str) -> Callable[[Results], float | None]:
    """Return what divides our whole pass by Zephon's best, which may leave out its start."""

    def read(results: Results) -> float | None:
        ours = results.one("texts/streampack/planned", workload=workload)
        lines = results.group("texts/zephon/", workload=workload, kind="texts")
        rates = [max(line["median"], line["tokens_per_cpu_s_after"]) for line in lines]
        return ours["median"] / max(rates) if ours and rates else None

    return read


def _of_texts() -> list[Target]:
    made = []
    for workload in ("jsonl", "parquet"):
        what = f"texts of {workload}, planned, empty cache, CPU seconds"
        value = _field("texts/streampack/planned", "of_tokenizer", workload=workload)
        made += [
            Target(
                what=f"{what}: of the tokenizer alone", sign=">=", bound=0.85, value=value, unit="%"
            ),
            Target(
                what=f"{what}: over Zephon's best",
                sign=">=",
                bound=1.4,
                value=_over_zephon(workload),
            ),
        ]
    return made


def _streams_over_one(results: Results) -> float | None:
    many, one = (results.one("plan/streams", num_streams=count) for count in (100, 1))
    return many["median"] / one["median"] if many and one else None


def _most_for_tiny_streams(results: Results) -> float | None:
    lines = results.group("plan/tiny")
    return max((line["ratio"] for line in lines if line["params"]["tiny"]), default=None)


def _most_for_tiny_blocks(results: Results) -> float | None:
    lines = results.group("plan/tiny")
    return max((line["ratio"] for line in lines if line["params"].get("block_size")), default=None)


def _most_for_chapters(results: Results) -> float | None:
    lines = results.group("plan/chapters")
    return max((line["ratio"] for line in lines if "ratio" in line), default=None)


def _worker_growth(results: Results) -> float | None:
    line = results.one("loader/workers_2", workload="web", batch_format="native")
    if line is None or "worker_mib" not in line:
        return None
    growth: float = line["worker_mib"]["late"] / line["worker_mib"]["early"]
    return growth


def _beside_peers() -> list[Target]:
    made = []
    for workload, max_seq_len in (("web", 8192), ("sft", 4096)):
        where = f"threads, native, {workload} at {max_seq_len}"
        for field, bound, what in (
            ("of_streaming", 30, "over StreamingDataset reading alone"),
            ("of_collator", 100, "over it with the packing collator"),
        ):
            value = _field(f"{OURS}threads", field, workload=workload)
            made.append(Target(what=f"{where}: {what}", sign=">=", bound=bound, value=value))
    for name in ("threads", "threads_compact"):
        value = _over(f"{OURS}{name}", [f"{LITDATA}documents", f"{LITDATA}blocks"], workload="web")
        what = f"{name.replace('_', ', ')}, web: over litData's faster way in process"
        made.append(Target(what=what, sign=">=", bound=1, value=value))
    for name in ("workers_2", "workers_2_compact"):
        what = name.replace("workers_2", "two workers").replace("_", ", ")
        others = [f"{LITDATA}documents, 2 workers", f"{LITDATA}blocks, 2 workers"]
        made += [
            Target(
                what=f"{what}, web: over StreamingDataset with two",
                sign=">=",
                bound=6,
                value=_field(f"{OURS}{name}", "of_streaming", workload="web"),
            ),
            Target(
                what=f"{what}, web: over litData's faster way with two",
                sign=">=",
                bound=1,
                value=_over(f"{OURS}{name}", others, workload="web"),
            ),
        ]
    return made


def _beside_the_machine() -> list[Target]:
    web = {"workload": "web"}
    made = []
    for workload, bound in (("web", 0.5), ("sft", 0.25)):
        value = _field("batch/gather", "ratio", workload=workload)
        what = f"gather, {workload}: of a memory copy of its tokens"
        made.append(Target(what=what, sign=">=", bound=bound, value=value, unit="%"))
    for batch_format, bound in (("native", 0.4), ("compact", 0.5)):
        value = _field("loader/threads", "of_fresh_write", batch_format=batch_format, **web)
        what = f"threads, {batch_format}, web: of writing its bytes into fresh memory"
        made.append(Target(what=what, sign=">=", bound=bound, value=value, unit="%"))
    zstd = "zstd shards, web, first epoch, cold cache"
    for name, what in (("at_hand", "memory at hand"), ("first", "memory of the host's")):
        value = _field(f"loader/zstd/{name}", "of_decompression", **web)
        what = f"{zstd}, {what}: of decompression alone"
        made.append(Target(what=what, sign=">=", bound=0.7, value=value, unit="%"))
    made += [
        Target(
            what="zstd shards, web, second epoch: of raw shards",
            sign=">=",
            bound=AS_RAW,
            value=_field("loader/zstd/second", "of_threads", **web),
            unit="%",
        ),
    ]
    return made


def _alone() -> list[Target]:
    ns = {"sign": "<=", "unit": "ns"}
    most = {"num_samples": 99_993_600}
    return [
        Target(
            what="planning a sample, web at 8192, one core",
            bound=600,
            value=_field("plan/web", "median", packs=True),
            **ns,
        ),
        Target(
            what="planning a sample, sft at 2048",
            bound=300,
            value=_field("plan/sft", "median", packs=True),
            **ns,
        ),
        Target(
            what="of that order and mixing, web",
            bound=150,
            value=_field("plan/web", "median", packs=False),
            **ns,
        ),
        Target(
            what="of that order and mixing, sft",
            bound=150,
            value=_field("plan/sft", "median", packs=False),
            **ns,
        ),
        Target(
            what="constructor to first batch, 100 million samples",
            sign="<=",
            bound=2,
            value=_field("start/streampack", "median", **most),
            unit="s",
        ),
        Target(
            what="memory for that, beyond the index",
            sign="<=",
            bound=400,
            value=_field("start/streampack", "beyond_index_mib", **most),
            unit="MiB",
        ),
        Target(
            what="planning, 100 streams over one", sign="<=", bound=1.5, value=_streams_over_one
        ),
        Target(
            what="planning beside a tiny stream over without",
            sign="<=",
            bound=2.0,
            value=_most_for_tiny_streams,
        ),
        Target(
            what="planning with shuffle blocks of one to three samples over without",
            sign="<=",
            bound=2.0,
            value=_most_for_tiny_blocks,
        ),
        Target(
            what="planning a run of chapters over one without",
            sign="<=",
            bound=1.05,
            value=_most_for_chapters,
        ),
        Target(
            what="a worker's memory, end of the run over its 50th batch",
            sign="<=",
            bound=1.05,
            value=_worker_growth,
        ),
        Target(
            what="fill, web at 8192, a whole epoch",
            sign=">=",
            bound=0.999,
            value=_field("plan/web", "fill", packs=True),
            unit="%",
        ),
    ]


def targets() -> list[Target]:
    """Return all that must hold."""
    return [*_beside_peers(), *_of_texts(), *_beside_the_machine(), *_alone()]


def rows(results: Results) -> list[list[str]]:
    """Return the rows of the table: what, target, measured, whether it has."""
    return [target.row(results) for target in targets()]
