"""The one door to mosaicml-streaming: no other file imports it.

::

    streams/, write/  --->  mosaic.py  --->  streaming (downloaders, registry, MDS writer, codecs)

PyPI's torchvision, which `streaming` imports, is built for another torch than the CPU one and fails
at import because its compiled operators are missing. Nothing here ever calls them, so their bare
schemas are declared first, and only where torchvision cannot be imported as it is.

The `__init__` of `streaming` and of `streaming.base` import its datasets too, and with them
transformers and torch's compiler, of which nothing here is used. So each runs only when something
is asked of it that it has to define: by whoever imports `streaming` beside streampack.

Cost: a tenth of a second at the first import; that of all of `streaming` is three seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from importlib.abc import Loader
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "DOWNLOADER_MAPPINGS",
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


def _put_off(name: str) -> None:
    """Put a package in its place, and run its `__init__` at the first use of what that defines.

    Modules of the package can be imported meanwhile, as from any other.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = importlib.util.module_from_spec(spec)
    loader = spec.loader
    vars(package)["__getattr__"] = lambda attribute: _run_init(package, loader, attribute)
    sys.modules[name] = package
    parent, _, own_name = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own_name, package)


def _run_init(package: ModuleType, loader: Loader, attribute: str) -> Any:
    missing = AttributeError(f"module {package.__name__!r} has no attribute {attribute!r}")
    # Some look at every module there is for names like __wrapped__.
    if attribute.startswith("__") and attribute != "__all__":
        raise missing
    with _init_lock:
        # Who is in here while it runs is what it imports itself: other threads wait.
        if package.__name__ in _running:
            raise missing
        if "__getattr__" in vars(package):
            _running.add(package.__name__)
            try:
                loader.exec_module(package)
            finally:
                _running.remove(package.__name__)
            del vars(package)["__getattr__"]
    return getattr(package, attribute)


_init_lock = threading.RLock()
_running: set[str] = set()  # packages whose `__init__` is under way
_torchvision_library = _declare_torchvision_operators()
for _name in ("streaming", "streaming.base"):
    _put_off(_name)

from streaming.base.compression import decompress, get_compressions  # noqa: E402
from streaming.base.format import MDSWriter, get_index_basename  # noqa: E402
from streaming.base.hashing import get_hash, get_hashes  # noqa: E402
from streaming.base.storage import CloudDownloader, CloudUploader  # noqa: E402
from streaming.base.storage.download import DOWNLOADER_MAPPINGS  # noqa: E402
from streaming.base.stream import Stream, streams_registry  # noqa: E402
