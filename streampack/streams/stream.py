"""`Stream`: MosaicML's class, plus the columns of tokens, labels and loss mask.

::

    Stream(remote=..., local=..., proportion=0.7,      as in MosaicML Streaming
           name="code", tokens="input_ids")            ours

Nothing is read here. The object only holds the arguments, and is never modified.
"""

from __future__ import annotations

import os
import tempfile
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streampack._checks import (
    check_at_most,
    check_choice,
    is_weight,
    read_integer,
    read_optional_count,
    show_number,
)
from streampack._paths import folder_of, local_path, shown_path
from streampack.chapters import OnExhausted
from streampack.errors import ConfigError, suggest
from streampack.mds import mosaic
from streampack.mds.columns import DTYPES
from streampack.storage.client_pool import library_of
from streampack.storage.filesystem import private_root

MAX_RETRY = 10**6
MAX_TIMEOUT_S = 10**6


class Stream(mosaic.Stream):  # type: ignore[misc]
    """A weighted source of samples: MDS shards at a remote and/or a local path.

    Args:
        remote: Folder to fetch from: a store's URL, `file://`, or a plain path.
        local: Folder that caches the files; without a remote, the stream itself. It belongs to
            the first remote that is used with it. None: a private folder inside the system's
            temporary folder, derived from `remote` and reused. `~` is this user's home folder,
            here and in a `remote` that is a plain path.
        split: Subfolder of both `remote` and `local`.
        name: Name of the stream in messages and reports. None: the last part of its path.
        tokens: Column of the tokens; for the default, "input_ids" is accepted too.
        tokens_dtype: Type of the tokens if stored as `bytes`, e.g. "uint16".
        labels: Column of labels, one per token. None: the label of a token is the next token.
        labels_dtype: Type of the labels if stored as `bytes`; None: `tokens_dtype`.
        labels_shifted: Whether labels[i] is the target at token i (True), or token i itself or
            -100 (False). None: detect from the first samples.
        loss_mask: Column that marks the targets, 1 or 0 for each token.
        loss_mask_dtype: Type of the loss mask if stored as `bytes`; None: `tokens_dtype`.
        check_dtypes: Whether to refuse types of `bytes` columns that the values contradict.
        max_seq_len: Tokens per pack of this stream. None: as in `Packing`. It must be a multiple of
            `Packing.max_seq_len` that divides the tokens of a device batch, and needs the batching
            method "device_per_stream" or "per_stream". A batch of this stream then has fewer,
            longer rows, and as many tokens.
        shards: The part of the stream to use: a slice of neighbouring shards. None: all. If shards
            were appended to a stream of n shards, slice(0, n) is the stream as it was.
        max_passes: Passes through the stream that a run of chapters may use, in each lane. None:
            any number.
        on_exhausted: What happens after `max_passes`. "substitute": other streams take its place.
            "end": the run ends with the stream's last pack. "error": a run that would need more is
            refused at the start.
        check_remote: Fetch index.json again at every start, and refuse a `local` that was fetched
            from another version of the stream. A remote that is a folder is always compared.
        **others: MosaicML's other arguments: proportion, repeat or choose (at most one), and
            download_retry, download_timeout, validate_hash, keep_zip.

    Raises:
        ConfigError: If the arguments are invalid or contradict each other.

    >>> Stream(local="data/code", proportion=0.7).tokens
    'tokens'
    """

    def __init__(  # noqa: PLR0913 - MosaicML's arguments, under their names
        self,
        *,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
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
        max_passes: float | None = None,
        on_exhausted: OnExhausted = "substitute",
        check_dtypes: bool = True,
        check_remote: bool = False,
        **others: Any,
    ) -> None:
        self.remote = remote = _checked_remote(remote, local)
        _check_names(others)
        _check_weights(others)
        _check_download(others)
        _check_dtypes(
            tokens_dtype=tokens_dtype, labels_dtype=labels_dtype, loss_mask_dtype=loss_mask_dtype
        )
        _check_labels(labels, labels_shifted)
        _check_part(shards, max_passes, on_exhausted)
        self.split = split or ""
        # MosaicML refuses to reuse its own temporary folder, but accepts it as local=.
        self._temporary_root = _private_root() if local is None else None
        local = self._get_temporary_directory() if local is None else local
        local_path(local, "local", "set remote= to it, and local= to a folder")
        local = str(folder_of(shown_path(local)))
        try:
            super().__init__(remote=remote, local=local, split=split, **others)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Stream(remote={remote!r}, local={local!r}): {error}") from error
        except ImportError as error:
            scheme = str(remote).partition(":")[0]
            raise ConfigError(
                f"Stream(remote={remote!r}): {scheme}: needs a library that is not installed; "
                f"{library_of(str(remote))}"
            ) from error
        self.name = name
        self.tokens, self.tokens_dtype = tokens, tokens_dtype
        self.labels, self.labels_dtype = labels, labels_dtype
        self.labels_shifted = labels_shifted
        self.loss_mask, self.loss_mask_dtype = loss_mask, loss_mask_dtype
        self.check_dtypes = check_dtypes
        self.check_remote = check_remote
        self.shards = shards
        self.max_passes, self.on_exhausted = max_passes, on_exhausted
        self.max_seq_len = read_optional_count("max_seq_len", max_seq_len)

    def _get_temporary_directory(self) -> str:
        """Return the folder for an unset `local`: MosaicML's name under a private root."""
        theirs = Path(super()._get_temporary_directory()).relative_to(tempfile.gettempdir())
        return os.path.join(self._temporary_root or _private_root(), theirs)

    def __repr__(self) -> str:
        keys = ("name", "remote", "local", "split", "proportion", "repeat", "choose")
        shown = {key: getattr(self, key, None) for key in keys}
        stated = [f"{key}={value!r}" for key, value in shown.items() if value not in (None, "")]
        return f"{type(self).__name__}({', '.join(stated)})"


def _private_root() -> str:
    try:
        return str(private_root())
    except PermissionError as error:
        raise ConfigError(f"local=None: {error}; set local= or TMPDIR") from error


def _check_labels(labels: str | None, labels_shifted: bool | None) -> None:
    if labels_shifted is not None and labels is None:
        raise ConfigError(
            f"labels_shifted={labels_shifted} describes a labels column, but labels=None; "
            "set labels= to its name, or leave labels_shifted out"
        )


def _check_part(shards: object, max_passes: Any, on_exhausted: str) -> None:
    check_choice("on_exhausted", on_exhausted, OnExhausted)
    if shards is not None and not isinstance(shards, slice):
        raise ConfigError(
            f"shards={shards!r:.80} is not a slice of shards; write slice(0, 10), or "
            "slice(10, None) for those from the tenth on"
        )
    if max_passes is not None and not (is_weight(max_passes) and max_passes > 0):
        raise ConfigError(
            f"max_passes={max_passes!r:.40} is not a number above 0; write one such as 4"
        )


def _check_names(others: dict[str, Any]) -> None:
    theirs = set(signature(mosaic.Stream.__init__).parameters) - {"self"}
    known = sorted(theirs | set(signature(Stream.__init__).parameters) - {"self", "others"})
    for name, value in others.items():
        if name not in known:
            raise ConfigError(
                f"{name}={value!r}: not an argument of Stream{suggest(name, known)}; "
                f"it takes {', '.join(known)}"
            )


def _check_weights(others: dict[str, Any]) -> None:
    weights = {
        name: others[name]
        for name in ("proportion", "repeat", "choose")
        if others.get(name) is not None
    }
    stated = ", ".join(f"{name}={show_number(value)}" for name, value in weights.items())
    if len(weights) > 1:
        raise ConfigError(f"{stated}: a stream has at most one of them; keep one")
    for value in weights.values():
        if not is_weight(value):
            raise ConfigError(f"{stated}: a weight must be a number of 0 or more; 0 leaves it out")


def _check_download(others: dict[str, Any]) -> None:
    retry, timeout = others.get("download_retry"), others.get("download_timeout")
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


def _check_dtypes(**dtypes: str | None) -> None:
    for option, dtype in dtypes.items():
        if dtype is not None:
            check_choice(option, dtype, DTYPES)


def _checked_remote(remote: str | os.PathLike[str] | None, local: object) -> str | None:
    """Return a remote as text, a folder as its path; refuse what nothing can fetch from."""
    if remote is None:
        if local is None:
            raise ConfigError(
                f"remote={remote} and local={local}: set one of them to the stream's folder"
            )
        return None
    remote = folder_of(shown_path(remote)) or shown_path(remote)
    scheme = urlsplit(remote).scheme  # as in MosaicML: whatever precedes a colon
    known = sorted(set(mosaic.DOWNLOADER_MAPPINGS) - {"", "dbfs-uc"})  # the last is used as dbfs
    if scheme and scheme not in known:
        raise ConfigError(
            f"remote={remote!r}: nothing can fetch from {scheme}:; a remote is a folder, or a "
            f"url of {', '.join(f'{name}:' for name in known)} or file:; copy the files to one of "
            "them"
        )
    return remote


mosaic.streams_registry.register("streampack", func=Stream)
