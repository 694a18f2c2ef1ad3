"""All stores but S3, through their fsspec drivers: gs, az, http(s), hf, sftp and others.

Drivers know no conditional requests. The version of an object is its tag or checksum, else its size
and the time of its last write, and it is compared after the bytes were read. A large object is
read in ranges, where the server knows them. Drivers that use asyncio cancel a request when the time
of its attempt is over; the thread of another driver is abandoned.

Options of a driver that its URL cannot state come from fsspec's own configuration: files in
~/.config/fsspec, or variables such as FSSPEC_GS_TOKEN.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError
from streampack.stores.failures import ChangedError, NoRangesError, NoStoreError
from streampack.stores.objects import StoredObject, fetch_parts, is_large, version_of_tag
from streampack.stores.s3 import CONNECT_S, S3_SCHEMES
from streampack.stores.threads import seconds_left

PACKAGES = {
    **dict.fromkeys(S3_SCHEMES, "boto3"),
    **dict.fromkeys(("gs", "gcs"), "'streampack[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss", "azure"), "'streampack[azure]'"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hf": "'streampack[hf]'",
}
"""What pip installs for a scheme; fsspec knows more schemes."""
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "version_id")
TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
AZURE_SCOPE = "https://storage.azure.com/.default"


def is_known(scheme: str) -> bool:
    """Return whether there is a driver for a scheme, installed or not.

    >>> is_known("s3"), is_known("nonsense")
    (True, False)
    """
    return scheme in PACKAGES or scheme in import_module("fsspec").available_protocols()


class DriverStore:
    """The `Store` of one host, account or bucket."""

    has_credentials = True  # or what the driver has instead

    def __init__(self, url: str, timeout_s: float) -> None:
        scheme = url.partition("://")[0]
        options = _OPTIONS[scheme](timeout_s) if scheme in _OPTIONS else {}
        try:
            # An instance of fsspec's cache may be the parent's, which is not usable after a fork.
            core: Any = import_module("fsspec.core")
            self._files, _ = core.url_to_fs(_known(url), skip_instance_cache=True, **options)
        except ValueError as error:
            raise NoStoreError(f"{url}: {error}") from error
        # Azure's clients take a missing token for a failed request, and retry for over a minute.
        if (credential := getattr(self._files, "sync_credential", None)) is not None:
            credential.get_token(AZURE_SCOPE)
        self._scheme = scheme
        self.has_served = False

    def list(self, prefix: str, _after: str = "") -> tuple[list[StoredObject], None]:
        self._files.invalidate_cache()
        folder = prefix.rpartition("/")[0]
        path = self._path(folder).rstrip("/")
        try:
            facts = self._files.find(path or "/", detail=True, **self._limit())
        except FileNotFoundError:
            facts = {}
        # Paths of some drivers lack the host, so they say only what follows the folder.
        names = {f"{folder}{name.removeprefix(path)}": name for name in facts}
        shown = sorted(url for url in names if url.startswith(prefix))
        return [self._found(url, facts[names[url]]) for url in shown], None

    def stat(self, url: str) -> StoredObject:
        # Drivers cache listings, and would report the version that they saw first.
        self._files.invalidate_cache()
        facts = self._info(url)
        if facts.get("type") == "directory":
            raise FileNotFoundError(f"{url}: is a folder")
        return self._found(url, facts)

    def read(
        self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes:
        if stop is not None and start >= stop:
            return b""
        data: bytes = self._files.cat_file(
            self._path(url), start=start or None, end=stop, **self._limit()
        )
        if version is not None:
            self._compare(url, version)
        if stop is not None and len(data) > stop - start:
            raise NoRangesError(f"the server sends whole objects only: {len(data)} bytes came")
        if stop is not None and len(data) < stop - start:
            raise ConnectionError(f"{len(data)} of {stop - start} bytes arrived")
        return data

    def download(self, url: str, to: Path, num_bytes: int | None, *, is_checked: bool) -> None:  # noqa: ARG002 - drivers compare no checksums, or always
        before = self.stat(url)
        try:
            if is_large(before.num_bytes):
                with to.open("wb") as file:

                    def fetch_part(start: int, stop: int) -> None:
                        os.pwrite(file.fileno(), self.read(url, start, stop), start)

                    fetch_parts(fetch_part, 0, before.num_bytes)
            else:
                self._get_file(url, to)
        except NoRangesError:
            self._get_file(url, to)
        self._compare(url, before.version)

    def write(self, url: str, data: bytes) -> None:
        self._files.pipe_file(self._path(url), data, **self._limit())

    def write_if_absent(self, url: str, data: bytes) -> bool:  # noqa: ARG002 - it is refused
        raise ConfigError(
            f"{url}: the driver of {self._scheme}: looks whether an object exists before it "
            "writes one, so two writers may both succeed; write to a folder, then upload it with "
            "the store's own tool"
        )

    def remove(self, url: str) -> None:
        self._files.rm_file(self._path(url))

    def _get_file(self, url: str, to: Path) -> None:
        self._files.get_file(self._path(url), str(to), **self._limit())

    def _limit(self) -> dict[str, float]:
        left = seconds_left()
        return {"timeout": left} if self._files.async_impl and left is not None else {}

    def _compare(self, url: str, version: str) -> None:
        now = self.stat(url).version
        if now != version:
            raise ChangedError(f"{url}: is no longer {version}, but {now}")

    def _info(self, url: str) -> Mapping[str, Any]:
        try:
            facts: Mapping[str, Any] = self._files.info(self._path(url), **self._limit())
        except FileNotFoundError as error:
            # The driver of http raises this for any failure.
            raise error.__cause__ or error from None
        return facts

    def _found(self, url: str, facts: Mapping[str, Any]) -> StoredObject:
        if facts.get("size") is None:  # in listings of http
            facts = self._info(url)
        tag = next((facts[name] for name in TAGS if facts.get(name)), None)
        time = next((facts[name] for name in TIMES if facts.get(name)), None)
        size = -1 if facts["size"] is None else int(facts["size"])
        if tag is not None:
            return StoredObject(url, version_of_tag(str(tag)), size)
        return StoredObject(url, f"size:{size},mtime_ns:{_nanoseconds(time)}", size)

    def _path(self, url: str) -> str:
        path: str = self._files._strip_protocol(_known(url))
        return path


def _known(url: str) -> str:
    return url.replace("azure://", "az://", 1)


def _nanoseconds(time: Any) -> int:
    """Return a driver's time in ns since 1970; 0 if it has none.

    >>> _nanoseconds(1.5), _nanoseconds(None), _nanoseconds("Thu, 01 Jan 1970 00:00:01 GMT")
    (1500000000, 0, 1000000000)
    """
    if isinstance(time, str):
        is_http = time.endswith("GMT")
        time = parsedate_to_datetime(time) if is_http else datetime.fromisoformat(time)
    if isinstance(time, datetime):
        time = time.timestamp()
    return round((time or 0) * 10**9)


def _http_options(timeout_s: float) -> dict[str, Any]:
    timeout = import_module("aiohttp").ClientTimeout(
        total=None, sock_connect=min(CONNECT_S, timeout_s), sock_read=timeout_s
    )
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def _azure_options(_: float) -> dict[str, Any]:
    """Return options that find credentials as Azure's tools do, and as MosaicML's downloader."""
    account = os.environ.get("AZURE_ACCOUNT_NAME"), os.environ.get("AZURE_ACCOUNT_ACCESS_KEY")
    options: dict[str, Any] = dict(zip(("account_name", "account_key"), account, strict=True))
    if "AZURE_STORAGE_ANON" not in os.environ:
        options["anon"] = False
    return {name: value for name, value in options.items() if value is not None}


def _sftp_options(timeout_s: float) -> dict[str, Any]:
    key = os.environ.get("COMPOSER_SFTP_KEY_FILE")
    return {"timeout": timeout_s, **({"key_filename": key} if key else {})}


_OPTIONS: dict[str, Callable[[float], dict[str, Any]]] = {
    **dict.fromkeys(("http", "https"), _http_options),
    **dict.fromkeys(("az", "abfs", "abfss", "azure"), _azure_options),
    **dict.fromkeys(("sftp", "ssh"), _sftp_options),
}
