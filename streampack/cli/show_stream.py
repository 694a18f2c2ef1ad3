"""What a stream holds, and what one of its packs looks like: the work of ``streampack inspect``.

::

    index.json ----------> shards, columns            at once
    length file, or the
    heads of some shards -> lengths                    the first 16 shards where there is none
    the first shards -----> one pack, decoded          a few samples

Cost: seconds; without a length file, the first shards are fetched and decompressed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.paths import folder_of
from streampack.read import Gatherer
from streampack.report import colour, histogram_table, length_quantiles, pack_lines
from streampack.streams import OpenStream, Stream, open_stream
from streampack.types import LENGTH, SAMPLE, START, TOTAL, Int64Array, IntArray, Packs
from streampack.write.rows import load_tokenizer

__all__ = ["show_stream"]

MAX_SHARDS_SHOWN = 10
MAX_SHARDS_READ = 16
BAR_WIDTH = 96
MARGIN = 32  # beside the bar
CHARACTERS_SHOWN = 160  # of each segment


def show_stream(
    path: str, pack: int, tokenizer: Path | None, tokens: str, tokens_dtype: str | None
) -> None:
    """Print what a stream holds.

    Args:
        path: The stream's folder, or the URL of a remote one.
        pack: Tokens in the pack that is drawn.
        tokenizer: What to decode with; None: token ids.
        tokens: Column of the token ids.
        tokens_dtype: Integer type of the ids in a column of bytes.

    Raises:
        DataError: If the stream is not what it should be.
    """
    folder = folder_of(path)
    described = Stream(
        remote=path if folder is None else None,
        local=folder,
        tokens=tokens,
        tokens_dtype=tokens_dtype,
    )
    stream = open_stream(described, 0)
    console = Console()
    console.print(_shard_table(stream))
    num_read = stream.num_shards if stream.has_length_file else MAX_SHARDS_READ
    lengths = np.concatenate([stream.shard_lengths(n) for n in _shards(stream, num_read)])
    console.print(_length_line(stream, lengths))
    console.print(histogram_table(lengths))
    packs = _busiest_pack(stream, lengths, pack)
    decoder = None if tokenizer is None else load_tokenizer(tokenizer)
    console.print(_draw(packs, pack, console.width - MARGIN))
    console.print(_decode(stream, packs, pack, decoder))


def _shards(stream: OpenStream, at_most: int) -> range:
    return range(min(stream.num_shards, at_most))


def _shard_table(stream: OpenStream) -> Table:
    """Return the first shards, and how many more there are."""
    more = stream.num_shards - MAX_SHARDS_SHOWN
    table = Table(
        title=f"{stream.name}: {stream.num_shards:,} shards, {stream.num_samples:,} samples",
        title_justify="left",
        caption=f"... and {more:,} more" if more > 0 else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("shard", "samples", "bytes", "compressed"):
        table.add_column(name, justify="left" if name == "shard" else "right")
    for shard in (stream.index.shards[number] for number in _shards(stream, MAX_SHARDS_SHOWN)):
        packed = "" if shard.packed is None else f"{shard.packed.num_bytes:,}"
        table.add_row(
            shard.raw.basename, f"{shard.num_samples:,}", f"{shard.raw.num_bytes:,}", packed
        )
    return table


def _length_line(stream: OpenStream, lengths: Int64Array) -> Text:
    """Return the quantiles of the lengths, and how all tokens are known."""
    total, source = stream.total_tokens()
    known = {"lengths": "counted in the length file", "bytes": "estimated from the shards' bytes"}
    parts = [f"{name} {value:,.0f}" for name, value in length_quantiles(lengths).items()]
    seen = "" if len(lengths) == stream.num_samples else f" (of the first {len(lengths):,} samples)"
    return Text(f"{total:,} tokens, {known[source]}\nlengths: {', '.join(parts)}{seen}")


def _busiest_pack(stream: OpenStream, lengths: Int64Array, max_seq_len: int) -> Packs:
    """Return the pack with most segments, of those that the first few samples make."""
    # Four packs' worth of tokens are enough to fill one to the brim.
    num_samples = int(np.searchsorted(np.cumsum(lengths), 4 * max_seq_len)) + 1
    few = lengths[:num_samples]
    samples = np.stack([0 * few, 0 * few, np.arange(len(few)), few], axis=1)
    packer = make_packer(Packing(max_seq_len=max_seq_len))
    packs = packer.add(fit_samples(samples, max_seq_len, "split", [stream.name]))
    packs = Packs.join([packs, packer.flush()])
    busiest = int(np.argmax(np.diff(packs.ends, prepend=0)))
    return packs.slice(busiest, busiest + 1)


def _draw(packs: Packs, max_seq_len: int, width: int) -> Text:
    """Return the pack as a bar, each of its segments in a colour of its own."""
    bar = packs[0][:, [SAMPLE, LENGTH]]
    bar[:, 0] = np.arange(len(bar))
    return Text("\na pack  ") + pack_lines([bar], max_seq_len, min(width, BAR_WIDTH))


def _decode(stream: OpenStream, packs: Packs, max_seq_len: int, decoder: Tokenizer | None) -> Text:
    """Return the pack's segments, decoded, in the colours of the bar."""
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
    """Return the beginning of a segment on one line."""
    some = ids[:CHARACTERS_SHOWN].tolist()
    if decoder is None:
        text = " ".join(map(str, some))
    else:
        text = decoder.decode(some, skip_special_tokens=False).replace("\n", "⏎")
    is_whole = len(some) == len(ids) and len(text) <= CHARACTERS_SHOWN
    return text if is_whole else f"{text[:CHARACTERS_SHOWN]} ..."
