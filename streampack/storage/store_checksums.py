"""Checksums from an object store's responses, and cancellation of overdue requests.

::

    HEAD, GET --> x-amz-checksum-*, x-goog-hash, Content-MD5, ETag --> the cheapest checksum
                                        downloaded file --> its checksum, equal or damaged
    overdue attempt --> its connection is cut, and the client sends no more requests

MosaicML's downloaders send a HEAD request before each download, so the checksums cost no extra
request. They are read from boto3 clients, for S3 and compatible stores. Google's own client
verifies x-goog-hash itself. An ETag is an MD5 only if the object was uploaded in one part and not
encrypted with customer or key-service keys; any other ETag is ignored.

Cost: for each object without a hash of its own, 0.1 s per GB (crc32c) to 4 s per GB (MD5).
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack._numba import compiled

# Bytes of each checksum, the cheapest to compute first.
SUM_BYTES = {"crc32c": 4, "crc64nvme": 8, "crc32": 4, "sha1": 20, "sha256": 32, "sha512": 64}
SUM_BYTES |= {"md5": 16}
HEX_MD5 = re.compile(r'"?([0-9a-fA-F]{32})"?')
ETAG_HINT = (
    " (if the store's ETags are not MD5 sums: run `streampack index` on a copy of the stream, and "
    "upload its lengths.bin)"
)


class Answers:
    """Checksums from the responses to a downloader of MosaicML; none without a boto3 client."""

    def __init__(self, client: Any) -> None:
        self.sums: dict[str, str] = {}
        """Checksums of the last requested object, in hex by algorithm."""
        self._is_cut = False
        self._body: Any = None
        for name in ("s3", "gcs"):
            create = getattr(client, f"_create_{name}_client", None)
            if create is not None:
                hooked = partial(self._create, client, name, create)
                setattr(client, f"_create_{name}_client", hooked)

    def _create(self, client: Any, name: str, create: Callable[..., Any], **options: Any) -> None:
        create(**options)
        inner: Any = getattr(client, f"_{name}_client", None)
        events = getattr(getattr(inner, "meta", None), "events", None)
        if events is None:
            return
        # If the GET requests checksums, so may the HEAD before it. A large object is fetched in
        # parts, and only the HEAD reports the checksum of the whole.
        if getattr(inner.meta.config, "response_checksum_validation", "") == "when_supported":
            events.register("before-parameter-build.s3.HeadObject", _request_checksums)
        events.register("before-send.s3", self._refuse_if_cut)
        events.register("after-call.s3", self._listen)

    def _refuse_if_cut(self, **_: Any) -> None:
        if self._is_cut:
            # Not one of botocore's error types, so that botocore does not retry.
            raise InterruptedError("the attempt was abandoned, because it is overdue")

    def _listen(self, http_response: Any, parsed: Any, **_: Any) -> None:
        self._body = getattr(parsed.get("Body"), "_raw_stream", None)
        if http_response.status_code == 200:  # a part's checksum is not the object's
            self.sums = sums_of(http_response.headers) or self.sums
        if self._is_cut:
            self.cut()

    def cut(self) -> None:
        """Abort the client's current request, as far as another thread can."""
        self._is_cut = True
        with suppress(Exception):
            self._body.shutdown()


def checksum_problem(path: Path, checksums: Mapping[str, str]) -> str | None:
    """Describe how a file differs from the cheapest checksum of the store, in hex by algorithm.

    None: the file matches, or none of the checksums can be computed.
    """
    for algorithm in SUM_BYTES:
        factory = _factories().get(algorithm)
        expected = checksums.get(algorithm)
        if expected and factory:
            with path.open("rb") as file:
                actual = hashlib.file_digest(file, factory).hexdigest()
            if actual == expected:
                return None
            hint = ETAG_HINT if algorithm == "md5" else ""
            return f"its {algorithm} is {actual}, but the store says {expected}{hint}"
    return None


def _request_checksums(params: dict[str, Any], **_: Any) -> None:
    params.setdefault("ChecksumMode", "ENABLED")


def sums_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums of a whole object from a response's headers, in hex by algorithm.

    >>> sums_of({"ETag": '"900150983cd24fb0d6963f7d28e17f72"'})
    {'md5': '900150983cd24fb0d6963f7d28e17f72'}
    >>> sums_of({"ETag": '"900150983cd24fb0d6963f7d28e17f72-3"', "x-goog-hash": "crc32c=NKPdWw=="})
    {'crc32c': '34a3dd5b'}
    """
    headers = {name.lower(): value for name, value in headers.items()}
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return {}  # of an object that is stored compressed and served decompressed
    encoded = {name: headers.get(f"x-amz-checksum-{name}", "") for name in SUM_BYTES}
    encoded["md5"] = encoded["md5"] or headers.get("content-md5", "")
    for field in headers.get("x-goog-hash", "").split(","):
        name, _, value = field.strip().partition("=")
        encoded[name] = value
    sums = {name: _hex_of(value, SUM_BYTES.get(name)) for name, value in encoded.items()}
    etag = HEX_MD5.fullmatch(headers.get("etag", ""))
    if etag and not sums.get("md5") and _is_etag_md5(headers):
        sums["md5"] = etag[1].lower()
    return {name: digest for name, digest in sums.items() if digest}


def _hex_of(text: str, num_bytes: int | None) -> str:
    """Convert a checksum from base64 to hex; empty if invalid or composite, as "abc=-3"."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
        return ""
    return content.hex() if len(content) == num_bytes else ""


def _is_etag_md5(headers: Mapping[str, str]) -> bool:
    encryption = {name: headers[name] for name in headers if "encryption" in name or "-sse" in name}
    is_plain = encryption in ({}, {"x-amz-server-side-encryption": "AES256"})
    return is_plain and headers.get("x-amz-storage-class") != "EXPRESS_ONEZONE"


class _Crc:
    """A cyclic redundancy check with the interface of hashlib's hashes."""

    def __init__(self, extend: Callable[[Any, int], int], num_bytes: int) -> None:
        self._extend = extend
        self._num_bytes = num_bytes
        self._value = 0

    def update(self, piece: memoryview) -> None:
        """Add the next bytes."""
        self._value = self._extend(piece, self._value)

    def hexdigest(self) -> str:
        """Return the checksum so far, in hex."""
        return self._value.to_bytes(self._num_bytes, "big").hex()


@cache
def _factories() -> dict[str, Callable[[], Any]]:
    """Return a factory for each checksum that can be computed here."""
    factories: dict[str, Callable[[], Any]] = {
        name: partial(hashlib.new, name) for name in ("md5", "sha1", "sha256", "sha512")
    }
    factories["crc32"] = partial(_Crc, zlib.crc32, 4)
    factories["crc64nvme"] = partial(_Crc, _extend_crc64, 8)
    with suppress(ImportError):
        library = import_module("google_crc32c")  # installed with google-cloud-storage
        if library.implementation == "c":  # the pure Python one takes minutes per shard
            factories["crc32c"] = partial(
                _Crc, lambda piece, value: library.extend(value, bytes(piece)), 4
            )
    return factories


CRC64_NVME = 0x9A6C9329AC4BC9B5  # its polynomial, lowest bit first


@cache
def _crc64_tables() -> npt.NDArray[np.uint64]:
    """Return the contribution of each byte value at each of 8 positions; shape (8, 256)."""
    values: npt.NDArray[Any] = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        values = values >> 1 ^ (values & 1) * np.uint64(CRC64_NVME)
    rows = [values]
    for _ in range(7):
        rows.append(rows[-1] >> 8 ^ values[rows[-1] & 255])
    return np.stack(rows)


def _extend_crc64(piece: memoryview, value: int) -> int:
    data = np.frombuffer(piece, np.uint8)
    words = data[: len(data) // 8 * 8].view(np.uint64)
    mask = 2**64 - 1
    tail = data[8 * len(words) :]
    return int(_crc64(np.uint64(value ^ mask), words, tail, _crc64_tables())) ^ mask


@compiled
def _crc64(
    value: np.uint64,
    words: npt.NDArray[np.uint64],
    tail: npt.NDArray[np.uint8],
    tables: npt.NDArray[np.uint64],
) -> np.uint64:
    low, eight = np.uint64(255), np.uint64(8)
    for word in words:
        rest = value ^ word
        value = np.uint64(0)
        for position in range(8):
            value ^= tables[7 - position, rest & low]
            rest >>= eight
    for byte in tail:
        value = (value >> eight) ^ tables[0, (value ^ np.uint64(byte)) & low]
    return value
