"""The YAML config of a run: its schema, and error messages that name the place of each mistake.

::

    configs/x.yaml: streams.0.repat: unknown key (got 2) - did you mean 'repeat'?
         file          place             error            suggestion

The models only validate; they build nothing. The four configs are the classes of
``streampack.config`` themselves, so a key means the same in YAML and in Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from streampack._paths import local_path
from streampack.balance import AttentionCost, Within
from streampack.chapters import Chapter, Ramp
from streampack.config import Buffers, Mixing, Order, PackCost, Packing
from streampack.config.download import Download
from streampack.config.held_out import HeldOut
from streampack.config.moved import line_of
from streampack.config.packing import refuse_gone
from streampack.errors import ConfigError, suggest
from streampack.planned.config_text import ENVIRONMENT
from streampack.streams import Stream
from streampack.streams.registry import SOURCES, make_named_stream, source_named
from streampack.streams.stream import OPTIONS
from streampack.world import World

MAX_BYTES = 2**24  # a mix may name tens of thousands of files
MAX_VALUES = 10**6  # with each alias counted as its value
MAX_DEPTH = 50  # mappings and lists within one another; a config has 5
MAX_DIGITS = 100


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


PLAIN: dict[str, Any] = {
    "only": tuple[int | None, int | None] | None,
    "files": str,
    **dict.fromkeys(("local", "remote", "tokenizer", "index", "format", "transform"), str | None),
}
"""Types of options that are other ones in Python."""


def _keys_of(kind: Any, leave: Sequence[str] = (), **types: Any) -> Any:
    """Return a base class with the arguments of a class as keys, of their types or of `types`."""
    types = get_type_hints(kind.__init__) | PLAIN | types
    parameters = [p for name, p in signature(kind).parameters.items() if name not in leave]
    keys: Any = {
        p.name: (types[p.name], ... if p.default is p.empty else p.default) for p in parameters
    }
    return create_model(kind.__name__, __base__=_Keys, **keys)


OWN: dict[str, Any] = {"token_files": {"files": str | list[str]}}
SECTIONS: dict[str, Any] = {
    name: _keys_of(kind, **OWN.get(name, {})) for name, kind in SOURCES.items()
}
"""The sections of sources, one of which a stream has."""


class StreamConfig(
    create_model(  # type: ignore[misc]
        "StreamConfig",
        __base__=(_keys_of(Stream, ["source", "shards"]), SECTIONS["shards"]),
        **{name: (kind | None, None) for name, kind in SECTIONS.items()},
    )
):
    """One stream: its source in one section, and the arguments of ``streampack.Stream``.

    The keys of ``shards`` may also be written without their section.
    """

    source: dict[str, dict[str, Any]] | None = None
    """A source of others: the name that `register_source` or an entry point gave it, and its
    options."""
    stream_name: str | None = None
    """A class that an installed package registers for the entry point ``streampack.streams``, or
    in MosaicML's ``streams_registry``."""
    stream_config: dict[str, Any] | None = None
    """Further arguments of that class."""

    def build(self) -> Any:
        """Return the stream, of `Stream` or of the named class."""
        given = _stated(self)
        sources = {name: given.pop(name) for name in SOURCES if name in given}
        sources |= given.pop("source", None) or {}
        name, more = given.pop("stream_name", None), given.pop("stream_config", None)
        options = {key: given.pop(key) for key in OPTIONS if key in given}
        if len(sources) + bool(given) > 1:
            found = [*sources, *given]
            raise ConfigError(f"{', '.join(found)}: a stream has one source; keep one of them")
        if name is not None or more is not None:
            return make_named_stream(name or "streampack", {**(more or {}), **options}, given)
        for kind, values in sources.items():
            if not isinstance(values, BaseModel):
                return Stream(source_named(kind)(**values), **options)
            return Stream(source_named(kind)(**_stated(values)), **options)
        return Stream(**options, **given)


def _stated(keys: BaseModel) -> dict[str, Any]:
    stated = {key: getattr(keys, key) for key in keys.model_fields_set}
    if stated.get("only") is not None:
        stated["only"] = slice(*stated["only"])
    return stated


class BalanceConfig(_keys_of(AttentionCost)):  # type: ignore[misc]
    """How packs are dealt to ranks: ``streampack.Balance`` with an ``AttentionCost``."""

    within: Within = "node"
    """Which ranks share packs: none (each rank orders its own), the ranks of a node, or all."""


class RampConfig(_keys_of(Ramp, start=float, stop=float)):  # type: ignore[misc]
    """A weight that changes over its chapter: ``streampack.Ramp``."""


class ChapterConfig(
    _keys_of(Chapter, weights=dict[str, float | RampConfig])  # type: ignore[misc]
):
    """One chapter of a run: ``streampack.Chapter``."""


class WorldConfig(
    _keys_of(World, ENVIRONMENT)  # type: ignore[misc]
):
    """How ranks share rows: ``streampack.World`` without the rank, which is the environment's."""


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
    """How packs are dealt to ranks so that their batches cost the same, or None if they are not."""
    chapters: list[ChapterConfig] | None = Field(default=None, min_length=1)
    """The mixture of each part of the run, instead of weights of streams and epochs."""
    skip: list[tuple[int, int]] = []
    """Inclusive ranges of steps of a run of chapters that are not delivered, counted from 0."""
    world: WorldConfig | None = None
    """How ranks share rows. By default each has its own."""
    batch_size: int | None = Field(default=None, ge=1)
    """Packs per batch and rank; 1 by default, unless a trainer sets it."""
    batch_format: str | None = None
    """A trainer's format by name, such as "hf"; "native" by default."""
    num_workers: int = Field(default=0, ge=0)
    """Reading processes; 0: threads of this process."""


AS_WRITTEN = ("packing", "mixing", "order", "buffers", "batch_size", "batch_format", "skip")
"""Fields of a RunConfig that are arguments of a `PackedStreamingDataset` as they are."""
CLASSES: tuple[type, ...] = (
    RunConfig,
    StreamConfig,
    *SECTIONS.values(),
    HeldOut,
    Download,
    Packing,
    PackCost,
    Mixing,
    Order,
    Buffers,
    BalanceConfig,
)
CLASSES += (ChapterConfig, RampConfig, WorldConfig)
KEYS = [key for kind in CLASSES for key in signature(kind).parameters]


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, and what would take all memory or much time."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in a node; none until it is complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node after checking its depth and the number of values so far."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._num_values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _at(event, f"is nested more than {MAX_DEPTH} deep; no key needs that")
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        # An alias inside its own value has no size yet: it would have no end.
        is_alias = isinstance(event, yaml.AliasEvent)
        self._num_values += self._sizes.get(node, MAX_VALUES) if is_alias else 1
        if self._num_values > MAX_VALUES:
            raise _at(event, f"has more than {MAX_VALUES} values with aliases; write fewer")
        self._sizes.setdefault(node, self._num_values - before)
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

    def construct_number(self, node: Any) -> int | float:
        """Return a float, or an int if it is integral: 1e3 is a count."""
        number: float = self.construct_yaml_float(node)
        return int(number) if number.is_integer() else number

    def construct_integer(self, node: Any) -> int:
        """Return an integer, unless it is too long to convert quickly."""
        if len(node.value) > MAX_DIGITS:
            raise _at(node, f"is an integer of {len(node.value)} characters; write fewer digits")
        return int(self.construct_yaml_int(node))


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
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
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
    place, given = mistake["loc"], mistake["input"]
    where = ".".join(str(part) for part in place) or "the file"
    got = f"(got {given!r:.200})"
    if "packing" in place[-2:-1]:
        try:
            refuse_gone({str(place[-1]): given})
        except ConfigError as error:
            return f"{where}: {error}"
    match mistake["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument" | "model_type":
            if "streams" in place and (line := line_of(str(place[-1]), given, is_yaml=True)):
                return f"{where}: no key of this section {got}; write {line}"
            return f"{where}: unknown key {got}{suggest(str(place[-1]), KEYS)}"
        case "missing":
            return f"{where}: is missing; it has no default"
        case "value_error":
            return f"{where}: {mistake['ctx']['error']}"
        case "list_type":
            # MosaicML's YAML has a mapping here, with the streams' names as keys.
            return f"{where}: must be a list; write each as - {{name: code, ...}} {got}"
        case "too_short":
            return f"{where}: is empty; give at least one"
    what = mistake["msg"][0].lower() + mistake["msg"][1:]
    return f"{where}: {what} {got}"
