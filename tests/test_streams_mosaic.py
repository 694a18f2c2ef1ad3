"""The door to mosaicml-streaming: what is used is imported, all of it is there when asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from streampack.streams import mosaic

PACKAGES = ["streaming", "streaming.base"]


def said_by(script: str) -> str:
    """Return what a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def test_what_is_used_of_streaming_comes_without_transformers_and_torchs_compiler():
    assert (
        said_by("""
import sys, streampack.load, streaming, streaming.base.stream
unused = {"transformers", "torch._dynamo", "torchvision", "streaming.text"}
print(sorted(unused & set(sys.modules)), hasattr(streaming, "__wrapped__"))
""")
        == "[] False"
    )


def test_threads_that_ask_for_streaming_at_once_all_get_it():
    assert (
        said_by("""
from concurrent.futures import ThreadPoolExecutor
import streampack.load, streaming
with ThreadPoolExecutor(8) as pool:
    found = set(pool.map(lambda _: streaming.StreamingDataset, range(8)))
    print(len(found), *(each.__name__ for each in found))
""")
        == "1 StreamingDataset"
    )


def test_all_of_streaming_is_there_once_it_is_asked_for_and_of_the_same_classes():
    streaming, text = import_module("streaming"), import_module("streaming.text")

    assert streaming.Stream is mosaic.Stream
    assert streaming.base.MDSWriter is mosaic.MDSWriter
    assert streaming.base.stream.Stream is mosaic.Stream
    assert streaming.base.StreamingDataset is streaming.StreamingDataset
    assert issubclass(text.StreamingC4, streaming.StreamingDataset)
    for name in PACKAGES:
        package = import_module(name)
        assert set(package.__all__) <= set(vars(package))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_streaming_does_not_have_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'nothing'"):
        _ = import_module(name).nothing
