"""Streams that set their own BOS, EOS and overflow rule."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    Chapter,
    Chats,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Stream,
)
from streampack.config import Packing
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.planned import build
from streampack.planned.dataset import PackedStreamingDataset
from streampack.texts import ChatEncoder, ChatSamples
from streampack.write import write_stream
from tests.helpers.chats import chat_tokenizer
from tests.helpers.examples import examples

SIZE = 16
BOS, EOS = 1, 2
IDS = st.sampled_from([None, BOS, EOS])
RULES = st.sampled_from([None, "split", "truncate", "drop"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two streams; some samples already have BOS and EOS, and some are longer than a pack."""
    root, rng = tmp_path_factory.mktemp("ends"), np.random.default_rng(5)
    for name in ("chats", "replay"):
        samples = []
        for number in range(60):
            tokens = rng.integers(3, 99, rng.integers(1, 40)).tolist()
            tokens = [BOS] * (number % 4 == 1) + tokens + [EOS] * (number % 3 == 1)
            samples.append({"tokens": tokens, "loss_mask": [n % 2 for n in range(len(tokens))]})
        write_stream(samples, root / name)
    return [root / "chats", root / "replay"]


def stored(folder: Path) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    whole = Packing(max_seq_len=64, max_samples_per_pack=1, method="next_fit")
    for batch in PackedStreamingDataset(local=folder, packing=whole, order=Order(shuffle=False)):
        for row, _, _, sample, _, length in batch["segments"].tolist():
            found[sample] = batch["tokens"][row, :length].tolist()
    return [found[number] for number in sorted(found)]


def delivered(dataset: Any) -> dict[tuple[int, int], list[int]]:
    """Return the complete tokens of each sample, by stream and number."""
    found: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for batch in dataset:
        places: Counter[int] = Counter()
        for row, stream, _, sample, start, length in batch["segments"].tolist():
            at = places[row]
            places[row] += length
            piece = batch["tokens"][row, at : at + length].tolist()
            found.setdefault((stream, sample), []).append((start, piece))
    return {
        key: [token for _, piece in sorted(each) for token in piece] for key, each in found.items()
    }


def expected(tokens: list[int], bos: int | None, eos: int | None, rule: str) -> list[int]:
    if bos is not None and tokens[0] != bos:
        tokens = [bos, *tokens]
    if eos is not None and tokens[-1] != eos:
        tokens = [*tokens, eos]
    if len(tokens) <= SIZE or rule == "split":
        return tokens
    return [] if rule == "drop" else tokens[:SIZE]


def dataset_of(
    folders: list[Path], own: list[dict[str, Any]], packing: dict[str, Any] | None = None, **options
) -> PackedStreamingDataset:
    streams = [
        Stream(local=folder, loss_mask="loss_mask", **each)
        for folder, each in zip(folders, own, strict=True)
    ]
    return PackedStreamingDataset(
        streams, packing=Packing(max_seq_len=SIZE, **(packing or {})), **options
    )


@given(
    own=st.lists(st.tuples(IDS, IDS, RULES), min_size=2, max_size=2),
    of_all=st.tuples(IDS, IDS, RULES),
)
@examples(12, many=60)
def test_each_stream_has_its_own_ends_or_those_of_the_packing(folders, own, of_all):
    names = ("bos_id", "eos_id", "overflow")
    packing = {n: value for n, value in zip(names, of_all, strict=True) if value is not None}
    dataset = dataset_of(folders, [dict(zip(names, each, strict=True)) for each in own], packing)
    wanted = {}
    for number, (folder, each) in enumerate(zip(folders, own, strict=True)):
        bos, eos, rule = (
            mine if mine is not None else theirs for mine, theirs in zip(each, of_all, strict=True)
        )
        for sample, tokens in enumerate(stored(folder)):
            wanted[number, sample] = expected(tokens, bos, eos, rule or "split")
    assert delivered(dataset) == {key: tokens for key, tokens in wanted.items() if tokens}


# The template's first token is that of a role, and its last one is 4, so some rows have both ends.
ENDS_OF_CHATS = [(None, None), (0, None), (2, 0), (0, 4)]
CHATS = [
    {"messages": [{"role": first, "content": "a " * num}, *([answer] if answer else [])]}
    for first in ("user", "system")
    for num in (0, *range(SIZE - 6, SIZE))
    for answer in (None, {"role": "assistant", "content": ""})
]


@pytest.fixture(scope="module")
def encoded() -> list[tuple[list[int], list[int]]]:
    samples = map(ChatEncoder(chat_tokenizer()), CHATS)
    return [(sample["tokens"].tolist(), sample["loss_mask"].tolist()) for sample in samples]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def dataset_of_chats(kind: str, ends: dict[str, Any], cache: Path) -> Any:
    tokenizer = chat_tokenizer()
    packing = Packing(max_seq_len=SIZE, **({} if kind == "own" else ends))
    if kind == "online":
        samples = ChatSamples(CHATS, ChatEncoder(tokenizer))
        stream = IterableStream(samples, loss_mask="loss_mask")
        return PackedIterableDataset([stream], packing=packing)
    source = Chats(CHATS, tokenizer, local=cache, lengths="lazy" if kind == "lazy" else None)
    stream = Stream(source, **(ends if kind == "own" else {}))
    return PackedStreamingDataset([stream], packing=packing)


@pytest.mark.parametrize("rule", ["split", "truncate", "drop", "error"])
@pytest.mark.parametrize("kind", ["eager", "lazy", "own", "online"])
def test_a_conversation_whose_ends_leave_no_room_for_a_target_is_omitted(
    kind, rule, encoded, cache
):
    for bos, eos in ENDS_OF_CHATS:
        dataset = dataset_of_chats(kind, {"bos_id": bos, "eos_id": eos, "overflow": rule}, cache)
        if rule == "error":
            with pytest.raises(DataError, match="does not fit max_seq_len"):
                list(dataset)
            continue
        wanted = {}
        for number, (tokens, mask) in enumerate(encoded):
            before = [0] * (bos is not None and tokens[0] != bos)
            is_learned = any((before + mask)[:SIZE] if rule == "truncate" else mask)
            if is_learned or kind == "online":
                wanted[0, number] = expected(tokens, bos, eos, rule)
        assert delivered(dataset) == {key: tokens for key, tokens in wanted.items() if tokens}


def test_stats_count_what_a_rule_of_a_stream_cuts_and_drops(folders):
    own = [{"overflow": "truncate"}, {"overflow": "drop"}]
    loader = PackedDataLoader(dataset_of(folders, own))
    list(loader)
    cut, long = ([len(sample) > SIZE for sample in stored(folder)] for folder in folders)
    streams = loader.stats()["streams"]
    assert streams["chats"]["truncated"] == sum(cut)
    assert streams["replay"]["dropped"] == sum(long)


def test_a_run_resumes_in_another_world_and_not_with_other_ends(folders):
    own = [{}, {"eos_id": EOS, "overflow": "drop"}]
    mixing = Mixing(global_batch_size=4)
    dataset = dataset_of(folders, own, mixing=mixing)
    batches = list(dataset)
    state = dataset.state_after(batches[7])
    resumed = dataset_of(folders, own, mixing=mixing, batch_size=2)
    resumed.load_state_dict(state)
    rest = [row for batch in resumed for row in batch["tokens"].tolist()]
    assert rest == [row for batch in batches[8:] for row in batch["tokens"].tolist()]
    for changed in ([{}, {}], [{}, {"eos_id": 3, "overflow": "drop"}]):
        with pytest.raises(ResumeError, match="replay"):
            dataset_of(folders, changed, mixing=mixing).load_state_dict(state)
    with pytest.raises(ResumeError, match="chats"):  # its rule comes from the packing
        dataset_of(folders, own, {"overflow": "truncate"}, mixing=mixing).load_state_dict(state)


def test_a_rule_that_refuses_long_samples_names_the_first(folders):
    long = next(n for n, sample in enumerate(stored(folders[1])) if len(sample) > SIZE)
    with pytest.raises(DataError, match=rf"stream 'replay', sample {long} of .* max_seq_len=16"):
        list(dataset_of(folders, [{"overflow": "truncate"}, {"overflow": "error"}]))


def test_a_stream_of_which_nothing_is_left_says_so(tmp_path):
    write_stream([[5] * 40] * 30, tmp_path / "long")
    stream = Stream(local=tmp_path / "long", overflow="drop")
    with pytest.raises(DataError, match=r"longer than max_seq_len=16, and overflow='drop' leaves"):
        list(PackedStreamingDataset([stream], packing=Packing(max_seq_len=SIZE)))


def test_chapters_take_the_ends_of_streams_but_no_other_packs(folders):
    chapters = [Chapter(weights={"chats": 1, "replay": 1}, steps=4)]
    mixing = Mixing(global_batch_size=4)
    own = [{"overflow": "truncate"}, {"eos_id": EOS}]
    for tokens in delivered(dataset_of(folders, own, mixing=mixing, chapters=chapters)).values():
        assert tokens
    chapters = [Chapter(weights={"chats": 1}, steps=4, packing=Packing(max_seq_len=32))]
    with pytest.raises(ConfigError, match=r"Stream\(overflow\).*does not work with Chapter"):
        dataset_of(folders, own, mixing=mixing, chapters=chapters)


@pytest.mark.parametrize(
    ("weights", "mixing", "is_said"),
    [
        ([{"proportion": 1}, {"proportion": 9}], {"epoch_size": 1000}, True),
        ([{"repeat": 1}, {"choose": 241}], {}, True),
        ([{"repeat": 1}, {"choose": 10**5}], {"weight_unit": "tokens"}, True),
        ([{"repeat": 1}, {"choose": 240}], {}, False),
        ([{}, {"repeat": 9}], {}, False),
    ],
)
def test_many_passes_over_a_small_stream_are_warned_of(folders, caplog, weights, mixing, is_said):
    build._warn_of_passes.cache_clear()
    with caplog.at_level(logging.WARNING, "streampack"):
        dataset_of(folders, weights, mixing=Mixing(**mixing))
    said = [record.getMessage() for record in caplog.records if "times" in record.getMessage()]
    assert len(said) == is_said
    assert not said or "stream 'replay': an epoch takes each of its 60 samples" in said[0]
