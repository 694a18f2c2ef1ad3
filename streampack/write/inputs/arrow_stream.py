"""Record batches in the middle of an Arrow IPC stream, without reading the bodies before them.

A stream is a sequence of messages, and has no index::

    FF FF FF FF | metadata size, int32 | metadata, a flatbuffer | body

The metadata holds the size of the body, by which the next message is found. Layout:
https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format

Cost: two small reads for each message that is skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

FILE_MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + bytes(4)  # optional in the specification, but every known writer ends with it
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3  # of the flatbuffer's MessageHeader
HEADER_TYPE_FIELD, HEADER_FIELD, BODY_LENGTH_FIELD = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a stream."""

    kind: int
    """Kind of its contents, such as `RECORD_BATCH`."""
    start: int
    """Its first byte."""
    stop: int
    """The byte after its body."""
    num_rows: int
    """Rows of a record batch; 0 for another kind."""


def is_arrow_file(file: BinaryIO) -> bool:
    """Return whether this is the file format of Arrow IPC, which has an index, not a stream."""
    begin = file.tell()
    magic = file.read(len(FILE_MAGIC))
    file.seek(begin)
    return magic == FILE_MAGIC


def check_end(file: BinaryIO) -> None:
    """Raise EOFError if a stream lacks the mark of its end: it may be cut after a batch."""
    begin = file.tell()
    size = file.seek(0, 2)
    file.seek(max(0, size - len(END)))
    mark = file.read(len(END))
    file.seek(begin)
    if mark != END:
        raise EOFError(f"ends at byte {size} without the mark of its end")


def messages(file: BinaryIO) -> Iterator[Message]:
    """Yield the messages of a stream; EOFError if it ends within one.

    The file's position is undefined meanwhile.
    """
    start = file.tell()
    size = file.seek(0, 2)
    while True:
        file.seek(start)
        head = file.read(8)
        if head == END:
            return
        if head[:4] != CONTINUATION[: len(head[:4])]:
            raise EOFError(f"has no message at byte {start}")
        num_bytes = struct.unpack("<i", head[4:])[0] if len(head) == 8 else size
        metadata = file.read(max(0, num_bytes))
        if len(metadata) < num_bytes:
            raise EOFError(f"ends at byte {size} within the message at byte {start}")
        (root,) = struct.unpack_from("<I", metadata)
        kind = _field(metadata, root, HEADER_TYPE_FIELD, "<B")
        body_bytes = _field(metadata, root, BODY_LENGTH_FIELD, "<q")
        stop = start + 8 + num_bytes + body_bytes
        if not start < stop <= size:
            raise EOFError(f"ends at byte {size} within the message at byte {start}")
        num_rows = _num_rows(metadata, root) if kind == RECORD_BATCH else 0
        yield Message(kind, start, stop, num_rows)
        start = stop


def read_messages(file: BinaryIO, pyarrow: Any, start: int, stop: int) -> Iterator[Any]:
    """Yield record batches `start` to `stop`; the number of rows instead for those before them."""
    schema = None
    number = 0
    for message in messages(file):
        if message.kind == SCHEMA:
            schema = pyarrow.ipc.read_schema(pyarrow.BufferReader(_read(file, message)))
        if message.kind != RECORD_BATCH:
            continue
        if number >= stop:
            return
        if number < start:
            yield message.num_rows
        else:
            data = pyarrow.py_buffer(_read(file, message))
            yield pyarrow.ipc.read_record_batch(data, schema)
        number += 1


def _read(file: BinaryIO, message: Message) -> bytes:
    file.seek(message.start)
    return file.read(message.stop - message.start)


def _num_rows(metadata: bytes, root: int) -> int:
    """Return the rows of a record batch: field 0 of the table in the message's header."""
    place = _place(metadata, root, HEADER_FIELD)
    (offset,) = struct.unpack_from("<I", metadata, place)
    return _field(metadata, place + offset, 0, "<q")


def _field(metadata: bytes, table: int, number: int, layout: str) -> int:
    """Return a scalar of a table; 0, the default, if it is not stored."""
    place = _place(metadata, table, number)
    return int(struct.unpack_from(layout, metadata, place)[0]) if place else 0


def _place(metadata: bytes, table: int, number: int) -> int:
    """Return the place of a table's field; 0 if it is not stored."""
    (back,) = struct.unpack_from("<i", metadata, table)
    vtable = table - back
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * number
    if entry >= vtable_bytes:
        return 0
    (offset,) = struct.unpack_from("<H", metadata, vtable + entry)
    return table + int(offset) if offset else 0
