"""Planning of a job: its settings and the files of its input, before anything is written.

::

    options, tokenizer, first rows  -->  Settings    columns and their encodings
    paths                           -->  InputSlice  of each file, in the order of the input

The first batch of rows that has a good one decides on the columns that are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from streampack._checks import parse_bytes
from streampack.errors import ConfigError
from streampack.mds.encoder import ShardLayout
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.slices import InputSlice, RowBatch
from streampack.texts.rows import LOSS_MASK, RowFormat, tokenizer_digest
from streampack.texts.samples import TARGETS, SampleSchema, is_per_token, list_dtype
from streampack.texts.token_shard import dtype_of
from streampack.texts.tokenization import (
    compare_added_tokens,
    describe_tokenizer,
    load_tokenizer,
    num_ids,
)
from streampack.write.job import Settings
from streampack.write.options import WriteOptions

HASHES = ("xxh64",)


def plan_job(
    paths: Sequence[str], options: WriteOptions, known: Settings | None
) -> tuple[Settings, Sequence[InputSlice]]:
    """Return the settings of a job, and the whole files of its input.

    The columns of `known`, the settings of the job that is there already, are kept.
    """
    rows = options.rows
    part_bytes = parse_bytes("part_bytes", options.part_bytes)
    if not part_bytes:
        raise ConfigError(f"part_bytes={options.part_bytes!r} must be 1 or more; write '256mb'")
    layout = ShardLayout(  # refuses invalid options before the input is listed
        columns={options.column: "ndarray:int32"},
        compression=options.compression,
        size_limit=parse_bytes("size_limit", options.size_limit or None),
        hashes=HASHES,
    )
    digest = tokenizer_digest(rows)
    if rows.tokenizer is not None and rows.backend == "gigatoken":
        compare_added_tokens(rows.tokenizer)
    skips_damage = options.on_bad_row == "skip"
    files = list_inputs(paths)
    text = next((one for one in files if one.format == "text"), None)
    if text is not None and rows.tokenizer is None:
        raise ConfigError(
            f"{text.uri}: is text; set tokenizer= to a tokenizer.json, or name JSON lines of token "
            "ids"
        )
    dtype = _dtype_of(options)
    selection = rows.selection
    if known is not None and known["keep"] == list(selection.keep):
        stated = {name: encoding for name, encoding in rows.kept.items() if encoding}
        columns, per_token = {**known["columns"], **stated}, tuple(known["per_token"])
    else:
        read = partial(read_rows, selection=selection, skips_damage=skips_damage)
        batches = chain.from_iterable(map(read, files)) if selection.keep else iter(())
        columns, per_token = _columns(batches, options.column, dtype, rows)
    schema = SampleSchema(column=options.column, dtype=dtype, columns=columns, per_token=per_token)
    settings = {
        **asdict(replace(layout, columns=columns)),
        **{name: value for name, value in asdict(rows).items() if name != "columns"},
        **asdict(schema),
        "keep": selection.keep,
        "tokenizer": digest,
        "tokenizer_facts": None if rows.tokenizer is None else describe_tokenizer(rows.tokenizer),
        "part_bytes": part_bytes,
    }
    return json.loads(json.dumps(settings)), files


def _dtype_of(options: WriteOptions) -> str:
    tokenizer = options.rows.tokenizer
    if tokenizer is None:
        return options.tokens_dtype or "int32"
    largest = num_ids(load_tokenizer(tokenizer)) - 1
    dtype = options.tokens_dtype or dtype_of(tokenizer)
    most = int(np.iinfo(dtype).max)
    if largest > most:  # its texts would be bad rows
        raise ConfigError(
            f"tokens_dtype={dtype!r} has room for ids up to {most}, but {tokenizer} has "
            f"ids up to {largest}; omit it",
            option="tokens_dtype",
        )
    return dtype


def _columns(
    batches: Iterator[RowBatch], column: str, dtype: str, rows: RowFormat
) -> tuple[dict[str, str], tuple[str, ...]]:
    columns = {column: f"ndarray:{dtype}"}
    if rows.chat is not None:
        columns[LOSS_MASK] = "ndarray:uint8"
    taken = [name for name in rows.kept if name in columns]
    if taken:
        raise ConfigError(
            f"columns: {taken[0]!r} is also the name of a column that is made; omit it, or "
            "rename it in the input",
            option="columns",
        )
    per_token = []
    batch = next((batch for batch in batches if batch.values), RowBatch())
    for name, encoding in rows.kept.items():
        values = batch.kept.get(name, [])
        if encoding:
            columns[name] = encoding
        elif rows.tokenizer is None and _is_per_token(name, values, batch.values):
            per_token.append(name)
            columns[name] = f"ndarray:{list_dtype(dtype)}"
        else:
            has_null = any(value is None for value in values)
            columns[name] = "json" if has_null else batch.types.get(name) or _encoding_of(values)
    return columns, tuple(per_token)


def _is_per_token(name: str, values: Sequence[Any], tokens: Sequence[Any]) -> bool:
    """Return whether a column has an integer for each token: by its name, or its first value."""
    if name in TARGETS or not values:
        return name in TARGETS
    first = values[0].tolist() if isinstance(values[0], np.ndarray) else values[0]
    return is_per_token(first, len(tokens[0]))


def _encoding_of(values: Sequence[Any]) -> str:
    """Return the encoding that fits all of a column's first values.

    >>> [_encoding_of(values) for values in (["a"], [1, 2], [1, 0.5], [b""], ["a", None], [])]
    ['str', 'int', 'float64', 'bytes', 'json', 'json']
    >>> [_encoding_of(values) for values in ([1, 2**64 - 1], [1, 2**64], [0.5, 2**53 + 1])]
    ['uint64', 'json', 'json']
    """
    kinds = {type(value) for value in values}
    if kinds in ({str}, {bytes}):
        return kinds.pop().__name__
    integers = [value for value in values if type(value) is int] or [0]
    least, most = min(integers), max(integers)
    if kinds == {int}:
        for encoding, name in (("int", "int64"), ("uint64", "uint64")):
            if np.iinfo(name).min <= least and most <= np.iinfo(name).max:
                return encoding
    is_exact = least >= -(2**53) and most <= 2**53
    return "float64" if float in kinds <= {int, float} and is_exact else "json"
