"""The bounds of `Buffers`: values that fit, the smallest that works, and high-water marks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack.config import Buffers
from streampack.errors import ConfigError
from streampack.loader.loader import PackedDataLoader
from streampack.runtime.memory_budget import BYTES_PER_TOKEN, MemoryFootprint, max_prefetch
from streampack.runtime.resumable import engine_of
from tests.helpers import conformance
from tests.helpers.conformance import Written, show, worlds
from tests.helpers.examples import crossed, examples

pytestmark = pytest.mark.processes

METHODS = ("random", "stratified", "device_per_stream")
BOUNDS = ("worker_tokens", "worker_bytes", "rank_tokens")
BUFFER = 256  # tokens in a packer
BATCH = 2 * 64


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(4)
    lengths = [rng.integers(1, 50, 300).tolist(), rng.integers(1, 100, 120).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def make(written: Written, buffers: Buffers | None = None, **options: Any) -> Any:
    return conformance.make(
        written, packing={"buffer_tokens": BUFFER}, buffers=buffers or Buffers(), **options
    )


@given(
    packer=st.integers(0, 1000),
    batch=st.integers(1, 300),
    num_workers=st.integers(0, 4),
    plans_in_workers=st.booleans(),
    limits=st.tuples(*[st.none() | st.integers(1, 20_000)] * 3),
    wanted=st.integers(1, 9),
)
def test_what_is_read_ahead_fits_every_bound_or_is_refused(
    packer, batch, num_workers, plans_in_workers, limits, wanted
):
    buffers = Buffers(worker_tokens=limits[0], worker_bytes=limits[1], rank_tokens=limits[2])
    footprint = MemoryFootprint(
        packer_tokens=packer,
        batch_tokens=batch,
        num_workers=num_workers,
        plans_in_workers=plans_in_workers,
    )
    copies = max(num_workers, 1) if plans_in_workers else 1
    own_packers = packer if plans_in_workers or num_workers == 0 else 0

    def fits(ahead: int) -> bool:
        held = (
            own_packers + ahead * batch,
            ahead * batch * BYTES_PER_TOKEN,
            packer * copies + max(num_workers, 1) * ahead * batch,
        )
        return all(limit is None or own <= limit for own, limit in zip(held, limits, strict=True))

    if fits(1):
        ahead = max_prefetch(buffers, footprint, wanted)
        assert 1 <= ahead <= wanted
        assert fits(ahead)
        assert ahead == wanted or not fits(ahead + 1)
    else:
        with pytest.raises(ConfigError, match="to at least"):
            max_prefetch(buffers, footprint, wanted)


@pytest.mark.parametrize(
    ("bound", "num_workers"),
    [
        *((bound, 0) for bound in BOUNDS),
        ("worker_tokens", 2),
        ("rank_tokens", 2),
        pytest.param("worker_bytes", 2, marks=pytest.mark.slow),
    ],
)
def test_an_impossible_bound_is_refused_and_the_least_that_works_works(written, bound, num_workers):
    with pytest.raises(ConfigError, match=rf"Buffers\({bound}=1\) cannot hold") as caught:
        make(written, Buffers(**{bound: 1}))
    # The constructor cannot know the number of workers, so it states what each would add.
    more = r"(?: \(and up to (\d+) more for each of num_workers\))?, or lower"
    named = re.search(rf"set {bound} to at least (\d+){more}", str(caught.value))
    least = int(named[1]) + num_workers * int(named[2] or 0)
    dataset = make(written, Buffers(**{bound: least}))
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    assert sum(1 for _ in loader) == len(dataset)
    for too_small in (1, BATCH - 1):
        with pytest.raises(ConfigError, match=bound):
            PackedDataLoader(make(written, Buffers(**{bound: too_small})), num_workers=num_workers)


def test_workers_that_plan_for_themselves_count_their_packers_each(written):
    dataset = make(written, Buffers(rank_tokens=2 * (BUFFER + BATCH) - 1))
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    with pytest.raises(ConfigError, match=rf"rank_tokens=.*at least {2 * (BUFFER + BATCH)}"):
        next(iter(loader))


@given(data=st.data())
@examples(6, many=40)
def test_what_a_rank_holds_never_passes_what_it_was_said_to_hold(written, data):
    num_ranks = data.draw(st.integers(1, 6), "ranks")
    world = worlds(num_ranks)[data.draw(st.integers(0, num_ranks - 1), "rank")]
    options = {
        "mixing": {"batching_method": data.draw(st.sampled_from(METHODS), "method")},
        "order": {"num_lanes": data.draw(st.integers(1, 6), "lanes")},
        "batch_size": data.draw(st.integers(1, 3), "batch_size"),
        "world": world,
    }
    ahead = data.draw(st.integers(1, 4), "ahead")
    footprint = engine_of(make(written, **options)).footprint()
    limit = footprint.packer_tokens + ahead * footprint.batch_tokens
    bound = data.draw(st.sampled_from(["worker_tokens", "rank_tokens"]), "bound")
    loader = PackedDataLoader(
        make(written, Buffers(**{bound: limit}), **options), prefetch_factor=9
    )
    for _ in loader:
        assert loader.stats()["buffers"][bound] <= limit
    assert loader.stats()["buffers"][bound] > footprint.batch_tokens


@pytest.mark.parametrize(
    ("bound", "num_workers"),
    [
        *((bound, 0) for bound in BOUNDS),
        *crossed(BOUNDS, [2, 1]),
    ],
)
def test_marks_stay_below_the_bounds_and_bounds_change_no_batch(written, bound, num_workers):
    wanted = [show(batch) for batch in make(written)]
    for batches in (1, 3):
        held = batches * BATCH
        limit = {
            "worker_tokens": held + (0 if num_workers else BUFFER),
            "worker_bytes": held * BYTES_PER_TOKEN,
            "rank_tokens": max(num_workers, 1) * held + BUFFER,
        }[bound]
        # The constructor assumes that the process that plans also reads.
        limit = max(limit, BUFFER + BATCH) if bound == "worker_tokens" else limit
        dataset = make(written, Buffers(**{bound: limit}))
        loader = PackedDataLoader(dataset, num_workers=num_workers, prefetch_factor=9)
        assert [show(batch) for batch in loader] == wanted
        marks = loader.stats()["buffers"]
        assert 0 < marks[bound] <= limit, f"{batches} batches ahead"
