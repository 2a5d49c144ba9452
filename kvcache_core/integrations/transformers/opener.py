"""How the sequences of a `KvCache` are opened: in whose name, and for which model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from kvcache_core.handle import KvCacheHandle
from kvcache_core.integrations.transformers.identity import model_identity
from kvcache_core.manager import KvCacheManager
from kvcache_core.prefix import KeyValue
from kvcache_core.sequence import unique_id

__all__ = ["Opener"]


class Opener:
    """Opens sequences that find what others of the same model, adapter and salt have stored.

    What tells models apart is the live object and the state of its weights, unless the cache's configuration names a
    `prefix.namespace`. Without a model nobody knows what a sequence was computed by, so it finds nothing and nobody
    finds it.

    Args:
        manager: The cache.
        model: The model, which is not kept alive.
        max_sequence_length: Tokens a sequence may ever hold; the cache's own maximum when None.
        adapter: Name of the adapter that the model runs with.
        salt: A tenant's secret.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        model: Any = None,
        *,
        max_sequence_length: int | None = None,
        adapter: KeyValue = None,
        salt: KeyValue = None,
    ) -> None:
        self._manager = manager
        self._model = (lambda: None) if model is None else ref(model)
        self._identity = unique_id("unknown-model")
        self._fields: dict[str, Any] = {
            "max_sequence_length": max_sequence_length,
            "adapter": adapter,
            "salt": salt,
        }
        self.refresh()

    def refresh(self) -> str:
        """Look at the model, and return what its K and V are known by; another text once its weights have changed."""
        model = self._model()
        if self._manager.store.prefixes.settings.namespace is not None:
            self._fields["extra_keys"] = {}
            return ""
        if model is not None:
            self._identity = model_identity(model)
        self._fields["extra_keys"] = {"model": self._identity}
        return self._identity

    @property
    def finds(self) -> bool:
        """Whether prompts find what others have stored at all."""
        return self._manager.store.prefixes.enabled

    @property
    def max_tokens(self) -> int:
        """Tokens a sequence may ever hold."""
        return self._fields["max_sequence_length"] or self._manager.max_sequence_length

    def open(self, prompt: Sequence[int] = ()) -> KvCacheHandle:
        """Open a sequence, which starts with what is cached of `prompt`.

        Raises:
            CacheFullError: There is no room for the prompt.
        """
        return self._manager.allocate(token_ids=prompt, **self._fields)

    def count_cached(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` a sequence would start with."""
        return self._manager.explain(token_ids=prompt, **self._fields).num_tokens
