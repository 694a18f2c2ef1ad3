"""The values that items of an iterable stream may hold."""

from __future__ import annotations

import re

import numpy as np
import pytest

from streampack import (
    ConfigError,
    DataError,
    IterableStream,
    PackedIterableDataset,
    Packing,
    Payloads,
)
from streampack.config.moved import line_of
from tests.helpers.iterables import pieces


@pytest.mark.parametrize("make", [list, tuple, np.array])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", 2**31, "token 2147483648 is not a token id"),
        ("tokens", -1, "token -1 is negative"),
        ("said", -(2**31), "'said' has the value -2147483648, outside int32"),
        ("mask", 2, "'mask' has the value 2, but a loss mask is 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_sample_or_skipped(make, field, value, message):
    rows = [{"tokens": [1, 2], "said": [1, -100], "mask": [0, 1]} for _ in range(3)]
    rows[1][field][1] = value
    rows = [{name: make(values) for name, values in row.items()} for row in rows]

    def dataset(**options):
        stream = IterableStream(
            rows, labels="said", labels_shifted=True, loss_mask="mask", **options
        )
        return PackedIterableDataset([stream], packing=Packing(max_seq_len=8))

    with pytest.raises(DataError, match=rf"sample 1: {message}"):
        list(dataset())
    assert len(pieces(dataset(on_bad_row="skip"))) == 2


FORMER = ("length_fn", "split_payloads", "on_bad_sample", "max_bad_samples")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 7}, rf"{name}=7: .*; write {re.escape(line_of(name, 7))};") for name in FORMER),
        ({"payload": {}}, "payload={}: not an argument .* did you mean 'payloads'"),
        (
            {"payloads": {"images": "at"}},
            r"payloads={'images': 'at'} is not a Payloads; write Payl",
        ),
        ({"on_bad_row": "skp"}, "on_bad_row='skp' .*; write 'error', 'skip', or how many samples"),
        ({"on_bad_row": -1}, "on_bad_row=-1 must be at least 0; write 'error', 'skip', or how"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_write(options, message):
    with pytest.raises(ConfigError, match=message):
        IterableStream([[1, 2]], **options)


@pytest.mark.parametrize("name", FORMER)
def test_what_to_write_for_a_former_option_can_be_written(name):
    for line in line_of(name, 7).split(" or "):
        names = {"IterableStream": IterableStream, "Payloads": Payloads, "source": [[1, 2]]}
        assert isinstance(eval(line, names), IterableStream)
