"""`Stream`: MosaicML's, and which of its columns are tokens, labels and loss mask.

::

    Stream(remote=..., local=..., proportion=0.7,      as in MosaicML Streaming
           name="code", tokens="input_ids")            ours

Nothing is read here; the object is only what was asked for, and is never written to.

Cost: none.
"""

from __future__ import annotations

import os
from inspect import signature
from typing import Any
from urllib.parse import urlsplit

from streampack.config import is_weight
from streampack.errors import ConfigError, suggest
from streampack.paths import folder_of, home_path
from streampack.streams import mosaic
from streampack.streams.clients import library_of
from streampack.streams.mds import DTYPES

__all__ = ["Stream"]


class Stream(mosaic.Stream):  # type: ignore[misc]
    """A weighted source of samples: MDS shards at a remote and/or a local path.

    Args:
        remote: Folder to fetch from: a store's url, `file://`, or a plain path.
        local: Folder to keep files in; with no remote, where the stream is. None: a folder under
            the system's temporary one that follows from `remote`, and is used again. `~` is this
            user's home, here and in a `remote` that is a plain path.
        split: Subfolder of both.
        name: What messages and reports call it; None: the last part of its path.
        tokens: Column of the tokens; as the default, "input_ids" is found too.
        tokens_dtype: Type of the tokens if stored as `bytes`, e.g. "uint16".
        labels: Column of labels, as many as tokens; None: the next token.
        labels_dtype: Type of the labels if stored as `bytes`; None: `tokens_dtype`.
        labels_shifted: Whether labels[i] is the target at token i, rather than token i itself
            or -100. None: the first samples tell.
        loss_mask: Column that says which tokens are targets, 1 or 0 for each token.
        loss_mask_dtype: Type of the loss mask if stored as `bytes`; None: `tokens_dtype`.
        **others: MosaicML's other arguments: proportion, repeat or choose (at most one), and
            download_retry, download_timeout, validate_hash, keep_zip.

    Raises:
        ConfigError: If the arguments cannot work together.

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
        **others: Any,
    ) -> None:
        if remote is None and local is None:
            raise ConfigError("remote=None and local=None: set one of them to the stream's folder")
        _check_names(others)
        _check_weights(others)
        _check_dtypes(
            tokens_dtype=tokens_dtype, labels_dtype=labels_dtype, loss_mask_dtype=loss_mask_dtype
        )
        _check_columns(labels, labels_shifted)
        remote = _plain_path(None if remote is None else os.fspath(remote))
        _check_scheme(remote)
        self.remote = remote
        self.split = split or ""
        if local is None:
            # MosaicML refuses to use its own temporary folder twice; given as local= it may be.
            local = self._get_temporary_directory()
        local = home_path(local)
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
        self.tokens = tokens
        self.tokens_dtype = tokens_dtype
        self.labels = labels
        self.labels_dtype = labels_dtype
        self.labels_shifted = labels_shifted
        self.loss_mask = loss_mask
        self.loss_mask_dtype = loss_mask_dtype

    def __repr__(self) -> str:
        keys = ("name", "remote", "local", "split", "proportion", "repeat", "choose")
        shown = {key: getattr(self, key, None) for key in keys}
        stated = [f"{key}={value!r}" for key, value in shown.items() if value not in (None, "")]
        return f"{type(self).__name__}({', '.join(stated)})"


def _check_names(others: dict[str, Any]) -> None:
    theirs = set(signature(mosaic.Stream.__init__).parameters) - {"self"}
    known = sorted(theirs | set(signature(Stream.__init__).parameters) - {"self", "others"})
    for name, value in others.items():
        if name not in known:
            raise ConfigError(
                f"{name}={value!r}: no argument of Stream{suggest(name, known)}; "
                f"it takes {', '.join(known)}"
            )


def _check_weights(others: dict[str, Any]) -> None:
    weights = {
        name: others[name]
        for name in ("proportion", "repeat", "choose")
        if others.get(name) is not None
    }
    stated = ", ".join(f"{name}={value!r}" for name, value in weights.items())
    if len(weights) > 1:
        raise ConfigError(f"{stated}: a stream has at most one of them; keep one")
    for value in weights.values():
        if not is_weight(value):
            raise ConfigError(f"{stated}: a weight must be a number of 0 or more; 0 leaves it out")


def _check_dtypes(**dtypes: str | None) -> None:
    for option, dtype in dtypes.items():
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(
                f"{option}={dtype!r} is not one of {'|'.join(DTYPES)}{suggest(dtype, DTYPES)}"
            )


def _check_columns(labels: str | None, labels_shifted: bool | None) -> None:
    if labels_shifted is not None and labels is None:
        raise ConfigError(
            f"labels_shifted={labels_shifted} speaks of a labels column, but labels=None; "
            "set labels= to its name, or leave labels_shifted out"
        )


def _check_scheme(remote: str | None) -> None:
    scheme = urlsplit(remote or "").scheme  # as MosaicML takes it: all that a colon follows
    known = sorted(set(mosaic.DOWNLOADER_MAPPINGS) - {"", "dbfs-uc"})  # the last is asked as dbfs
    if scheme and scheme not in known:
        raise ConfigError(
            f"remote={remote!r}: nothing here speaks {scheme}:; a remote is a folder, or a url of "
            f"{', '.join(f'{each}:' for each in known)} or file:; copy the files to one of them"
        )


def _plain_path(remote: str | None) -> str | None:
    folder = None if remote is None else folder_of(remote)
    return remote if folder is None else folder


mosaic.streams_registry.register("streampack", func=Stream)
