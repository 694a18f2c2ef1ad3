"""Extra fields of iterables: values for each token, and payloads such as images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import DataError, IterableStream, PackedIterableDataset, Packing, Payloads
from tests.helpers.examples import examples


def dataset(*streams, **packing) -> PackedIterableDataset:
    return PackedIterableDataset(streams, packing=Packing(**{"max_seq_len": 16} | packing))


@examples(30)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_values_for_each_token_stay_beside_their_tokens(lengths):
    rows = [
        {"tokens": list(range(1, n + 1)), "weight": [i / 2 for i in range(1, n + 1)]}
        for n in lengths
    ]
    stream = IterableStream(rows, token_fields={"weight": "float32"})
    for batch in dataset(stream):
        assert batch["weight"].dtype == torch.float32
        assert torch.equal(batch["weight"] * 2, batch["tokens"].float())


def test_an_added_bos_or_eos_has_no_value_and_shifts_spans():
    row = {"tokens": [5, 6, 7], "weight": [1, 2, 3], "image": b"x", "span": [1, 3]}
    stream = IterableStream(
        [row], token_fields={"weight": "int64"}, payloads=Payloads({"image": "span"})
    )
    [batch] = dataset(stream, max_seq_len=6, bos_id=1, eos_id=2)

    assert batch["weight"][0].tolist() == [0, 1, 2, 3, 0, 0]
    assert batch["image"] == [b"x"]
    assert batch["image_at"].tolist() == [[0, 2, 4]]


@examples(40)
@given(
    samples=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=12),
    multiple=st.sampled_from([None, 4]),
)
def test_a_payload_is_never_cut_and_lies_where_its_tokens_are(samples, multiple):
    """A sample is a row of images, each of so many tokens that bear its number."""
    rows, number = [], 0
    if multiple is not None:  # pieces end at its multiples, so all images do
        samples = [[4 * (size % 4 + 1) for size in sizes] for sizes in samples]
    for sizes in samples:
        row = {"tokens": [], "images": [], "spans": []}
        for size in sizes:
            number += 1
            row["spans"].append([len(row["tokens"]), len(row["tokens"]) + size])
            row["tokens"] += [number] * size
            row["images"].append(np.array([number]))
        rows.append(row)
    stream = IterableStream(rows, payloads=Payloads({"images": "spans"}, split=True))
    packing = {} if multiple is None else {"pad_to_multiple": multiple}
    seen = []
    for batch in dataset(stream, **packing):
        for image, (pack, start, stop) in zip(
            batch["images"], batch["images_at"].tolist(), strict=True
        ):
            assert set(batch["tokens"][pack, start:stop].tolist()) == {int(image[0])}
            assert len(set(batch["document_ids"][pack, start:stop].tolist())) == 1
            seen.append((int(image[0]), stop - start))

    sizes = [size for sizes in samples for size in sizes]
    assert sorted(seen) == list(enumerate(sizes, start=1))


def test_a_payload_without_a_span_belongs_to_all_of_its_sample():
    rows = [{"tokens": [1] * 5}, {"tokens": [2] * 6, "image": b"y"}]
    [batch] = dataset(IterableStream(rows, payloads=Payloads({"image": None})))

    assert batch["image"] == [b"y"]
    assert batch["image_at"].tolist() == [[0, 5, 11]]


def test_what_payloads_cost_beyond_their_tokens_takes_room_and_is_no_target():
    rows = [{"tokens": [1, 2], "image": b"y"}, {"tokens": [3, 4, 5]}]
    stream = IterableStream(
        rows, payloads=Payloads({"image": None}, cost=lambda row: 11 if "image" in row else 0)
    )
    [batch] = dataset(stream, padding_id=9)

    assert batch["tokens"][0].tolist() == [1, 2, *[9] * 11, 3, 4, 5]
    assert batch["labels"][0].tolist() == [2, *[-100] * 12, 4, 5, -100]
    assert batch["document_ids"][0].tolist() == [1] * 13 + [2] * 3


LONG = {"tokens": [1] * 20, "image": b"x", "span": [14, 18]}


@pytest.mark.parametrize(
    ("row", "stream", "packing", "message"),
    [
        (LONG, {}, {}, "has payloads, so it is not cut, .* set Payloads"),
        (LONG | {"span": [1, 18]}, {"split": True}, {}, "payload of up to 17 tokens"),
        (LONG | {"span": [1, 30]}, {}, {}, r"span \[1, 30\], which is not inside its 20 tokens"),
        (LONG | {"span": [1, 2, 3, 4]}, {}, {}, "1 payloads, but 2 spans"),
        (LONG, {"cost": lambda _: -1}, {}, "cost of payloads is -1"),
        (LONG, {"cost": lambda _: 0.5}, {}, "cost of payloads is 0.5"),
        (LONG, {}, {"overflow": "error"}, "does not fit max_seq_len=16"),
    ],
)
def test_bad_payloads_are_named(row, stream, packing, message):
    source = IterableStream([row], payloads=Payloads({"image": "span"}, **stream))
    with pytest.raises(DataError, match=message):
        list(dataset(source, **packing))


def test_a_truncated_sample_ends_before_a_payload_that_would_be_cut():
    [batch] = dataset(
        IterableStream([LONG], payloads=Payloads({"image": "span"})), overflow="truncate"
    )

    assert batch["segments"][:, 5].tolist() == [14]
    assert batch["image"] == []


def test_a_dropped_sample_takes_its_payloads_with_it():
    rows = [LONG, {"tokens": [7]}]
    [batch] = dataset(IterableStream(rows, payloads=Payloads({"image": None})), overflow="drop")

    assert batch["image"] == []
    assert batch["segments"][:, 3].tolist() == [1]


@pytest.mark.parametrize(
    ("values", "dtype", "bad"),
    [
        ([1, 300], "uint8", "300"),
        ([1, -1], "uint64", "-1"),
        (np.array([1, 2**64 - 1], np.uint64), "int64", "18446744073709551615"),
        ([1.0, 0.5], "int32", "0.5"),
        ([1.0, float("nan")], "int64", "nan"),
        ([0, 2], "bool", "2"),
        ([1.0, 1e39], "float32", r"1e\+39"),
        ([1, 10**6], "float16", "1000000"),
    ],
)
def test_values_that_the_dtype_cannot_hold_are_refused_and_a_wider_dtype_holds_them(
    values, dtype, bad
):
    row = {"tokens": [1, 2], "w": values}
    with pytest.raises(
        DataError, match=f"'w' has the value {bad}, .* not fit in {dtype}; .* a dtype"
    ):
        list(dataset(IterableStream([row], token_fields={"w": dtype})))
    wider = np.asarray(values).dtype.name
    [batch] = dataset(IterableStream([row], token_fields={"w": wider}))
    assert np.array_equal(
        batch["w"].numpy()[0, :2], np.asarray(values), equal_nan=wider == "float64"
    )


@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask"])
def test_an_unsigned_integer_beyond_int64_is_refused_not_read_as_a_negative_one(name):
    row = {"tokens": [1, 2], "labels": [1, -100], "loss_mask": [1, 1]}
    row = {
        key: np.array(value).astype(np.uint64 if key == name else int) for key, value in row.items()
    }
    row[name][1] = np.uint64(2**64 - 100)
    fields = {} if name == "tokens" else {name: name}
    with pytest.raises(
        DataError, match=f"'{name}' has the value 18446744073709551516, but .* signed type"
    ):
        list(dataset(IterableStream([row], **fields)))
