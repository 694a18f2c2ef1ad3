"""The family of errors, and the suggestion that many of them end with."""

from __future__ import annotations

import pickle

import pytest
from torch._utils import ExceptionWrapper

from streampack.errors import (
    ConfigError,
    DataError,
    ResumeError,
    StreampackError,
    WorkerError,
    suggest,
)


@pytest.mark.parametrize("error", [ConfigError, DataError, ResumeError, WorkerError])
def test_catching_the_root_catches_every_error_of_the_family(error):
    with pytest.raises(StreampackError, match="what was wrong"):
        raise error("what was wrong")


def test_a_data_error_keeps_what_is_known_of_a_download_on_its_way_between_processes():
    error = DataError("what was wrong", uri="s3://b/a", shard="a", attempts=3, elapsed_s=1.5)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "what was wrong"
    assert (again.uri, again.shard, again.attempts, again.elapsed_s) == ("s3://b/a", "a", 3, 1.5)
    assert DataError("what was wrong").attempts is None


def test_torch_can_raise_a_workers_data_error_again():
    try:
        raise DataError("what was wrong", uri="s3://b/a", attempts=3)
    except DataError:
        carried = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(DataError, match="what was wrong"):
        carried.reraise()


def test_a_near_word_is_suggested_and_a_far_one_is_not():
    assert suggest("repat", ["remote", "repeat"]) == " - did you mean 'repeat'?"
    assert suggest("zzz", ["remote", "repeat"]) == ""
