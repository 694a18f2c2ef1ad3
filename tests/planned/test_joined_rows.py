"""There is a warning for streams of joined documents that are cut into rows of a pack's length."""

from __future__ import annotations

import logging

import pytest

from streampack import Mixing, PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.mds.length_file import LENGTH_FILE
from streampack.planned import stream_lengths
from streampack.write import write_stream

SIZE = 32


@pytest.fixture(autouse=True)
def _nothing_was_warned_of():
    stream_lengths._warn_of_joined_rows.cache_clear()


def stream(folder, lengths, *, has_lengths=True, **options) -> Stream:
    path = write_stream([[1 + n] * length for n, length in enumerate(lengths)], folder / "web").path
    if not has_lengths:
        (path / LENGTH_FILE).unlink()
    return Stream(local=str(path), **options)


def warnings(caplog, *streams, epochs=1, **packing) -> list[str]:
    """Return the warnings that a number of epochs log."""
    with caplog.at_level(logging.WARNING, logger="streampack"):
        dataset = PackedStreamingDataset(
            list(streams), packing=Packing(max_seq_len=SIZE, **packing), mixing=Mixing()
        )
        loader = PackedDataLoader(dataset)
        for _ in range(epochs):
            list(loader)
    return caplog.messages


@pytest.mark.parametrize("has_lengths", [True, False])
def test_rows_as_long_as_a_pack_are_warned_of_once_with_both_effects(tmp_path, caplog, has_lengths):
    rows = stream(tmp_path, [SIZE] * 40, has_lengths=has_lengths)
    [message] = warnings(caplog, rows, epochs=2)

    assert "stream 'web': nearly all samples have 32 tokens, as many as a pack" in message
    assert "documents of a row then attend to each other" in message
    assert "eos_id= or bos_id= mark each cut between rows as the end of a document" in message


@pytest.mark.parametrize(
    "lengths",
    [[SIZE - 1] * 40, [SIZE] * 36 + [5] * 4, [SIZE] * 10, [7, 12, 30, 2] * 10],
    ids=["another length", "a tenth is shorter", "few samples", "documents"],
)
def test_other_lengths_are_not_warned_of(tmp_path, caplog, lengths):
    assert warnings(caplog, stream(tmp_path, lengths), eos_id=0) == []


def test_without_ids_of_its_own_the_packing_leaves_rows_whole(tmp_path):
    rows = stream(tmp_path, [SIZE] * 40)
    for packing, num_segments in (({}, 40), ({"eos_id": 0}, 80)):
        dataset = PackedStreamingDataset([rows], packing=Packing(max_seq_len=SIZE, **packing))
        batches = list(dataset)

        assert sum(len(batch["segments"]) for batch in batches) == num_segments
