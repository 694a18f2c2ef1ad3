"""A report is a single page that opens anywhere, with the numbers of the plan and the loader."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from streampack import (
    Balance,
    Chapter,
    ConfigError,
    Mixing,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    ResumeError,
    Stream,
)
from streampack.cli import demo
from streampack.cli.app import build_app
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.report import simulate, write_report
from streampack.report.charts import documents_again
from streampack.report.facts import Steps, run_facts
from streampack.report.nodes import NodeReads
from streampack.report.simulate import simulate_with
from streampack.runtime.resumable import engine_of
from streampack.world import World
from streampack.write import write_stream
from tests.helpers import conformance
from tests.helpers.browser import browser_page
from tests.helpers.conformance import worlds

LENGTHS = ([5, 40, 7, 30, 12, 33, 1, 64, 9, 18] * 9, [90, 3, 150, 64, 20, 8] * 11)
MIXED = {"weight_unit": "tokens", "global_batch_size": 12}
SIX = ["The mixture as asked, planned and delivered", "Each stream over the run"]
SIX += ["How long documents are", "Fill", "Documents in a step", "Cut documents"]
FIGURES = """[...document.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg");
  const boxes = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim())
    .map(text => [text.textContent, text.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const clashes = boxes.flatMap(([text, box], n) => boxes.slice(n + 1)
    .filter(([_, other]) => meet(box, other)).map(([other]) => [text, other]));
  return {title: figure.querySelector("h3").textContent, role: svg.getAttribute("role"),
    unit: figure.querySelector("figcaption p").textContent, label: svg.getAttribute("aria-label"),
    rows: figure.querySelectorAll("tr").length, width: svg.getBoundingClientRect().width, clashes};
})"""
COLOURS = "[document.body, document.querySelector('svg text')].map(e => getComputedStyle(e).{})"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two streams; the second has samples longer than a pack."""
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), LENGTHS)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser_page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def make(written, **options):
    return conformance.make(written, **{"mixing": MIXED, **options})


def chapters(written, **options):
    sizes = {"batching_method": "stratified", "global_batch_size": 4}
    first = Chapter(weights={"s0": 0.5, "s1": 0.5}, steps=6)
    second = Chapter(weights={"s0": 0.2, "s1": 0.8}, steps=9)
    return conformance.make(written, mixing=sizes, chapters=[first, second], **options)


def demo_dataset(folder: Path, monkeypatch) -> object:
    """The demo's config over streams with similar lengths."""
    monkeypatch.chdir(folder)
    path = Path(demo.__file__).with_name("demo.yaml")
    for name, (num, mean) in {"code": (90, 9000), "manuals": (300, 3000)}.items():
        write_lognormal(folder / "demo-output" / "streams" / name, num, mean)
    write_lognormal(folder / "demo-output" / "streams" / "docstrings", 4000, 120)
    return build_dataset(read_config(path), path, World(num_ranks=4, ranks_per_node=2))


def write_lognormal(path: Path, num: int, mean: int) -> None:
    lengths = np.random.default_rng(num).lognormal(np.log(mean), 0.8, num).astype(int) + 1
    write_stream((np.zeros(length, np.uint16) for length in lengths), path)


@pytest.mark.processes
def test_a_report_opens_in_a_browser_without_an_error_or_a_request(page, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_report(demo_dataset(tmp_path, monkeypatch), path, title="demo <&>")

    shown = []
    for is_dark in (False, True):
        page.open(path, is_dark=is_dark)
        figures = page.evaluate(FIGURES)
        background, text = page.evaluate(COLOURS.format("backgroundColor")), COLOURS.format("fill")
        shown.append([background[0], page.evaluate(text)[1]])
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith("data:")] == [path.as_uri()]
    assert page.evaluate("document.querySelector('h1').textContent") == "demo <&>"
    assert all(light != dark for light, dark in zip(*shown, strict=True))
    titles = [figure["title"] for figure in figures]
    last = ["The first 32 packs", "What each node reads and caches"]
    assert titles == [*SIX, "Waiting for the slowest rank", *last]
    for figure in figures:
        assert figure["role"] == "img"
        assert figure["label"].startswith(f"{figure['title']}; {figure['unit']}. ")
        assert len(figure["unit"]) > 10
        assert figure["rows"] > 1
        assert figure["width"] > 400
        assert figure["clashes"] == []


@pytest.mark.processes
def test_many_streams_of_long_names_are_the_largest_and_a_row_of_the_others(page, tmp_path):
    write_stream(([1] * (1 + 7 * n % 90) for n in range(300)), tmp_path / "s")
    names = [f"bucket-{n:02}/{'a-long-folder/' * 13}part-{n:02}" for n in range(30)]
    streams = [
        Stream(local=tmp_path / "s", name=name, proportion=1 if n < 5 else 1 + n)
        for n, name in enumerate(names)
    ]
    path = tmp_path / "report.html"
    dataset = PackedStreamingDataset(
        streams, packing=Packing(max_seq_len=256), mixing=Mixing(epoch_size=3000)
    )
    write_report(dataset, path)
    page.open(path)

    assert min(map(len, names)) > 190
    texts = "[...document.querySelectorAll('#mixture svg text')].map(text => text.textContent)"
    rows = [text for text in page.evaluate(texts) if not text.startswith("asked ")]
    large = [f"bucket-{n}/a-lo…folder/part-{n}" for n in range(29, 19, -1)]
    assert sorted(rows, reverse=True) == [*large, "20 others"]
    about = page.evaluate("document.querySelector('header p').textContent")
    assert about.count(" % ") == 5
    assert "26 others" in about
    assert [row["stream"] for row in table_of(path, "mixture")] == names
    opened = page.evaluate(
        "(others => { others.querySelector('summary').click();"
        " return others.open && others.innerText.trim().split('\\n'); })"
        "(document.querySelector('#mixture details'))"
    )
    assert opened[0] == "20 others"
    assert [line.split("\t")[0] for line in opened[2:]] == names[:20]
    for figure in page.evaluate(FIGURES):
        assert figure["clashes"] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def table_of(path: Path, key: str) -> list[dict[str, str]]:
    """The numbers in a report's chart, as a dict for each row."""
    [figure] = re.findall(rf'<figure id="{key}".*?</figure>', path.read_text(), flags=re.DOTALL)
    head, *rows = re.findall(r"<tr>(.*?)</tr>", figure.split("<details>")[-1])
    names = re.findall(r"<th>(.*?)</th>", head)
    return [dict(zip(names, re.findall(r"<td>(.*?)</td>", row), strict=True)) for row in rows]


@pytest.mark.parametrize("kind", [make, chapters])
def test_a_report_has_the_shares_that_were_asked_planned_and_delivered(written, tmp_path, kind):
    loader = PackedDataLoader(kind(written), prefetch_threads=0)
    _ = list(islice(loader, 12))
    stats, path = loader.stats(), tmp_path / "report.html"
    planned = simulate(kind(written), steps=None if kind is make else 30)["streams"]

    for given in ({"stats": stats}, {"state": loader.state_dict()}):
        write_report(kind(written), path, **given)
        rows = table_of(path, "mixture")
        for row, (name, own) in zip(rows, stats["streams"].items(), strict=True):
            if "stats" in given:
                assert row["delivered"] == f"{100 * own['share_tokens']:.1f} %"
            assert row["planned"] == f"{100 * planned[name]['share_tokens']:.1f} %"
            assert row["asked"] == f"{100 * planned[name]['target']:.1f} %"
        assert ("state</text>" in path.read_text()) == ("state" in given)
        assert ("give statistics" in path.read_text()) == ("state" in given)


def test_a_state_of_another_run_is_refused_and_no_report_is_left(written, tmp_path):
    for kind, other in ((make, {"max_seq_len": 32}), (chapters, {"order": {"seed": 4}})):
        state = PackedDataLoader(kind(written, **other)).state_dict()
        with pytest.raises(ResumeError):
            write_report(kind(written), tmp_path / "report.html", state=state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [make, chapters])
def test_each_step_has_the_tokens_and_documents_of_its_batches(written, kind):
    size = 12 if kind is make else 4
    parts = defaultdict(list)
    for number, batch in enumerate(kind(written)):
        parts[number * 2 // size] += batch["segments"].tolist()
    tokens, effective, documents = [], [], []
    for segments in parts.values():
        sums = defaultdict(int)
        for _, stream, turn, sample, _, length in segments:
            sums[stream, turn, sample] += length
        shares = np.array(list(sums.values())) / sum(sums.values())
        effective.append(1 / (shares**2).sum())
        documents.append(len(sums))
        tokens.append([sum(s[5] for s in segments if s[1] == stream) for stream in range(2)])
    collected = Steps(2)
    simulate_with(engine_of(kind(written)), None if kind is make else 99, [collected.add])

    found = collected.series()
    np.testing.assert_array_equal(found[0], tokens)
    np.testing.assert_array_equal(found[2], documents)
    np.testing.assert_allclose(found[3], effective)
    assert found[1].max() == 64 * size


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_nodes_are_expected_to_read_what_they_read_in_a_whole_pass(written, num_lanes):
    mixing = {"epoch_end": "carry", "global_batch_size": 4}
    dataset = make(written, mixing=mixing, order={"num_lanes": num_lanes}, world=worlds(4, 2)[0])
    exact = simulate(dataset, steps=300)["nodes"]

    assert NodeReads(engine_of(dataset)).expected(np.ones(2)) == exact
    half = NodeReads(engine_of(dataset)).expected(np.full(2, 0.5))
    assert [2 * node["read_bytes"] for node in half] == [node["read_bytes"] for node in exact]
    assert [node["fetched_bytes"] for node in exact] == [0, 0]


KINDS = {
    "open end": {
        "mixing": {"batching_method": "stratified", "global_batch_size": 4},
        "chapters": [
            Chapter(weights={"s0": 0.5, "s1": 0.5}, steps=6),
            Chapter(weights={"s0": 1}),
        ],
    },
    "balanced over nodes": {
        "mixing": {"global_batch_size": 16},
        "balance": Balance(within="batch"),
        "world": worlds(4, 2)[1],
    },
    "one stream in a pack": {"mixing": {**MIXED, "batching_method": "per_stream"}},
    "dropped": {"packing": {"overflow": "drop"}},
    "carried": {"mixing": {"epoch_end": "carry"}, "packing": {"overflow": "truncate"}},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_kind_of_run_has_a_report(written, tmp_path, options, monkeypatch):
    monkeypatch.setattr("streampack.report.facts.PLANNED_PIECES", 10_000)
    write_report(make(written, **options), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("<figure") >= 8


def test_a_long_epoch_is_reported_of_its_first_steps(written, tmp_path, monkeypatch):
    monkeypatch.setattr("streampack.report.facts.PLANNED_PIECES", 40)
    facts = run_facts(make(written), None, None, None)
    whole = run_facts(make(written), None, None, 1000)

    assert not facts.is_whole
    assert facts.numbers["steps"] < whole.numbers["steps"]
    assert whole.is_whole
    write_report(make(written), tmp_path / "report.html")
    assert "Planned: " in (tmp_path / "report.html").read_text()


def test_documents_with_pieces_in_several_packs_are_numbered_in_order():
    def pack(*rows):
        return np.array([[stream, 0, sample, start, 4, 12] for stream, sample, start in rows])

    packs = [pack((0, 5, 0), (1, 7, 0)), pack((1, 7, 4)), pack((0, 6, 0)), pack((0, 5, 4))]
    assert documents_again(packs) == {(0, 0, 5): 0, (1, 0, 7): 1}
    assert documents_again([pack((0, 5, 0), (0, 5, 4))]) == {}


def test_the_verb_writes_a_report_with_statistics_and_says_where(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = PackedDataLoader(make(written))
    _ = list(loader)
    Path("stats.json").write_text(json.dumps(loader.stats()))
    Path("run.yaml").write_text(
        json.dumps({"streams": [{"local": str(p)} for p in written.paths]})[:-1]
        + ', "packing": {"max_seq_len": 64}, "batch_size": 2}'
    )
    command = ["report", "run.yaml", "--stats", "stats.json", "--num-ranks", "2"]
    done = CliRunner().invoke(build_app(), command)

    assert done.exception is None, done.output
    assert done.output.startswith("report.html: ")
    assert "The loader fetched 0 shards" in Path("report.html").read_text()
    Path("stats.json").write_text("{")
    done = CliRunner().invoke(build_app(), command)
    assert isinstance(done.exception, ConfigError)
    assert "stats=stats.json: is not JSON" in str(done.exception)


def test_dollar_signs_of_names_are_no_formulas(tmp_path):
    write_stream([[1, 2, 3]] * 100, tmp_path / "s")
    names = ["a$b_c$d", "cost_$5_to_$10_{", r"$\frac{$"]
    runs = {
        "epochs": ({"repeat": 1}, {}),
        "chapters": (
            {},
            {
                "chapters": [Chapter(weights=dict.fromkeys(names, 1 / 3), steps=2)],
                "mixing": Mixing(global_batch_size=6),
            },
        ),
    }
    for kind, (weight, options) in runs.items():
        streams = [Stream(local=tmp_path / "s", name=name, **weight) for name in names]
        dataset = PackedStreamingDataset(streams, packing=Packing(max_seq_len=64), **options)
        write_report(dataset, str(tmp_path / f"{kind}.html"))
        charts = (tmp_path / f"{kind}.html").read_text().partition("<figure")[2]
        assert [name for name in names if f">{name}</text>" not in charts] == []


def test_the_shares_over_a_run_name_their_unit(tmp_path):
    for name, length in (("short", 10), ("long", 90)):
        write_stream([[1] * length] * 100, tmp_path / name)
    streams = [Stream(local=tmp_path / name, proportion=1) for name in ("short", "long")]
    dataset = PackedStreamingDataset(streams, packing=Packing(max_seq_len=256))
    assert engine_of(dataset).recipe.target_unit == "samples"
    write_report(dataset, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    [figure] = re.findall(r'<figure id="run".*?</figure>', page, re.DOTALL)
    assert "shares of tokens, tokens and repeats" in figure
    assert "share of tokens" in figure
    assert "share of samples" not in figure
