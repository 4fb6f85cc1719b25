"""Contents: the array records on their way to workers, each distinct one held and stored once."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from . import internals, wire

# Contents kept though no message uses them: a server that sends one message at a time sends the same again.
_IDLE_CONTENTS = 2


@dataclass(eq=False)
class Content:
    """An array record that several messages share."""

    number: int
    arrays: list[wire.PackedArray]
    identity: tuple[Any, ...]
    sources: list[Any]
    """What `identity` names by address, kept alive for as long as it counts."""
    users: int = 0
    ref: Any = None


class Contents:
    """The array records on their way to workers, each distinct one held once."""

    def __init__(self) -> None:
        self._by_identity: dict[tuple[Any, ...], Content] = {}
        self._by_content: dict[tuple[Any, ...], list[Content]] = {}
        self._idle: OrderedDict[int, Content] = OrderedDict()
        self._count = 0

    def split(self, message: Message) -> list[tuple[str, Any]]:
        """Take a message's content apart, with its array records replaced by contents that others may share."""
        records: list[tuple[str, Any]] = []
        for name, record in message.content.items():
            if isinstance(record, ArrayRecord):
                content = self._find(record)
                content.users += 1
                self._idle.pop(content.number, None)
                records.append((name, content))
            else:
                kind = "m" if isinstance(record, MetricRecord) else "c"
                records.append((name, (name, kind, internals.plain(record))))
        return records

    def drop(self, records: Sequence[tuple[str, Any]]) -> None:
        """Say that a message has been answered."""
        for _, content in records:
            if isinstance(content, Content):
                content.users -= 1
                if not content.users:
                    self._idle[content.number] = content
                    while len(self._idle) > _IDLE_CONTENTS:
                        self._forget(self._idle.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything."""
        self._by_identity.clear()
        self._by_content.clear()
        self._idle.clear()

    def _find(self, record: ArrayRecord) -> Content:
        # Messages mostly share not the record but the bytes in it, which never change.
        sources = [wire.source(array) for array in record.values()]
        identity = (*map(id, sources), *((k, a.dtype, a.shape, a.stype) for k, a in record.items()))
        found = self._by_identity.get(identity)
        if found is not None:
            return found
        arrays = wire.pack_arrays(record)
        key = _fingerprint(arrays)
        for content in self._by_content.get(key, ()):
            # Comparing memory is several times faster than hashing it.
            if all(np.array_equal(x[4], y[4]) for x, y in zip(content.arrays, arrays, strict=True)):
                return content
        content = Content(self._count, arrays, identity, sources)
        self._count += 1
        self._by_identity[identity] = content
        self._by_content.setdefault(key, []).append(content)
        return content

    def _forget(self, content: Content) -> None:
        del self._by_identity[content.identity]
        key = _fingerprint(content.arrays)
        self._by_content[key].remove(content)
        if not self._by_content[key]:
            del self._by_content[key]


def _fingerprint(arrays: Sequence[wire.PackedArray]) -> tuple[Any, ...]:
    """What equal contents share, cheaply: labels, sizes, and a checksum of the ends of each array."""
    check = 0
    for a in arrays:
        check = zlib.crc32(a[4][-256:].tobytes(), zlib.crc32(a[4][:256].tobytes(), check))
    return (*(a[:4] for a in arrays), *(a[4].nbytes for a in arrays), check)
