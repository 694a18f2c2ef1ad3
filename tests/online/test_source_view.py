"""Ranks with different sources are refused by rank and name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from torch.utils.data import Dataset

from streampack import IterableStream, PackedDataLoader, PackedIterableDataset, Packing
from streampack.errors import StreampackError
from streampack.online.source_view import source_view
from tests.helpers.iterables import Again, rows_of
from tests.helpers.ranks import on_ranks
from tests.helpers.words import words

NUM_RANKS = 2
ROWS = [[number + 1] * (1 + number % 20) for number in range(300)]


def generated(shards):
    for shard in shards:
        for row in ROWS[shard::10]:
            yield {"input_ids": row}


def hugging_face(**arguments):
    return datasets.IterableDataset.from_generator(generated, gen_kwargs=arguments)


def files(folder: Path, rank: int, names: list[str]):
    """Return a stream of JSON files, of which each rank has copies in a folder of its own."""
    own = folder / f"node{rank}"
    own.mkdir(exist_ok=True)
    for number, name in enumerate(sorted(names)):
        lines = [f'{{"tokens": {row}}}' for row in ROWS[number :: len(names)]]
        (own / name).write_text("\n".join(lines))
    paths = [str(own / name) for name in names]
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True)


class Augmented(Dataset):
    """Gives one of some tokens, another whenever a sample is read."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> list[int]:
        return [*ROWS[index], random.SystemRandom().randrange(1000, 1000 + self._num_tokens)]


def table():
    return datasets.Dataset.from_dict({"input_ids": ROWS})


def map_with_a_random_fingerprint():
    class Unpicklable:
        def __reduce__(self):
            raise TypeError

    what = Unpicklable()
    return table().map(lambda row: {"n": len(row["input_ids"]) + (what is None)})


def shuffled(rank: int) -> list[list[int]]:
    rows = list(ROWS)
    random.Random(rank).shuffle(rows)
    return rows


# Sources that differ between ranks, and the field by which they are refused.
DIFFERENT = {
    "a shuffle without a seed": (
        lambda *_: hugging_face(shards=list(range(10))).shuffle(buffer_size=20),
        "shuffle seeds",
    ),
    "a table shuffled otherwise": (lambda rank, _: table().shuffle(seed=rank), "samples"),
    "shards of a table shuffled otherwise": (
        lambda rank, _: table().shuffle(seed=rank).to_iterable_dataset(num_shards=4),
        "list of shards",
    ),
    "a list in another order": (lambda rank, _: shuffled(rank), "samples"),
    "a shorter list": (lambda rank, _: ROWS[: 300 - 50 * rank], "length"),
    "shards in another order": (
        lambda rank, _: hugging_face(shards=[*range(rank, 10), *range(rank)]),
        "list of shards",
    ),
    "files in another order": (
        lambda rank, folder: files(folder, rank, ["a.json", "b.json"][:: 1 - 2 * rank]),
        "list of shards",
    ),
    "texts in another order": (
        lambda rank, _: ["a text", "more text"][:: 1 - 2 * rank] * 40,
        "samples",
    ),
}
SAME = {
    "a list": lambda *_: ROWS,
    "a table": lambda *_: table(),
    "a table with a random fingerprint": lambda *_: map_with_a_random_fingerprint(),
    "a seeded shuffle": lambda *_: hugging_face(shards=list(range(10))).shuffle(
        seed=3, buffer_size=20
    ),
    "copies of files": lambda rank, folder: files(folder, rank, ["a.json", "b.json"]),
    "augmented samples": lambda *_: Augmented(1000),
    "samples that are augmented by the toss of a coin": lambda *_: Augmented(2),
    "an iterator": lambda *_: iter(ROWS),
    "an iterable": lambda *_: Again(ROWS),
}


def outcome(source: Any) -> Any:
    """Return the first tokens of the samples that a rank delivers, or its error."""
    is_text = isinstance(source, list) and isinstance(source[0], str)
    stream = IterableStream(source, name="web", tokenizer=words() if is_text else None)
    loader = PackedDataLoader(PackedIterableDataset([stream], packing=Packing(max_seq_len=64)))
    try:
        batches = list(loader)
    except StreampackError as error:
        return f"{type(error).__name__}: {error}"
    return sorted(
        {token for batch in batches for token in batch["tokens"][0].tolist()}
        & {row[0] for row in ROWS}
    )


def load_all(rank: int, folder: Path) -> dict[str, Any]:
    makers = {name: make for name, (make, _) in DIFFERENT.items()} | SAME
    seen = {name: outcome(make(rank, folder)) for name, make in makers.items()}
    # Sources that a rank shards itself may differ.
    stream = IterableStream(ROWS[rank::NUM_RANKS], sharded=True)
    own = PackedDataLoader(PackedIterableDataset([stream], packing=Packing(max_seq_len=64)))
    return seen | {"its own": len(list(own))}


@pytest.mark.processes
def test_ranks_with_other_sources_are_refused_and_with_equal_ones_get_all_samples(tmp_path):
    datasets.disable_progress_bars()
    seen = on_ranks(tmp_path, load_all, NUM_RANKS)

    for name, (_, field) in DIFFERENT.items():
        for each in seen:
            assert each[name].startswith(f"DataError: ranks have different {field}"), name
            assert "of stream 'web' (streams[0]): rank 0 has " in each[name]
            assert ", rank 1 has " in each[name]
            assert "set sharded=True" in each[name]
    for name in SAME:
        together = sorted(seen[0][name] + seen[1][name])
        assert together == [row[0] for row in ROWS], name
    assert all(each["its own"] for each in seen)


def test_a_view_does_not_consume_an_iterator_and_reads_few_samples():
    iterator = iter(ROWS)
    view = source_view(IterableStream(iterator), "a")
    assert view == source_view(IterableStream(iter([[9]])), "a")
    assert next(iterator) == ROWS[0]

    class Counting(list):
        num_read = 0

        def __getitem__(self, index):
            Counting.num_read += 1
            return super().__getitem__(index)

    source_view(IterableStream(Counting(ROWS)), "a")
    assert Counting.num_read == 2 * 16


@pytest.mark.parametrize("change", [0, 150, 299])
def test_the_samples_of_a_view_are_its_tokens_labels_and_mask(change):
    def view(**changes):
        rows = [
            {"tokens": row, "labels": row, "mask": [1] * len(row)} for row in rows_of(0, [4] * 16)
        ]
        rows[change * 15 // 299] |= changes
        return source_view(IterableStream(rows, labels="labels", loss_mask="mask"), "a")

    assert view() == view() == view(tokens=np.array(rows_of(0, [4] * 16)[change * 15 // 299]))
    assert view(path="/node1/a") == view()
    for changes in ({"tokens": [1] * 4}, {"labels": [1] * 4}, {"mask": [0, 1, 1, 1]}):
        assert view(**changes) != view()
