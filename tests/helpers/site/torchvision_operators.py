"""Make torchvision importable with a torch that it was not built for.

PyPI's torchvision is not built for the CPU build of torch. There its import fails, because its
compiled operators are missing. MosaicML Streaming, transformers and Lightning import torchvision,
but no test calls these operators. So this module declares just their schemas, if torchvision's
library cannot be loaded when it is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Declares:
    """A finder that finds nothing, but declares the operators before torchvision is imported."""

    def __init__(self) -> None:
        self._library: Any = None  # the operators exist for as long as this object

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if name == "torchvision" and self._library is None:
            spec = PathFinder.find_spec(name)
            self._library = () if spec is None else _library_of(spec)


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
