"""`IterableStream` accepts lists, arrays and dicts, and refuses samples without integers."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.streams import IterableStream


@pytest.mark.parametrize(
    "item",
    [
        [5, 6, 7],
        (5, 6, 7),
        np.array([5, 6, 7], np.uint16),
        {"tokens": [5, 6, 7], "text": "x"},
        {"input_ids": np.array([5, 6, 7])},
    ],
)
def test_tokens_are_found(item):
    sample = IterableStream([]).sample(item, 0)
    assert sample.tokens.tolist() == [5, 6, 7]
    assert sample.tokens.dtype == np.int64
    assert sample.labels is None
    assert sample.loss_mask is None


def test_labels_and_masks_are_found():
    stream = IterableStream([], labels="y", loss_mask="m")
    sample = stream.sample({"tokens": [5, 6], "y": [-100, 6], "m": [False, True]}, 0)
    assert sample.labels.tolist() == [-100, 6]
    assert sample.loss_mask.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([], "stream 'web', sample 8: 0 tokens, but a sample needs 1 or more"),
        ([0.5], "field 'tokens' holds float64, but must hold integers"),
        ({"text": "x"}, "sample 8: no field 'tokens'; it has 'text'; set tokenizer="),
        ({"tokens": [1, 2], "y": [1]}, "sample 8: 2 tokens, but 1 values in 'y'"),
        ({"tokens": [1, 2]}, "no field 'y'; it has 'tokens'"),
    ],
)
def test_what_is_no_sample_is_refused(item, message):
    labels = "y" if "y" in message else None
    with pytest.raises(DataError, match=message):
        IterableStream([], name="web", labels=labels).sample(item, 8)
