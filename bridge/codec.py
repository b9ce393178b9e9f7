"""The wire codec: msgpack with a schema version in every record, capped before it is parsed.

A record is a msgspec struct with an integer field ``schema``. Its class names the versions it reads in
``READS_SCHEMAS`` (the current one and, once there is one, the previous).
"""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar

import msgspec

from lorabridge.bridge.errors import CodecError, SchemaUnknown

MAX_RECORD_BYTES = 64 * 1024 * 1024
# What msgspec raises on bytes that it cannot read; the last one on values nested deeper than the stack.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Record(Protocol):
    """Anything with a schema version that crosses between processes."""

    READS_SCHEMAS: ClassVar[tuple[int, ...]]

    @property
    def schema(self) -> int: ...


T = TypeVar("T", bound=Record)


class _Version(msgspec.Struct):
    schema: int


_encode = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder(order="sorted").encode


def encode(record: Record) -> bytes:
    """msgpack bytes of a record."""
    return _encode(record)


def decode(kind: type[T], body: bytes) -> T:
    """The record in ``body``.

    Raises:
        SchemaUnknown: written by a release whose records this one does not read.
        CodecError: over ``MAX_RECORD_BYTES``, not msgpack, or not of this kind.
    """
    _check_size(kind, body)
    try:
        _check_schema(kind, msgspec.msgpack.decode(body, type=_Version).schema)
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise _unreadable(kind, error) from error


def encode_json(record: Record) -> bytes:
    """Canonical JSON bytes of a record (sorted keys), for what people read: manifests and commits."""
    return _encode_json(record)


def decode_json(kind: type[T], body: bytes) -> T:
    """As ``decode``, from JSON."""
    _check_size(kind, body)
    try:
        _check_schema(kind, msgspec.json.decode(body, type=_Version).schema)
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise _unreadable(kind, error) from error


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys and no white space: the same value gives the same bytes anywhere."""
    return _encode_json(value)


def _check_size(kind: type[Record], body: bytes) -> None:
    if len(body) > MAX_RECORD_BYTES:
        raise CodecError(
            f"a {kind.__name__} of {len(body)} bytes is over the limit of {MAX_RECORD_BYTES}",
            action="Look at who wrote it; nothing of it was parsed",
        )


def _check_schema(kind: type[Record], schema: int) -> None:
    if schema not in kind.READS_SCHEMAS:
        raise SchemaUnknown(
            f"a {kind.__name__} of schema {schema}; this release reads {', '.join(map(str, kind.READS_SCHEMAS))}",
            action="Run the same release of lorabridge in every process",
        )


def _unreadable(kind: type[Record], error: Exception) -> CodecError:
    return CodecError(
        f"not a readable {kind.__name__}: {error}",
        action="Look at who wrote it: another program, or bytes changed on the way",
    )
