"""The family of errors, and the suggestion that many of them end with."""

from __future__ import annotations

import pytest

from streampack.errors import ConfigError, DataError, ResumeError, StreampackError, suggest


@pytest.mark.parametrize("error", [ConfigError, DataError, ResumeError])
def test_catching_the_root_catches_every_error_of_the_family(error):
    with pytest.raises(StreampackError, match="what was wrong"):
        raise error("what was wrong")


def test_only_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(DataError, ValueError)
    assert not issubclass(ResumeError, ValueError)


def test_a_near_word_is_suggested_and_a_far_one_is_not():
    assert suggest("repat", ["remote", "repeat"]) == " - did you mean 'repeat'?"
    assert suggest("zzz", ["remote", "repeat"]) == ""


def test_a_suggestion_takes_what_yaml_may_hold_for_a_word():
    assert suggest(7, ["remote"]) == ""
    assert suggest(None, iter(["remote"])) == ""
