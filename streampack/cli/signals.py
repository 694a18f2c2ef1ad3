"""SIGTERM as an exception, so that a verb ends its processes and says where it stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it before they kill a job."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at a SIGTERM, inside this block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal wants it
    raise Terminated
