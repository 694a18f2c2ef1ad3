"""Hostile streams, made from good ones: index.json, shards, compressed shards, length files.

``python -m tests.helpers.faults.fuzz FOLDER SEED FIRST LAST`` reads hostile streams FIRST to LAST
- 1 and prints the results as JSON; the same number is always the same stream. FOLDER/current names
the one being read, in case it kills the process.
"""

from __future__ import annotations

import bz2
import copy
import gzip
import json
import logging
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from streampack.config import Mixing, Order, Packing
from streampack.errors import DataError, StreampackError
from streampack.gather.gather import Gatherer
from streampack.plan.device_plan import DeviceView
from streampack.planned.build import build_recipe
from streampack.planned.spec import DatasetSpec
from streampack.storage.materialize import Downloader
from streampack.stores.failures import DamagedError
from streampack.streams import Stream, open_streams
from streampack.streams.shard_pool import shard_pool
from streampack.world import World
from tests.helpers import builders
from tests.helpers.planning import epoch_sequence

SEQ_LEN = 32
CODECS = ("br", "bz2", "gz", "snappy", "zstd")
BOMB_BYTES = 2**29
MAX_BATCHES = 40  # 160 packs: more than a good stream has
Files = dict[str, bytes]

# ---------------------------------------------------------------------------- watching

RUNS_CODE = {"exec", "compile", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec"}
RUNS_CODE |= {"os.spawn", "os.posix_spawn", "os.fork", "os.forkpty", "ctypes.dlopen", "import"}
RUNS_CODE |= {"marshal.loads", "marshal.load", "code.__new__", "socket.connect"}
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"}
TOUCHES |= {"os.truncate", "os.utime", "os.chmod", "os.chown", "os.listdir", "os.scandir"}
TOUCHES |= {"shutil.rmtree"}
IN_FOLDERS = {"os.remove", "os.rmdir", "os.mkdir"}  # their last argument: an open folder, or -1
MAY_BE_READ = ("/proc/self/mountinfo",)


@dataclass(slots=True)
class Seen:
    """Forbidden events that happened."""

    folder: str
    code: list[str] = field(default_factory=list)
    """Events that run code."""
    outside: list[str] = field(default_factory=list)
    """Paths outside the folder that were touched."""

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if event in RUNS_CODE:
            self.code.append(f"{event} {args!r:.200}")
        elif event in TOUCHES and not (event in IN_FOLDERS and args[-1] != -1):
            for path in args[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._look(event, os.fsdecode(path))

    def _look(self, event: str, path: str) -> None:
        whole = os.path.normpath(os.path.join(os.getcwd(), path))
        if not f"{whole}/".startswith(self.folder) and whole not in MAY_BE_READ:
            self.outside.append(f"{event} {path}")


_seen: list[Seen] = []
_is_hooked: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen and (event in RUNS_CODE or event in TOUCHES):
        _seen[-1].note(event, args)


@contextmanager
def watch(folder: Path) -> Iterator[Seen]:
    """Record what this process does outside a folder, and what code it runs.

    The hook cannot be removed, so use it in a separate process.
    """
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked.append(True)
    seen = Seen(f"{os.path.realpath(folder)}/")
    _seen.append(seen)
    try:
        yield seen
    finally:
        _seen.pop()


# ---------------------------------------------------------------------------- reading


def read_everything(folder: Path, store: Downloader | None = None, **options: Any) -> str:
    """Open, plan and read a stream; return "ok" or the name of a StreampackError."""
    shard_pool().clear()
    try:
        remote = "s3://store/hostile" if store else None
        stream = Stream(local=str(folder), remote=remote, **options)
        (opened,) = open_streams([stream], store=store)
        for shard in range(opened.num_shards):
            opened.open_shard(shard)
        _read_epoch(opened)
    except StreampackError as error:
        return type(error).__name__
    return "ok"


def _read_epoch(opened: Any) -> None:
    packing = Packing(max_seq_len=SEQ_LEN, buffer_tokens=4 * SEQ_LEN)
    blueprint = DatasetSpec(
        streams=(opened,),
        packing=packing,
        mixing=Mixing(),
        order=Order(seed=1),
        batch_size=4,
        world=World(),
    )
    recipe = build_recipe(blueprint)
    sequence = epoch_sequence(recipe, DeviceView(batch_size=4))
    gatherer = Gatherer((opened,), packing)
    try:
        for _ in range(MAX_BATCHES):
            plan = sequence.next()
            if plan is None:
                return
            gatherer.gather(plan.packs, plan.num_rows)
    finally:
        sequence.close()


def store_of(files: Files) -> Downloader:
    def fetch(source: Any, basename: str, to: Path, *, check: Any = None, **_: Any) -> None:
        if basename not in files:
            raise DataError(f"{source.remote}/{basename}: there is none")
        to.write_bytes(files[basename])
        if check is not None:
            try:
                check(to)
            except DamagedError as error:
                raise DataError(f"{source.remote}/{basename}: {error}") from error

    def fetch_if_there(source: Any, basename: str, to: Path) -> bool:
        if basename in files:
            fetch(source, basename, to)
        return basename in files

    return Downloader(fetch=fetch, fetch_if_there=fetch_if_there)


# ---------------------------------------------------------------------------- hostile bytes

NASTY_BYTES = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x01\0\0\0", b"\0\0\0\x80"]
NASTY_BYTES += [b"\xff" * 8, b"\x80\x04.", b"\x09", b"\x40"]
NAMES = ["../evil", "/etc/passwd", "a/../../b", ".streampack/x", "a\0b", "x" * 300, "..", ".", ""]
NAMES += [
    "c:\\x",
    "a//b",
    "index.json",
    "shard.00001.mds",
    "lengths.bin",
    "\u202e",
    "a/b/c",
    "\ud800",
]
NAMES += ["shard.00000.mds/x", "x/" * 300 + "x", "~root/x", "%2e%2e/x", "\uff0e\uff0e/x", "tmp"]
VALUES: list[Any] = [0, 1, -1, 2, 7, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63]
VALUES += [2**64, 10**30, 10**400, 1e308, float("nan"), float("inf"), 0.5, True, False, None]
VALUES += [
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    "0",
    "md5",
    "zstd",
    "gz",
    "br",
    "bz2",
    "snappy",
    "zstd:99",
]
VALUES += ["int", "pkl", "bytes", "str", "ndarray", "ndarray:int32", "ndarray:int32:4294967295"]
VALUES += ["ndarray:uint16", "ndarray:int32:0", "ndarray:int32:3,5", "ndarray:float32", "uint16"]
VALUES += ["ndarray:int64:-1", "pkl:ndarray:int32", "jpeg", "json", "tokens", "mds", "csv", "xxh64"]


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with one to four changes, often near the front, where the counts are."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        size = len(changed)
        at = rng.randrange(min(size, 64) + 1) if rng.random() < 0.4 else rng.randrange(size + 1)
        match rng.randrange(7):
            case 0 if size:
                changed[min(at, size - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randrange(1, 40)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 3:
                nasty = rng.choice(NASTY_BYTES)
                changed[at : at + len(nasty)] = nasty
            case 4:
                begin = rng.randrange(size + 1)
                piece = changed[begin : begin + 40]
                changed[at : at + len(piece)] = piece
            case 5:
                place = at // 4 * 4
                if place + 4 <= size:
                    (old,) = struct.unpack_from("<I", changed, place)
                    new = old + rng.choice([-256, -4, -1, 1, 4, 256, 65536])
                    struct.pack_into("<I", changed, place, new % 2**32)
            case _:
                del changed[at:]
    return bytes(changed)


def changed_json(document: Any, rng: random.Random) -> Any:
    changed = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(changed))
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 2:
                other, place = rng.choice(places)
                if _is_in(other, place):
                    holder[key] = copy.deepcopy(other[place])
            case 3:
                holder[key] = rng.choice(NAMES)
            case 4 if type(holder[key]) is int:
                holder[key] += rng.choice([-(2**20), -8, -4, -1, 1, 4, 8, 2**20])
            case 5 if isinstance(holder[key], str):
                holder[key] = rng.choice(["", "../", "a/", "ndarray:"]) + holder[key]
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _is_in(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def deep_json(rng: random.Random) -> bytes:
    """Return JSON that is nested too deeply, or has numbers too long, for most parsers."""
    depth = rng.choice([100, 5_000, 100_000])
    number = b"9" * rng.choice([10, 5_000])
    return rng.choice(
        [
            b"[" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b'{"version": 2, "shards": [' + b"[" * depth + b"]" * depth + b"]}",
            b'{"version": 2, "shards": ' + number + b"}",
            b'{"version": ' + number + b', "shards": [{}]}',
        ]
    )


# ---------------------------------------------------------------------------- hostile streams


def write_good_streams(folder: Path) -> dict[str, tuple[Files, dict[str, Any]]]:
    lengths = [1 + (i * 37) % 60 for i in range(14)]
    labels = [list(range(n)) for n in lengths]
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "dynamic": ({"encoding": "ndarray"}, {}),
        "columns": ({"extra_columns": True, "lengths_file": False}, {}),
        "lengths": ({"lengths_file": True}, {}),
        "bytes": ({"encoding": "bytes", "dtype": "uint16"}, {"tokens": "tokens:uint16"}),
        "labels": (
            {
                "columns": {"labels": "ndarray:int32", "meta": "pkl"},
                "values": {
                    "labels": [builders.tokens_of(0, i, n) for i, n in enumerate(lengths)],
                    "meta": labels,
                },
            },
            {"labels": "labels", "labels_shifted": False},
        ),
        "hashed": ({"hashes": ["xxh64", "sha1"]}, {}),
    }
    kinds |= {name: ({"compression": name}, {}) for name in CODECS}
    good = {}
    for name, (how, options) in kinds.items():
        how = {"lengths_file": False, "size_limit": 1200, **how}
        path, _ = builders.write_stream_files(folder / name, lengths, **how)
        files = {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}
        good[name] = files, options
    return good


def hostile_stream(
    good: dict[str, tuple[Files, dict[str, Any]]], seed: int, number: int
) -> tuple[str, Files, dict[str, Any]]:
    rng = random.Random(f"{seed}:{number}")
    name = rng.choice(sorted(good))
    files, options = good[name]
    files = dict(files)
    document = json.loads(files["index.json"])
    data = [basename for basename in files if basename != "index.json"]
    what = rng.choice(["index", "index", "index bytes", "data", "data", "data", "both", "deep"])
    if what == "deep" and rng.random() < 0.9:
        what = "data"
    if what in ("data", "both"):
        basename = rng.choice(data)
        files[basename] = changed_bytes(files[basename], rng)
        if rng.random() < 0.8:  # otherwise, only its size would be checked
            _state_sizes(document, basename, len(files[basename]))
    if what in ("index", "both"):
        document = changed_json(document, rng)
    files["index.json"] = json.dumps(document).encode("utf-8", "surrogatepass")
    if what == "index bytes":
        files["index.json"] = changed_bytes(files["index.json"], rng)
    if what == "deep":
        files["index.json"] = deep_json(rng)
    if "lengths.bin" in files and rng.random() < 0.5:
        files["lengths.bin"] = _with_digest_of(files["index.json"], files["lengths.bin"])
    return f"{name}, {what}", files, options


def _state_sizes(document: Any, basename: str, num_bytes: int) -> None:
    for shard in document["shards"]:
        for part in (shard["raw_data"], shard["zip_data"]):
            if part and part["basename"] == basename:
                part["bytes"] = num_bytes


def _with_digest_of(index: bytes, lengths: bytes) -> bytes:
    from streampack.mds.length_file import HEAD, index_digest

    if len(lengths) < HEAD.size:
        return lengths
    head = list(HEAD.unpack(lengths[: HEAD.size]))
    head[6] = index_digest(index)
    return HEAD.pack(*head) + lengths[HEAD.size :]


def fuzz(root: Path, seed: int, first: int, last: int) -> dict[str, Any]:
    tempfile.tempdir = str(root / "tmp")
    (root / "tmp").mkdir()
    logging.disable(logging.WARNING)  # otherwise every stream warns that it has no hashes
    good = write_good_streams(root / "good")
    for name, (files, options) in good.items():
        result = read_everything(root / "good" / name, **options)
        assert result == "ok", (name, result)
        for is_remote in (False, True):
            _read(root / "case", files, options, is_remote=is_remote)
            _read(root / "case", {"index.json": b"7"}, options, is_remote=is_remote)
    for number in range(200):  # also imports what refusals need
        _read(root / "case", *hostile_stream(good, -1, number)[1:], is_remote=number % 2 == 0)
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"):
        "7".encode(encoding)  # JSON may be in any of them, and Python imports them one by one
    "7".encode("utf-32-be")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results: Counter[str] = Counter()
    bad: list[list[Any]] = []
    code: list[list[Any]] = []
    outside: list[list[Any]] = []
    for number in range(first, last):
        (root / "current").write_text(str(number))
        kind, files, options = hostile_stream(good, seed, number)
        try:
            result, seen = _read(root / "case", files, options, is_remote=number % 3 == 0)
            code += [[number, kind, each] for each in seen.code]
            outside += [[number, kind, each] for each in seen.outside]
        except Exception:  # any error other than ours is a bug to report
            result = "bad"
            bad.append([number, kind, traceback.format_exc(limit=-4)])
        results[result] += 1
    return {
        "results": dict(results),
        "bad": bad[:20],
        "code": code[:20],
        "outside": outside[:20],
        "extra_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
    }


def _read(
    case: Path, files: Files, options: dict[str, Any], *, is_remote: bool
) -> tuple[str, Seen]:
    shutil.rmtree(case, ignore_errors=True)
    folder = case / "cache" if is_remote else case / "stream"
    folder.mkdir(parents=True)
    for name, content in () if is_remote else files.items():
        (folder / name).write_bytes(content)
    store = store_of(files) if is_remote else None
    with watch(folder) as seen:
        return read_everything(folder, store, **options), seen


# ---------------------------------------------------------------------------- bombs


def bomb(codec: str, num_bytes: int) -> bytes:
    if codec == "zstd":
        packer = zstandard.ZstdCompressor(level=3).compressobj()
        pieces = [packer.compress(bytes(2**20)) for _ in range(num_bytes >> 20)]
        return b"".join(pieces) + packer.flush()
    if codec in ("gz", "bz2"):
        # Files of these formats may be concatenated: repeat one of 16 MiB.
        piece = {"gz": gzip.compress, "bz2": bz2.compress}[codec](bytes(2**24))
        return piece * (num_bytes >> 24)
    if codec == "br":
        import brotli

        packer = brotli.Compressor(quality=1)
        pieces = [packer.process(bytes(2**20)) for _ in range(num_bytes >> 20)]
        return b"".join(pieces) + packer.finish()
    size = num_bytes
    varint = b""
    while size >= 128:
        varint, size = varint + bytes([size & 127 | 128]), size >> 7
    # A literal 0, then copies of 64 bytes at offset 1: 3 bytes each.
    return varint + bytes([size, 0, 0]) + b"\xfe\x01\x00" * (num_bytes // 64)


def read_bombs(root: Path) -> dict[str, list[Any]]:
    tempfile.tempdir = str(root / "tmp")
    (root / "tmp").mkdir()
    good = write_good_streams(root / "good")
    for name, (
        files,
        options,
    ) in good.items():  # by now, everything that reading needs is in memory
        for is_remote in (False, True):
            assert _read(root / "case", files, options, is_remote=is_remote)[0] == "ok", name
    found = {}
    for codec in CODECS:
        files, options = dict(good[codec][0]), good[codec][1]
        document = json.loads(files["index.json"])
        basename = document["shards"][0]["zip_data"]["basename"]
        files[basename] = bomb(codec, BOMB_BYTES)
        _state_sizes(document, basename, len(files[basename]))
        files["index.json"] = json.dumps(document).encode()
        for place in ("local", "remote"):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result, _ = _read(root / "case", files, options, is_remote=place == "remote")
            extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            on_disk = sum(each.stat().st_size for each in (root / "case").rglob("*"))
            found[f"{codec}, {place}"] = [len(files[basename]), result, extra, on_disk]
    return found


def main() -> None:
    root, what, *numbers = sys.argv[1:]
    if what == "bombs":
        found: Any = read_bombs(Path(root))
    else:
        found = fuzz(Path(root), int(what), int(numbers[0]), int(numbers[1]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
