"""What a listing of a bucket names: objects, not a console's folders; what is called again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from streampack.write import s3_client
from streampack.write.inputs.listing import list_inputs
from streampack.write.output import open_output

KEYS = ("in/", "in/a.txt", "in/deep/", "in/deep/b.txt", "out/", "out/parts/")


class Bucket:
    """A client of a bucket with an empty object for each key."""

    def get_paginator(self, _: str) -> Bucket:
        return self

    def paginate(self, *, Prefix: str, **_: str) -> Iterator[dict[str, Any]]:  # noqa: N803
        entries = [{"Key": key, "ETag": '"0"', "Size": 0} for key in KEYS]
        yield {"Contents": [entry for entry in entries if entry["Key"].startswith(Prefix)]}


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    monkeypatch.setattr(s3_client, "s3_client", Bucket)


def test_a_folder_that_a_console_made_is_empty():
    output = open_output("s3://bucket/out")

    assert output.is_empty()
    assert output.names("", "") == []
    assert not open_output("s3://bucket/in").is_empty()


@pytest.mark.parametrize("uri", ["s3://bucket/in", "s3://bucket/in/", "s3://bucket/in/**"])
def test_a_folder_that_a_console_made_holds_the_files_below_it(uri):
    assert [file.uri for file in list_inputs([uri])] == [
        "s3://bucket/in/a.txt",
        "s3://bucket/in/deep/b.txt",
    ]


def test_ctrl_c_ends_a_request_that_would_be_repeated():
    calls = []

    def request():
        calls.append(len(calls))
        if len(calls) == 1:
            raise ConnectionError
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        s3_client.retrying(lambda _: True)(request)
    assert calls == [0, 1]
