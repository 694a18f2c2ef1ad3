"""The data that a model was trained on, observed with torch hooks, independently of the trainer.

A trainer may read ahead, skip, repeat or shard as it likes; only the data that passed through the
model before a change of its weights counts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

ROOT = Path(__file__).parents[2]
VOCABULARY = 256
MAX_SEQ_LEN = 128


class StoppedError(Exception):
    """Raised to stop a run in the middle."""


def digest_of(row: Tensor) -> str:
    return blake2b(row.numpy().tobytes(), digest_size=8).hexdigest()


class Seen:
    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[list[str]] = []
        self.gradient: dict[str, Tensor] = {}
        """The gradients of the first step."""
        self.model: nn.Module | None = None
        self._stop_after = stop_after
        self._num_batches = 0
        self._now: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Seen:
        self._handles = [
            register_module_forward_pre_hook(self._on_forward),
            register_optimizer_step_post_hook(self._on_step),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> bool:
        for handle in self._handles:
            handle.remove()
        return kind is StoppedError

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:
        if self.model is None:
            # The model is called before its parts. DDP's wrapper must not outlive the run.
            self.model = module.module if isinstance(module, DistributedDataParallel) else module
        if not (isinstance(module, nn.Embedding) and module.num_embeddings == VOCABULARY):
            return
        if not module.training:  # a leak check or an evaluation
            return
        if self._num_batches == self._stop_after:
            raise StoppedError
        self._num_batches += 1
        self._now += [digest_of(row) for row in arguments[0].view(-1, MAX_SEQ_LEN)]

    def _on_step(self, *_: Any) -> None:
        if not self.steps:
            self.gradient = {
                name: parameter.grad.clone() for name, parameter in self.model.named_parameters()
            }
        self.steps.append(self._now)
        self._now = []


def load_example(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run(name: str, arguments: Sequence[Any], *, stop_after: int | None = None) -> Seen:
    example = load_example(name)
    # accelerate keeps the state of the last run in its classes, even if that run was stopped.
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    # Trainer and accelerate set some environment variables permanently.
    with mock.patch.dict(os.environ), Seen(stop_after) as seen:
        example.main([str(argument) for argument in arguments])
    return seen
