"""A store that misbehaves on demand, one request at a time.

::

    client --> FaultServer --> rclone serve s3      upstream=: a proxy, signatures pass unchanged
    client --> FaultServer --> a folder             folder=: an unsigned path-style S3 by itself
                  '-- faults: the n-th request for this path gets a 503, is reset, stalls, ...
                  '-- log: every request, its client, status, bytes and fault

All stalled handlers wait for one event, so `close()` can release them together. A forked child must
close the sockets it inherits, or clients would see no reset until the child has exited.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import random
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Kind = Literal[
    "status",  # an answer with this status and an S3 error body
    "reset",  # the connection is reset instead of an answer
    "short",  # the stated length, then only half of the bytes, then the end
    "shorter",  # a consistent response with only half of the object's bytes
    "flip",  # one bit of the body's middle byte is flipped
    "stall_headers",  # no answer for `seconds`, then a reset
    "stall_body",  # headers and half of the body, nothing for `seconds`, then a reset
    "slow_start",  # a right answer after `seconds`
    "trickle",  # a right answer at `bytes_per_s`
    "down",  # every connection is reset for `seconds` from the first match on
]
OF_A_BODY = ("short", "shorter", "flip", "stall_body", "trickle")
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")
TICK_S = 0.05
MAX_STALL_S = 300.0
NAMES = {400: "BadRequest", 403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests"}
NAMES |= {500: "InternalError", 503: "SlowDown"}


@dataclass(kw_only=True, eq=False)
class Fault:
    """What goes wrong, for which requests.

    >>> fault = Fault(kind="status", status=503, path="shard", times=20)
    >>> [fault.takes("GET", path) for path in ("/bucket/ds/index.json", "/bucket/ds/shard.0.mds")]
    [False, True]
    """

    kind: Kind
    path: str = ""
    """A regular expression to search for in the request's path; "" matches every path."""
    method: str = "GET|HEAD"
    """A regular expression for the method; faults in the body only apply to GET."""
    skip: int = 0
    """Number of requests to let through before the first fault."""
    times: int | None = None
    """Number of requests that then get the fault, or None for all of them."""
    per_path: bool = False
    """Count `skip` and `times` for each path by itself."""
    share: float = 1.0
    """Chance that a request gets the fault, by `seed`."""
    seed: int = 0
    status: int = 500
    seconds: float = MAX_STALL_S
    """How long the request stalls or the server is down."""
    bytes_per_s: float = 1000.0
    met: dict[str, int] = field(default_factory=dict)
    """Requests that matched so far, by path or all under ""."""
    given: int = 0
    """Requests that got the fault."""
    since: float | None = None
    """When "down" began, on the monotonic clock."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def takes(self, method: str, path: str) -> bool:
        if self.kind in OF_A_BODY and method != "GET":
            return False
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        key = path if self.per_path else ""
        number = self.met.get(key, 0)
        self.met[key] = number + 1
        if self.kind == "down" and number >= self.skip:
            self.since = self.since or time.monotonic()
            return time.monotonic() - self.since < self.seconds
        if number < self.skip or (self.times is not None and number >= self.skip + self.times):
            return False
        takes = self.share >= 1 or self._chance.random() < self.share
        self.given += takes
        return takes


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request as the server saw it, logged on arrival so that counts never lag behind."""

    method: str
    path: str
    """Without the query."""
    client: int
    """The client's port: one connection has one."""
    user_agent: str
    fault: str | None
    """The kind of fault it got, if any."""
    status: int = 0
    """What was answered; 0: nothing yet."""
    num_bytes: int = 0


class FaultServer:
    """An HTTP server on the loopback that serves or forwards objects, and injects faults.

    A context manager: it listens from construction and ends with the block.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        upstream: str | None = None,
    ) -> None:
        # Returns additional headers for an object of the folder; None removes one.
        self.tells: Callable[[bytes], Mapping[str, str | None]] = lambda _: {}
        if (folder is None) == (upstream is None):
            raise ValueError(f"folder={folder}, upstream={upstream}: give one of them")
        self.folder = folder
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.most_at_once = 0
        """The most requests that were open together."""
        self.prefix = "/"
        self.freed = threading.Event()
        self.seen = threading.Condition()
        self.sockets: set[socket.socket] = set()
        self._num_open = 0
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()
        _servers.add(self)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, kind: Kind, **options: Any) -> Fault:
        fault = Fault(kind=kind, **options)
        with self.seen:
            self.faults.insert(0, fault)
        return fault

    def clear(self) -> None:
        """Remove all faults; requests that are stalled now stay stalled."""
        with self.seen:
            self.faults.clear()

    def start_anew(self, prefix: str = "/") -> None:
        """Remove all faults, clear the log, and reset requests that are stalled now."""
        with self.seen:
            self.prefix = prefix
            self.faults.clear()
            self.log = []
            freed, self.freed = self.freed, threading.Event()
        freed.set()

    def requests(self, path: str = "", method: str = "GET|HEAD") -> list[Request]:
        with self.seen:
            return [
                request
                for request in self.log
                if re.search(path, request.path) and re.fullmatch(method, request.method)
            ]

    def count(self, path: str = "", method: str = "GET") -> int:
        return len(self.requests(path, method))

    def wait_for(self, fault: Fault, times: int = 1, limit_s: float = 60.0) -> None:
        with self.seen:
            if not self.seen.wait_for(lambda: fault.given >= times, limit_s):
                raise TimeoutError(f"{fault}: {fault.given} of {times} requests in {limit_s} s")

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self.seen:
            if not path.startswith(self.prefix):
                return None
            found = [fault for fault in self.faults if fault.takes(method, path)]
            self.seen.notify_all()
        return found[0] if found else None

    def note(self, request: Request) -> None:
        with self.seen:
            if request.path.startswith(self.prefix):
                self.log.append(request)
                self.seen.notify_all()

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        with self.seen:
            self._num_open += 1
            self.most_at_once = max(self.most_at_once, self._num_open)
        try:
            yield
        finally:
            with self.seen:
                self._num_open -= 1

    def close(self) -> None:
        self.freed.set()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()
        for connection in list(self.sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        for connection in [self._server.socket, *self.sockets]:
            number = connection.detach()
            if number >= 0:
                os.close(number)

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_servers: weakref.WeakSet[FaultServer] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_servers):
        server.forget()


os.register_at_fork(after_in_child=_forget_all)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: FaultServer) -> None:
        self.owner = owner
        self.cut: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.owner.sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.owner.sockets.discard(request)
        if request in self.cut:
            self.cut.discard(request)
            self.close_request(request)  # a shutdown before it would send an orderly end
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that hang up in the middle of a response are expected here."""


@dataclass(kw_only=True)
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    """The body that a GET receives."""


class _CutError(ConnectionError):
    """Raised to reset the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = MAX_STALL_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        # Small answers in two writes would each wait for the client's delayed acknowledgement.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the log is a list."""

    def _handle(self) -> None:
        owner = self.server.owner
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._freed = owner.freed
        fault = owner.fault_of(self.command, path)
        self._request = Request(
            method=self.command,
            path=path,
            client=self.client_address[1],
            user_agent=self.headers.get("User-Agent", ""),
            fault=fault and fault.kind,
        )
        owner.note(self._request)
        try:
            with owner.open_request():
                self._answer(fault, body)
        except _CutError:
            linger = struct.pack("ii", 1, 0)  # closing sends a reset, and nothing that was queued
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.server.cut.add(self.connection)
            self.close_connection = True
        except OSError:
            self.close_connection = True  # the client went away

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def _answer(self, fault: Fault | None, body: bytes) -> None:
        kind = fault.kind if fault else None
        if fault is None:
            self._send(self._ask(body))
            return
        if kind in ("reset", "down"):
            raise _CutError
        if kind in ("stall_headers", "slow_start"):
            self._stall(fault.seconds)
            if kind == "stall_headers":
                raise _CutError
        answer = _refusal(fault.status) if kind == "status" else self._ask(body)
        if kind in OF_A_BODY and answer.body:
            self._send_badly(answer, fault)
        else:
            self._send(answer)

    def _send_badly(self, answer: _Answer, fault: Fault) -> None:
        half = len(answer.body) // 2
        if fault.kind == "flip":
            flipped = bytes([answer.body[half] ^ 1])
            answer.body = answer.body[:half] + flipped + answer.body[half + 1 :]
        if fault.kind == "shorter":
            answer.body = answer.body[:half]
        if fault.kind in ("flip", "shorter"):
            self._send(answer)
            return
        self._send_headers(answer)
        if fault.kind == "trickle":
            self._trickle(answer.body, fault.bytes_per_s)
            return
        self._write(answer.body[:half])
        if fault.kind == "stall_body":
            self._stall(fault.seconds)
            raise _CutError
        self.close_connection = True

    def _trickle(self, body: bytes, bytes_per_s: float) -> None:
        step = max(1, int(bytes_per_s * TICK_S))
        for begin in range(0, len(body), step):
            self._write(body[begin : begin + step])
            self._stall(TICK_S)

    def _stall(self, seconds: float) -> None:
        if self._freed.wait(min(seconds, MAX_STALL_S)):
            raise _CutError

    def _send(self, answer: _Answer) -> None:
        self._send_headers(answer)
        if self.command != "HEAD":
            self._write(answer.body)

    def _send_headers(self, answer: _Answer) -> None:
        self._request.status = answer.status
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304) and "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()

    def _write(self, part: bytes) -> None:
        self._request.num_bytes += len(part)
        self.wfile.write(part)

    def _ask(self, body: bytes) -> _Answer:
        owner = self.server.owner
        if owner.upstream is not None:
            return self._forward(owner.upstream, body)
        return self._of_folder(owner.folder)

    def _forward(self, upstream: str, body: bytes) -> _Answer:
        address = urlsplit(upstream)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            # The signature covers the Host header, so forward all headers exactly as received.
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            headers = {
                name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP
            }
            if self.command == "HEAD" and answer.headers.get("Content-Length"):
                headers["Content-Length"] = answer.headers["Content-Length"]
            return _Answer(status=answer.status, headers=headers, body=answer.read())
        finally:
            connection.close()

    def _of_folder(self, folder: Path) -> _Answer:
        path = folder / unquote(urlsplit(self.path).path).lstrip("/")
        if self.command not in ("GET", "HEAD"):
            return _refusal(400)
        try:
            body = path.read_bytes()
            modified = path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return _refusal(404)
        headers = {
            "ETag": f'"{hashlib.md5(body).hexdigest()}"',
            "Last-Modified": formatdate(modified, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        headers = {k: v for k, v in {**headers, **self.server.owner.tells(body)}.items() if v}
        status = 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            begin, end = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(body)}"
            body, status = body[begin : end + 1], 206
            # Like S3, which does not send the checksum of the whole object with a range of it.
            headers = {k: v for k, v in headers.items() if not k.startswith("x-amz-checksum")}
        if self.command == "HEAD":
            headers["Content-Length"] = str(len(body))
            body = b""
        return _Answer(status=status, headers=headers, body=body)


def _refusal(status: int) -> _Answer:
    name = NAMES.get(status, "InternalError")
    text = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>injected</Message></Error>"
    return _Answer(status=status, headers={"Content-Type": "application/xml"}, body=text.encode())
