"""What a virtual shard consists of: bytes of a token file, and of its loss mask.

::

    web.ds               |....|....|     web.ds.loss               |..|..|     datatrove
    token_ids_part_0.npy |....|....|     labels_mask_part_0.npy    |..|..|     open-instruct
    in the cache         |....|..|                                 tokens, then mask

A mask has a byte for each token: 1 for a target. Of a store, both are fetched into one file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from streampack.errors import DataError
from streampack.flat.documents import DOCUMENTS, HASH
from streampack.flat.files import mask_of
from streampack.flat.token_file import MaskFile, TokenFile, VirtualShards
from streampack.mds.index import Shard, ShardFile
from streampack.storage.location import ShardPart
from streampack.storage.names import versioned_name
from streampack.stores.objects import StoredObject


def with_masks(
    files: Sequence[TokenFile], of_name: Mapping[str, StoredObject]
) -> tuple[TokenFile, ...]:
    """Return token files with the loss masks next to them, which are among the files `of_name`.

    Raises:
        DataError: If a mask has not a byte for each token, or only some of the files have one.
    """
    found = []
    for file in files:
        name = mask_of(file.name)
        if name is not None and (mask := of_name.get(name)) is not None:
            if mask.num_bytes != file.num_tokens:
                raise DataError(
                    f"{name}: has {mask.num_bytes} bytes, but {file.name} has {file.num_tokens} "
                    f"tokens of {file.dtype}, and a loss mask has a byte for each; make both "
                    "again, or remove it if all tokens are targets",
                    uri=name,
                )
            file = replace(file, mask=MaskFile(name=name, version=mask.version))
        found.append(file)
    without = [file.name for file in found if file.mask is None]
    if without and len(without) < len(found):
        raise DataError(
            f"{without[0]}: has no loss mask {mask_of(without[0])}, but other files of the stream "
            "have one; copy it too, or read files without masks as a stream of their own"
        )
    return tuple(found)


def cached_shards(
    files: Sequence[TokenFile], shards: VirtualShards
) -> tuple[tuple[Shard, ...], dict[str, ShardPart]]:
    """Return the virtual shards of remote files as shards of a cache, and what to fetch of each."""
    entries, parts = [], {}
    for number, (start, stop), count in zip(
        shards.file.tolist(), shards.extents.tolist(), np.diff(shards.first_sample), strict=True
    ):
        file, mask, num_bytes = files[number], None, stop - start
        basename = f"{versioned_name(file.name, file.version or '')}.{start}-{stop}"
        if file.mask is not None:
            first, end = file.mask_range(start, stop)
            name, version = file.mask.name, file.mask.version
            mask = ShardPart(name=name, start=first, stop=end, version=version)
            num_bytes += end - first
            basename = f"{basename}.{versioned_name(os.path.basename(name), version)}"
        parts[basename] = ShardPart(
            name=file.name, start=start, stop=stop, version=file.version, mask=mask
        )
        digest = file.hashes.get((start, stop))
        hashes = {} if digest is None else {HASH: digest}
        raw = ShardFile(
            basename=basename, num_bytes=num_bytes, hashes=hashes, hashes_from=DOCUMENTS
        )
        entries.append(Shard(num_samples=int(count), raw=raw))
    return tuple(entries), parts
