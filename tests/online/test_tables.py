"""Hugging Face tables that were filtered, reordered or concatenated."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pytest

from streampack import (
    IterableStream,
    Order,
    PackedIterableDataset,
    Packing,
    World,
)
from tests.helpers.batches import same
from tests.helpers.examples import crossed
from tests.helpers.iterables import assert_continues, pieces, rows_of, with_states

# datasets' own call into pyarrow, where it sorts.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:Specifying null_placement in SortOptions"),
]

LENGTHS = [5, 9, 2, 20, 1, 13] * 12
ROWS = rows_of(0, LENGTHS)
NUMBERS = np.arange(len(ROWS))


def whole(rows=ROWS, **columns) -> datasets.Dataset:
    """A table of rows, each with its number."""
    numbers = [row[0] // 1000 for row in rows]
    return datasets.Dataset.from_dict({"input_ids": rows, "number": numbers} | columns)


def in_chunks() -> datasets.Dataset:
    """The same table in three pieces of memory, the first of which begins within another."""
    table = whole().data.table
    parts = [table.slice(0, 7), table.slice(7, 40), table.slice(47)]
    return datasets.Dataset(pa.concat_tables(parts))


def of_type(kind: pa.DataType, cut: slice = slice(None)) -> datasets.Dataset:
    """A slice of an Arrow table in which the rows have another type."""
    table = pa.table({"input_ids": pa.array(ROWS, kind)})
    first, last, _ = cut.indices(len(ROWS))
    return datasets.Dataset(table.slice(first, last - first))


# Each table, and the ROWS it has, in order; with None, its own "number" column lists them.
TABLES = {
    "select a range": (lambda: whole().select(range(10, 40)), NUMBERS[10:40]),
    "select some": (lambda: whole().select([50, 3, 3, 17, 0]), [50, 3, 3, 17, 0]),
    "select of a range of some": (
        lambda: whole().select(range(5, 60)).select([40, 2, 30]).select(range(1, 3)),
        [7, 35],
    ),
    "select a range of a shuffle": (
        lambda: whole().shuffle(seed=4).select(range(20, 50)),
        None,
    ),
    "shuffle": (lambda: whole().shuffle(seed=4), None),
    "shuffle of a select": (lambda: whole().select(range(30)).shuffle(seed=4), None),
    "flat shuffle": (lambda: whole().shuffle(seed=4).flatten_indices(), None),
    "shard": (lambda: whole().shard(5, 3), None),
    "shard with gaps": (lambda: whole().shard(5, 3, contiguous=False), NUMBERS[3::5]),
    "shard of a shard": (lambda: whole().shard(3, 2).shard(2, 1), None),
    "sort": (lambda: whole().sort("number", reverse=True), NUMBERS[::-1]),
    "filter": (lambda: whole().filter(lambda row: row["number"] % 3 == 1), NUMBERS[1::3]),
    "skip and take": (lambda: whole().skip(9).take(20), NUMBERS[9:29]),
    "split": (lambda: whole().train_test_split(0.4, seed=1)["test"], None),
    "put together": (
        lambda: datasets.concatenate_datasets(
            [whole().select(range(60, 72)), whole().select([8, 1]), whole().select(range(4))]
        ),
        [*range(60, 72), 8, 1, *range(4)],
    ),
    "in chunks": (in_chunks, NUMBERS),
    "a range over chunks": (lambda: in_chunks().select(range(5, 50)), NUMBERS[5:50]),
    "of int32": (lambda: of_type(pa.list_(pa.int32()), slice(11, 50)), NUMBERS[11:50]),
    "of large lists": (lambda: of_type(pa.large_list(pa.int64()), slice(11, 50)), NUMBERS[11:50]),
    "other columns": (
        lambda: whole(other=[str(n) for n in NUMBERS]).select_columns("input_ids").select([9, 1]),
        [9, 1],
    ),
}


def expected_of(name: str) -> tuple[datasets.Dataset, list[list[int]]]:
    """A table and the rows that it has, known without reading its tokens."""
    make, numbers = TABLES[name]
    table = make()
    if numbers is None:
        numbers = table["number"]
    return table, [ROWS[int(number)] for number in numbers]


def packed(source, order=None, **options) -> PackedIterableDataset:
    stream = IterableStream(source, name="table")
    return PackedIterableDataset([stream], packing=Packing(max_seq_len=16), order=order, **options)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("form", "order"),
    crossed([None, "numpy", "torch", "column"], [None, Order(seed=1, shuffle_block_size=8)]),
)
def test_each_sample_is_the_row_of_its_number(name, form, order):
    table, rows = expected_of(name)
    source = table["input_ids"] if form == "column" else table.with_format(form)
    found = pieces(packed(source, order))

    assert {number: tokens for (_, _, number), tokens in found.items()} == dict(enumerate(rows))


@pytest.mark.parametrize("name", TABLES)
def test_batches_are_those_of_plain_lists_in_every_rank_and_after_a_resume(name):
    table, rows = expected_of(name)
    for rank in range(2):
        world = World(rank=rank, num_ranks=2)
        expected = list(packed(rows, world=world))
        found, states = with_states(packed(table, world=world))
        assert same(found, expected)
        at = len(found) // 2
        if at + 1 < len(found):
            again = packed(expected_of(name)[0], world=world)
            assert_continues(again, states[at], found[at + 1 :])


def test_a_table_from_disk_that_was_cut_gives_its_own_rows(tmp_path):
    whole().save_to_disk(tmp_path, num_shards=4)
    table = datasets.load_from_disk(tmp_path).select(range(13, 55)).shard(2, 1)
    rows = [ROWS[number] for number in table["number"]]

    found = pieces(packed(table))
    assert [found[key] for key in sorted(found)] == rows


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_what_lies_beside_the_tokens_of_a_cut_is_theirs(form):
    table = whole(labels=ROWS, mask=[[n % 2] * len(row) for n, row in enumerate(ROWS)])
    cut = table.shuffle(seed=2).select(range(7, 60))
    numbers = [int(number) for number in cut["number"]]
    stream = IterableStream(
        cut.with_format(form), labels="labels", labels_shifted=False, loss_mask="mask"
    )
    for batch in PackedIterableDataset([stream], packing=Packing(max_seq_len=32)):
        targets = batch["labels"][batch["labels"] != -100]
        assert set((targets // 1000).tolist()) <= {n for n in numbers if n % 2}
