"""Gathered rows of real MDS files, compared with samples joined and cut as plain lists."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming import MDSWriter

from streampack.config import Packing
from streampack.errors import DataError
from streampack.gather import kernels
from streampack.gather.context_slice import ContextSlice
from streampack.gather.gather import Gatherer, Rows
from streampack.pack import fit_samples, make_packer
from streampack.streams import open_stream, shard_pool
from streampack.streams.label_shift import detect_shift, labels_are_shifted
from streampack.streams.stream import Stream
from streampack.streams.token_stream import TokenStream
from streampack.types import Packs
from tests.helpers.examples import examples
from tests.helpers.slices import slots

ROW_TOKENS = 12
BOS, EOS = 1, 2
NUM_SAMPLES = 40

# How each stream stores its tokens, and how it marks those that are targets.
STORED = [
    ("ndarray:int32", "int32", "plain"),
    ("ndarray:uint16", "uint16", "mask"),
    ("ndarray", "int64", "unshifted"),
    ("bytes", "uint32", "shifted"),
    ("bytes", "uint16", "plain"),
    ("ndarray:uint32", "uint32", "shifted and mask"),
    ("ndarray:int32", "int32", "mask"),
    ("ndarray:int32", "int32", "mask"),
    ("ndarray:int32", "int32", "mask"),
]
# How masks of these streams are stored.
MASKS = {1: "uint8", 5: "int8", 6: "int16", 7: "uint32", 8: "int64"}


def own_tokens(stream: int, sample: int) -> list[int]:
    """The stored tokens of a sample; some begin with a BOS, some end with an EOS."""
    length = 1 + (sample * 7 + stream) % 17
    tokens = [10 + stream * 10_000 + sample * 20 + i for i in range(length)]
    if sample % 5 == 1:
        tokens[0] = BOS
    if sample % 5 in (1, 2):
        tokens[-1] = EOS
    return tokens


def own_targets(stream: int, sample: int) -> list[bool]:
    """Which tokens of a sample are targets; all of them if the stream does not mark any."""
    if STORED[stream][2] == "plain":
        return [True] * len(own_tokens(stream, sample))
    return [(sample + 3 * i + i * i) % 4 > 1 for i in range(len(own_tokens(stream, sample)))]


def columns_of(stream: int, sample: int) -> dict[str, Any]:
    """A sample as its stream stores it, along with columns that are never requested."""
    encoding, dtype, way = STORED[stream]
    tokens, targets = own_tokens(stream, sample), own_targets(stream, sample)
    values = np.array(tokens, dtype)
    row = {
        "a_text": "x" * (sample % 4),  # puts the next column at odd offsets
        "tokens": values.tobytes() if encoding == "bytes" else values,
        "z_number": sample,
    }
    kept = [token if is_target else -100 for token, is_target in zip(tokens, targets, strict=True)]
    if "unshifted" in way:
        row["labels"] = np.array(kept, np.int32)
    elif "shifted" in way:
        row["labels"] = np.array([*kept[1:], -100], np.int64)
    if "mask" in way:
        row["loss_mask"] = np.array(targets, MASKS[stream])
    return row


def write_stream(
    folder: Path, samples: Sequence[dict[str, Any]], encodings: dict[str, str]
) -> None:
    with MDSWriter(out=str(folder), columns=encodings, size_limit=600) as writer:
        for sample in samples:
            writer.write(sample)


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """One stream of several shards for each way to store tokens and targets."""
    opened = []
    for number, (encoding, dtype, way) in enumerate(STORED):
        folder = tmp_path_factory.mktemp("streams") / f"s{number}"
        encodings = {"a_text": "str", "tokens": encoding, "z_number": "int"}
        options: dict[str, Any] = {"tokens": f"tokens:{dtype}"} if encoding == "bytes" else {}
        if "shifted" in way:
            encodings["labels"] = "ndarray:int32" if way == "unshifted" else "ndarray:int64"
            options["labels"] = "labels"
        if "mask" in way:
            encodings["loss_mask"] = f"ndarray:{MASKS[number]}"
            options["loss_mask"] = "loss_mask"
        write_stream(folder, [columns_of(number, i) for i in range(NUM_SAMPLES)], encodings)
        opened.append(open_stream(Stream(local=str(folder), **options), number))
    assert all(len(stream.first_sample) > 3 for stream in opened)
    return opened


def whole(stream: int, sample: int, packing: Packing) -> tuple[list[int], list[bool]]:
    """A sample's tokens including BOS and EOS, and which of them are targets."""
    tokens, targets = own_tokens(stream, sample), own_targets(stream, sample)
    is_shifted = STORED[stream][2].startswith("shifted")
    if packing.eos_id is not None and tokens[-1] != packing.eos_id:
        # A shifted column has no entry for token 0, so it cannot make an only token a target.
        is_target = targets[-1] and not (is_shifted and len(tokens) == 1)
        tokens, targets = [*tokens, packing.eos_id], [*targets, is_target]
    if packing.bos_id is not None and tokens[0] != packing.bos_id:
        first = targets[0] and not is_shifted
        tokens, targets = [packing.bos_id, *tokens], [False, first, *targets[1:]]
    return tokens, targets


def plain_rows(packs: Packs, packing: Packing, num_rows: int) -> dict[str, list[Any]]:
    """Tokens, labels and next tokens of packs, joined in plain lists."""
    out: dict[str, list[Any]] = {"tokens": [], "labels": [], "next_tokens": []}
    for row in range(num_rows):
        tokens: list[int] = []
        labels: list[int] = []
        for stream, _, sample, start, length, total in packs[row] if row < len(packs) else ():
            full, targets = whole(stream, sample, packing)
            stop = start + length
            tokens += full[start:stop]
            out["next_tokens"].append(full[stop] if stop < total else -100)
            ahead = range(start + 1, stop + 1)
            labels += [full[i] if i < total and targets[i] else -100 for i in ahead]
        out["tokens"].append(tokens + [packing.padding_id] * (packing.max_seq_len - len(tokens)))
        out["labels"].append(labels + [-100] * (packing.max_seq_len - len(labels)))
    return out


@st.composite
def plans(draw: st.DrawFn, ways: set[str]) -> tuple[Packs, Packing]:
    """Packs of random segments, from streams that all mark targets in the same way."""
    packing = Packing(
        max_seq_len=ROW_TOKENS,
        bos_id=draw(st.sampled_from([None, BOS])),
        eos_id=draw(st.sampled_from([None, EOS])),
        padding_id=draw(st.sampled_from([0, 99])),
        overflow=draw(st.sampled_from(["split", "truncate"])),
    )
    numbers = [number for number, stored in enumerate(STORED) if stored[2] in ways]
    segments, ends = [], []
    for _ in range(draw(st.integers(0, 4))):
        room = ROW_TOKENS
        for _ in range(draw(st.integers(0, 5))):
            if room == 0:
                break
            stream = draw(st.sampled_from(numbers))
            sample = draw(st.integers(0, NUM_SAMPLES - 1))
            total = len(whole(stream, sample, packing)[0])
            if packing.overflow == "truncate":
                total = min(total, ROW_TOKENS)
            start = draw(st.just(0) | st.integers(0, total - 1))
            longest = min(total - start, room)
            length = draw(st.just(longest) | st.integers(1, longest))
            segments.append([stream, 0, sample, start, length, total])
            room -= length
        ends.append(len(segments))
    rows = np.array(segments, np.int64).reshape(-1, 6)
    return Packs(segments=rows, ends=np.array(ends, np.int64)), packing


@examples(80, many=200)
@given(plan=plans({stored[2] for stored in STORED}), num_padding=st.integers(0, 2))
def test_rows_hold_the_planned_tokens_and_labels_of_every_way_to_store_them(
    streams, plan, num_padding
):
    packs, packing = plan
    num_rows = len(packs) + num_padding
    rows = Gatherer(streams, packing).gather(packs, num_rows)
    expected = plain_rows(packs, packing, num_rows)
    assert rows.tokens.tolist() == expected["tokens"]
    assert rows.next_tokens.tolist() == expected["next_tokens"]
    if rows.labels is None:
        assert all(STORED[stream][2] == "plain" for stream in packs.segments[:, 0])
    else:
        assert rows.labels.tolist() == expected["labels"]


@examples(40, many=100)
@given(
    plan=plans({stored[2] for stored in STORED}),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    num_ranks=st.sampled_from([2, 3]),
    frame_rows=st.sampled_from([1, 2]),
)
def test_slices_of_rows_hold_their_part_of_the_tokens_and_labels(
    streams, plan, layout, num_ranks, frame_rows
):
    packs, packing = plan
    num_rows = -(-len(packs) // frame_rows) * frame_rows
    expected = plain_rows(packs, packing, num_rows)
    frame = ROW_TOKENS * frame_rows
    for rank in range(num_ranks):
        context = ContextSlice(rank=rank, num_ranks=num_ranks, layout=layout, frame_tokens=frame)
        rows = Gatherer(streams, packing, context).gather(packs, num_rows)
        own = slots(layout, num_ranks, rank, [0, ROW_TOKENS * num_rows], frame)
        assert rows.tokens.shape == (num_rows, ROW_TOKENS // num_ranks)
        whole_tokens, whole_labels = (np.ravel(expected[key]) for key in ("tokens", "labels"))
        assert rows.tokens.reshape(-1).tolist() == [whole_tokens[slot] for slot in own]
        if rows.labels is not None:
            assert rows.labels.reshape(-1).tolist() == [whole_labels[slot] for slot in own]
        else:
            read, _ = context.pieces(packs, rows.tokens.shape, 1).to_read(packs)
            assert all(STORED[stream][2] == "plain" for stream in read.segments[:, 0])


def packs_of(*packs: Sequence[Sequence[int]]) -> Packs:
    rows = [segment for pack in packs for segment in pack]
    ends = np.cumsum([len(pack) for pack in packs])
    return Packs(segments=np.array(rows, np.int64).reshape(-1, 6), ends=ends)


def every_sample(packing: Packing) -> Packs:
    """The head of every sample of every stream, each in a separate pack."""
    packs = []
    for stream in range(len(STORED)):
        for sample in range(NUM_SAMPLES):
            total = len(whole(stream, sample, packing)[0])
            packs.append([[stream, 0, sample, 0, min(total, ROW_TOKENS), total]])
    return packs_of(*packs)


def test_threads_that_share_a_gatherer_and_drop_each_others_shards_read_right(streams, monkeypatch):
    monkeypatch.setattr(shard_pool, "_pool", shard_pool.ShardPool(2, 10**6))
    packing = Packing(max_seq_len=ROW_TOKENS)
    packs = every_sample(packing)
    expected = plain_rows(packs, packing, len(packs))["tokens"]
    gatherer = Gatherer(streams, packing)
    start = threading.Barrier(4)

    def read(first: int) -> None:
        start.wait(timeout=30)
        for pack in range(first, len(packs), 2):
            rows = gatherer.gather(packs.slice(pack, pack + 1), 1)
            assert rows.tokens.tolist() == expected[pack : pack + 1]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(read, first % 2) for first in range(4)]:
            done.result(timeout=60)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_segment_without_target_columns_leaves_no_location_to_prefetch(streams, monkeypatch):
    """Memory may hold a location of an earlier batch, of any size."""
    made = []

    def room_for(num_segments: int) -> kernels.FoundRows:
        where, cursor = np.full((num_segments, kernels.FOUND_COLUMNS), 1 << 12), np.zeros(3, int)
        made.append(where)
        return where, cursor

    monkeypatch.setattr(kernels, "room_for", room_for)
    packing = Packing(max_seq_len=ROW_TOKENS)
    Gatherer(streams, packing).gather(every_sample(packing), len(STORED) * NUM_SAMPLES)

    is_plain = np.repeat([way == "plain" for *_, way in STORED], NUM_SAMPLES)
    _, of_labels = made
    assert not of_labels[is_plain].any()
    assert of_labels[~is_plain].all()


def test_a_forked_child_does_not_wait_for_its_parents_lock(streams):
    packing = Packing(max_seq_len=ROW_TOKENS)
    gatherer, packs = Gatherer(streams, packing), every_sample(packing)
    expected = gatherer.gather(packs, len(packs)).tokens
    with gatherer._lookup()._lock:  # as if another thread were looking up a shard
        child = os.fork()
        if child == 0:
            same = np.array_equal(gatherer.gather(packs, len(packs)).tokens, expected)
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def gather_one(streams: list[TokenStream], *segment: int, **packing: Any) -> Rows:
    options = Packing(max_seq_len=ROW_TOKENS, **packing)
    return Gatherer(streams, options).gather(packs_of([segment]), 1)


TOTAL_OF_4 = len(own_tokens(0, 4))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ((9, 0, 0, 0, 1, 1), r"stream 9 is planned, but there are 9 streams; plan with"),
        ((-1, 0, 0, 0, 1, 1), r"stream -1 is planned"),
        ((0, 0, 40, 0, 1, 1), r"stream 's0', sample 40: is planned, .* has 40 samples; .*damaged"),
        ((0, 0, -1, 0, 1, 1), r"stream 's0', sample -1: is planned"),
        ((0, 0, 4, 0, 5, 5), r"stream 's0', sample 4: is planned with 5 tokens, but has another"),
        ((0, 0, 4, 9, 9, TOTAL_OF_4), r"sample 4: tokens 9 to 18 of 12 are planned"),
        ((0, 0, 4, -1, 3, TOTAL_OF_4), r"sample 4: tokens -1 to 2 of 12 are planned"),
        ((0, 0, 4, 0, 0, TOTAL_OF_4), r"sample 4: tokens 0 to 0 of 12 are planned"),
    ],
)
def test_a_segment_that_is_not_in_its_stream_is_an_error_that_names_it(streams, segment, message):
    assert TOTAL_OF_4 == 12
    with pytest.raises(DataError, match=message):
        gather_one(streams, *segment)


def labelled(
    folder: Path, tokens: list[Any], labels: list[Any], **options: Any
) -> list[TokenStream]:
    """Write a stream of samples with labels, and open it."""
    rows = [
        {"tokens": np.array(ids, np.int32), "labels": np.array(said, np.int32)}
        for ids, said in zip(tokens, labels, strict=True)
    ]
    write_stream(folder, rows, {"tokens": "ndarray:int32", "labels": "ndarray:int32"})
    return [open_stream(Stream(local=str(folder), labels="labels", **options), 0)]


@pytest.mark.parametrize(
    ("labels", "why"),
    [([[-100] * 4], "both"), ([[5, 5, 5, 5]], "both"), ([[1, 2, 3, 4]], "neither")],
)
def test_labels_that_fit_both_ways_or_neither_ask_to_say_which(tmp_path, labels, why):
    streams = labelled(tmp_path, [[5, 5, 5, 5]] if why == "both" else [[5, 6, 7, 8]], labels)
    message = "the labels of its first 1 samples do not tell .* say so with labels_shifted=True"
    with pytest.raises(DataError, match=f"stream '{tmp_path.name}': {message}"):
        gather_one(streams, 0, 0, 0, 0, 4, 4)


def test_a_shifted_columns_last_label_counts_for_an_added_eos_and_not_after_truncation(tmp_path):
    streams = labelled(tmp_path, [[5, 6, 7], list(range(20, 34))], [[6, 7, 8], list(range(21, 35))])
    rows = gather_one(streams, 0, 0, 0, 0, 3, 3)
    assert rows.labels is not None
    assert rows.labels[0, :3].tolist() == [6, 7, 8]
    rows = gather_one(streams, 0, 0, 0, 0, 4, 4, eos_id=EOS)
    assert rows.labels is not None
    assert rows.labels[0, :4].tolist() == [6, 7, EOS, -100]
    rows = gather_one(streams, 0, 0, 1, 0, 12, 12, overflow="truncate")
    assert rows.labels is not None
    assert rows.labels[0].tolist() == [*range(21, 32), -100]


@given(
    tokens=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_labels_are_told_apart_as_the_rule_written_out_does(tokens, data):
    labels = [[data.draw(st.sampled_from([-100, *ids])) for _ in ids] for ids in tokens]
    pairs = [
        (own, said, ids, i)
        for ids, saids in zip(tokens, labels, strict=True)
        for i, (own, said) in enumerate(zip(ids, saids, strict=True))
    ]
    unshifted = all(said in (-100, own) for own, said, _, _ in pairs)
    shifted = all(said in (-100, ids[i + 1]) for _, said, ids, i in pairs if i + 1 < len(ids))
    expected = None if shifted == unshifted else shifted
    samples = [(np.array(a), np.array(b)) for a, b in zip(tokens, labels, strict=True)]
    assert labels_are_shifted(samples) is expected


@pytest.mark.parametrize("is_shifted", [True, False])
def test_shards_that_do_not_tell_how_labels_are_stored_leave_it_to_the_next(tmp_path, is_shifted):
    # One sample per shard, since its 200 tokens and labels exceed the limit of write_stream.
    tokens = [np.arange(200) + number for number in range(3)]
    unsaid = np.full(200, -100)
    said = np.append(tokens[2][1:], -100) if is_shifted else tokens[2]
    streams = labelled(tmp_path, tokens, [unsaid, unsaid, said])
    assert (np.diff(streams[0].first_sample) > 0).sum() == 3

    assert detect_shift(streams[0]) is is_shifted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("column", "dtype", "value", "message"),
    [
        *(
            ("tokens", f"int{bits}", -1, "one of its token ids is negative")
            for bits in (8, 16, 32, 64)
        ),
        *(("tokens", dtype, 2**31, "outside int32") for dtype in ("int64", "uint32")),
        *(
            ("mask", dtype, value, "its loss mask .* belong in labels=")
            for dtype, value in [
                *(("uint8", 2), ("int8", -1), ("int16", 256)),
                *(("int32", -100), ("uint32", 2**16), ("int64", 2**32)),
            ]
        ),
    ],
)
@pytest.mark.parametrize("at", [0, 40, 99])
def test_a_value_that_cannot_be_is_refused_with_its_sample(
    tmp_path, column, dtype, value, message, at
):
    values = np.ones((2, 100), dtype)
    first = 1 if column == "mask" else 0  # the first token is not a label, so its mask is not read
    values[1, max(at, first)] = value
    rows = [
        {"tokens": np.arange(100, dtype="int32"), "mask": np.ones(100, "int32"), column: each}
        for each in values
    ]
    encodings = {name: f"ndarray:{rows[0][name].dtype}" for name in rows[0]}
    write_stream(tmp_path / "s", rows, encodings)
    loss_mask = "mask" if column == "mask" else None
    stream = open_stream(Stream(local=str(tmp_path / "s"), loss_mask=loss_mask), 0)
    gatherer = Gatherer([stream], Packing(max_seq_len=100))
    gatherer.gather(packs_of([[0, 0, 0, 0, 100, 100]]), 1)
    with pytest.raises(DataError, match=rf"sample 1: .*{message}"):
        gatherer.gather(packs_of([[0, 0, 1, 0, 100, 100]]), 1)


def test_an_error_names_the_shard_that_holds_the_sample(tmp_path):
    samples = [{"tokens": np.full(50, value, np.int32)} for value in (1, 2, 3, -4, 5)]
    write_stream(tmp_path / "s", samples, {"tokens": "ndarray:int32"})
    stream = open_stream(Stream(local=str(tmp_path / "s")), 0)
    shard = int(np.searchsorted(stream.first_sample, 3, "right")) - 1
    assert 0 < shard < stream.num_shards - 1, stream.first_sample
    gatherer = Gatherer([stream], Packing(max_seq_len=50))
    with pytest.raises(DataError, match="sample 3: ") as caught:
        gatherer.gather(packs_of([[0, 0, 3, 0, 50, 50]]), 1)
    file = tmp_path / "s" / f"shard.0000{shard}.mds"
    assert str(caught.value).endswith(f"rewrite them with ids of 0 and more ({file})")
    assert (caught.value.uri, caught.value.shard) == (str(file), file.name)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("max_seq_len", [1500, 8192])
def test_samples_of_many_lines_of_memory_are_read_whole_wherever_they_begin_and_are_cut(
    tmp_path, dtype, max_seq_len
):
    generator = np.random.default_rng(max_seq_len)
    lengths = [1, 3000, 1023, 1024, 1025, 2048, 511, 5000, 12_000, 2, 16, 4096, 700, 33]
    samples = [generator.integers(10, 50_000, length).astype(dtype) for length in lengths]
    masks = [generator.integers(0, 2, length).astype(np.uint8) for length in lengths]
    rows = [
        {"a_text": "x" * (number % 4), "tokens": tokens, "loss_mask": mask}
        for number, (tokens, mask) in enumerate(zip(samples, masks, strict=True))
    ]
    encodings = {"a_text": "str", "tokens": f"ndarray:{dtype}", "loss_mask": "ndarray:uint8"}
    write_stream(tmp_path / "long", rows, encodings)
    packing = Packing(max_seq_len=max_seq_len, eos_id=EOS)
    order = generator.permutation(len(lengths))
    totals = np.array(lengths)[order] + 1
    zeros = np.zeros_like(order)
    segments = fit_samples(
        np.stack([zeros, zeros, order, totals], axis=1),
        max_seq_len,
        "split",
        ["long"],
    )
    packer = make_packer(packing)
    packs = Packs.join([packer.add(segments), packer.flush()])
    opened = open_stream(Stream(local=str(tmp_path / "long"), loss_mask="loss_mask"), 0)

    got = Gatherer([opened], packing).gather(packs, len(packs))

    assert got.labels is not None
    for row in range(len(packs)):
        at = 0
        for _, _, sample, start, length, total in packs[row].tolist():
            full = [*samples[sample].tolist(), EOS]
            mask = [*masks[sample].tolist(), masks[sample][-1]]  # an EOS goes by the last token
            labels = [full[i] if mask[i] else -100 for i in range(total)] + [-100]
            assert got.tokens[row, at : at + length].tolist() == full[start : start + length]
            ahead = labels[start + 1 : start + length + 1]
            assert got.labels[row, at : at + length].tolist() == ahead
            at += length
        assert not got.tokens[row, at:].any()
