"""``streampack migrate INPUTS``: a Megatron blend or an OLMo mix as a run's YAML.

::

    --data-path 0.7 web 0.3 code --split 969,30,1    --> streams, samples: [0, n], weights of tokens
    dclm,dclm/part-0.npy                             --> a stream for each label, with its files
    all other options                                --> named in a comment at the top
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from streampack._checks import check_choice
from streampack.cli.console import output_console
from streampack.cli.verbs import Migrate
from streampack.errors import ConfigError
from streampack.flat.files import format_named
from streampack.streams import Stream, open_stream
from streampack.streams.flat_opening import find_files

SUBSETS = ("train", "valid", "test")
MIX_LINE = re.compile(r"[^,\s-][^,\s]*,[^,\s]+")
NUMBER = re.compile(r"[-+]?[\d.]+([eE][-+]?\d+)?")
# Options of Megatron, and where each goes in the config.
CARRIED = {
    "--seq-length": ("packing", "max_seq_len"),
    "--global-batch-size": ("mixing", "global_batch_size"),
    "--seed": ("order", "seed"),
    "--micro-batch-size": ("batch_size",),
}
STEPS = {"train": "--train-iters", "valid": "--eval-iters", "test": "--eval-iters"}
ATTENTION = (
    "without --reset-attention-mask, Megatron's documents attend to those before them in a row; "
    "here they never do"
)


def run(options: Migrate) -> None:
    """Write the config, and show its remarks."""
    arguments = vars(options).copy()
    out = arguments.pop("out")
    text = migrate(arguments.pop("inputs"), **arguments)
    if out is None:
        output_console().out(text, highlight=False, end="")
        return
    out.write_text(text, encoding="utf-8")
    notes = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    output_console().out("\n".join([f"{out}: written", *notes]), highlight=False)


def migrate(
    inputs: Sequence[str],
    *,
    max_seq_len: int | None = None,
    global_batch_size: int | None = None,
    subset: str = "train",
    root: str = "",
    tokenizer_id: str | None = None,
    tokens_dtype: str | None = None,
) -> str:
    """Return the YAML of a run for a Megatron blend or an OLMo mix.

    Args:
        inputs: Megatron's options, or the words of its `--data-path`; or a file with either of
            them, or with an OLMo mix.
        max_seq_len: Tokens of a pack, if there is no `--seq-length`.
        global_batch_size: Packs of an optimizer step, if there is no `--global-batch-size`.
        subset: "train", "valid" or "test": the part of a `--split`.
        root: Folder or URL that the paths of an OLMo mix begin with.
        tokenizer_id: The value of `{TOKENIZER}` in an OLMo mix.
        tokens_dtype: Type of the tokens of an OLMo mix.

    Raises:
        ConfigError: If the input cannot be parsed, or a length is missing.
        DataError: If a file that has to be opened is missing or damaged.
    """
    check_choice("subset", subset, SUBSETS)
    text = inputs[0] if len(inputs) == 1 else shlex.join(inputs)
    if len(inputs) == 1 and Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    config: dict[str, Any] = {"mixing": {"weight_unit": "tokens"}, "packing": {}, "order": {}}
    steps: dict[str, int] = {}
    notes: list[str] = []
    if lines and all(map(MIX_LINE.fullmatch, lines)):
        streams, weights = _mix_streams(lines, root, tokenizer_id, tokens_dtype), None
    else:
        options = _options(shlex.split(text.replace("\\\n", " "), comments=True))
        streams, weights, used = _blend_streams(options, subset)
        steps, notes = _carry(options, subset, config, used)
    notes.append("the order of documents is streampack's own")
    for section, key, value in (
        ("packing", "max_seq_len", max_seq_len),
        ("mixing", "global_batch_size", global_batch_size),
    ):
        if value is not None:
            config[section][key] = value
        if key not in config[section]:
            raise ConfigError(f"is not in {text!r:.60}; set it", option=key)
    found = map(_num_bytes, streams) if weights is None else weights
    names = [stream["name"] for stream in streams]
    chapter = steps | {"weights": dict(zip(names, found, strict=True))}
    config |= {"streams": streams, "chapters": [chapter]}
    config = {key: value for key, value in config.items() if value != {}}
    written: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return "".join(f"# {note}\n" for note in notes) + written


def _carry(
    options: dict[str, list[str]], subset: str, config: dict[str, Any], used: set[str]
) -> tuple[dict[str, int], list[str]]:
    """Put Megatron's options into a config; return the steps of its chapter, and remarks."""
    for option, (*place, key) in CARRIED.items():
        if option in options:
            target = config[place[0]] if place else config
            target[key] = _integer(option, options[option])
    steps = {}
    if STEPS[subset] in options:
        steps["steps"] = _integer(STEPS[subset], options[STEPS[subset]])
    used |= {*CARRIED, STEPS[subset], "--reset-attention-mask"}  # the last: as it always is here
    left = sorted(options.keys() - used)
    notes = [f"not carried over: {' '.join(left)}"] if left else []
    if "--reset-attention-mask" not in options:
        notes.append(ATTENTION)
    return steps, notes


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option; words before the first one are those of --data-path."""
    found: dict[str, list[str]] = {}
    option = "--data-path"
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found[option] = [value] if equals else []
        else:
            found.setdefault(option, []).append(word)
    if path := found.get("--data-args-path"):
        try:
            found["--data-path"] = Path(path[0]).read_text(encoding="utf-8").split()
        except OSError as error:
            raise ConfigError(
                f"--data-args-path {path[0]}: cannot be read ({error.strerror}); correct its name"
            ) from error
    return found


def _integer(option: str, values: list[str]) -> int:
    if len(values) != 1 or not values[0].isdecimal():
        raise ConfigError(f"{option} {' '.join(values)!r:.60} is not a whole number; write one")
    return int(values[0])


def _blend_streams(
    options: dict[str, list[str]], subset: str
) -> tuple[list[dict[str, Any]], list[float] | None, set[str]]:
    """Return streams, their weights if there are any, and the options that they come from."""
    own = f"--{subset}-data-path"
    blend = options.get(own) or options.get("--data-path")
    if not blend:
        raise ConfigError(
            f"{' '.join(options)!r:.80}: has neither --data-path nor {own}; write one of them with "
            "weights and prefixes, such as 0.7 data/web 0.3 data/code"
        )
    is_number = [NUMBER.fullmatch(word) is not None for word in blend]
    weights, prefixes = None, blend
    if any(is_number):
        if len(blend) % 2 or is_number != [True, False] * (len(blend) // 2):
            raise ConfigError(
                f"{' '.join(blend)!r:.80}: is not a list of weights and prefixes in turn; write "
                "0.7 data/web 0.3 data/code, or prefixes alone"
            )
        sums: dict[str, float] = {}  # Megatron takes a prefix that is named twice by both weights
        for weight, prefix in zip(blend[::2], blend[1::2], strict=True):
            sums[prefix] = sums.get(prefix, 0.0) + float(weight)
        weights, prefixes = list(sums.values()), list(sums)
    streams: list[dict[str, Any]] = [
        {"name": name, _place(prefix): prefix, "format": "megatron"}
        for name, prefix in zip(_names(prefixes), prefixes, strict=True)
    ]
    if own not in options and (split := options.get("--split")):
        for stream in streams:
            stream["samples"] = _split_part(stream, split, subset)
    return streams, weights, {own, "--data-path", "--data-args-path", "--split"}


def _split_part(stream: dict[str, Any], split: list[str], subset: str) -> list[int]:
    """Return the first document of a part, and one past its last, rounded as Megatron does."""
    try:
        shares = [float(share) for share in re.split("[,/]", split[0])] + [0.0, 0.0]
        total = sum(shares[: len(SUBSETS)])
        before = [sum(shares[:n]) / total for n in range(len(SUBSETS) + 1)]
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise ConfigError(f"--split {split}: are not shares; write 969,30,1") from error
    num_samples = open_stream(Stream(**stream), 0).num_samples
    number = SUBSETS.index(subset)
    first, stop = (round(share * num_samples) for share in before[number : number + 2])
    if first == stop:
        raise ConfigError(
            f"--split {split[0]}: {subset} has none of the {num_samples} documents of "
            f"{stream['name']!r}; give it a larger share, or omit the stream"
        )
    return [first, stop]


def _mix_streams(
    lines: Sequence[str], root: str, tokenizer_id: str | None, tokens_dtype: str | None
) -> list[dict[str, Any]]:
    """Return a stream for each label of an OLMo mix."""
    if tokens_dtype is None:
        raise ConfigError(
            "is not in an OLMo mix; set it to uint16 or uint32", option="tokens_dtype"
        )
    files: dict[str, list[str]] = {}
    for line in lines:
        label, path = line.split(",")
        if "{TOKENIZER}" in path:
            if tokenizer_id is None:
                raise ConfigError(
                    f"{line!r:.80}: has {{TOKENIZER}}; set it to the name in the paths, such as "
                    "dolma2-tokenizer",
                    option="tokenizer_id",
                )
            path = path.replace("{TOKENIZER}", tokenizer_id)
        files.setdefault(label, []).append(f"{root.rstrip('/')}/{path}" if root else path)
    shared = {"format": "olmo", "tokens_dtype": tokens_dtype}
    return [{"name": name, _place(paths[0]): paths, **shared} for name, paths in files.items()]


def _num_bytes(stream: dict[str, Any]) -> int:
    """Return the size of a stream's token files: the weight of one that has none."""
    found = find_files(Stream(**stream), format_named(stream["format"]))
    return sum(found.of_name[name].num_bytes for name in found.names)


def _place(path: str) -> str:
    return "remote" if "://" in path else "local"


def _names(prefixes: Sequence[str]) -> list[str]:
    """Return the last part of each prefix, or all of it if others have the same."""
    names = [Path(prefix).name for prefix in prefixes]
    return [
        name if names.count(name) == 1 else prefix
        for name, prefix in zip(names, prefixes, strict=True)
    ]
