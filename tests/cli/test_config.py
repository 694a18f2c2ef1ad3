"""Runs as YAML: our own files load, and each mistake is reported with its place and a way out."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

import streampack
from streampack import (
    Chats,
    ConfigError,
    HeldOut,
    Mixing,
    Order,
    PackCost,
    Packing,
    Shards,
    Stream,
    Texts,
    TokenFiles,
)
from streampack.cli.config import StreamConfig, read_config
from streampack.config.moved import MOVED, line_of
from streampack.config.packing import GONE

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "streampack" / "cli" / "demo" / "demo.yaml"
CONFIGS = [*sorted((ROOT / "configs").glob("*.yaml")), DEMO]
MIX = {
    "streams": [{"local": "data/code", "proportion": 0.7}, {"local": "data/docs"}],
    "packing": {"max_seq_len": 2048},
}

# Each of ten lines stands for nine times the values of the line before it.
ALIASES = "".join(
    f"\na{n}: &a{n} {{0}}" + ", ".join([f"*a{n - 1}"] * 9) + "{1}" for n in range(1, 11)
)


@pytest.fixture
def refuse(tmp_path):
    """Write a config and return the lines of its refusal, each without the file's name."""

    def read(written):
        path = tmp_path / "x.yaml"
        path.write_text(written if isinstance(written, str) else yaml.safe_dump(written))
        with pytest.raises(ConfigError) as refusal:
            read_config(path)
        lines = str(refusal.value).splitlines()
        assert all(line.startswith(f"{path}: ") for line in lines)
        return [line.removeprefix(f"{path}: ") for line in lines]

    return read


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_that_we_ship_loads_and_names_its_streams(path):
    config = read_config(path)

    names = [stream.name for stream in config.streams]
    assert len(set(names)) == len(names) > 1
    assert all(stream.build().source for stream in config.streams)


def test_keys_become_the_configs_of_the_package(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({**MIX, "mixing": {"epoch_size": "10k"}, "order": {"seed": 3}}))

    config = read_config(path)

    assert config.packing == Packing(max_seq_len=2048)
    assert config.mixing == Mixing(epoch_size=10_000)
    assert config.order == Order(seed=3)
    assert (config.batch_size, config.num_workers) == (None, 0)
    stream = config.streams[0].build()
    assert (stream.source.local, stream.proportion) == ("data/code", 0.7)


def test_a_section_in_yaml_has_the_options_of_its_class():
    sections = {"shards": Shards, "token_files": TokenFiles, "texts": Texts, "chats": Chats}
    of_shards = set(inspect.signature(Shards).parameters)
    own = set(inspect.signature(Stream).parameters) - {"source", "shards"}
    beside = {*sections, "source", "stream_name", "stream_config"}
    assert set(StreamConfig.model_fields) == own | of_shards | beside
    for name, kind in sections.items():
        section = get_args(StreamConfig.model_fields[name].annotation)[0]
        assert set(section.model_fields) == set(inspect.signature(kind).parameters), name


SOURCES_IN_YAML = [
    ({"local": "a", "only": [0, 3]}, "Shards(local='a', only=slice(0, 3, None))"),
    ({"shards": {"remote": "s3://b/a", "only": [1, None]}}, "Shards(remote='s3://b/a', only=sl"),
    ({"token_files": {"files": ["a.bin", "b.bin"], "has": ["eos"]}}, "TokenFiles(files=('a.bin',"),
    ({"texts": {"files": "a.jsonl", "tokenizer": "t"}}, "Texts(files='a.jsonl', tokenizer='t')"),
    ({"chats": {"files": "a.jsonl", "tokenizer": "t", "train_on": "all"}}, "train_on='all'"),
    ({"local": "a", "download": {"retry": 5}}, "download=Download(retry=5)"),
]


@pytest.mark.parametrize(("stream", "shown"), SOURCES_IN_YAML)
def test_each_source_has_a_section(tmp_path, stream, shown):
    path = tmp_path / "x.yaml"
    held = {"side": "train", "fraction": 0.1, "by": "row"}
    path.write_text(yaml.safe_dump({**MIX, "streams": [{**stream, "held_out": held}]}))
    built = read_config(path).streams[0].build()
    assert shown in repr(built.source)
    assert built.held_out == HeldOut("train", 0.1, by="row")


def test_a_stream_in_yaml_has_one_source(tmp_path):
    path = tmp_path / "x.yaml"
    both = {"local": "a", "texts": {"files": "a.jsonl", "tokenizer": "t"}}
    path.write_text(yaml.safe_dump({**MIX, "streams": [both]}))
    with pytest.raises(ConfigError, match=r"texts, local: a stream has one source; keep one of"):
        read_config(path).streams[0].build()


KEPT = {*inspect.signature(Shards).parameters, *inspect.signature(Stream).parameters} - {"shards"}


OF_ITERABLES = {name for name, line in MOVED.items() if line.startswith("IterableStream(")}


def test_what_to_write_for_an_option_that_moved_is_there():
    for name in MOVED.keys() - OF_ITERABLES:
        of_python, of_yaml = (line_of(name, "x", is_yaml=is_yaml) for is_yaml in (False, True))
        lines = zip(of_python.split(" or "), of_yaml.split(" or "), strict=True)
        for in_python, in_yaml in lines:
            kind, options = re.fullmatch(r"(?:\w+=)?(\w+)\((.*)\)", in_python).groups()
            [[section, keys]] = yaml.safe_load(in_yaml).items()
            keys = keys[0] if kind == "Stream" else keys
            known = inspect.signature(getattr(streampack, kind)).parameters
            assert set(keys) == set(re.findall(r"(\w+)=", options))
            assert set(keys) <= set(StreamConfig.model_fields if kind == "Stream" else known), name
            assert section in {*StreamConfig.model_fields, "streams"}


@pytest.mark.parametrize("name", sorted(MOVED.keys() - KEPT))
def test_options_that_moved_are_refused_with_the_line_to_write(refuse, name):
    with pytest.raises(ConfigError) as refused:
        Stream(**{"local": "a", name: [0, 9]})
    assert f"; write {line_of(name, [0, 9])}; it takes" in str(refused.value)
    [line] = refuse({**MIX, "streams": [{"local": "a", name: [0, 9]}]})
    written = line_of(name, [0, 9], is_yaml=True)
    assert line == f"streams.0.{name}: no key of this section (got [0, 9]); write {written}"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"packing": {"max_seq_len": 8, "overflw": "drop"}},
            "packing.overflw: unknown key (got 'drop') - did you mean 'overflow'?",
        ),
        (
            {"mixing": {"batching_method": "stratfied"}},
            "mixing.batching_method: input should be 'random', 'stratified', 'per_stream' or "
            "'device_per_stream' (got 'stratfied')",
        ),
        ({"packing": {}}, "packing.max_seq_len: is missing; it has no default"),
        (
            {"streams": {"code": {"local": "a"}}},
            "streams: must be a list; write each as - {name: code, ...} "
            "(got {'code': {'local': 'a'}})",
        ),
    ],
)
def test_each_mistake_is_named_with_its_place_and_what_was_given(refuse, change, line):
    assert refuse({**MIX, **change}) == [line]


def test_every_mistake_has_a_line_of_its_own(refuse):
    lines = refuse({"streams": [{"lcal": "a"}], "packing": {"max_seq_len": "long"}})

    assert lines == [
        "streams.0.lcal: unknown key (got 'a') - did you mean 'local'?",
        "packing.max_seq_len: input should be a valid integer (got 'long')",
    ]


@pytest.mark.parametrize("count", ["1024", "1_024", "1024.0", "1.024e3", "1.024E+3", "0x400"])
def test_a_count_may_be_written_as_any_whole_number(tmp_path, count):
    path = tmp_path / "x.yaml"
    path.write_text(
        f"streams: [{{local: a, proportion: 5e-1, choose: {count}}}]\n"
        f"packing: {{max_seq_len: {count}}}\n"
        f"mixing: {{epoch_size: {count}}}\nbatch_size: {count}\n"
    )

    config = read_config(path)

    counts = [config.packing.max_seq_len, config.mixing.epoch_size, config.streams[0].choose]
    assert [*counts, config.batch_size] == [1024] * 4
    assert all(type(each) is int for each in counts)
    assert config.streams[0].proportion == 0.5


def test_a_key_that_is_written_twice_is_refused(refuse):
    text = "streams: []\npacking: {max_seq_len: 8}\norder: {seed: 1, seed: 2}\n"

    assert refuse(text) == ["line 3: 'seed' is a duplicate key; keep one of them"]


def test_a_stream_may_take_over_what_another_one_says(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text(
        "streams:\n"
        "  - &code {local: data/code, repeat: 2, check_dtypes: false}\n"
        "  - &docs {<<: *code, local: data/docs}\n"
        "  - {<<: *docs, repeat: 1}\n"
        "packing: {max_seq_len: 8}\n"
    )

    streams = [stream.build() for stream in read_config(path).streams]

    assert [(each.source.local, each.repeat) for each in streams] == [
        ("data/code", 2),
        ("data/docs", 2),
        ("data/docs", 1),
    ]
    assert not any(each.source.check_dtypes for each in streams)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 5000 + "]" * 5000, "line 1: is nested more than 50 deep"),
        ("\n".join(" " * n + "a:" for n in range(99)), "line 50: is nested more than 50 deep"),
        ("\na: &x [*x]", "line 2: has more than 1000000 values with aliases"),
        ("a: &x {b: {<<: *x}}", "line 1: has more than 1000000 values with aliases"),
        ("a0: &a0 [1]" + ALIASES.format("[", "]"), "line 7: has more than 1000000 values"),
        ("a0: &a0 {k: 1}" + ALIASES.format("{<<: [", "]}"), "line 7: has more than 1000000"),
        ("batch_size: " + "9" * 101, "line 1: is an integer of 101 characters"),
        ("batch_size: " + ":".join("1" * 3000), "line 1: is an integer of 5999 characters"),
        ("#" * (2**24 + 1), "has more than 16777216 bytes"),
        ("{" + "k: 1, " * 30_000 + "}", "line 1: 'k' is a duplicate key"),
        ("batch_size: 2020-13-01", "month must be in 1..12"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(refuse, text, message):
    [line] = refuse(text)
    assert message in line


@pytest.mark.parametrize("name", GONE)
def test_what_packing_had_before_is_refused_with_what_to_write(tmp_path, name):
    options = {"method": name} if "fit" in name else {name: 4}
    path = tmp_path / "x.yaml"
    described = {"streams": [{"local": "a"}], "packing": {"max_seq_len": 64, **options}}
    path.write_text(yaml.safe_dump(described))

    for make in (lambda: Packing(max_seq_len=64, **options), lambda: read_config(path)):
        with pytest.raises(ConfigError, match=f"{name}.* any more: .*(omit it|write )"):
            make()


def test_a_packing_bounds_the_cost_of_packs(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "streams: [{local: a}]\npacking: {max_seq_len: 64, cost: {max_cost: 90, hidden_size: 8}}\n"
    )

    assert read_config(path).packing.cost == PackCost(90, hidden_size=8)
