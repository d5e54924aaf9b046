from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tracekit import schema
from tracekit.model.vocabulary import readable, tokenizer_hash, vocabulary_table


def rows_of(tokenizer: Any, num_rows: int) -> dict[int, dict[str, Any]]:
    table = vocabulary_table(tokenizer, num_rows)
    assert table.schema == schema.VOCAB.schema
    return {row["token_id"]: row for row in table.to_pylist()}


def sentencepiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: spaces as U+2581, unknown characters as bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\u2581", "a", "\u2581a", "\u2581\u2581", "\u4e2d", "7"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("\u2581", "a"), ("\u2581", "\u2581")]
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@settings(deadline=None)
@given(st.text())
def test_pieces_of_a_text_joined_are_its_bytes_in_byte_level_bpe(text: str) -> None:
    rows = rows_of(tiny.tokenizer(), 272)
    ids = tiny.tokenizer()(text, add_special_tokens=False).input_ids
    assert b"".join(rows[token]["piece"] for token in ids) == text.encode()


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
def test_pieces_of_a_text_joined_are_its_bytes_in_sentencepiece(text: str) -> None:
    rows = rows_of(sentencepiece(), 265)
    ids = sentencepiece()(text, add_special_tokens=False).input_ids
    assert b"".join(rows[token]["piece"] for token in ids) == text.encode()


def test_an_emoji_split_over_bytes_is_shown_byte_by_byte() -> None:
    tokenizer = tiny.tokenizer()
    rows = rows_of(tokenizer, 272)
    shown = [rows[token] for token in tokenizer("\U0001f600").input_ids]
    assert [row["text"] for row in shown] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert {row["class"] for row in shown} == {"byte"}


def test_byte_tokens_of_sentencepiece_are_bytes_even_where_they_are_letters() -> None:
    rows = rows_of(sentencepiece(), 265)
    byte = rows[3 + ord("A")]
    assert (byte["piece"], byte["text"], byte["class"]) == (b"A", "A", "byte")
    assert rows[3 + 0xE4]["text"] == "<0xE4>"
    assert [rows[n]["class"] for n in range(3)] == ["special"] * 3
    assert [rows[n]["class"] for n in range(259, 265)] == [
        "whitespace",
        "word",
        "word",
        "whitespace",
        "cjk",
        "number",
    ]


def test_rows_beyond_the_tokenizer_are_padded() -> None:
    rows = rows_of(tiny.tokenizer(), 272)
    assert [rows[n]["class"] for n in range(265, 272)] == ["padded"] * 7
    assert (rows[270]["piece"], rows[270]["text"]) == (None, "<row 270>")


def test_special_tokens_stand_for_themselves() -> None:
    rows = rows_of(tiny.tokenizer(), 272)
    assert (rows[2]["piece"], rows[2]["class"]) == (b"<|im_end|>", "special")


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (b" the", " the"),
        (b"\n\t\r", "\\n\\t\\r"),
        (b"\x00\x7f", "U+0000U+007F"),
        ("\u202eabc".encode(), "U+202Eabc"),
        (b"\xe4\xb8", "<0xE4><0xB8>"),
        (b"a\x80b", "a<0x80>b"),
        ("\u4e2d\xe9".encode(), "\u4e2d\xe9"),
        (b"\xed\xa0\x80", "<0xED><0xA0><0x80>"),
    ],
)
def test_readable_text_shows_everything(piece: bytes, text: str) -> None:
    assert readable(piece) == text


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("don't", "word"),
        (" caf\xe9", "word"),
        ("x1", "identifier"),
        (" get_name", "identifier"),
        ("_name", "identifier"),
        ("getName", "identifier"),
        ("HTTP2", "identifier"),
        ("HTTP", "word"),
        ("Name", "word"),
        ("__", "other"),
        ("1x", "other"),
        ("();", "other"),
        ("3.14", "number"),
        (" \n", "whitespace"),
        ("\u4e2d\u6587", "cjk"),
        ("\uff0c", "cjk"),
        ("'", "other"),
        ("\u0928\u093f", "word"),
    ],
)
def test_classes_are_what_a_reader_would_say(word: str, kind: str) -> None:
    core = Tokenizer(models.WordLevel({word: 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert rows_of(tokenizer, 2)[0]["class"] == kind


def test_a_tokenizer_hash_forgets_the_last_call_and_sees_the_template() -> None:
    tokenizer = sentencepiece()
    first = tokenizer_hash(tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer_with_pad = tokenizer_hash(tokenizer)
    tokenizer(["a", "a a"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == tokenizer_with_pad
    tokenizer.chat_template = "{{ messages }}"
    assert len({first, tokenizer_with_pad, tokenizer_hash(tokenizer)}) == 3
