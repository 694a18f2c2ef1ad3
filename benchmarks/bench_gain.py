"""The gain from packing: real tokens per second in a training step, packed and padded.

::

    python benchmarks/bench_gain.py --plot gain.png --table gain.txt
    python benchmarks/bench_gain.py --device cuda --dim 2048 --num-layers 16 --num-heads 16

    padded_max       4 rows, padded to max_seq_len            s s s s . . . . . . . . . . . . . . .
    padded_longest   4 rows, padded to their longest          s s s s . . .
    padded_budget    rows padded to their longest, as many slots as a batch of packs
    bucketed         the same, with samples of similar length: BucketedIterableDataset
    packed_mask      4 packs, block_causal_mask               a a a a b b b c d d d d d d e e e e e
    packed_segments  4 packs, each segment by itself, like varlen kernels

One small decoder trains on all of them, forward and backward with AdamW in float32; for rows of one
sample, is_causal replaces the mask. Batches are ready before the clock starts, which measures the
processor time of one thread. The ways take turns with similar numbers of slots; the first turn does
not count.

    tokens/s = slots/s of the steps * fill of the whole epoch         epoch = its tokens / tokens/s
    bound    = slots of the padded epoch / slots of the packed one    as if all slots cost the same

With ``--device cuda`` the model runs in bfloat16 (autocast), packed_segments uses FlashAttention's
varlen kernel, packed_blocks uses FlexAttention, and the clock measures wall time.

Cost: four minutes on one core.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
import workloads
from gain_model import Decoder
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch.nn import functional

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    IterableStream,
    PackedIterableDataset,
    Packing,
)

Batch = dict[str, Any]
Samples = Sequence[np.ndarray]

VOCABULARY = 2048
IGNORED = -100
TORCHTUNE = {512: "3x", 4096: "nearly 5x"}  # the speedups in its write-up on packing


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to put samples into batches; counts are those of a whole epoch."""

    name: str
    kind: str
    """Of attention."""
    tokens: int
    """Real tokens."""
    slots: int
    """Rows times their length, summed over all batches."""
    steps: int
    """Batches."""
    batches: Iterator[Batch]
    """Its first batches, again and again."""

    @property
    def fill(self) -> float:
        """The share of slots with a real token."""
        return self.tokens / self.slots


def slots_of(batch: Batch) -> int:
    """Return the token slots of a batch."""
    slots: int = batch["tokens"].numel()
    return slots


def padded(samples: Samples, width: int) -> Batch:
    """Return samples as rows of `width` tokens, with shifted labels."""
    tokens = np.zeros((len(samples), width), np.int64)
    labels = np.full((len(samples), width), IGNORED)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample
        labels[row, : len(sample) - 1] = sample[1:]
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "input_pos": torch.arange(width).expand(len(samples), width),
    }


def rows_within(lengths: Sequence[int], slots: int) -> Iterator[slice]:
    """Yield runs of samples that fit in so many slots when padded to the longest of the run."""
    first = longest = 0
    for number, length in enumerate(lengths):
        if number > first and (number + 1 - first) * max(longest, length) > slots:
            yield slice(first, number)
            first, longest = number, 0
        longest = max(longest, length)
    yield slice(first, len(lengths))


def kept(batches: Iterable[Batch], slots: int) -> Iterator[Batch]:
    """Return a cycle of the first batches, enough of them for so many slots."""
    first = []
    for batch in batches:
        first.append(batch)
        slots -= slots_of(batch)
        if slots <= 0:
            break
    return itertools.cycle(first)


def padded_layout(
    name: str, samples: Samples, runs: Sequence[slice], width: int | None, keep: int
) -> Layout:
    """Return runs of samples as batches, padded to `width` or, by default, to their longest."""
    sizes = [len(sample) for sample in samples]
    widths = [width or max(sizes[run]) for run in runs]
    pairs = zip(runs, widths, strict=True)
    return Layout(
        name=name,
        kind="causal",
        tokens=sum(sizes),
        slots=sum((run.stop - run.start) * wide for run, wide in zip(runs, widths, strict=True)),
        steps=len(runs),
        batches=kept((padded(samples[run], wide) for run, wide in pairs), keep),
    )


def dataset_layouts(kinds: dict[str, str], dataset: Iterable[Batch], keep: int) -> list[Layout]:
    """Return the layouts of a dataset's epoch, by name, one for each kind of attention."""
    tokens = slots = steps = 0
    first: list[Batch] = []
    for batch in dataset:
        if slots < keep:
            first.append(batch)
        tokens += int(batch["segments"][:, 5].sum())
        slots += slots_of(batch)
        steps += 1
    layouts = []
    for name, kind in kinds.items():
        batches = map(flat, first) if kind == "segments" else first
        cycle = kept(batches, keep)
        layouts.append(
            Layout(name=name, kind=kind, tokens=tokens, slots=slots, steps=steps, batches=cycle)
        )
    return layouts


def flat(batch: Batch) -> Batch:
    """Return a batch as a single row, in which `cu_seqlens` are the edges."""
    rows = {key: batch[key].view(1, -1) for key in ("tokens", "labels", "input_pos")}
    return batch | rows


def layouts(
    samples: Samples,
    max_seq_len: int,
    batch_size: int,
    turns: int = 1,
    *,
    with_blocks: bool = False,
) -> list[Layout]:
    """Return all ways to batch samples, each with batches for so many turns."""
    samples = [sample[:max_seq_len] for sample in samples]
    budget = batch_size * max_seq_len
    keep, count = turns * budget, len(samples)
    fours = [slice(i, min(i + batch_size, count)) for i in range(0, count, batch_size)]
    within = list(rows_within([len(sample) for sample in samples], budget))
    packed = PackedIterableDataset(
        [IterableStream(samples)],
        packing=Packing(max_seq_len=max_seq_len),
        batch_size=batch_size,
    )
    bucketed = BucketedIterableDataset(
        [IterableStream(samples)], bucketing=Bucketing(max_tokens=budget)
    )
    kinds = {"packed_mask": "mask", "packed_segments": "segments"}
    if with_blocks:
        kinds["packed_blocks"] = "blocks"
    return [
        padded_layout("padded_max", samples, fours, max_seq_len, keep),
        padded_layout("padded_longest", samples, fours, None, keep),
        padded_layout("padded_budget", samples, within, None, keep),
        *dataset_layouts({"bucketed": "causal"}, bucketed, keep),
        *dataset_layouts(kinds, packed, keep),
    ]


class Trainer:
    """A model that trains on any layout, and measures its speed."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = Decoder(VOCABULARY, dim, num_layers, num_heads).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._device = device

    def step(self, batch: Batch, kind: str) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
            logits = self.model(batch, kind)
        targets = batch["labels"].flatten()
        functional.cross_entropy(logits.float().flatten(0, 1), targets).backward()
        self._optimizer.step()

    def rate(self, layout: Layout, slots: int) -> float:
        """Train on at least so many slots; return the slots per second."""
        batches = []
        while sum(map(slots_of, batches)) < slots:
            batch = next(layout.batches)
            batches.append({key: self._placed(value) for key, value in batch.items()})
        start = self._clock()
        for batch in batches:
            self.step(batch, layout.kind)
        return sum(map(slots_of, batches)) / (self._clock() - start)

    def _placed(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, torch.Tensor) else value

    def _clock(self) -> float:
        """Return the processor time, or for a GPU the wall time after synchronising."""
        if self._device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def measure(args: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each max_seq_len and way, once all are measured."""
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.dim, args.num_layers, args.num_heads, args.device)
    samples = [ids % VOCABULARY for ids in workloads.tokens("sft", args.num_samples)]
    # New shapes cost extra on a GPU, so there all turns use the same batches.
    turns = args.batches * (args.runs + 1 if args.device == "cpu" else 1)
    make = partial(layouts, samples, with_blocks=args.device == "cuda")
    ways = {s: make(s, args.batch_size, turns) for s in args.max_seq_len}
    rates: dict[tuple[int, str], list[float]] = {}
    for _ in range(args.runs + 1):
        for max_seq_len, several in ways.items():
            for way in several:
                rate = trainer.rate(way, args.batches * args.batch_size * max_seq_len)
                rates.setdefault((max_seq_len, way.name), []).append(rate)
    params = {name: value for name, value in vars(args).items() if name not in ("plot", "table")}
    params |= {"workload": "sft", "vocabulary": VOCABULARY}
    if args.device == "cuda":
        params["gpu"] = torch.cuda.get_device_name()
    for max_seq_len, several in ways.items():
        runs = {way.name: rates[max_seq_len, way.name][1:] for way in several}
        yield from lines_of(several, runs, params | {"max_seq_len": max_seq_len})


def lines_of(
    ways: Sequence[Layout], rates: dict[str, list[float]], params: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one max_seq_len; those of packs include the gain over the others."""
    slots_per_s = {way.name: statistics.median(rates[way.name]) for way in ways}
    speeds = {way.name: slots_per_s[way.name] * way.fill for way in ways}
    for way in ways:
        fields: dict[str, Any] = {
            "clock": "processor time" if params["device"] == "cpu" else "wall time",
            "fill": round(way.fill, 4),
            "steps": way.steps,
            "epoch_tokens": way.tokens,
            "epoch_s": round(way.tokens / speeds[way.name], 1),
            "slots_per_s": round(slots_per_s[way.name]),
        }
        if way.name.startswith("packed"):
            fields["gain_over"] = {
                other.name: {
                    "measured": round(speeds[way.name] / speeds[other.name], 2),
                    "bound": round(other.slots / way.slots, 2),
                }
                for other in ways
                if not other.name.startswith("packed")
            }
            fields["torchtune_reports"] = TORCHTUNE.get(params["max_seq_len"])
        runs = [rate * way.fill for rate in rates[way.name]]
        yield record.line(f"gain/{way.name}", "tokens/s", runs, params, **fields)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as Markdown, with the measurements and the gain from packing."""
    rows = [
        "| max_seq_len | batches | fill | slots/s | tokens/s | epoch "
        "| packed_segments gains | packed_mask gains | bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        name, size = line["bench"].removeprefix("gain/"), line["params"]["max_seq_len"]
        over = {
            other["bench"]: other["gain_over"][name]
            for other in lines
            if other["params"]["max_seq_len"] == size and name in other.get("gain_over", {})
        }
        gains = [""] * 3
        if over:
            segments, mask = over["gain/packed_segments"], over["gain/packed_mask"]
            gains = [f"{x:.2f}" for x in (segments["measured"], mask["measured"], mask["bound"])]
        rows.append(
            f"| {size} | {name} | {line['fill']:.1%} | {line['slots_per_s']:,} | "
            f"{round(line['median']):,} | {line['epoch_s']:,.0f} s | {' | '.join(gains)} |"
        )
    return "\n".join(rows) + "\n"


def plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot tokens per second, and what they would be without any padding."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    sizes = sorted({line["params"]["max_seq_len"] for line in lines})
    names = list(dict.fromkeys(line["bench"].removeprefix("gain/") for line in lines))
    width = 0.8 / len(names)
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    panels = [("median", "real tokens / s"), ("epoch_s", "seconds of an epoch")]
    for axes, (field, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for line in lines:
            name = line["bench"].removeprefix("gain/")
            at = sizes.index(line["params"]["max_seq_len"]) + (names.index(name) + 0.5) * width
            bound = line["slots_per_s"]
            if field == "epoch_s":
                bound = line["epoch_tokens"] / bound
            axes.bar(at, line[field], width * 0.9, color=colours[name])
            axes.plot([at - width * 0.45, at + width * 0.45], [bound, bound], color="black")
        lowest = (
            min(line[field] for line in lines) / 3
        )  # a bar on a logarithmic axis needs a lower end
        axes.set(yscale="log", title=title, ylim=(lowest, None))
        axes.set_xticks([i + 0.4 for i in range(len(sizes))], [f"max_seq_len {s}" for s in sizes])
        axes.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [Patch(color=colours[name], label=name) for name in names]
    handles.append(
        Line2D([], [], color="black", label="bound: as many slots, none of them padding")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print one line for each max_seq_len and way."""
    parser = record.options(__doc__, runs=3)
    parser.add_argument("--max-seq-len", type=int, nargs="+", default=list(TORCHTUNE))
    parser.add_argument("--batch-size", type=int, default=4, help="rows, as in torchtune's runs")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, default=1, help="batches of packs in a turn")
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    parser.add_argument("--table", type=Path, help="a Markdown table to write")
    args = parser.parse_args()
    lines = list(measure(args))
    for line in lines:
        record.emit(line, args.out)
    if args.plot:
        plot(lines, args.plot)
    if args.table:
        args.table.write_text(table(lines))


if __name__ == "__main__":
    main()
