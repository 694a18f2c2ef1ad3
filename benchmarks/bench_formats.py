"""Token files of other programs compared with MDS: tokens per second of an epoch, by format.

::

    the same documents as  mds  megatron  olmo  datatrove  arrow  litdata
                            '-- one epoch each, in turn: native and compact batches, one process

The files come from tests/helpers/flat.py, which uses the original writers if they are installed.

Cost: a minute, 1.5 GB of disk.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import record
import workloads

sys.path.insert(0, str(record.HOME))

from streampack import (
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.write import write_stream
from tests.helpers.flat import FORMATS, source_of, write

MAX_SEQ_LEN, BATCH_SIZE = 8192, 8


def epoch(stream: Stream, batch_format: str) -> tuple[int, float]:
    """Return the number of tokens in an epoch, and its seconds of processor time."""
    dataset = PackedStreamingDataset(
        [stream],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        order=Order(seed=1, num_lanes=1),
        batch_size=BATCH_SIZE,
        batch_format=batch_format,
        world=World(),
    )
    begin, tokens = time.process_time(), 0
    for batch in PackedDataLoader(dataset):
        tokens += batch["tokens"].numel()
    return tokens, time.process_time() - begin


def main() -> None:
    """Print a line for each format and kind of batch."""
    parser = record.options(__doc__, runs=5, num_samples=60_000)
    args = parser.parse_args()
    streams: dict[str, Stream] = {}
    folder: Path = args.data / "formats"
    for form in ("mds", *FORMATS):
        path = folder / form
        if not path.exists():
            drawn = workloads.tokens("web", args.num_samples)
            documents = [each.astype("uint16") for each in drawn]
            if form == "mds":
                write_stream(documents, path)
            else:
                write(form, path, documents)
        streams[form] = Stream(source_of(form, path))
    for batch_format in ("native", "compact"):
        rates: dict[str, list[float]] = {form: [] for form in streams}
        for turn in range(args.runs + 1):
            for form, stream in streams.items():
                tokens, seconds = epoch(stream, batch_format)
                if turn:
                    rates[form].append(tokens / seconds)
        base = sorted(rates["mds"])[args.runs // 2]
        for form, runs in rates.items():
            params = {"format": form, "batch_format": batch_format, "max_seq_len": MAX_SEQ_LEN}
            params |= {"num_samples": args.num_samples, "batch_size": BATCH_SIZE}
            ratio = round(sorted(runs)[args.runs // 2] / base, 3)
            line = record.line(f"formats/{form}", "tokens/s of CPU", runs, params, of_mds=ratio)
            record.emit(line, args.out)


if __name__ == "__main__":
    main()
