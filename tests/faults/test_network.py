"""Network faults: every token once and unchanged, or a typed error in time.

The store is a real S3 server behind a proxy that injects the fault. The parameter ids are rows of
the reliability table. Tests that wait for a deadline take 4 s, all others about one.
"""

from __future__ import annotations

import pytest

from streampack import Download
from streampack.errors import DataError
from streampack.streams import Stream
from tests.helpers.faults import harness, servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.faults.harness import make_loader, run_epoch

SHARD = r"shard\.00003"
WORKERS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
QUICK = {"timeout": 2.0, "retry": 1}
"""For a shard of 64 KB: 2.1 s per attempt, 4.1 s in total."""
QUICK_BUDGET_S = 4.2
SEED = 5
"""For random faults: with this seed, three of the first hundred requests fail."""
SMALL = {"num_samples": 600}
"""9 shards."""
GRACE_S = 30.0
"""In addition to an object's time budget: 10 in the guarantee, and a busy machine's own."""


def run(store, dataset, num_workers=0, *, limit_s=60.0, on_batch=None, **options):
    return run_epoch(
        lambda: make_loader(store.stream(**options), num_workers=num_workers),
        dataset,
        limit_s=limit_s,
        on_batch=on_batch,
    )


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_base_ok_an_epoch_without_faults_is_exact(store, dataset, num_workers):
    ds = store.put(dataset())
    outcome = run(store, ds, num_workers)
    outcome.assert_exact()
    assert len(ds.shards) == 29
    assert all(store.server.count(path.name) == 1 for path in ds.shards)


# Tests of storage and stores wait for the same faults, one object at a time.
LATE = ("stall_body_once", "trickle_once", "net_reset_forever", "net_trickle", "short_forever")


def slow_or_not(row):
    return pytest.param(row, marks=[pytest.mark.slow] if row in LATE else [])


RIDDEN_OUT = {
    "net_500_twice": {"kind": "status", "status": 500, "path": SHARD, "times": 2},
    "net_503_burst_of_20": {"kind": "status", "status": 503, "path": "shard", "times": 20},
    "net_close_short_once": {"kind": "short", "path": SHARD, "times": 1},
    "net_reset_once_each": {"kind": "reset", "path": "shard", "times": 1, "per_path": True},
    "net_stall_headers_once": {"kind": "stall_headers", "path": SHARD, "times": 1},
    "stall_body_once": {"kind": "stall_body", "path": SHARD, "times": 1},
    "trickle_once": {"kind": "trickle", "path": SHARD, "times": 1, "bytes_per_s": 2000},
    "429_five_times": {"kind": "status", "status": 429, "path": SHARD, "times": 5},
    "index_503_twice": {"kind": "status", "status": 503, "path": "index.json", "times": 2},
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("row", [*map(slow_or_not, RIDDEN_OUT)])
def test_a_fault_that_passes_is_ridden_out(store, dataset, row, num_workers):
    ds = store.put(dataset(**SMALL))
    fault = store.server.add(**RIDDEN_OUT[row])
    # If a request hangs, another one follows after its timeout.
    hangs = fault.kind in ("stall_headers", "stall_body", "trickle")
    options = {"timeout": 2.0, "retry": 20} if hangs else {}
    if hangs:
        store.put_in_cache(ds, but="shard.00003")  # so that no other file can be late
    run(store, ds, num_workers, **options).assert_exact()
    assert fault.given >= 1
    assert not harness.temporary_names(store.caches / "ds")


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_bit_that_flips_in_flight_is_caught_by_the_hash_that_was_asked_for(
    store, dataset, num_workers
):
    # Row net_flip_in_flight_once_hash.
    ds = store.put(dataset(**SMALL))
    fault = store.server.add("flip", path=SHARD, times=1)
    run(store, ds, num_workers, hash="xxh64").assert_exact()
    assert fault.given == 1
    assert store.server.count(SHARD) == 2


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "kind",
    # Over HTTP, the others fail three requests of ten, below.
    [
        "flip",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("status", "reset", "short")),
    ],
)
def test_one_request_in_a_hundred_fails_at_random_and_the_epoch_is_exact(
    store, dataset, kind, num_workers
):
    ds = store.put(dataset(size_limit=16 * 1024))  # 124 shards, so that some get a fault
    fault = store.server.add(kind, path="shard", share=0.01, seed=SEED, status=503)
    run(store, ds, num_workers).assert_exact()
    assert fault.given >= 1
    assert len(store.server.requests()) <= 2 * (len(ds.shards) + 2)


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ("outage_of_1_s", 1.0),
        pytest.param("net_down_20s_midrun", 20.0, marks=pytest.mark.slow),
        pytest.param("outage_of_60_s", 60.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_outage_within_the_budget_is_ridden_out(store, dataset, row, seconds, num_workers):
    ds = store.put(dataset())
    fault = store.server.add("down", path="shard", skip=12, seconds=seconds)
    outcome = run(store, ds, num_workers, limit_s=150, timeout=max(20, seconds))
    outcome.assert_exact()
    assert outcome.wall_s >= seconds, row
    assert fault.since is not None


REFUSED = {
    "net_500_forever": {"kind": "status", "status": 500},
    "net_reset_forever": {"kind": "reset"},
    "net_stall_headers": {"kind": "stall_headers"},
    "net_stall_body": {"kind": "stall_body"},
    "net_trickle": {"kind": "trickle", "bytes_per_s": 2000},
    "short_forever": {"kind": "short"},
    "flip_forever": {"kind": "flip"},
    "net_shorter_object": {"kind": "shorter"},
}
QUICK_WITH_WORKERS = ("flip_forever",)


@pytest.mark.parametrize(
    ("row", "num_workers"),
    [
        pytest.param(
            row,
            num_workers,
            marks=[pytest.mark.slow]
            if row in LATE or num_workers == 1 or (num_workers and row not in QUICK_WITH_WORKERS)
            else [],
        )
        for row in REFUSED
        for num_workers in (0, 1, 2)
    ],
)
def test_a_fault_that_stays_ends_in_a_typed_error_in_time(store, dataset, row, num_workers):
    ds = store.put(dataset(**SMALL))
    # On a busy machine other files could also be late, so all of them are in the cache.
    store.put_in_cache(ds, but="shard.00003")
    fault = store.server.add(path=SHARD, **REFUSED[row])
    # A response that is complete but damaged has nothing to do with time.
    options = {} if fault.kind in ("flip", "shorter") else QUICK
    outcome = run(store, ds, num_workers, **options)
    for _ in range(5):
        if fault.given:
            break
        # A busy machine can use up the budget before the first request.
        outcome = run(store, ds, num_workers, **options)
    error = outcome.assert_refused(store.uri("shard.00003.mds"))
    assert isinstance(error, DataError)
    assert error.uri == store.uri("shard.00003.mds")
    assert error.shard == "shard.00003.mds"
    assert error.attempts >= 1
    assert str(error.attempts) in str(error)
    assert 0 < error.elapsed_s <= QUICK_BUDGET_S + GRACE_S
    assert outcome.wall_s <= QUICK_BUDGET_S + GRACE_S
    assert not list((store.caches / "ds").rglob("shard.00003.mds.????????"))
    assert fault.given >= 1, "the machine is too busy: not even a request in the whole budget"


@pytest.mark.parametrize("row", ["net_trickle_no_retry_seen"])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_bytes_that_drip_on_do_not_keep_a_download_alive(store, dataset, row, num_workers):
    # All shards trickle, and no single wait is long: only a deadline for the whole object helps.
    ds = store.put(dataset(**SMALL))
    store.put_in_cache(ds, but="shard.")
    store.server.add("trickle", path="shard", bytes_per_s=4000)
    outcome = run(store, ds, num_workers, limit_s=120, timeout=3.0, retry=0)
    error = outcome.assert_refused("shard.", f"s3://{store.bucket}/ds/", within_s=40)
    assert error.uri.startswith(f"s3://{store.bucket}/ds/shard."), row
    assert outcome.num_batches == 0


@pytest.mark.parametrize(("status", "row"), [(403, "net_403_midrun"), (404, "404_midrun")])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_what_no_retry_can_mend_is_an_error_at_once(store, dataset, status, row, num_workers):
    ds = store.put(dataset(**SMALL))
    store.put_in_cache(ds, but="shard.00003")
    fault = store.server.add("status", status=status, path=SHARD)
    outcome = run(store, ds, num_workers)  # the budget is three minutes, which this must not use up
    error = outcome.assert_refused(store.uri("shard.00003.mds"), within_s=40)
    assert error.uri == store.uri("shard.00003.mds"), row
    # A client that worked before gets one more try, with new credentials.
    most = 2 if status == 403 else 1
    assert error.attempts <= most
    # Each of a worker's two batches asks for its own, beside the process that prefetches.
    assert fault.given <= most * (1 + 2 * num_workers)


def test_net_down_at_start_is_a_typed_error_soon(store, dataset):
    ds = store.put(dataset(**SMALL))
    stream = Stream(
        remote="s3://unreachable/ds", local=str(store.caches / "ds"), download=Download(**QUICK)
    )
    with servers.s3_environment(f"http://127.0.0.1:{servers.free_port()}"):
        outcome = run_epoch(lambda: make_loader(stream), ds)
    error = outcome.assert_refused(within_s=40)
    assert error.uri == "s3://unreachable/ds/index.json"
    assert error.uri in str(error)


@pytest.fixture
def web(tmp_path, dataset):
    """Yield a data set in a folder behind a web server that can misbehave, and the server."""
    ds = dataset(**SMALL)
    with FaultServer(folder=ds.folder.parent.parent) as server:
        url = f"{server.url}/{ds.folder.parent.name}/{ds.folder.name}"
        yield (
            ds,
            server,
            Stream(remote=url, local=str(tmp_path / "web"), download=Download(timeout=20.0)),
        )


@pytest.mark.parametrize("kind", ["status", "reset", "short"])
def test_an_epoch_over_http_is_exact_though_requests_fail_at_random(web, kind):
    ds, server, stream = web
    fault = server.add(kind, path="shard", share=0.3, seed=SEED, status=503)
    run_epoch(lambda: make_loader(stream), ds).assert_exact()
    assert fault.given >= 1
