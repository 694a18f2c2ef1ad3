"""The YAML config of a run: its schema, and error messages that name the place of each mistake.

::

    configs/x.yaml: streams.0.repat: unknown key (got 2) - did you mean 'repeat'?
         file          place             error            suggestion

The models only validate; they build nothing. The four configs are the classes of
``streampack.config`` themselves, so a key means the same in YAML and in Python.

Cost: importing pydantic, a fifth of a second; only the verbs that read a config import it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streampack._paths import local_path
from streampack.balance import Within
from streampack.chapters import OnExhausted
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError, suggest
from streampack.world import ContextLayout

KeyPath = Sequence[int | str]

MAX_BYTES = 2**20
MAX_DEPTH = 50  # mappings and lists within one another; a config has 5
MAX_DIGITS = 100
MAX_VALUES = 10**5  # with each alias counted as what it stands for


class _Keys(BaseModel):
    """A mapping of the file, in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamConfig(_Keys):
    """One stream: the arguments of ``streampack.Stream``, or of the class in `stream_name`."""

    name: str | None = None
    """Name in tables and messages; None: the last part of the stream's path."""
    remote: str | None = None
    """Location of the shards: a path, or the URL of a store."""
    local: str | None = None
    """Folder of the shards on this machine, or the cache for a remote stream."""
    split: str | None = None
    """Subfolder of both `remote` and `local`."""
    proportion: float | None = None
    """Share of an epoch, relative to the other streams' proportions."""
    repeat: float | None = None
    """Number of times that an epoch takes each sample of the stream."""
    choose: int | None = None
    """Number of samples (or tokens) that an epoch takes from the stream."""
    download_retry: int | None = None
    """Further attempts to fetch a file after a failure."""
    download_timeout: float | None = None
    """Seconds for an attempt, plus one second for each MB of the file."""
    validate_hash: str | None = None
    """Hash algorithm to verify shards with, e.g. sha1."""
    keep_zip: bool | None = None
    """Keep the compressed file next to the decompressed one."""
    tokens: str | None = None
    """Column of the token ids."""
    tokens_dtype: str | None = None
    """Integer type of the ids in a column of bytes."""
    labels: str | None = None
    """Column of labels, if the stream has its own."""
    labels_dtype: str | None = None
    """Integer type of labels in a column of bytes; None: that of the tokens."""
    labels_shifted: bool | None = None
    """Whether labels[i] is tokens[i + 1] (true) or tokens[i] (false); None: detect it."""
    loss_mask: str | None = None
    """Column that marks the tokens that are targets."""
    loss_mask_dtype: str | None = None
    """Integer type of a loss mask in a column of bytes; None: that of the tokens."""
    max_seq_len: int | None = None
    """Tokens per pack of this stream; None: those of `packing`. Needs batches of one stream."""
    shards: tuple[int | None, int | None] | None = None
    """The first shard to use and one past the last, such as [0, 10] or [10, null]; None: all."""
    max_passes: float | None = None
    """Passes through the stream that a run of chapters may use; None: any number."""
    on_exhausted: OnExhausted = "substitute"
    """What happens after `max_passes`. substitute: other streams take its place. end: the run ends
    there. error: the run is refused at the start."""
    check_remote: bool = False
    """Fetch index.json again at every start, and open the version that the store holds now."""
    check_dtypes: bool = True
    """Whether to refuse an integer type that the values in a column of bytes contradict."""
    stream_name: str | None = None
    """A class that an installed package registers for the entry point ``streampack.streams``, or
    in MosaicML's ``streams_registry``."""
    stream_config: dict[str, Any] | None = None
    """Further arguments of that class."""

    def arguments(self) -> dict[str, Any]:
        """Return the keys that were set, as arguments of ``Stream`` or of the named class."""
        values = self.model_dump(exclude_unset=True, exclude={"stream_name", "stream_config"})
        if self.shards is not None:
            values["shards"] = slice(*self.shards)
        return values


class BalanceConfig(_Keys):
    """How packs are dealt to ranks: ``streampack.Balance`` with an ``AttentionCost``."""

    within: Within = "node"
    """Which ranks share packs: none (each rank orders its own), the ranks of a node, or all."""
    hidden_size: int = Field(default=4096, ge=1)
    """Width of the model."""
    window: int | None = Field(default=None, ge=1)
    """Tokens that a token attends to, itself included; None: all before it in its sample."""


class RampConfig(_Keys):
    """A weight that changes over its chapter: ``streampack.Ramp``."""

    start: float = Field(ge=0)
    """Weight at the chapter's first step."""
    stop: float = Field(ge=0)
    """Weight after the chapter's last step."""


class ChapterConfig(_Keys):
    """One chapter of a run: ``streampack.Chapter``."""

    weights: dict[str, float | RampConfig]
    """Share of each stream, by name: a number, or {start: 0.8, stop: 0.4}. Streams that are left
    out rest."""
    until: int | str | None = None
    """Length in tokens, such as 2t or 500b, rounded to whole global batches."""
    steps: int | None = None
    """Length in global batches, instead of `until`. None for both: the chapter has no end."""
    packing: Packing | None = None
    """How samples share packs; None: as in the run's packing."""
    batch_size: int | None = None
    """Packs per batch and rank; None: the run's batch_size."""
    global_batch_size: int | None = None
    """Packs per optimizer step; None: the value in `mixing`."""
    stop_after: int | None = None
    """Global batches after which the run leaves the chapter, before its end; None: it runs to its
    end."""


class WorldConfig(_Keys):
    """How ranks share rows: ``streampack.World`` without the rank, which is the environment's."""

    replication: int = Field(default=1, ge=1)
    """Number of neighbouring ranks that receive the same rows (tensor, sequence, context or
    pipeline parallelism)."""
    context_parallel: int = Field(default=1, ge=1)
    """Number of ranks that divide the tokens of a row; a divisor of `replication`. 1: rows stay
    whole."""
    context_layout: ContextLayout = "zigzag"
    """The tokens that each of these ranks gets: of the row, or of each document in it."""


class RunConfig(_Keys):
    """The config of ``streampack run``: streams, mixing, packing, buffers and batches."""

    streams: list[StreamConfig] = Field(min_length=1)
    """The weighted streams, in order."""
    packing: Packing
    """How samples share packs."""
    mixing: Mixing = Mixing()
    """The share of each stream, and the batches it appears in."""
    order: Order = Order()
    """The order of samples."""
    buffers: Buffers = Buffers()
    """Memory limits."""
    balance: BalanceConfig | None = None
    """How packs are dealt to ranks so that their batches cost the same; None: they are not."""
    chapters: list[ChapterConfig] | None = Field(default=None, min_length=1)
    """The mixture of each part of the run, instead of weights of streams; None: it has epochs."""
    skip: list[tuple[int, int]] = []
    """Inclusive ranges of steps of a run of chapters that are not delivered, counted from 0."""
    world: WorldConfig | None = None
    """How ranks share rows; None: each rank has its own."""
    batch_size: int = Field(default=1, ge=1)
    """Packs per batch and rank."""
    num_workers: int = Field(default=0, ge=0)
    """Reading processes; 0: threads of this process."""


PART_MODELS = {"balance": BalanceConfig, "world": WorldConfig, "chapters": ChapterConfig}


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, and what would take long to read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in a node; none until it is complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node, after a check of its depth and size."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._num_values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _at(event, f"is nested more than {MAX_DEPTH} deep; no key needs that")
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._num_values += 1
            self._sizes[node] = self._num_values - before
        elif node in self._sizes:
            self._num_values += self._sizes[node]
        else:
            raise _at(event, "the alias stands for what it is part of; write a value")
        if self._num_values > MAX_VALUES:
            raise _at(event, f"has more than {MAX_VALUES} values, aliases included; write fewer")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping node after checking that its keys are distinct."""
        # Not on construction: by then ``<<: *base`` may have inserted the keys of another mapping.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        known = set()
        for key, _ in node.value:
            if (name := (key.tag, str(key.value))) in known:
                raise _at(key, f"{key.value!r} is a duplicate key; keep one of them")
            known.add(name)
        return node

    def construct_integer(self, node: Any) -> int:
        """Return an integer, unless it is too long to convert quickly."""
        if len(node.value) > MAX_DIGITS:
            raise _at(node, f"is an integer of {len(node.value)} characters; write fewer digits")
        return int(self.construct_yaml_int(node))

    def construct_number(self, node: Any) -> int | float:
        """Return a float, or an int if it is integral: 1e3 is a count."""
        number: float = self.construct_yaml_float(node)
        return int(number) if number.is_integer() else number


def _at(place: Any, text: str) -> ConfigError:
    return ConfigError(f"line {place.start_mark.line + 1}: {text}")


FLOAT = "tag:yaml.org,2002:float"
# PyYAML reads 1e3 as text, following YAML 1.1.
_Loader.add_implicit_resolver(
    FLOAT, re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.add_constructor(FLOAT, _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_config(path: Path) -> RunConfig:
    """Read and check a run's YAML; a ConfigError has a line for each mistake, with its place."""
    file = local_path(path, "config")  # a shell leaves the `~` of --config=~/x.yaml as it is
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"has more than {MAX_BYTES} bytes; name the YAML file of a run")
        written = yaml.load(content.decode(), Loader=_Loader)
        # Validated as JSON: in that mode pydantic refuses text for a number, as the classes do.
        as_json = json.dumps(written, default=str)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not YAML: {' '.join(str(error).split())}; fix it, or name a YAML file"
        ) from error
    try:
        return RunConfig.model_validate_json(as_json, strict=True)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        raise ConfigError(
            "\n".join(f"{path}: {_explain(mistake)}" for mistake in mistakes)
        ) from None


def _explain(mistake: Any) -> str:
    """Word one of pydantic's errors in the style of the package's messages."""
    place, given = mistake["loc"], mistake["input"]
    where = ".".join(str(part) for part in place) or "the file"
    got = f"(got {given!r:.200})"
    match mistake["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            hint = suggest(str(place[-1]), _known_keys(place[:-1]))
            return f"{where}: unknown key {got}{hint}"
        case "missing":
            return f"{where}: is missing; it has no default"
        case "literal_error":
            words = get_args(get_type_hints(_class_at(place[:-1]))[str(place[-1])])
            return f"{where}: {given!r} is not one of {'|'.join(words)}{suggest(given, words)}"
        case "value_error":
            return f"{where}: {mistake['ctx']['error']}"
        case "list_type":
            # MosaicML's YAML has a mapping here, with the streams' names as keys.
            return f"{where}: must be a list; write each as - {{name: code, ...}} {got}"
        case "too_short":
            return f"{where}: is empty; give at least one"
        case "model_type" | "dataclass_type":
            keys = ": ... and ".join(_known_keys(place)[:2])
            return f"{where}: must hold keys, such as {keys}: ... {got}"
    what = mistake["msg"][0].lower() + mistake["msg"][1:]
    return f"{where}: {what} {got}"


def all_keys() -> set[str]:
    """Return all keys of a config, for messages."""
    sections = ("streams", "packing", "mixing", "order", "buffers", *PART_MODELS)
    return {*_known_keys(()), *(key for section in sections for key in _known_keys((section,)))}


def _class_at(place: KeyPath) -> Any:
    if not place:
        return RunConfig
    annotation = RunConfig.model_fields[str(place[0])].annotation
    if place[0] == "chapters" and "packing" in place:
        return Packing
    if place[0] == "chapters" and "weights" in place:
        return RampConfig
    return {"streams": StreamConfig, **PART_MODELS}.get(str(place[0]), annotation)


def _known_keys(place: KeyPath) -> list[str]:
    holder = _class_at(place)
    return [f.name for f in fields(holder)] if is_dataclass(holder) else list(holder.model_fields)
