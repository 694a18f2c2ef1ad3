"""URL schemes that a store can be opened for, and the packages that they need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

S3_SCHEMES = ("s3", "r2")
"""Served by boto3."""
PACKAGES = {
    **dict.fromkeys(S3_SCHEMES, "boto3"),
    **dict.fromkeys(("gs", "gcs"), "'streampack[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss", "azure"), "'streampack[azure]'"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hf": "'streampack[hf]'",
}
"""What pip installs for a scheme; fsspec has drivers for more."""


def is_known(scheme: str) -> bool:
    """Return whether there is a driver for a scheme, installed or not.

    >>> is_known("s3"), is_known("nonsense")
    (True, False)
    """
    if scheme in PACKAGES:
        return True
    fsspec: Any = import_module("fsspec")
    return scheme in fsspec.available_protocols()
