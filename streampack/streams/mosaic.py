"""The one door to mosaicml-streaming: no other file imports it.

::

    streams/, write/  --->  mosaic.py  --->  streaming (downloaders, registry, MDS writer, codecs)

PyPI's torchvision, which `streaming` imports, is built for another torch than the CPU one and fails
at import because its compiled operators are missing. Nothing here ever calls them, so their bare
schemas are declared first, and only where torchvision cannot be imported as it is.

Cost: some seconds at the first import, nearly all of it in `streaming`'s own dependencies.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

__all__ = [
    "CloudDownloader",
    "CloudUploader",
    "MDSWriter",
    "Stream",
    "decompress",
    "get_compressions",
    "get_hash",
    "get_hashes",
    "get_index_basename",
    "streams_registry",
]

TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _declare_torchvision_operators() -> torch.library.Library | None:
    """Make torchvision importable; return what must stay alive for that, if anything."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        # What was half imported would be found in sys.modules and used as it is.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return None
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in TORCHVISION_SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


_torchvision_library = _declare_torchvision_operators()

from streaming.base.compression import decompress, get_compressions  # noqa: E402
from streaming.base.format import MDSWriter, get_index_basename  # noqa: E402
from streaming.base.hashing import get_hash, get_hashes  # noqa: E402
from streaming.base.storage import CloudDownloader, CloudUploader  # noqa: E402
from streaming.base.stream import Stream, streams_registry  # noqa: E402
