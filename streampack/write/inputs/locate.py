"""The place that a path or URL lies in.

::

    data/*.jsonl     file:///data     LocalPlace
    s3://bucket/a                     S3Place
    gs://bucket/a    hf://datasets/a  FsspecPlace
"""

from __future__ import annotations

from streampack._paths import folder_of, shown_path
from streampack.write.inputs.fsspec_place import FsspecPlace
from streampack.write.inputs.local_place import LocalPlace
from streampack.write.inputs.places import Place
from streampack.write.inputs.s3_place import S3Place


def place_of(uri: str) -> tuple[Place, str]:
    """Return the place of a path or URL, and its name there.

    >>> place_of("file:///data/a.txt")[1]
    '/data/a.txt'
    """
    uri = shown_path(uri)
    path = folder_of(uri)
    if path is not None:
        return LocalPlace(), path
    return (S3Place() if uri.startswith("s3://") else FsspecPlace()), uri
