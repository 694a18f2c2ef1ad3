"""The door to mosaicml-streaming: what is used is imported, all of it is there when asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from streampack.mds import mosaic

PACKAGES = ["streaming", "streaming.base"]
INSTALL_PAGE = Path(__file__).parents[2] / "docs/install.md"


def said_by(script: str) -> str:
    """Return what a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


@pytest.mark.processes
def test_what_is_used_of_streaming_comes_without_transformers_and_torchs_compiler():
    assert (
        said_by("""
import sys, streampack.loader.loader, streaming, streaming.base.stream
unused = {"transformers", "torch._dynamo", "torchvision", "streaming.text"}
print(sorted(unused & set(sys.modules)), hasattr(streaming, "__wrapped__"))
""")
        == "[] False"
    )


@pytest.mark.processes
def test_streaming_imports_first_where_torchvision_fits_torch_and_else_fails_as_documented():
    # The other order is that of the test below.
    script = """
try:
    import {first}
    print("imported")
except RuntimeError as error:
    print(error)
"""
    way_out = """
from streampack import PackedStreamingDataset
import streaming
print(streaming.StreamingDataset.__name__)
"""
    alone = said_by(script.format(first="torchvision"))
    outcome, after = said_by(script.format(first="streaming") + way_out).splitlines()

    assert after == "StreamingDataset"
    assert outcome == alone
    if outcome != "imported":
        page = INSTALL_PAGE.read_text(encoding="utf-8")
        assert f"RuntimeError: {outcome}\n" in page
        assert "from streampack import PackedStreamingDataset" in page


def test_the_install_page_names_the_versions_of_the_constraints():
    constraints = (INSTALL_PAGE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    pins = [line for line in constraints.split() if line.startswith(("torch==", "torchvision=="))]

    assert len(pins) == 2
    assert f"pip install {' '.join(pins)} " in INSTALL_PAGE.read_text(encoding="utf-8")


@pytest.mark.processes
def test_threads_that_ask_for_streaming_at_once_all_get_it():
    assert (
        said_by("""
from concurrent.futures import ThreadPoolExecutor
import streampack.loader.loader, streaming
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
