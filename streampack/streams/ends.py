"""The ends and the overflow rule that a stream's samples have of their own.

::

    Stream(eos_id=2)                      chats end as they are, replay texts with EOS
    Packing(bos_id=1), for all streams    what a stream does not state is the packing's
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from streampack.config import Packing
from streampack.config.packing import Overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnds:
    """Options of `Packing` that a stream has of its own, or None for the packing's."""

    bos_id: int | None = None
    eos_id: int | None = None
    overflow: Overflow | None = None

    @classmethod
    def of(cls, stream: Any) -> StreamEnds:
        """Read them from a `Stream`; MosaicML's class has none."""
        return cls(**{name: getattr(stream, name, None) for name in cls.__slots__})

    def packing_of(self, packing: Packing) -> Packing:
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(packing, **stated) if stated else packing

    def digest_of(self, digest: str) -> str:
        """Return a digest of a stream's contents and these options; without any, the former."""
        if self == StreamEnds():
            return digest
        return hashlib.blake2b(f"{digest}{astuple(self)}".encode(), digest_size=16).hexdigest()
