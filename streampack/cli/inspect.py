"""``streampack inspect PATH``: show a stream's contents and one of its packs.

::

    job.json, part.json --> parts, bad rows            of a stream that `streampack write` made
    index.json -----------> shards, columns            immediately
    length file, or the
    headers of shards ----> lengths                    the first 16 shards without a length file
    the first shards -----> one pack, decoded          a few samples
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from streampack._paths import folder_of
from streampack.cli.console import counted, output_console, visible
from streampack.cli.verbs import Inspect
from streampack.config import Packing
from streampack.errors import ConfigError
from streampack.gather.gather import Gatherer
from streampack.mds.index import INDEX_FILE
from streampack.pack import fit_samples, make_packer
from streampack.report.bars import colour, pack_lines
from streampack.report.lengths import histogram_table, length_quantiles
from streampack.streams import Stream, TokenStream, open_stream
from streampack.streams.sources.shards import Shards
from streampack.texts.rows import RowFormat, tokenizer_digest
from streampack.texts.tokenization import load_tokenizer
from streampack.types import LENGTH, SAMPLE, START, TOTAL, Int64Array, IntArray, Packs
from streampack.write.files import finished_parts
from streampack.write.job import Settings, read_job
from streampack.write.job_output import open_output
from streampack.write.part import shown_row

MAX_SHARDS_SHOWN = 10
MAX_BAD_ROWS_SHOWN = 5
MAX_SHARDS_READ = 16  # of shards to fetch or decompress
MAX_SAMPLES_READ = 1_000_000  # of memory-mapped shards: a few seconds
DIGITS_SHOWN = 3  # of an estimate
BAR_WIDTH = 96
MARGIN = 32  # columns next to the bar
CHARACTERS_SHOWN = 160  # of each segment


def run_inspect(options: Inspect) -> None:
    """Print a stream's parts, its shards, its lengths and one of its packs.

    For an unfinished stream, only the parts are printed.
    """
    console = output_console()
    path = folder_of(options.path)
    given = {name: getattr(options, name) for name in ("split", "tokens", "check_dtypes")}
    given["remote" if path is None else "local"] = path or options.path
    described = Stream(Shards(**given))
    lines, is_complete = _job_progress(options)
    for line in lines:
        console.out(line, highlight=False)
    if not is_complete:
        return
    stream = open_stream(described, 0, has_targets=False)
    console.print(_shard_table(stream))
    num_read = stream.num_shards
    if not stream.shards.has_lengths:
        mapped = int(np.searchsorted(stream.first_sample, MAX_SAMPLES_READ, "right")) - 1
        most = MAX_SHARDS_READ if stream.cache.needs_fetch else max(MAX_SHARDS_READ, mapped)
        num_read = min(num_read, most)
    lengths = lengths_of(stream, num_read)
    console.print(_length_line(stream, lengths, num_read))
    console.print(histogram_table(lengths))
    packs = _busiest_pack(stream, lengths, options.pack)
    decoder = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    # As a bar of many streams, so that each segment has a colour of its own.
    bar = np.stack([np.arange(len(packs[0])), packs[0][:, LENGTH]], axis=1)
    width = min(console.width - MARGIN, BAR_WIDTH)
    console.print(Text("\na pack  ") + pack_lines([bar], options.pack, width))
    console.print(_decode(stream, packs, options.pack, decoder))


def _job_progress(options: Inspect) -> tuple[list[str], bool]:
    """Return lines on the job that wrote a stream, and whether there is a whole stream to show.

    There are no lines if the stream is not the output of `streampack write`.
    """
    path = options.path if options.split is None else f"{options.path.rstrip('/')}/{options.split}"
    if folder_of(path) is None and not path.startswith("s3://"):
        return [], True
    output = open_output(path)
    job = read_job(output)
    if job is None:
        return [], True
    _check_tokenizer(options, job.settings)
    results = finished_parts(output, job)
    num_bad = sum(result.counts.num_bad_rows for result in results.values())
    lines = [
        f"{len(results):,} of {len(job.parts):,} parts are done, "
        f"{counted(num_bad, 'bad row')} skipped"
    ]
    bad_rows = (bad for result in results.values() for bad in result.bad_rows)
    lines += [f"  {shown_row(bad)}" for bad in islice(bad_rows, MAX_BAD_ROWS_SHOWN)]
    if num_bad > MAX_BAD_ROWS_SHOWN:
        lines.append(f"  and {num_bad - MAX_BAD_ROWS_SHOWN:,} more; part.json names 1,000 a part")
    if facts := job.settings["tokenizer_facts"]:
        lines.append(
            f"tokenizer {facts['name']}: {facts['size']:,} ids, BOS {facts['bos']} "
            f"({facts['bos_id']}), EOS {facts['eos']} ({facts['eos_id']})"
        )
    if len(results) < len(job.parts):
        return [*lines, "the stream is not finished: run the command that began it again"], False
    if output.read(INDEX_FILE) is None:
        return [*lines, f"all parts are done; finish the stream: streampack merge {path}"], False
    return lines, True


def _check_tokenizer(options: Inspect, settings: Settings) -> None:
    if options.tokenizer is None or settings["tokenizer"] is None:
        return
    rows = RowFormat(tokenizer=options.tokenizer, chat=settings["chat"])
    if tokenizer_digest(rows) != settings["tokenizer"]:
        name = (settings["tokenizer_facts"] or {}).get("name", "another one")
        raise ConfigError(
            f"tokenizer={str(options.tokenizer)!r} differs from the one that wrote "
            f"{options.path}, {name}; name that one, or omit it to see the ids",
            option="tokenizer",
        )


def lengths_of(stream: TokenStream, num_shards: int) -> Int64Array:
    """Return the lengths of the samples in the first shards, in tokens."""
    parts = [stream.shard_lengths(shard) for shard in range(num_shards)]
    return np.concatenate(parts).astype(np.int64)


def _shard_table(stream: TokenStream) -> Table:
    more, shards = stream.num_shards - MAX_SHARDS_SHOWN, counted(stream.num_shards, "shard")
    title = f"{stream.name}: {shards}, {counted(stream.num_samples, 'sample')}"
    table = Table(
        title=Text(title, style="table.title"),  # of plain text a name's brackets would be markup
        title_justify="left",
        caption=f"... and {more:,} more" if more > 0 else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("shard", "samples", "bytes", "compressed"):
        table.add_column(name, justify="left" if name == "shard" else "right")
    numbers = range(min(stream.num_shards, MAX_SHARDS_SHOWN))
    for shard in filter(None, map(stream.shards.entry, numbers)):
        packed = "" if shard.packed is None else f"{shard.packed.num_bytes:,}"
        table.add_row(
            shard.raw.basename, f"{shard.num_samples:,}", f"{shard.raw.num_bytes:,}", packed
        )
    return table


def _length_line(stream: TokenStream, lengths: Int64Array, num_read: int) -> Text:
    total = f"{lengths.sum():,} tokens"
    seen = ""
    if num_read < stream.num_shards:
        # Scaled by bytes: tokens per byte vary less among shards than tokens per shard.
        share = lengths.sum() / stream.raw_bytes[:num_read].sum()
        about = float(share * stream.raw_bytes.sum())
        total = (
            f"about {float(f'{about:.{DIGITS_SHOWN}g}'):,.0f} tokens, estimated from "
            f"{num_read:,} of {stream.num_shards:,} shards; `streampack index` counts them"
        )
        seen = f" (of the first {counted(len(lengths), 'sample')})"
    parts = [f"{name} {value:,.0f}" for name, value in length_quantiles(lengths).items()]
    return Text(f"{total}\nlengths: {', '.join(parts)}{seen}")


def _busiest_pack(stream: TokenStream, lengths: Int64Array, max_seq_len: int) -> Packs:
    # Four packs' worth of tokens are enough to fill one completely.
    num_samples = int(np.searchsorted(np.cumsum(lengths), 4 * max_seq_len)) + 1
    few = lengths[:num_samples]
    samples = np.stack([0 * few, 0 * few, np.arange(len(few)), few], axis=1)
    packer = make_packer(Packing(max_seq_len=max_seq_len))
    packs = packer.add(fit_samples(samples, max_seq_len, "split", [stream.name]))
    packs = Packs.join([packs, packer.flush()])
    busiest = int(np.argmax(np.diff(packs.ends, prepend=0)))
    return packs.slice(busiest, busiest + 1)


def _decode(stream: TokenStream, packs: Packs, max_seq_len: int, decoder: Tokenizer | None) -> Text:
    gatherer = Gatherer([stream], Packing(max_seq_len=max_seq_len))
    row = gatherer.gather(packs, 1).tokens[0]
    lines = []
    ends = np.cumsum(packs[0][:, LENGTH]).tolist()
    for number, (segment, end) in enumerate(zip(packs[0].tolist(), ends, strict=True)):
        ids = row[end - segment[LENGTH] : end]
        start, stop = segment[START], segment[START] + segment[LENGTH]
        where = f"sample {segment[SAMPLE]}, tokens {start}-{stop - 1} of {segment[TOTAL]}"
        lines.append(Text(where, style=f"bold {colour(number)}"))
        lines.append(Text(_words(ids, decoder), style=colour(number)))
    return Text("\n").join(lines)


def _words(ids: IntArray, decoder: Tokenizer | None) -> str:
    some = ids[:CHARACTERS_SHOWN].tolist()
    if decoder is None:
        text = " ".join(map(str, some))
        end = text.rfind(" ", 0, CHARACTERS_SHOWN + 1)  # an id is shown whole, or not at all
    else:
        text = visible(decoder.decode(some, skip_special_tokens=False))
        end = CHARACTERS_SHOWN
    is_whole = len(some) == len(ids) and len(text) <= CHARACTERS_SHOWN
    return text if is_whole else f"{text[:end]} ..."
