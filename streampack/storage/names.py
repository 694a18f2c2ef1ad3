"""Names of the files in a cache: each identifies what it is a copy of.

::

    local/3f1c9a0b7d24e586/                      the remote, without a password
        index.9f31c2aa.json                      a version of index.json
        lengths.9f31c2aa.bin                     its length file
        shard.00000.mds.1b7e40d2                 a shard, by its entry in index.json
        shard.00000.mds.1b7e40d2.zip             its compressed form, with keep_zip=True
        .streampack/                             locks and notes; `last` names the last version
"""

from __future__ import annotations

import hashlib
import json
import re

from streampack.mds.index import Shard
from streampack.mds.length_file import index_digest
from streampack.storage.filesystem import FileState
from streampack.storage.locks import note_name

SHARD = re.compile(r".+\.[0-9a-f]{8}(\.zip)?", re.DOTALL)
VERSION = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{8})?")
PACKED = ".zip"
LAST = "last"
"""The note that names the last version of index.json, and the remote."""


def remote_digest(remote: str) -> str:
    """Return the name of a remote's folder.

    >>> remote_digest("s3://bucket/code")
    '7e8ce556afd31d7a'
    """
    return hashlib.blake2b(remote.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def index_version(text: bytes, source: FileState | None) -> str:
    """Return the version of an index.json, as in the names of its file and its length file.

    `source` is the state of the original, if it is in a folder of this machine and has shards
    without hashes: then it may have been rewritten with the same text, for other shards.
    """
    version = index_digest(text).hex()[:8]
    return version if source is None else f"{version}-{_hex(f'{source.mtime_ns} {source.inode}')}"


def shard_name(shard: Shard, source: object) -> str:
    """Return the name of a shard's raw file; its compressed one has the ending `PACKED`.

    `source` identifies the version of a shard without hashes. A shard that is made here has the
    name of what it is made of, which has the same form.
    """
    if shard.raw.make is not None:
        return shard.raw.basename
    files = [[one.basename, one.num_bytes, sorted(one.hashes.items())] for one in shard.files]
    layout = [shard.layout.names, shard.layout.encodings, shard.layout.sizes]
    text = json.dumps(
        [shard.num_samples, shard.compression, files, layout, "" if shard.is_hashed else source]
    )
    return f"{note_name(shard.raw.basename)}.{_hex(text)}"


def versioned_name(name: str, version: str) -> str:
    """Return the name of a file of a store, whole or in parts, in one version.

    >>> versioned_name("web.idx", "etag:1")
    'web.idx.c2e59fbc'
    """
    return f"{name}.{_hex(version)}"


def _hex(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
