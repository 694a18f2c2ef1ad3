"""The door to mosaicml-streaming: what is used is imported, all of it is there when asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from streampack.streams import mosaic

PACKAGES = ["streaming", "streaming.base"]


def test_what_is_used_of_streaming_comes_without_transformers_and_torchs_compiler():
    check = """
import sys, streampack.load, streaming, streaming.base.stream
unused = {"transformers", "torch._dynamo", "torchvision", "streaming.text"}
print(sorted(unused & set(sys.modules)), hasattr(streaming, "__wrapped__"))
"""
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] False"


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
