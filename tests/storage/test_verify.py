"""We compute the hashes of MosaicML Streaming with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from streampack.config import Download
from streampack.errors import DataError
from streampack.mds.codecs import HASHES
from streampack.mds.index import ShardFile
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.verify import FileVerifier, file_digest


def verifier(folder: Path, algorithm: str | None = None) -> FileVerifier:
    location = StreamLocation.of(local=str(folder), download=Download(hash=algorithm))
    return FileVerifier(location, LocalFilesystem())


@pytest.mark.parametrize("algorithm", sorted(HASHES))
def test_every_hash_of_mosaicml_is_the_same_here(tmp_path, algorithm):
    from streaming.base.hashing import get_hash

    content = bytes(range(256)) * 5000  # more than one piece
    (tmp_path / "a").write_bytes(content)
    expected = f"{algorithm}:{get_hash(algorithm, content)}"
    file = ShardFile(
        basename="a", num_bytes=len(content), hashes={algorithm: expected.split(":")[1]}
    )
    assert verifier(tmp_path).expected(file) == expected
    assert verifier(tmp_path, algorithm).expected(file, is_validated=True) == expected
    assert file_digest(LocalFilesystem(), tmp_path / "a", expected) == expected


def test_unknown_hashes_are_left_out(tmp_path):
    file = ShardFile(basename="a", num_bytes=1, hashes={"crc99": "00", "shake_128": "00"})
    assert verifier(tmp_path).expected(file) == ""
    with pytest.raises(DataError, match=r": a has no 'crc99' hash, only \['crc99', 'shake_128'\]"):
        verifier(tmp_path, "crc99").expected(file, is_validated=True)
