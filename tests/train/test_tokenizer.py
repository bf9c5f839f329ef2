"""The byte tokenizer: every text survives it, and it opens without this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from moe_fragment.train.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_fingerprint

TOKENIZER = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("<|eos|> is text here, <|bos|><|pad|> too")
@example(" \n\t  don't , .  merge !\r\n\u2028\x00")
@example("naïve 漢字 🦜")
@settings(deadline=None)
def test_tokens_are_bytes_and_come_back(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    assert tokens == list(text.encode())
    assert TOKENIZER.decode(tokens) == text


def test_special_tokens_follow_the_bytes() -> None:
    assert len(TOKENIZER) == 259
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (256, 257, 258)
    assert TOKENIZER.decode([72, 105, 257], skip_special_tokens=True) == "Hi"


def test_opens_in_plain_transformers_beside_a_model(tmp_path: Path) -> None:
    """AutoTokenizer also looks at the model's config, which must not talk it into another class."""
    byte_tokenizer().save_pretrained(tmp_path)
    Qwen3MoeConfig(vocab_size=259, hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
    script = f"""
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
text = "dé  <|eos|> 'll"
assert tokenizer(text)["input_ids"] == list(text.encode()), tokenizer(text)
assert tokenizer.decode(list(text.encode()) + [257], skip_special_tokens=True) == text
assert tokenizer.eos_token_id == 257
assert "moe_fragment" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again("ab")["input_ids"] == [97, 98]


def test_fingerprint_tells_tokenizers_apart(tmp_path: Path) -> None:
    other = byte_tokenizer()
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(TOKENIZER)
    other.add_tokens(["<think>"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(TOKENIZER)


def test_unknown_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer: .* cannot be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))
