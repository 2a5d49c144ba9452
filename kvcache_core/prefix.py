"""What a prompt must share with a cached prefix besides its tokens, and why it found no more of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvcache_core.errors import ConfigError
from kvcache_core.frozen import FrozenMapping

__all__ = ["KeyValue", "MissReason", "PrefixExplanation", "PrefixKey"]

KeyValue = str | bytes | int | None

_NOTHING: Mapping[str, KeyValue] = FrozenMapping()


@dataclass(frozen=True, eq=False)
class PrefixKey:
    """What cached K and V depend on besides the token ids.

    Two prompts share blocks only if all fields are equal. None means "not given" and differs from an empty
    string; text differs from the bytes that spell it, and from the number that it spells.

    Attributes:
        namespace: Identity of the model: weights, dtype, rotary settings.
        adapter: Name or digest of an adapter, such as a LoRA.
        salt: A tenant's secret; prompts under different salts never share. Not shown by `repr`.
        request: Name of the one request whose prompts may share, or None where requests share.
        extra: Anything else, such as digests of attached media, by name.
        encoded: All given fields, each with its name, its type and their lengths, so that no two keys are alike.

    Raises:
        ConfigError: A value of another type, or a name in `extra` that is no text.
    """

    namespace: KeyValue = None
    adapter: KeyValue = None
    salt: KeyValue = field(default=None, repr=False)
    request: str | None = None
    extra: Mapping[str, KeyValue] = _NOTHING
    encoded: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.extra is not _NOTHING:
            object.__setattr__(self, "extra", _sorted_copy(self.extra))
        parts = [_encode(name, value) for name, value in self._fields() if value is not None]
        object.__setattr__(self, "encoded", b"kvcache-core prefix 1" + b"".join(parts))

    def _fields(self) -> Iterator[tuple[str, KeyValue]]:
        yield "namespace", self.namespace
        yield "adapter", self.adapter
        yield "salt", self.salt
        yield "request", self.request
        for name, value in self.extra.items():
            yield f"extra.{name}", value

    def __eq__(self, other: object) -> bool:
        return self.encoded == other.encoded if isinstance(other, PrefixKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.encoded)


def _sorted_copy(extra: Mapping[str, KeyValue]) -> Mapping[str, KeyValue]:
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ConfigError("extra keys of a prefix must be a mapping whose keys are text", key="extra_keys")
    return FrozenMapping(dict(sorted(extra.items()))) if extra else _NOTHING


def _encode(name: str, value: str | bytes | int) -> bytes:
    if isinstance(value, str):
        kind, data = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, data = b"b", value
    elif isinstance(value, int) and not isinstance(value, bool):
        kind, data = b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    else:  # the value itself may be a secret
        raise ConfigError(f"{name} must be text, bytes, an int or None, not a {type(value).__name__}", key=name)
    tag = name.encode("utf-8", "surrogatepass")
    return len(tag).to_bytes(8, "little") + tag + kind + len(data).to_bytes(8, "little") + data


MissReason = Literal[
    "hit",
    "disabled",
    "shorter-than-a-block",
    "below-minimum",
    "busy",
    "never-stored",
    "evicted",
    "salt-differs",
    "diverged",
]


@dataclass(frozen=True, kw_only=True)
class PrefixExplanation:
    """What a prompt would find, and why not more.

    Attributes:
        num_tokens: Tokens that a handle allocated for this prompt now would start with.
        demoted_tokens: Of these, tokens that wait in the host tier and would be copied back.
        reason: Why it is not more. `"hit"` when nothing more could be: the last prompt token is always left to
            compute, and only whole blocks are found. `"busy"` when the sequence that holds more of it, in memory that
            cannot be shared meanwhile, has an open step.
        diverged_at: With `"diverged"`, the index of the first token that differs from what is cached.
        message: The same as a sentence.
    """

    num_tokens: int
    reason: MissReason
    demoted_tokens: int = 0
    diverged_at: int | None = None
    message: str
