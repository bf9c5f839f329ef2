"""The tokenizer of a run: bytes by default, or any that transformers can load.

The byte tokenizer needs no download and no training: token i below 256 is byte i, then beginning of text, end
of text, padding. It is made of stock parts, so an exported model's tokenizer opens in plain `AutoTokenizer`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moe_fragment.schema import ConfigError

BYTES = "bytes"
"""Name of the built-in byte tokenizer in a recipe."""

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"


def load_tokenizer(name: str = BYTES) -> PreTrainedTokenizerBase:
    """The tokenizer called `name`: `bytes`, or what `AutoTokenizer` knows (a directory or a hub name).

    Raises:
        ConfigError: it cannot be loaded, or has no end-of-text token to put between documents.
    """
    if name == BYTES:
        return byte_tokenizer()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"data.tokenizer: {name!r} cannot be loaded ({reason})") from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"data.tokenizer: {name!r} has no end-of-text token, which separates documents")
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose first 256 tokens are the bytes; any text survives the round trip."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {token: 256 + i for i, token in enumerate((BOS, EOS, PAD))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Splitting into words matters to merges only, and there are none.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        split_special_tokens=True,  # "<|eos|>" inside a text is seven bytes of text, not the end of it
        clean_up_tokenization_spaces=False,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what decides the tokens of a text, for clusters to compare."""
    digest = hashlib.sha256()
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        digest.update(backend.to_str().encode())
    else:
        digest.update(repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()))).encode())
    digest.update(repr((tokenizer.eos_token_id, tokenizer.bos_token_id)).encode())
    return digest.hexdigest()[:32]


def _byte_characters() -> list[str]:
    """The printable stand-in for each byte, as in GPT-2's `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, substitutes = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + substitutes))
            substitutes += 1
    return characters
