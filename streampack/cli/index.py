"""``streampack index PATHS``: write length files, with hashes, for streams that have none.

::

    PATH/index.json, PATH/*/index.json  -->  a lengths.bin next to each
    s3://bucket/stream/index.json       -->  s3://bucket/stream/lengths.bin, uploaded
    --out FOLDER web.bin                -->  FOLDER/web.bin.documents
    --out FOLDER rows.jsonl             -->  FOLDER/rows.npz, the rows of lines
    --out FOLDER --tokenizer T rows.*   -->  FOLDER/rows.npz, FOLDER/lengths.npz
"""

from __future__ import annotations

from dataclasses import fields
from itertools import count

from rich.console import Console

from streampack.cli.console import counted, output_console, progress
from streampack.cli.verbs import Index, RowOptions
from streampack.cli.write import refuse_stated, stated_format
from streampack.errors import ConfigError
from streampack.flat.files import is_flat
from streampack.index import write_lengths, write_text_lengths
from streampack.index.token_index import index_files
from streampack.streams.sources.chats import Chats
from streampack.streams.sources.texts import Texts
from streampack.texts.counts import write_index
from streampack.texts.inputs.listing import format_of, list_inputs
from streampack.texts.units import LINES

OF_TOKENS = ("eos_id", "bos_id", "part", "resume", "num_workers", "check_dtypes")
OF_FILES = ("format", "tokens", "dtype", "trailing")
OF_TOKEN_FILES = ("bos_id", "dtype", "format", "trailing", "part", "resume", "num_workers")
OF_SOURCE = ("transform", "version")
OF_TEXTS = (*OF_SOURCE, *(field.name for field in fields(RowOptions)[1:]))
"""Options of texts, except for their tokenizer."""


def run_index(options: Index) -> None:
    """Write the missing length files, and print a line for each."""
    console = output_console()
    sources = options.paths[0] if len(options.paths) == 1 else options.paths
    if options.tokenizer is not None:
        _index_texts(console, options)
        return
    refuse_stated(options, OF_TEXTS, "is for texts; omit it, or set --tokenizer")
    if options.out is not None and options.eos_id is None and _index_lines(console, options):
        return
    if options.out is not None and is_flat(sources, options.format):
        _index_tokens(console, options, sources)
        return
    refuse_stated(options, OF_TOKEN_FILES, "is for token files; omit it, or set --out")
    others = {*OF_TEXTS, *OF_TOKEN_FILES, "tokenizer"}
    given = {name: value for name, value in vars(options).items() if name not in others}
    if (options.out is None) != (options.eos_id is None):
        missing = "out" if options.out is None else "eos_id"
        raise ConfigError("is needed to find documents in rows; set it", option=missing)
    documents = (given.pop("out"), given.pop("eos_id"))
    if options.out is not None:
        given["documents"] = documents
    with progress("shards read") as show:
        done = count(1)
        for path in given.pop("paths"):
            for stream in write_lengths(path, progress=lambda _: show(next(done)), **given):
                console.out(
                    f"{stream.path}: {counted(stream.num_samples, 'sample')}, "
                    f"{counted(stream.num_tokens, 'token')} in "
                    f"{counted(stream.num_shards, 'shard')}, column {stream.column!r}",
                    highlight=False,
                )


def _index_texts(console: Console, options: Index) -> None:
    """Tokenize texts or conversations for the lengths of their samples."""
    of_tokens = (*(name for name in OF_TOKEN_FILES if name != "num_workers"), "eos_id", "tokens")
    refuse_stated(options, of_tokens, "is for token files and rows of ids; omit it, or --tokenizer")
    if options.out is None:
        raise ConfigError("is needed for an index of texts; set it to a folder", option="out")
    if len(options.paths) > 1:
        raise ConfigError(
            f"{' '.join(options.paths)}: an index of texts is of one source; name its files by a "
            "folder or a glob, such as 'rows/*.jsonl'"
        )
    rows, kind = stated_format(options), Texts if options.chat is None else Chats
    names = {field.name for field in fields(kind)}
    given = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name in names}
    given |= {name: getattr(options, name) for name in (*OF_SOURCE, "local", "on_bad_row")}
    source = kind(options.paths[0], **given)
    found = write_text_lengths(source, options.out, num_workers=options.num_workers)
    console.out(
        f"{found.path}: {counted(found.num_samples, 'sample')}, "
        f"{counted(found.num_tokens, 'token')} in {counted(found.num_shards, 'text shard')}",
        highlight=False,
    )


def _index_lines(console: Console, options: Index) -> bool:
    """Count the rows of lines, if the paths are of such files."""
    is_named = all((format_of(path) or ("",))[0] in LINES for path in options.paths)
    if not is_named and is_flat(options.paths[0], options.format):
        return False
    files = [file for file in list_inputs(options.paths) if file.format in LINES]
    if not files or options.out is None:
        return False
    for file, num_rows in zip(files, write_index(files, options.out), strict=True):
        console.out(f"{file.uri}: {counted(num_rows, 'row')}", highlight=False)
    return True


def _index_tokens(console: Console, options: Index, sources: str | list[str]) -> None:
    given = {option: getattr(options, option) for option in (*OF_TOKENS, *OF_FILES)}
    with progress("files indexed") as show:
        for number, file in enumerate(index_files(sources, options.out or "", **given), 1):
            console.out(
                f"{file.name}: {counted(file.num_documents, 'document')}, "
                f"{counted(file.num_tokens, 'token')}; {file.num_left:,} outside of them",
                highlight=False,
            )
            show(number)
