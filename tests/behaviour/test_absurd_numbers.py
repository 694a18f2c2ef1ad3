"""Absurd numbers raise a ConfigError or give batches; nothing hangs."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import (
    Bucketing,
    Buffers,
    ConfigError,
    Download,
    Mixing,
    Order,
    PackedDataLoader,
    Packing,
    World,
)
from streampack.write import write_stream
from tests.helpers.datasets import online_dataset, planned_dataset
from tests.helpers.iterables import Again

LIMIT_S = 60
SPARE_BYTES = 3 * 2**30
ITEMS = [[i + 1] * (5 + i % 7) for i in range(60)]

VALUES: list[Any] = [
    *(2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 10**5000),
    *(1e18, 1e30, 1e300, 1.7e308, 5e-324, float("inf"), float("nan"), -1, 0, 0.5, True, -1e30),
    *(Fraction(1, 10**40), Fraction(10**40), Decimal("1e300"), Decimal("1e-4000")),
    *(Decimal("1e1000000000"), Decimal("nan"), np.uint64(2**64 - 1), np.float32(3e38)),
    *("1e30", "1e400", "9" * 5000, "nan", "", "-1", "1e9pb", [], 3 + 4j),
]
numbers = st.one_of(
    st.sampled_from(VALUES),
    st.integers(2**31, 2**70),
    st.floats(),
    st.floats().map(str),
    st.fractions(),
)


def options_of(given_: dict[str, Any]) -> dict[str, Any]:
    return {
        "mixing": Mixing(**given_.get("mixing", {})),
        "order": Order(**given_.get("order", {})),
        "buffers": Buffers(**given_.get("buffers", {})),
        "world": World(**given_.get("world", {})),
    }


def streams_of(given_: dict[str, Any]) -> dict[str, Any]:
    return {"a": given_.get("stream", {}), "b": given_.get("other", {})}


def begin(dataset: Any, given_: dict[str, Any]) -> None:
    if "epoch" in given_:
        dataset.set_epoch(given_["epoch"])
    loader = PackedDataLoader(dataset, **{"prefetch_threads": 0, **given_.get("loader", {})})
    for _ in islice(loader, 2):
        pass


def planned(root: Path, **given_: Any) -> None:
    options = options_of(given_) | {"batch_size": given_.get("batch_size", 2)}
    packing = Packing(**{"max_seq_len": 256, **given_.get("packing", {})})
    begin(planned_dataset(root, streams_of(given_), packing=packing, **options), given_)


def flow(_: Path, source: Any = ITEMS, **given_: Any) -> None:
    options = options_of(given_)
    if "bucketing" in given_:
        options["bucketing"] = Bucketing(**{"max_tokens": 256, **given_["bucketing"]})
        options.pop("order")
    else:
        options["packing"] = Packing(**{"max_seq_len": 64, **given_.get("packing", {})})
        options["batch_size"] = given_.get("batch_size", 2)
    begin(online_dataset({"a": source, "b": ITEMS}, streams_of(given_), **options), given_)


Case = Callable[[Path, Any], None]


def cases_of(run: Callable[..., None]) -> dict[str, Case]:
    """Return a function for each numeric option of a kind of dataset, which sets it to a value."""

    def option(group: str, name: str, **more: Any) -> Case:
        inner = more.pop(group, {})
        return lambda root, value: run(root, **{group: {**inner, name: value}, **more})

    cases: dict[str, Case] = {
        "batch_size": lambda root, value: run(root, batch_size=value),
        "epoch": lambda root, value: run(root, epoch=value),
    }
    methods: dict[str, dict[str, Any]] = {
        "short_seq_len": {"method": "two_tiers"},
    }
    for name in ("max_seq_len", "buffer_tokens", "buffer_samples", "max_samples_per_pack"):
        cases[f"knapsack {name}"] = option("packing", name, packing={"method": "knapsack"})
    for group, names in {
        "packing": "max_seq_len buffer_tokens buffer_samples max_samples_per_pack pad_to_multiple "
        "bos_id eos_id padding_id short_seq_len",
        "order": "seed shuffle_block_size num_lanes",
        "buffers": "worker_tokens worker_bytes rank_tokens cache_limit",
        "loader": "prefetch_factor timeout",
        "world": "rank num_ranks ranks_per_node replication",
    }.items():
        for name in names.split():
            cases[name] = option(group, name, **{group: methods.get(name, {})})
    for method, unit in product(("random", "stratified"), ("samples", "tokens")):
        mixing = {"batching_method": method, "weight_unit": unit}
        both = {"stream": {"proportion": 0.5}, "other": {"proportion": 0.5}}
        for name in ("epoch_size", "global_batch_size"):
            cases[f"{name} {method} {unit}"] = option("mixing", name, mixing=mixing, **both)
        for name in ("repeat", "choose"):
            cases[f"{name} {method} {unit}"] = option("stream", name, mixing=mixing)
        for size in (None, 1000):
            more = {"mixing": {**mixing, "epoch_size": size}, "other": {"proportion": 1}}
            cases[f"proportion {method} {unit} {size}"] = option("stream", "proportion", **more)
    return cases


CASES = {f"planned {name}": case for name, case in cases_of(planned).items()}
CASES |= {f"flow {name}": case for name, case in cases_of(flow).items()}
CASES |= {
    f"unsized {name}": lambda root, value, name=name: flow(root, Again(ITEMS), stream={name: value})
    for name in ("repeat", "choose", "proportion", "on_bad_row")
}
CASES |= {
    f"mosaicml {name}": lambda root, value, name=name: planned(
        root,
        stream={name: value},
        mixing={"arithmetic": "mosaicml"},
        other={"proportion": 1} if name == "proportion" else {},
    )
    for name in ("repeat", "choose", "proportion")
}
CASES |= {
    f"bucketed {name}": lambda root, value, name=name: flow(root, bucketing={name: value})
    for name in ("max_tokens", "max_samples", "max_seq_len", "buffer_samples")
}
CASES |= {
    f"planned {name}": lambda root, value, name=name: planned(
        root, stream={"download": Download(**{name: value})}
    )
    for name in ("retry", "timeout")
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    for name, count in (("a", 300), ("b", 100)):
        write_stream((np.full(30 + i % 50, i % 99) for i in range(count)), folder / name)
    planned(folder)
    flow(folder)
    return folder


class TimeIsUpError(BaseException):
    """An exception that the code under test does not catch."""


@contextmanager
def limits() -> Iterator[None]:
    """Stop anything that takes minutes, and refuse to allocate gigabytes."""

    def stop(*_: Any) -> None:
        raise TimeIsUpError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def check(root: Path, case: str, value: Any) -> None:
    with limits(), suppress(ConfigError):
        CASES[case](root, value)


quiet = partial(settings, deadline=None, suppress_health_check=list(HealthCheck))


@quiet(max_examples=60)
@given(case=st.sampled_from(sorted(CASES)), value=numbers)
def test_any_number_is_a_config_error_or_works(root, case, value):
    check(root, case, value)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_option_takes_or_refuses_every_absurd_number(root, case):
    for value in VALUES:
        check(root, case, value)
