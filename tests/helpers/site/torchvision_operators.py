"""Make MosaicML Streaming importable without torchvision, or with one for another build of torch.

PyPI's torchvision is not built for the CPU build of torch. There its import fails, because its
compiled operators are missing, and so fails that of MosaicML Streaming, transformers and Lightning,
though no test calls these operators. So this module declares just their schemas, if torchvision's
library cannot be loaded when it is imported. Where torchvision is missing, as `make install` leaves
it then, MosaicML Streaming gets a stand-in while its classes for images are imported. Nothing else
sees the stand-in: transformers would take it for the package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


IMAGES = "streaming.vision.base"
STAND_IN = {
    "torchvision": {},
    "torchvision.datasets": {"VisionDataset": type("VisionDataset", (), {})},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {"to_tensor": None},
}


class _WithStandIn(SourceFileLoader):
    """Loads a module that imports torchvision where there is none."""

    def exec_module(self, module: ModuleType) -> None:
        for name, contents in STAND_IN.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        try:
            super().exec_module(module)
        finally:
            for name in STAND_IN:
                del sys.modules[name]


class _Declares:
    """A finder that declares the operators before torchvision is imported, or stands in for it."""

    def __init__(self) -> None:
        self._library: Any = None  # the operators exist for as long as this object

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision" and self._library is None:
            spec = PathFinder.find_spec(name)
            self._library = () if spec is None else _library_of(spec)
        if name != IMAGES or PathFinder.find_spec("torchvision") is not None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _WithStandIn(name, spec.origin)
        return spec


def _library_of(spec: ModuleSpec) -> Any:
    torch = import_module("torch")
    try:
        for folder in spec.submodule_search_locations or ():
            for compiled in Path(folder).glob("_C*.so"):
                torch.ops.load_library(compiled)
                return ()
    except OSError:
        pass  # built for another torch
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library


def declare_on_import() -> None:
    """Declare the operators, if necessary, when this process first imports torchvision."""
    if not any(isinstance(finder, _Declares) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Declares())
