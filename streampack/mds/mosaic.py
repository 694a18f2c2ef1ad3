"""The only module that imports mosaicml-streaming.

::

    streams/, write/  --->  mosaic.py  --->  streaming (downloaders, registry, MDS writer, codecs)

`streaming` imports torchvision. PyPI's torchvision is built for another torch than the CPU build
and fails at import, because its compiled operators are missing. streampack never calls them, so
their bare schemas are declared first, and only if torchvision cannot be imported otherwise.

The `__init__` of `streaming` and of `streaming.base` import its datasets too, and with them
transformers and torch's compiler, none of which is used here. Each `__init__` therefore runs only
on the first access to an attribute that it defines, by code that uses `streaming` directly.

Cost: a tenth of a second at the first import; all of `streaming` takes three seconds.
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
    "streams_registry",
]

TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _declare_torchvision_operators() -> torch.library.Library | None:
    """Make torchvision importable; return the object to keep alive for that, if any."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        # A partly imported module would stay in sys.modules and be used as it is.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return None
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in TORCHVISION_SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


def _put_off(name: str) -> None:
    """Register a package without running its `__init__`, which runs on the first missing attribute.

    Submodules of the package can be imported in the meantime.
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
    # Some code probes every module for names such as __wrapped__.
    if attribute.startswith("__") and attribute != "__all__":
        raise missing
    with _init_lock:
        # Only imports made by the `__init__` itself get here while it runs: other threads wait.
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
_running: set[str] = set()  # packages whose `__init__` is running
_torchvision_library = _declare_torchvision_operators()
for _name in ("streaming", "streaming.base"):
    _put_off(_name)

from streaming.base.compression import decompress  # noqa: E402
from streaming.base.format import MDSWriter  # noqa: E402
from streaming.base.storage import CloudDownloader, CloudUploader  # noqa: E402
from streaming.base.storage.download import DOWNLOADER_MAPPINGS  # noqa: E402
from streaming.base.stream import Stream, streams_registry  # noqa: E402
