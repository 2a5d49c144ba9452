"""Requests for new sequences: what they may ask for, and whether a cache can give it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from kvcache_core.counts import check_count
from kvcache_core.errors import ConfigError, ShapeError
from kvcache_core.geometry import DTYPE_SIZES, CacheGeometry, check_dtype
from kvcache_core.names import device_fits
from kvcache_core.prefix import KeyValue, PrefixKey
from kvcache_core.validation import show

if TYPE_CHECKING:
    from kvcache_core.storage import Storage

__all__ = ["AllocationRequest", "RequestRules", "check_request_id", "token_array"]


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Return token ids as a signed 64-bit array.

    Args:
        token_ids: Ints, or a one-dimensional integer tensor or array (anything with `tolist()`). An `array("q")`
            is copied as it is, without looking at each id.

    Raises:
        ShapeError: An id is not an int of at most 64 bits, or the tensor has more than one dimension.
    """
    kind = type(token_ids)
    if kind is array and cast("array[int]", token_ids).typecode == "q":
        return cast("array[int]", token_ids)[:]
    values = token_ids.tolist() if kind is not list and hasattr(token_ids, "tolist") else token_ids
    try:
        if isinstance(values, (bytes, bytearray)):  # which `array` would take for its own memory
            raise TypeError("bytes are no token ids")
        return array("q", values)
    except (TypeError, OverflowError) as error:
        raise ShapeError(f"token ids must be a flat sequence of 64-bit ints, not {show(token_ids)} ({error})") from None


def check_request_id(request_id: object) -> None:
    """Raise ShapeError unless `request_id` is a name for a sequence, or None."""
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise ShapeError(f"request_id must be a string with at least one character, not {show(request_id)}")


@lru_cache(maxsize=64, typed=True)
def _plain_key(namespace: KeyValue) -> PrefixKey:
    """The key of most prompts; made once for each model."""
    return PrefixKey(namespace=namespace)


def _dtype_name(dtype: object) -> str | None:
    try:
        return None if dtype is None else check_dtype(dtype)
    except ValueError as error:
        raise ShapeError(f"dtype {error}") from None


@dataclass(frozen=True, kw_only=True)
class AllocationRequest:
    """What a new sequence needs.

    Attributes:
        token_ids: The prompt, which is copied to an `array("q")`. Room for it is reserved, and its cached prefix, if
            any, is reused.
        num_tokens: Tokens to reserve room for when the prompt's ids are not given, or for more than the prompt.
        request_id: The caller's name for the sequence; made up when None.
        max_sequence_length: Tokens the sequence may ever hold; the cache's own maximum when None.
        priority: Higher is more important; eviction policies may use it.
        adapter: Name or digest of the adapter the prompt runs with; prompts reuse only what the same one stored.
        salt: A tenant's secret; prompts reuse only what the same salt stored. Not shown by `repr`.
        extra_keys: Whatever else the contents depend on, such as digests of attached media, by name.
        num_layers: If given, must equal the cache's.
        num_heads: Key/value heads; if given, must equal the cache's.
        head_dim: If given, must equal the cache's.
        device: If given, must be the cache's, as a string or `torch.device`.
        dtype: If given, must be the cache's, as torch's name or `torch.dtype`.
    """

    token_ids: Iterable[int] = ()
    num_tokens: int | None = None
    request_id: str | None = None
    max_sequence_length: int | None = None
    priority: int = 0
    adapter: KeyValue = None
    salt: KeyValue = field(default=None, repr=False)
    extra_keys: Mapping[str, KeyValue] = field(default_factory=dict)
    num_layers: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    device: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_array(self.token_ids))
        for name in ("num_tokens", "max_sequence_length", "num_layers", "num_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, least=0 if name == "num_tokens" else 1)
        if type(self.priority) is not int:
            raise ShapeError(f"priority must be an int, not {show(self.priority)}")
        check_request_id(self.request_id)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))

    def prefix_key(self, namespace: KeyValue) -> PrefixKey:
        """What cached blocks of this prompt depend on besides its tokens, in the cache of `namespace`."""
        if self.adapter is None and self.salt is None and not self.extra_keys:
            return _plain_key(namespace)
        return PrefixKey(namespace=namespace, adapter=self.adapter, salt=self.salt, extra=self.extra_keys)

    @property
    def initial_tokens(self) -> int:
        """Tokens to reserve room for."""
        return max(len(self.prompt), self.num_tokens or 0)

    @property
    def prompt(self) -> array[int]:
        """The ids as they are kept."""
        return cast("array[int]", self.token_ids)

    def estimated_memory_bytes(self, geometry: CacheGeometry | None = None, dtype: str | None = None) -> int:
        """Bytes of K and V that `initial_tokens` take, not rounded to blocks.

        Args:
            geometry: The cache's geometry; needed where the request does not give its own numbers.
            dtype: Stored dtype by torch's name; the request's, else the geometry's, else float32.

        Raises:
            ConfigError: Neither a geometry nor all of num_layers, num_heads and head_dim is given.
            ShapeError: A cache cannot be stored in `dtype`.
        """
        name = _dtype_name(dtype) or self.dtype
        if geometry is not None:
            return self.initial_tokens * geometry.bytes_per_token(name)
        if self.num_layers is None or self.num_heads is None or self.head_dim is None:
            raise ConfigError(
                "estimated_memory_bytes needs a geometry, or num_layers, num_heads and head_dim in the request"
            )
        per_token = self.num_layers * self.num_heads * self.head_dim * 2 * DTYPE_SIZES[name or "float32"]
        return self.initial_tokens * per_token


class RequestRules:
    """What requests one cache can serve.

    Args:
        storage: Its memory.
    """

    def __init__(self, storage: Storage) -> None:
        geometry, spec = storage.spec.geometry, storage.spec.geometry.single_spec
        heads, head_dim = (spec.num_kv_heads, spec.head_dim) if spec else (_DIFFERS, _DIFFERS)
        fixed = {
            "num_layers": geometry.num_layers,
            "num_heads": heads,
            "head_dim": head_dim,
            "device": storage.device,
            "dtype": storage.dtype,
        }
        #: What a request may ask for but not choose.
        self._fixed = {name: _text(value) for name, value in fixed.items()}
        self._longest = storage.spec.max_sequence_length

    def max_tokens(self, request: AllocationRequest) -> int:
        """Tokens that the sequence may ever hold."""
        return request.max_sequence_length or self._longest

    def checked(self, request: AllocationRequest | None, fields: dict[str, Any]) -> AllocationRequest:
        """Return the request, or one of these fields, if the cache can serve it.

        Raises:
            ShapeError: It does not fit the cache's geometry, device, dtype or longest sequence.
        """
        if request is None:
            request = AllocationRequest(**fields)
        elif fields:
            raise TypeError("give either an AllocationRequest or its fields, not both")
        for name, actual in self._fixed.items():
            asked = getattr(request, name)
            if asked is None or _text(asked) == actual or (name == "device" and device_fits(_text(asked), actual)):
                continue
            raise ShapeError(f"the request asks for {name}={asked} and the cache's is {actual}")
        if self.max_tokens(request) > self._longest:
            raise ShapeError(
                f"the request asks for max_sequence_length={request.max_sequence_length} and the cache's is "
                f"{self._longest}; raise it in the configuration"
            )
        return request


_DIFFERS = "different from layer to layer"


def _text(value: object) -> str:
    """A number, device or dtype as text, however it was given."""
    return str(value).removeprefix("torch.")
