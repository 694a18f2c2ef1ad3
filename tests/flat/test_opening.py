"""Opening token files: what is beside them does not matter, and only a few entries are read."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from streampack import DataError, TokenFiles
from streampack.streams.flat_opening import find_files
from tests.helpers.flat import write_megatron

NUM_FILES, NUM_DOCUMENTS, LENGTH = 10_000, 100_000, 1000
OPEN = """
import sys, time
from streampack import Stream, TokenFiles
from streampack.streams import open_stream

start = time.process_time()
stream = open_stream(Stream(TokenFiles(sys.argv[1])), 0)
seconds = time.process_time() - start
status = dict(line.split(":") for line in open("/proc/self/status"))
print(stream.num_samples, seconds, int(status["RssAnon"].split()[0]) << 10)
"""


def test_what_is_beside_a_file_does_not_matter_and_a_link_to_nothing_among_files_does(tmp_path):
    for name in ("code.ds", "code.ds.index"):
        (tmp_path / name).write_bytes(bytes(16))
    (tmp_path / "venv" / "lib").mkdir(parents=True)
    (tmp_path / "venv" / "lib64").symlink_to("lib")
    (tmp_path / "gone").symlink_to("nothing")
    found = find_files(TokenFiles(tmp_path / "code.ds"))
    assert (found.names, sorted(found.of_name)) == (["code.ds"], ["code.ds", "code.ds.index"])

    (tmp_path / "venv" / "lib64").unlink()
    (tmp_path / "more.ds").symlink_to("nothing")
    for files in ("more.ds", "*.ds"):
        with pytest.raises(DataError, match=r"more\.ds: does not exist"):
            find_files(TokenFiles(tmp_path / files))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["megatron", "datatrove"])
def test_a_billion_documents_open_in_5_seconds_and_600_mib(form, tmp_path):
    ends = np.arange(1, NUM_DOCUMENTS + 1, dtype="<u8") * LENGTH
    if form == "datatrove":
        (tmp_path / "0.ds.index").write_bytes(ends.tobytes())
        tokens = tmp_path / "0.ds"
    else:
        documents = np.zeros((NUM_DOCUMENTS, LENGTH), "uint16")
        write_megatron(tmp_path, list(documents), "0")
        tokens = tmp_path / "0.bin"
    os.truncate(tokens, 0) if tokens.exists() else tokens.touch()
    os.truncate(tokens, int(ends[-1]) * 2)  # sparse, since no token is read
    for path in list(tmp_path.iterdir()):
        for number in range(1, NUM_FILES):
            os.link(path, path.with_name(f"{number}{path.name[1:]}"))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    num_samples, seconds, num_bytes = map(float, done.stdout.split())
    assert num_samples == NUM_FILES * NUM_DOCUMENTS
    assert seconds <= 5
    assert num_bytes <= 600 << 20
