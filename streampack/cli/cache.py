"""``streampack cache PATH``: list or remove what the caches of remote streams contain.

::

    PATH/7e8ce556afd31d7a/   s3://bucket/code   9f31c2aa last   812 of 812   48,801.2 MiB
                                                1b7e40d2        790 of 800   47,512.0 MiB
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from streampack.cli.console import output_console, print_json
from streampack.cli.verbs import Cache
from streampack.errors import ConfigError
from streampack.storage.cached_versions import CachedRemote, cached_remotes

REMOVALS = ("old", "all")


def run_cache(options: Cache) -> None:
    """Remove what was asked for, and print what is left."""
    if options.remove not in (None, *REMOVALS):
        raise ConfigError(
            f"remove={options.remove!r} is not one of {', '.join(REMOVALS)}; old removes all "
            "versions but the last of each remote"
        )
    if not options.path.is_dir():
        raise ConfigError(
            f"{options.path}: is not a folder; name the one that remote streams are kept in"
        )
    if options.remove is not None:
        for remote in cached_remotes(options.path):
            remote.remove() if options.remove == "all" else remote.remove_old()
    remotes = list(cached_remotes(options.path))
    if options.as_json:
        print_json([_facts(remote) for remote in remotes])
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("remote", "version", "shards", "bytes"):
        table.add_column(column, justify="left" if column == "remote" else "right")
    for remote in remotes:
        for fact in _facts(remote)["versions"]:
            name = f"{fact['version']}{' (last)' if fact['is_last'] else ''}"
            shards = f"{fact['shards_here']:,} of {fact['shards']:,}"
            table.add_row(remote.remote, name, shards, _mib(fact["bytes"]))
        table.add_row(str(remote.folder), "together", "", _mib(sum(remote.sizes.values())))
    output_console().print(table)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _facts(remote: CachedRemote) -> dict[str, Any]:
    versions = [
        {
            "version": version.name,
            "is_last": version.is_last,
            "shards": version.num_shards,
            "shards_here": version.num_here,
            "bytes": sum(remote.sizes[name] for name in version.files),
        }
        for version in remote.versions
    ]
    num_bytes = sum(remote.sizes.values())
    folder = str(remote.folder)
    return {"remote": remote.remote, "folder": folder, "bytes": num_bytes, "versions": versions}
