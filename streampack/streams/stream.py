"""`Stream`: where a stream's shards are, its weight, and its columns.

Nothing is read here. The object keeps what the user said, and streampack never modifies it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from streampack._checks import (
    check_at_most,
    check_choice,
    is_weight,
    read_integer,
    read_optional_count,
    read_token_id,
    show_number,
)
from streampack._paths import folder_of, local_path, shown_path
from streampack.config.combinations import check_combination
from streampack.config.packing import Overflow
from streampack.errors import ConfigError, suggest
from streampack.flat.token_file import TokenFormat
from streampack.mds.columns import DTYPES
from streampack.storage.mosaicml import MOSAICML_SCHEMES
from streampack.stores.drivers import PACKAGES, is_known
from streampack.types import Side

Files: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
MAX_RETRY = 10**6
MAX_TIMEOUT_S = 10**6
MIN_FRACTION = 1e-12
SLICES = ("shards", "samples")
OPTIONS = [
    "rows",
    "remote",
    "split",
    "tokenizer",
    "chat",
    "labels",
    "loss_mask",
    "split_at",
    "index",
]


class Stream:
    """A weighted source of samples: MDS shards at a remote and/or a local path.

    Args:
        remote: Folder to fetch from: a store's URL, `file://`, or a plain path.
        local: Folder that caches the files, for any number of remotes; without a remote, the
            stream itself. None: a private folder inside the system's temporary folder, which is
            reused. `~` is this user's home folder, here and in a `remote` that is a plain path.
        split: Subfolder of both `remote` and `local`.
        proportion: Share of an epoch, relative to the other streams. At most one of proportion,
            repeat and choose may be set; without them, an epoch takes each sample once.
        repeat: Number of times that an epoch takes each sample.
        choose: Number of samples (or tokens, by weight_unit) that an epoch takes.
        loss_weight: Factor of the losses of this stream's tokens, whatever its share. None: 1. The
            batch has it where the loss is yours, or ours, to weigh: see `loss_weights`.
        download_retry: Further attempts to fetch a file after a failure. None: 2.
        download_timeout: Seconds for an attempt, plus one second for each MB of the file. None: 60.
        validate_hash: Hash algorithm to verify shards with, such as "sha1".
        keep_zip: Whether to keep a compressed file next to the decompressed one. None: only if
            `local` is the stream itself.
        name: Name of the stream in messages and reports. None: the last part of its path.
        tokens: Column of the tokens; for the default, "input_ids" is accepted too.
        tokens_dtype: Type of the tokens if stored as `bytes`, e.g. "uint16".
        labels: Column of labels, one per token. None: the label of a token is the next token.
        labels_dtype: Type of the labels if stored as `bytes`, or None for `tokens_dtype`.
        labels_shifted: Whether labels[i] is the target at token i (True), or token i itself or
            -100 (False). None: detect from the first samples.
        loss_mask: Column that marks the targets, 1 or 0 for each token.
        loss_mask_dtype: Type of the loss mask if stored as `bytes`, or None for `tokens_dtype`.
        check_dtypes: Whether to refuse types of `bytes` columns that the values contradict.
        max_seq_len: Tokens per pack of this stream. None: as in `Packing`. It must be a multiple of
            `Packing.max_seq_len` that divides the tokens of a device batch, and needs the batching
            method "device_per_stream" or "per_stream". A batch of this stream then has fewer,
            longer rows, and as many tokens.
        shards: The part of the stream to use: a slice of neighbouring shards. None: all. If shards
            were appended to a stream of n shards, slice(0, n) is the stream as it was.
        format: "mds", "litdata", "megatron", "olmo", "datatrove" or "arrow", one that an entry
            point registers, or a format of your own. None: found by the files' names; a remote
            without such names is "mds". Token files (all but the first two) may be given as a
            folder, a file, the part of its name before the ending, a glob, or a list of files.
        unit: A sample of Megatron's files: a "document", or a "sequence" of one. With `part`, what
            is held out: a "shard", which suits a remote, as held-out samples would be in every
            shard that is fetched; or a "sample".
        samples: The part of token files to use, as a slice of neighbouring samples. None: all.
        part: The side of a held-out split to use, "train" or "held_out". Of each block of
            1 / fraction shards or samples, one is held out, at a place that a hash of the block's
            number gives. Token files are numbered each by itself, and their names are hashed too.
            So two streams of the same token files, in any lists, or of the same shards never share
            a sample at the same `fraction` and `unit`, and what is appended moves nothing. None:
            both sides.
        fraction: The share of the stream that is held out, such as 0.005.
        index: Folder that `streampack index --out` wrote: where documents begin and end in token
            files or rows, with hashes. None: token files are read by their own tables.
        trailing: Tokens of token files after the last document of their table. None: up to 1 % of a
            file cause a warning, more an error. "ignore": they are left unread, however many.
        split_at: The token that ends a document inside of a row, if rows are joined documents.
            Samples are then documents, which `index` has.
        begins_with_bos: Whether every sample of token files begins with `Packing.bos_id` already.
            None, here and below: known from `index`, or not at all.
        ends_with_eos: Whether every sample of token files ends with `Packing.eos_id` already.
        check_remote: Fetch index.json again at every start, and open the version that the store
            holds now; otherwise the last one on this disk. A folder's is always read.
        bos_id: Token inserted before each sample of this stream that does not start with it. None,
            here and below: as in `Packing`.
        eos_id: Token appended to each sample of this stream that does not end with it.
        overflow: Handling of samples of this stream that are longer than a pack, as in `Packing`.
        rows: Rows to tokenize, instead of a `remote`: a list, a table of pandas or pyarrow, a
            `Dataset` of Hugging Face, or the path of files. The first process of a node writes
            them into `local`, or into a folder of this user in the system's temporary one. Later
            ones, and later runs, find them there by their content, the tokenizer and the options.
        tokenizer: Tokenizer of the rows: one of transformers, a `tokenizers.Tokenizer`, or the path
            of either. None: the rows hold token ids, in the column `tokens`.
        chat: What a conversation is in a row: True for the row, or the name of its field; or a dict
            of `RowFormat`'s options, such as ``{"train_on": "last_response"}``. None: rows are
            texts.
        text: Column of the texts.
        on_bad_row: What a row that cannot become a sample does: raise an error, or be omitted and
            counted in a warning.

    Raises:
        ConfigError: If the arguments are invalid or contradict each other.

    >>> Stream(local="data/code", proportion=0.7).tokens
    'tokens'
    """

    asked: Mapping[str, Any] = MappingProxyType({})
    """Of rows that were written to this stream, the arguments that differed."""

    def __init__(  # noqa: PLR0913 - MosaicML's arguments, under their names
        self,
        *,
        remote: Files | None = None,
        local: Files | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        loss_weight: float | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
        name: str | None = None,
        tokens: str = "tokens",
        tokens_dtype: str | None = None,
        labels: str | None = None,
        labels_dtype: str | None = None,
        labels_shifted: bool | None = None,
        loss_mask: str | None = None,
        loss_mask_dtype: str | None = None,
        max_seq_len: int | None = None,
        shards: slice | None = None,
        check_dtypes: bool = True,
        check_remote: bool = False,
        bos_id: int | None = None,
        eos_id: int | None = None,
        overflow: Overflow | None = None,
        rows: Any = None,
        tokenizer: Any = None,
        chat: bool | str | Mapping[str, Any] | None = None,
        text: str = "text",
        on_bad_row: Literal["error", "skip"] = "error",
        format: str | TokenFormat | None = None,  # noqa: A002 - the word of its users
        unit: Literal["document", "sequence", "shard", "sample"] = "document",
        samples: slice | None = None,
        part: Side | None = None,
        fraction: float | None = None,
        index: str | os.PathLike[str] | None = None,
        split_at: int | None = None,
        trailing: Literal["ignore"] | None = None,
        begins_with_bos: bool | None = None,
        ends_with_eos: bool | None = None,
        **unknown: object,
    ) -> None:
        given = dict(locals())
        del given["self"], given["unknown"]
        _check_names(unknown, known=given)
        vars(self).update(_checked(given))

    def __getattr__(self, name: str) -> Any:  # tells type checkers that there are attributes
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        keys = ("name", "remote", "local", "split", "proportion", "repeat", "choose")
        shown = {key: getattr(self, key) for key in keys}
        stated = [f"{key}={value!r}" for key, value in shown.items() if value not in (None, "")]
        return f"{type(self).__name__}({', '.join(stated)})"


# Options of conversations that `chat_dataset` also has.
OF_CHATS = ("train_on", "chat_template", "template_kwargs", "context_roles", "ignore_fields")
CHOICES = {
    "on_bad_row": ("error", "skip"),
    "overflow": Overflow,
    "part": Side,
    "trailing": ("ignore",),
    "unit": ("document", "sequence", "shard", "sample"),
    **dict.fromkeys(("tokens_dtype", "labels_dtype", "loss_mask_dtype"), DTYPES),
}


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as they are kept; refuse what is invalid, or contradicts another."""
    # Not the values of these: rows of pandas compare element by element.
    is_set = {name: given[name] is not None and given[name] is not False for name in OPTIONS}
    split = {name: given[name] for name in ("part", "fraction", "unit", "samples", "on_bad_row")}
    check_combination(is_set | split)
    for option, choices in CHOICES.items():
        if given[option] is not None:
            check_choice(option, given[option], choices)
    remote, local, labels_shifted = (given[name] for name in ("remote", "local", "labels_shifted"))
    if given["rows"] is None and remote is None and local is None:
        raise ConfigError(
            f"remote={remote} and local={local}: set one of them to the stream's folder"
        )
    is_cache = remote is not None or given["rows"] is not None
    if is_cache and not isinstance(local, str | os.PathLike | None):
        raise ConfigError(
            f"local={local!r:.80} is a list, but with remote= or rows= it is a cache; set "
            "it to one folder"
        )
    if labels_shifted is not None and given["labels"] is None:
        raise ConfigError(
            f"labels_shifted={labels_shifted} describes a labels column, but labels=None; "
            "set labels= to its name, or omit labels_shifted"
        )
    if (weight := given["loss_weight"]) is not None and not is_weight(weight):
        raise ConfigError(
            f"loss_weight={weight!r:.40} is not a number of 0 or more; write a factor, such as 0.5"
        )
    _check_weights({name: given[name] for name in ("proportion", "repeat", "choose")})
    _check_download(given["download_retry"], given["download_timeout"])
    _check_part(given["fraction"], {name: given[name] for name in SLICES})
    return {
        **given,
        "remote": None if remote is None else _each(remote, _checked_remote),
        "local": None if local is None else _each(local, _checked_local),
        "split": given["split"] or "",
        "max_seq_len": read_optional_count("max_seq_len", given["max_seq_len"]),
        **{name: read_token_id(name, given[name]) for name in ("bos_id", "eos_id", "split_at")},
    }


def _check_part(fraction: Any, slices: Mapping[str, object]) -> None:
    for option, value in slices.items():
        if value is not None and not isinstance(value, slice):
            raise ConfigError(
                f"{option}={value!r:.80} is not a slice of {option}; write slice(0, 10), or "
                "slice(10, None) for those from the tenth on"
            )
    if fraction is not None and not (is_weight(fraction) and MIN_FRACTION <= fraction < 1):
        raise ConfigError(
            f"fraction={fraction!r:.40} is not a number from {MIN_FRACTION} up to 1; write the "
            "held-out share, such as 0.005"
        )


def _check_names(unknown: Mapping[str, object], known: Mapping[str, object]) -> None:
    for name, value in unknown.items():
        meant = suggest(name, known)
        if name in OF_CHATS:
            meant = f", write it as chat={ {name: value}!r}"
        raise ConfigError(
            f"{name}={value!r}: not an argument of Stream{meant}; it takes "
            f"{', '.join(sorted(known))}"
        )


def _check_weights(weights: Mapping[str, Any]) -> None:
    weights = {name: value for name, value in weights.items() if value is not None}
    stated = ", ".join(f"{name}={show_number(value)}" for name, value in weights.items())
    if len(weights) > 1:
        raise ConfigError(f"{stated}: a stream has at most one of them; keep one")
    for value in weights.values():
        if not is_weight(value):
            raise ConfigError(f"{stated}: a weight must be a number of 0 or more; 0 leaves it out")


def _check_download(retry: object, timeout: Any) -> None:
    if retry is not None:
        number = read_integer("download_retry", retry, "write how often to try again, such as 2")
        if number < 0:
            raise ConfigError(f"download_retry={number} is negative; 0 never tries again")
        check_at_most("download_retry", number, MAX_RETRY)
    if timeout is not None and not (is_weight(timeout) and 0 < timeout <= MAX_TIMEOUT_S):
        raise ConfigError(
            f"download_timeout={show_number(timeout)} must be a number of seconds, more than 0 and "
            f"at most {MAX_TIMEOUT_S}"
        )


def _each(files: Files, check: Callable[[Any], str]) -> str | tuple[str, ...]:
    if isinstance(files, str | os.PathLike):
        return check(files)
    if not isinstance(files, Sequence) or not files:
        raise ConfigError(f"{files!r:.80} is neither a path nor a list of files; write one of them")
    return tuple(check(each) for each in files)


def _checked_local(local: str | os.PathLike[str]) -> str:
    return str(local_path(local, "local", "set remote= to it, and local= to a folder"))


def _checked_remote(remote: str | os.PathLike[str]) -> str:
    remote = folder_of(shown_path(remote)) or shown_path(remote)
    scheme = urlsplit(remote).scheme  # as in MosaicML: whatever precedes a colon
    if scheme and scheme not in MOSAICML_SCHEMES and not is_known(scheme):
        known = ", ".join(f"{name}:" for name in sorted((*MOSAICML_SCHEMES, *PACKAGES)))
        raise ConfigError(
            f"remote={remote!r}: nothing can fetch from {scheme}:; a remote is a folder, or a "
            f"url of {known} or file:; copy the files to one of them"
        )
    return remote
