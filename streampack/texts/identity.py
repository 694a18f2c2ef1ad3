"""What token shards are named by, and what the fingerprint of a run has of texts.

::

    name          versions of files, rows | tokenizer, options, transform | versions of libraries
    fingerprint   names, sizes, rows      | tokenizer, options, transform | ids of the first rows

So a library that gives other ids is refused at a resume, and one that gives the same is not. BOS,
EOS and `overflow` are in neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, compress
from typing import Any

import orjson

import streampack
from streampack._extras import installed
from streampack.texts.inputs.slices import RowBatch
from streampack.texts.rows import RowFormat, tokenizer_digest
from streampack.texts.table import TextTable, read_shard
from streampack.texts.token_shard import ShardFormat, keep_probed, row_encoder
from streampack.texts.transform import Transform

PROBE_ROWS = 256
PROBE_BYTES = 1 << 20
TOKENS_PER_BYTE = 0.25  # without any text


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the ids of a row depend on, other than the row itself."""

    options: str
    """Tokenizer by content, options of a `RowFormat` that change ids, and transform, as JSON."""
    versions: str
    """Versions of libraries, as JSON; they are in names, and not in fingerprints."""

    @classmethod
    def of(cls, rows: RowFormat, transform: Transform | None = None) -> Identity:
        """Return the identity of rows of a format; loads the tokenizer."""
        options = {k: v for k, v in asdict(rows).items() if k != "tokenizer"}
        versions = library_versions(rows.backend, is_chat=rows.chat is not None)
        described = [options, tokenizer_digest(rows), transform and asdict(transform)]
        return cls(
            options=json.dumps(described, sort_keys=True),
            versions=json.dumps(versions, sort_keys=True),
        )


def library_versions(backend: str, *, is_chat: bool) -> dict[str, str | None]:
    """Return the versions of what token ids depend on, streampack among it, by name."""
    libraries = ["tokenizers", *(["gigatoken"] if backend == "gigatoken" else [])]
    libraries += ["transformers", "jinja2"] if is_chat else []
    return {"streampack": streampack.__version__} | {name: installed(name) for name in libraries}


def token_shard_name(table: TextTable, number: int, identity: Identity) -> str:
    """Return the name of a token shard: 32 hex digits of versions of files, rows and identity."""
    shard = table.shard(number)
    units = [
        (table.memory or unit.uri, unit.version, unit.start, unit.stop) for unit in shard.units
    ]
    described = [units, shard.first_row, shard.num_rows, identity.options, identity.versions]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


def described(table: TextTable, identity: Identity, probed: str) -> dict[str, object]:
    """Return by name what samples depend on, as an index of their lengths states it.

    `probed` is the digest of `probe`.
    """
    options, tokenizer, transform = json.loads(identity.options)
    own = {"tokenizer": tokenizer, **options, "transform": transform}
    return {**own, "files": table.digest(), "ids of the first rows": probed}


def fingerprint(of: Mapping[str, object]) -> str:
    """Return what a resume compares: a digest of the table, the options and the probe's ids."""
    return hashlib.blake2b(json.dumps(of).encode(), digest_size=16).hexdigest()


def probe(table: TextTable, form: ShardFormat) -> tuple[str, float]:
    """Tokenize the first 256 rows, 1 MiB of text at most, and keep them for their token shards.

    Returns:
        A digest of the ids, and of what comes with them, such as loss masks; and the tokens divided
        by the bytes of rows as JSON, for estimates: 0.25 without any text.
    """
    digest, encoder = hashlib.blake2b(digest_size=16), row_encoder(form)
    num_rows = num_tokens = num_bytes = 0
    batches = (
        (shard, batch)
        for shard in map(table.shard, range(len(table)))
        for batch in read_shard(shard, form.rows.selection, form.transform)
    )
    for shard, batch in batches:
        taken, size = _first(batch, PROBE_ROWS - num_rows, PROBE_BYTES - num_bytes)
        num_bytes += size
        encoded = encoder.encode(taken)
        keep_probed(shard, form, dict(zip(taken.rows, encoded, strict=True)))
        for samples in encoded:
            for sample in () if isinstance(samples, str) else filter(None, samples):
                tokens, *others = sample.values()
                num_tokens += len(tokens)
                digest.update(tokens.astype("<i4").tobytes())
                digest.update(b"".join(other.tobytes() for other in others))
            digest.update(b"|")
        num_rows += batch.num_rows
        if num_rows >= PROBE_ROWS or len(taken.values) < len(batch.values):
            break
    return digest.hexdigest(), num_tokens / num_bytes if num_tokens else TOKENS_PER_BYTE


def _first(batch: RowBatch, num_rows: int, num_bytes: int) -> tuple[RowBatch, int]:
    """Return the first rows of a batch, up to a number and to bytes, and their bytes as JSON."""
    sizes = list(map(_size, batch.values))
    are_taken = [
        number < num_rows and total <= num_bytes for number, total in enumerate(accumulate(sizes))
    ]
    return batch.take(are_taken), sum(compress(sizes, are_taken))


def _size(value: Any) -> int:
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return len(orjson.dumps(value, default=str, option=option))
    except TypeError:  # half of a surrogate pair, which a transform may return
        return len(repr(value))
