"""Columns of bytes read with the wrong type, and with the right one."""

from __future__ import annotations

import numpy as np
import pytest
import streaming
from hypothesis import given
from hypothesis import strategies as st

from streampack import DataError, PackedStreamingDataset, Packing, Stream
from streampack.index import write_lengths
from streampack.mds.dtype_check import LIKELY, check_tokens_dtype, itemsize_of
from tests.helpers.examples import examples

SIGNED = ("int8", "int16", "int32", "int64")
DTYPES = (*SIGNED, "uint8", "uint16", "uint32")


def text(rng, n, vocabulary):
    """Ids of words: a few are frequent, independently of their numbers."""
    ranks = np.exp(rng.random(n) * np.log(vocabulary)).astype(np.int64) - 1
    return (ranks * 7_919 + 11) % vocabulary


CORPUS = {
    "gpt2": lambda rng, n: text(rng, n, 50_257),
    "llama3": lambda rng, n: text(rng, n, 128_256),
    "gemma": lambda rng, n: text(rng, n, 262_144),
    "65k": lambda rng, n: text(rng, n, 65_536),
    "5k": lambda rng, n: text(rng, n, 5_000),
    "uniform": lambda rng, n: rng.integers(0, 50_000, n),
    "uniform 16 bits": lambda rng, n: rng.integers(0, 65_536, n),
    "letters": lambda rng, n: rng.choice(np.frombuffer(b"the quick brown fox", np.uint8), n),
    "bytes": lambda rng, n: rng.integers(0, 256, n),
    "amino acids": lambda rng, n: rng.integers(0, 25, n),
    "bits": lambda rng, n: rng.integers(0, 2, n),
    "one": lambda _, n: np.full(n, 7),
    "zeros": lambda _, n: np.zeros(n),
    "sparse": lambda rng, n: (rng.random(n) < 0.02) * text(rng, n, 50_257),
    "padded": lambda rng, n: np.where(np.arange(n) < n / 3, text(rng, n, 50_257), 0),
    "padded left": lambda rng, n: np.where(np.arange(n) > n / 3, text(rng, n, 50_257), 0),
    "pairs with an EOS": lambda rng, _: np.append(rng.integers(1, 50_000, 1), 0),
    "items": lambda rng, n: rng.integers(0, 2**31, n),
    "images": lambda rng, n: np.where(np.arange(n) == 1, -200, text(rng, n, 32_000)),
}


def stored(rng, kind, dtype, lengths):
    """Return a shard's bytes, the beginnings of its samples, and the number of bytes of each."""
    samples = [np.asarray(CORPUS[kind](rng, n), np.int64) for n in lengths]
    limits = np.iinfo(dtype)
    whole = np.concatenate(samples)
    if whole.min() < limits.min or whole.max() > limits.max:
        return None
    raw = [sample.astype(dtype).tobytes() for sample in samples]
    sizes = np.array([len(each) for each in raw])
    return np.frombuffer(b"?" + b"".join(raw), np.uint8), 1 + np.cumsum(sizes) - sizes, sizes


@pytest.mark.parametrize("kind", CORPUS)
@examples(12)
@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    num_samples=st.sampled_from([1, 2, 300]),
    multiple=st.sampled_from([1, 2, 8]),
    shortest=st.sampled_from([0, 1, 40]),
)
def test_no_stream_is_refused_its_own_type(kind, dtype, seed, num_samples, multiple, shortest):
    rng = np.random.default_rng(seed)
    lengths = multiple * rng.integers(shortest, shortest + 60, num_samples)
    shard = stored(rng, kind, dtype, lengths)
    if shard is not None:
        check_tokens_dtype(*shard, dtype, "stream 'x'")


WRONG = [
    ("gpt2", "int64", "int32"),
    ("gpt2", "int32", "uint16"),
    ("llama3", "int64", "int32"),
    ("5k", "int32", "uint8"),
    ("bits", "int64", "int32"),
    ("amino acids", "int32", "uint8"),
    ("padded", "int64", "int32"),
]


@pytest.mark.parametrize(("kind", "dtype", "wrong"), WRONG)
def test_a_wrong_type_is_refused_and_the_type_it_names_is_taken(kind, dtype, wrong):
    rng = np.random.default_rng(5)
    shard = stored(rng, kind, dtype, 8 * rng.integers(4, 60, 400))
    with pytest.raises(DataError, match=rf"is read as {wrong}, .*tokens='tokens:\w+'") as no:
        check_tokens_dtype(*shard, wrong, "stream 'x'")
    assert f"was likely written as {dtype}: " in str(no.value)
    check_tokens_dtype(*shard, dtype, "stream 'x'")


@pytest.mark.parametrize(
    ("kind", "dtype", "wrong"),
    [("gpt2", "uint16", "int32"), ("gpt2", "int32", "int64")],
)
def test_sizes_that_do_not_fit_name_the_type_that_does(kind, dtype, wrong):
    rng = np.random.default_rng(6)
    shard = stored(rng, kind, dtype, rng.integers(20, 60, 400))
    assert (shard[2] % np.dtype(wrong).itemsize).any()
    assert LIKELY[itemsize_of(shard[2])] == dtype


def write(folder, samples, dtype):
    with streaming.MDSWriter(out=str(folder), columns={"tokens": "bytes"}) as writer:
        for sample in samples:
            writer.write({"tokens": sample.astype(dtype).tobytes()})


def first_batch(folder, **options):
    stream = Stream(local=str(folder), name="web", **options)
    return next(iter(PackedStreamingDataset([stream], packing=Packing(max_seq_len=256))))


@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize(("dtype", "wrong"), [("int64", "int32"), ("int64", "uint16")])
def test_a_dataset_refuses_it_by_name_and_reads_it_as_it_is_told(
    tmp_path, dtype, wrong, has_lengths
):
    rng = np.random.default_rng(8)
    write(tmp_path / "s", [text(rng, 40, 50_257) for _ in range(100)], dtype)
    if has_lengths:
        write_lengths(tmp_path / "s", tokens=f"tokens:{dtype}")
    with pytest.raises(
        DataError, match=r"stream 'web', column of the tokens: .*tokens='tokens:int64'"
    ):
        first_batch(tmp_path / "s", tokens=f"tokens:{wrong}")
    assert first_batch(tmp_path / "s", tokens=f"tokens:{dtype}")["segments"][0, 5] == 40


def test_data_that_only_looks_so_is_read_if_asked_for(tmp_path):
    rng = np.random.default_rng(9)
    samples = [np.stack([rng.integers(1, 99, 20), np.zeros(20)], 1).ravel() for _ in range(100)]
    write(tmp_path / "s", samples, "int32")
    with pytest.raises(DataError, match=r"if int32 is right, set check_dtypes=False$"):
        first_batch(tmp_path / "s", tokens="tokens:int32")
    batch = first_batch(tmp_path / "s", tokens="tokens:int32", check_dtypes=False)
    assert batch["segments"][0, 5] == 40
