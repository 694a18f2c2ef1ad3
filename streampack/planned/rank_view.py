"""What every rank of a planned dataset must share, to be compared before the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streampack.planned.build import DatasetSpec
from streampack.runtime.rank_digest import RankView


def rank_view(
    spec: DatasetSpec, names: Sequence[str], digests: Sequence[str], fingerprint: dict[str, Any]
) -> RankView:
    """Return the streams and options that every rank must share.

    Args:
        spec: The specification of the dataset.
        names: Name of each stream in messages.
        digests: Digest of each stream, followed by a colon and that of its lengths, if known.
        fingerprint: The fingerprint of the plan.
    """
    streams = []
    for name, stream, text in zip(names, spec.streams, digests, strict=True):
        index, _, lengths = text.partition(":")
        folder = str(stream.cache.folder)
        streams.append({"name": name, "folder": folder, "index": index, "lengths": lengths})
    recipe = {key: value for key, value in fingerprint.items() if key != "streams"}
    world, balance = spec.world, spec.balance
    recipe |= {"batch_size": spec.batch_size, "replication": world.replication}
    recipe |= {"nodes": world.num_nodes}
    recipe |= {"context_parallel": [world.context_parallel, world.context_layout]}
    recipe["balance"] = None if balance is None else [balance.within, balance.digest()]
    return {"streams": streams, "recipe": recipe}
