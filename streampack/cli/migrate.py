"""``streampack migrate INPUTS``: the data of another program's run as a run's YAML.

::

    --data-path 0.7 web 0.3 code --split 969,30,1    --> streams, samples: [0, n], weights of tokens
    train-data-paths: [web, code]                    --> the same, from a YAML of GPT-NeoX
    dclm,dclm/part-0.npy                             --> a stream for each label, with its files
    data: {paths: [part-0.npy]}                      --> one stream, from a YAML of OLMo
    all other options                                --> named in a comment at the top
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from streampack._checks import check_choice
from streampack.cli.console import output_console
from streampack.cli.migrate_inputs import (
    NUMBER,
    SUBSETS,
    Options,
    options_of_text,
    options_of_yaml,
    read_input_text,
    yaml_of,
)
from streampack.cli.verbs import Migrate
from streampack.errors import ConfigError
from streampack.flat.files import format_named
from streampack.streams import Stream
from streampack.streams.flat_opening import find_files, open_files, open_flat

DEFAULT_SPLIT = "969,30,1"  # of Megatron and GPT-NeoX
MIX_LINE = re.compile(r"[^,\s-][^,\s]*,[^,\s]+")
# Options of Megatron, and where each goes in the config.
CARRIED = {
    "seq-length": ("packing", "max_seq_len"),
    "global-batch-size": ("mixing", "global_batch_size"),
    "seed": ("order", "seed"),
    "micro-batch-size": ("batch_size",),
}
STEPS = {"train": "train-iters", "valid": "eval-iters", "test": "eval-iters"}
# Packs always do what these ask for.
MASKED = ("reset-attention-mask", "dataloader-inter-document-masking")
ALWAYS = (*MASKED, "reset-position-ids", "eod-mask-loss")
BATCHES = ("global_train_batch_size", "device_train_microbatch_size")  # of OLMo
ATTENTION = "there, documents attend to those before them in a row; here they never do"


def run_migrate(options: Migrate) -> None:
    """Write the config, and show its remarks."""
    text, out = migrate(options), options.out
    if out is None:
        output_console().out(text, highlight=False, end="")
        return
    out.write_text(text, encoding="utf-8")
    notes = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    output_console().out("\n".join([f"{out}: written", *notes]), highlight=False)


def migrate(options: Migrate) -> str:
    """Return the YAML of a run with the data of Megatron, GPT-NeoX or OLMo.

    A ConfigError says that the input cannot be parsed, or a length is missing; a DataError, that a
    file that has to be opened is missing or damaged.
    """
    inputs, subset, tokens_dtype = options.inputs, options.subset, options.tokens_dtype
    check_choice("subset", subset, SUBSETS)
    text = inputs[0] if len(inputs) == 1 else shlex.join(inputs)
    config: dict[str, Any] = {"mixing": {"weight_unit": "tokens"}, "packing": {}, "order": {}}
    for section, key, value in (
        ("packing", "max_seq_len", options.max_seq_len),
        ("mixing", "global_batch_size", options.global_batch_size),
    ):
        if value is not None:
            config[section][key] = value
    if all(path.endswith((".yml", ".yaml", ".json")) for path in inputs):
        loaded = yaml_of(inputs)
        if isinstance(loaded.get("data"), dict):
            notes = _add_olmo(loaded, config, tokens_dtype)
        else:
            notes = _add_blend(options_of_yaml(loaded), subset, config, is_neox=True)
    else:
        if len(inputs) == 1 and Path(text).is_file():
            text = read_input_text(text)
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if lines and all(map(MIX_LINE.fullmatch, lines)):
            _add_files(
                _paths_of_mix(lines, options.root, options.tokenizer_id), config, tokens_dtype
            )
            notes = []
        else:
            notes = _add_blend(options_of_text(text), subset, config, is_neox=False)
    for section, key in (("packing", "max_seq_len"), ("mixing", "global_batch_size")):
        if key not in config[section]:
            raise ConfigError(f"is not in {text!r:.60}; set it", option=key)
    notes.append("the order of documents is streampack's own")
    config = {key: value for key, value in config.items() if value != {}}
    written: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return "".join(f"# {note}\n" for note in notes) + written


def _add_blend(
    options: Options, subset: str, config: dict[str, Any], *, is_neox: bool
) -> list[str]:
    own = f"{subset}-data-path"
    sources = (own, "data-path", "data-args-path", "")
    source = next((name for name in sources if options.get(name)), None)
    if source is None:
        raise ConfigError(
            f"{' '.join(options)!r:.80}: has neither data-path nor {own}; write one of them with "
            "weights and prefixes, such as 0.7 data/web 0.3 data/code"
        )
    weights, prefixes = _blend(options[source])
    config["streams"] = [
        {"name": name, _place(prefix): f"{prefix}.bin", "format": "megatron"}
        for name, prefix in zip(_names(prefixes), prefixes, strict=True)
    ]
    notes = []
    split = "1" if source == own else " ".join(options.get("split", []))
    if not split:
        is_whole = subset == "train" and source != "data-path"
        split = "1" if is_whole else DEFAULT_SPLIT
        notes = [] if is_whole else [f"split={split}, as by default; --split 1 takes all documents"]
    for stream in config["streams"]:
        _take_part(stream, split, subset, is_neox=is_neox)
    if weights is None:
        weights = [
            options[source].count(prefix) * _num_tokens(stream)
            for prefix, stream in zip(prefixes, config["streams"], strict=True)
        ]
    names = [stream["name"] for stream in config["streams"]]
    steps = _carry(options, subset, config)
    config["chapters"] = [steps | {"weights": dict(zip(names, weights, strict=True))}]
    used = {own, *sources, *CARRIED, *ALWAYS, "split", "per-split-data-args-path"}
    left = sorted(options.keys() - used - {STEPS[subset], "train-samples"})
    if left:
        notes.append(f"not carried over: {' '.join(left)}")
    return notes if options.keys() & {*MASKED} else [*notes, ATTENTION]


def _blend(words: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Return weights, or None for those of sizes, and prefixes, each of these once."""
    for word in words:
        if "$" in word:
            raise ConfigError(
                f"{word!r:.80}: has a variable without a value; write the path, or set it: "
                "DATA=/data streampack migrate ..."
            )
    is_number = [NUMBER.fullmatch(word) is not None for word in words]
    if not any(is_number):
        prefixes = list(dict.fromkeys(words))
        return [1.0] if len(prefixes) == 1 else None, prefixes
    if len(words) % 2 or is_number != [True, False] * (len(words) // 2):
        raise ConfigError(
            f"{' '.join(words)!r:.80}: is not a list of weights and prefixes in turn; write "
            "0.7 data/web 0.3 data/code, or prefixes alone"
        )
    sums: dict[str, float] = {}  # Megatron takes a prefix that is named twice by both weights
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        sums[prefix] = sums.get(prefix, 0.0) + float(weight)
    return [*sums.values()], [*sums]


def _carry(options: Options, subset: str, config: dict[str, Any]) -> dict[str, int]:
    found = {}
    for option in (*CARRIED, STEPS[subset], "train-samples"):
        if values := options.get(option):
            if len(values) != 1 or not values[0].isdecimal():
                raise ConfigError(
                    f"{option} {' '.join(values)!r:.60} is not a whole number; write one"
                )
            found[option] = int(values[0])
    for option, (*sections, key) in CARRIED.items():
        if option in found:
            section = config[sections[0]] if sections else config
            section.setdefault(key, found[option])
    batch = config["mixing"].get("global_batch_size")
    if subset == "train" and batch and "train-samples" in found:
        return {"steps": found["train-samples"] // batch}  # as Megatron rounds
    return {"steps": found[STEPS[subset]]} if STEPS[subset] in found else {}


def _take_part(stream: dict[str, Any], split: str, subset: str, *, is_neox: bool) -> None:
    """Set `samples` to the part of a --split, rounded as its program rounds; none of a whole."""
    number = SUBSETS.index(subset)
    try:
        shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
        parts = [share / sum(shares) for share in shares] + [0.0, 0.0]
    except (ValueError, ZeroDivisionError):
        shares = []
    if not 1 <= len(shares) <= len(SUBSETS):
        raise ConfigError(f"split {split!r:.60}: are not up to three shares; write 969,30,1")
    if parts[number] == 1.0:
        return
    # The programs split sequences, which are documents in all files but those of sentences.
    count, num_documents = (_num_samples(stream, unit) for unit in ("sequence", "document"))
    if count != num_documents:
        stream["unit"] = "sequence"
    if is_neox:
        ends = list(accumulate(round(share * count) for share in parts[: len(SUBSETS)]))
        ends = [end - ends[-1] + count for end in ends]
    else:
        ends = [round(end * count) for end in accumulate(parts[: len(SUBSETS)])]
    first, stop = [0, *ends][number : number + 2]
    if first >= stop:
        raise ConfigError(
            f"split {split}: {subset} has none of the {count} documents of {stream['name']!r}; "
            "give it a larger share, or omit the stream"
        )
    stream["samples"] = [first, stop]


def _num_samples(stream: dict[str, Any], unit: str) -> int:
    whole = Stream(**stream | {"unit": unit})
    files = open_files(whole, find_files(whole, format_named("megatron")))
    return sum(file.boundaries.num_samples for file, _ in files)


def _num_tokens(stream: dict[str, Any]) -> int:
    arguments = stream.copy()
    if "samples" in stream:
        arguments["samples"] = slice(*stream["samples"])
    return open_flat(Stream(**arguments), 0).total_tokens()[0]


def _add_olmo(loaded: Mapping[str, Any], config: dict[str, Any], dtype: str | None) -> list[str]:
    data, model = loaded["data"], loaded.get("model") or {}
    files = data.get("datasets") or {"data": data.get("paths")}
    if not all(isinstance(paths, list) and paths for paths in files.values()):
        raise ConfigError(
            f"data={data!r:.60}: has neither a list of paths nor datasets; write the paths of the "
            ".npy files"
        )
    for section, key, value in (
        ("packing", "max_seq_len", model.get("max_sequence_length")),
        ("mixing", "global_batch_size", loaded.get("global_train_batch_size")),
        ("order", "seed", data.get("seed", loaded.get("seed"))),
    ):
        if value is not None:
            config[section].setdefault(key, value)
    if "device_train_microbatch_size" in loaded:
        config["batch_size"] = loaded["device_train_microbatch_size"]
    _add_files(files, config, dtype or str(data.get("memmap_dtype", "uint16")))
    used = {"paths", "datasets", "seed", "memmap_dtype", "generate_doc_lengths"}
    left = {*loaded} - {"data", "model", "seed", *BATCHES} | {
        f"data.{key}" for key in {*data} - used
    }
    duration = str(loaded.get("max_duration", "ep"))
    if not duration.endswith("ep"):
        key = "until" if duration.endswith("T") else "steps"
        config["chapters"][0] = {key: int(float(duration.rstrip("T")))} | config["chapters"][0]
        left.discard("max_duration")
    notes = [f"not carried over: {' '.join(sorted(left))}"] if left else []
    return notes if data.get("generate_doc_lengths") else [*notes, ATTENTION]


def _paths_of_mix(
    lines: Sequence[str], root: str, tokenizer_id: str | None
) -> dict[str, list[str]]:
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
    return files


def _add_files(
    files: Mapping[str, list[str]], config: dict[str, Any], tokens_dtype: str | None
) -> None:
    """Put a stream for each label into a config, weighted by size: OLMo reads all files once."""
    if tokens_dtype is None:
        raise ConfigError(
            "is not in an OLMo mix; set it to uint16 or uint32", option="tokens_dtype"
        )
    shared = {"format": "olmo", "tokens_dtype": tokens_dtype}
    for path in (path for paths in files.values() for path in paths):
        if "${" in path:
            raise ConfigError(f"{path!r:.80}: is an expression of OmegaConf; write the paths")
    streams = [{"name": name, _place(paths[0]): paths} | shared for name, paths in files.items()]
    weights = {stream["name"]: _num_bytes(stream) for stream in streams if len(streams) > 1}
    config |= {"streams": streams, "chapters": [{"weights": weights or {streams[0]["name"]: 1}}]}


def _num_bytes(stream: dict[str, Any]) -> int:
    found = find_files(Stream(**stream), format_named("olmo"))
    return sum(found.of_name[name].num_bytes for name in found.names)


def _place(path: str) -> str:
    return "remote" if "://" in path else "local"


def _names(prefixes: Sequence[str]) -> list[str]:
    names = [Path(prefix).name for prefix in prefixes]
    return [
        name if names.count(name) == 1 else prefix
        for name, prefix in zip(names, prefixes, strict=True)
    ]
