"""A tiny model in a folder, with a tokenizer of whole words, as `from_pretrained` wants it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.integrations.tiny import VOCABULARY, tiny_model

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHAT = "{% for m in messages %}{{ '<bos> ' + m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}<bos> assistant"


def save_tiny_model(folder: Path, *, chat: bool = True) -> Path:
    """Write the model and its tokenizer; every word that is not `w0`, `w1`, ... is unknown."""
    words = [*_SPECIAL, "user", "system", "assistant"]
    words += [f"w{number}" for number in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = _CHAT if chat else None
    fast.save_pretrained(folder)
    tiny_model().save_pretrained(folder)
    return folder
