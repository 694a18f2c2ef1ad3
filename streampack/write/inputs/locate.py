"""Find and open inputs by their path or URL, on this machine or in a store."""

from __future__ import annotations

from contextlib import AbstractContextManager

from streampack._paths import folder_of, is_url, shown_path
from streampack.write.inputs.local_files import find_files, open_file
from streampack.write.inputs.places import Listing, OpenInput
from streampack.write.inputs.stored_files import find_objects, open_object

SAME_STORES = {"gcs": "gs", "az": "abfs", "azure": "abfs"}  # one name for each in job.json


def path_or_url(uri: str) -> str:
    """Return an input as a path of this machine, or as a URL of a store under one name.

    >>> [path_or_url(uri) for uri in ("file:///data/a.txt", "s3://bucket/a.txt", "gcs://bucket/a")]
    ['/data/a.txt', 's3://bucket/a.txt', 'gs://bucket/a']
    """
    uri = shown_path(uri)
    path = folder_of(uri)
    if path is not None:
        return path
    scheme, colon, rest = uri.partition("://")
    return f"{SAME_STORES.get(scheme, scheme)}{colon}{rest}"


def find_input(uri: str) -> list[Listing]:
    """Return the files that a path or URL names: a file, a folder or a glob.

    A glob has one listing for its files, and one for each folder that it matches. A DataError says
    that the folder or store cannot be listed.
    """
    return find_objects(uri) if is_url(uri) else find_files(uri)


def open_input(
    uri: str, version: str, stop: int, *, is_sequential: bool
) -> AbstractContextManager[OpenInput]:
    """Open a file in the version that was listed; a DataError refuses another version.

    Bytes up to `stop` will be read (-1: to the end of the file), in order if `is_sequential`.
    """
    if is_url(uri):
        return open_object(uri, version, stop, is_sequential=is_sequential)
    return open_file(uri, version)
