"""Naming full blocks by what they hold, so that a later prompt can find them.

A block's name is a SHA-256 chain: the digest of the block before it and of its own token ids. The chain starts
from a key that binds everything else the contents depend on: the model, an adapter, a tenant's salt, attached
media. A digest only finds a candidate; a hit also compares the tokens and the identity of every ancestor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

from kvcache_core.errors import ConfigError
from kvcache_core.frozen import FrozenMapping

if TYPE_CHECKING:
    from kvcache_core.sequence import CachedSequence

__all__ = ["MissReason", "PrefixEntry", "PrefixExplanation", "PrefixIndex", "PrefixKey"]

KeyValue = str | bytes | int | None


@dataclass(frozen=True)
class PrefixKey:
    """What cached K and V depend on besides the token ids.

    Two prompts share blocks only if all fields are equal. None means "not given" and differs from an empty
    string; text differs from the bytes that spell it.

    Attributes:
        namespace: Identity of the model: weights, dtype, rotary settings.
        adapter: Name or digest of an adapter, such as a LoRA.
        salt: A tenant's secret; prompts under different salts never share.
        extra: Anything else, such as digests of attached media, by name.
    """

    namespace: KeyValue = None
    adapter: KeyValue = None
    salt: KeyValue = None
    extra: Mapping[str, KeyValue] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", FrozenMapping(dict(sorted(self.extra.items()))))
        for name, value in self._fields():
            if value is not None and (isinstance(value, bool) or not isinstance(value, str | bytes | int)):
                raise ConfigError(f"prefix key {name!r} must be text, bytes, an int or None, not {value!r}", key=name)

    def _fields(self) -> Iterator[tuple[str, KeyValue]]:
        yield from (("namespace", self.namespace), ("adapter", self.adapter), ("salt", self.salt))
        yield from ((f"extra.{name}", value) for name, value in self.extra.items())

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all given fields, each with its name, its type and their lengths."""
        parts = [b"kvcache-core prefix 1"]
        for name, value in self._fields():
            if value is not None:
                kind, data = _encode(value)
                encoded = name.encode()
                parts += [len(encoded).to_bytes(8, "little"), encoded, kind, len(data).to_bytes(8, "little"), data]
        return sha256(b"".join(parts)).digest()


def _encode(value: str | bytes | int) -> tuple[bytes, bytes]:
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    return b"i", str(value).encode()


class PrefixEntry:
    """One full block that prompts can find.

    Attributes:
        parent: The entry of the block before it, or the key that the chain starts from.
        tokens: Its token ids, 8 bytes each.
        position: Its logical block index.
        home: A sequence that holds the block and all before it, live or retained.
    """

    __slots__ = ("home", "parent", "position", "tokens")

    def __init__(self, parent: PrefixEntry | PrefixKey, tokens: bytes, position: int, home: CachedSequence) -> None:
        self.parent = parent
        self.tokens = tokens
        self.position = position
        self.home = home


MissReason = Literal[
    "hit", "disabled", "shorter-than-a-block", "below-minimum", "never-stored", "evicted", "salt-differs", "diverged"
]


@dataclass(frozen=True, kw_only=True)
class PrefixExplanation:
    """What a prompt would find, and why not more.

    Attributes:
        num_tokens: Tokens that a handle allocated for this prompt now would start with.
        reason: Why it is not more. `"hit"` when nothing more could be: the last prompt token is always left to
            compute, and only whole blocks are found.
        diverged_at: With `"diverged"`, the index of the first token that differs from what is cached.
        message: The same as a sentence.
    """

    num_tokens: int
    reason: MissReason
    diverged_at: int | None
    message: str


class PrefixIndex:
    """Digest -> entry, for all blocks that can be found."""

    #: How many digests of evicted blocks are remembered, so that a miss can be explained.
    _REMEMBERED = 4096

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._entries: dict[bytes, PrefixEntry] = {}
        self._evicted: dict[bytes, None] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, PrefixEntry]]:
        return iter(self._entries.items())

    def get(self, digest: bytes) -> PrefixEntry | None:
        """Return the entry of a digest."""
        return self._entries.get(digest)

    def match(self, key: PrefixKey, token_ids: array[int], max_blocks: int) -> tuple[list[bytes], PrefixEntry | None]:
        """Return the digests of the leading blocks that are cached, and the last one's entry."""
        width = self._size * token_ids.itemsize
        data = token_ids[: max_blocks * self._size].tobytes()
        digest, entry = key.digest, None
        parent: PrefixEntry | PrefixKey = key
        digests: list[bytes] = []
        for start in range(0, max_blocks * width, width):
            tokens = data[start : start + width]
            digest = sha256(digest + tokens).digest()
            found = self._entries.get(digest)
            if found is None or not _is_child(found, parent, tokens):
                break
            digests.append(digest)
            parent = entry = found
        return digests, entry

    def publish(self, sequence: CachedSequence) -> None:
        """Enter the full named blocks of a sequence that are not yet entered.

        A block whose digest is taken by other contents ends the sequence's chain: nothing after it is entered.
        """
        key = sequence.prefix_key
        digests, size = sequence.digests, self._size
        full, done = len(sequence.token_ids) // size, len(digests)
        if key is None or full <= done:
            return
        width = size * sequence.token_ids.itemsize
        data = sequence.token_ids[done * size : full * size].tobytes()
        digest = digests[-1] if digests else key.digest
        parent: PrefixEntry | PrefixKey = self._entries[digest] if digests else key
        for position in range(done, full):
            start = (position - done) * width
            tokens = data[start : start + width]
            digest = sha256(digest + tokens).digest()
            entry = self._entries.get(digest)
            if entry is None:
                entry = self._entries[digest] = PrefixEntry(parent, tokens, position, sequence)
                self._evicted.pop(digest, None)
            elif not _is_child(entry, parent, tokens):
                sequence.prefix_key = None
                return
            digests.append(digest)
            parent = entry

    def rehome(self, sequence: CachedSequence, keep: int, others: Iterator[CachedSequence]) -> None:
        """A sequence lets go of its blocks from logical index `keep` on: find them other homes, or drop them."""
        leaving = sequence.digests[keep:]
        if not leaving:
            return
        home, shared = None, keep
        for other in others:
            if other is not sequence:
                common = _common_length(sequence.digests, other.digests, shared)
                if common > shared:
                    home, shared = other, common
        for position, digest in enumerate(leaving, start=keep):
            entry = self._entries[digest]
            if entry.home is not sequence:
                continue
            if home is not None and position < shared:
                entry.home = home
            else:
                self._drop(digest)
        del sequence.digests[keep:]

    def _drop(self, digest: bytes) -> None:
        del self._entries[digest]
        self._evicted[digest] = None
        if len(self._evicted) > self._REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    def clear(self) -> None:
        """Forget everything, also what was evicted."""
        self._entries.clear()
        self._evicted.clear()

    def explain(
        self, key: PrefixKey, token_ids: array[int], max_blocks: int, *, across_salts: bool
    ) -> tuple[int, MissReason, int | None]:
        """Return the blocks found, why the next one is not, and the first differing token where there is one."""
        digests, entry = self.match(key, token_ids, max_blocks)
        found = len(digests)
        if found == max_blocks:
            return found, "hit", None
        size = self._size
        tokens = token_ids[found * size : (found + 1) * size].tobytes()
        last = digests[-1] if digests else key.digest
        if sha256(last + tokens).digest() in self._evicted:
            return found, "evicted", None
        parent = entry if entry is not None else key
        siblings = [other for other in self._entries.values() if _same_parent(other, parent)]
        if siblings:
            ids = token_ids[found * size : (found + 1) * size]
            longest = max(_common_tokens(ids, other.tokens) for other in siblings)
            return found, "diverged", found * size + longest
        if across_salts and any(other.position == 0 and other.tokens == tokens for other in self._entries.values()):
            return found, "salt-differs", None
        return found, "never-stored", None


def _is_child(entry: PrefixEntry, parent: PrefixEntry | PrefixKey, tokens: bytes) -> bool:
    """Whether an entry is what its digest promises."""
    return entry.tokens == tokens and _same_parent(entry, parent)


def _same_parent(entry: PrefixEntry, parent: PrefixEntry | PrefixKey) -> bool:
    return entry.parent is parent or (isinstance(parent, PrefixKey) and entry.parent == parent)


def _common_tokens(ids: array[int], tokens: bytes) -> int:
    other = array("q")
    other.frombytes(tokens)
    return next((index for index, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(ids))


def _common_length(digests: list[bytes], other: list[bytes], at_least: int) -> int:
    """Leading digests that two chains share, if more than `at_least`; equal digests have equal ancestors."""
    low, high = at_least, min(len(digests), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if digests[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
