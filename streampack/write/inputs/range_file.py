"""A seekable file over byte ranges of a stored object, with the next block read ahead.

::

    read  read  read | read ...         the caller
    [ block 0 ]  [ block 1 ]            GET bytes=0-..., GET bytes=8388608-... in a thread
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

BLOCK_BYTES = 8 << 20


class RangeFile(io.RawIOBase):
    """Bytes 0 to `num_bytes` of an object, fetched a block at a time.

    Args:
        num_bytes: Size of the object, or the end of the range that is read.
        fetch: Returns the bytes from a start to a stop.
        block_bytes: Least bytes of a request; larger reads make larger ones, up to 8 MiB.
        reads_ahead: Whether to fetch the next block in a thread, for sequential readers.
    """

    def __init__(
        self,
        num_bytes: int,
        fetch: Callable[[int, int], bytes],
        block_bytes: int = BLOCK_BYTES,
        *,
        reads_ahead: bool = False,
    ) -> None:
        self._num_bytes = num_bytes
        self._fetch = fetch
        self._block_bytes = block_bytes
        self._position = 0
        self._begin, self._block = 0, b""
        self._ahead: tuple[int, Future[bytes]] | None = None
        self._reads_ahead = reads_ahead

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._num_bytes or not view:
            return 0
        offset = self._position - self._begin
        if not 0 <= offset < len(self._block):
            self._load(max(self._block_bytes, min(len(view), BLOCK_BYTES)))
            offset = 0
        piece = self._block[offset : offset + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def close(self) -> None:
        """Drop the blocks; a block that is being fetched is not waited for."""
        self._ahead, self._block = None, b""
        super().close()

    def _load(self, num_bytes: int) -> None:
        begin, ahead = self._position, self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] == begin:
            self._block = ahead[1].result()
        else:
            self._block = self._fetch(begin, min(begin + num_bytes, self._num_bytes))
        self._begin = begin
        after = begin + len(self._block)
        if self._reads_ahead and after < self._num_bytes:
            stop = min(after + self._block_bytes, self._num_bytes)
            self._ahead = after, _in_thread(self._fetch, after, stop)


def _in_thread(fetch: Callable[[int, int], bytes], start: int, stop: int) -> Future[bytes]:
    """Fetch a block in a daemon thread, so that Ctrl-C need not wait for a store that is down."""
    future: Future[bytes] = Future()

    def work() -> None:
        try:
            future.set_result(fetch(start, stop))
        except BaseException as error:  # raised where the bytes are read
            future.set_exception(error)

    Thread(target=work, name="streampack-input", daemon=True).start()
    return future
