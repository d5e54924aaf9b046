"""What each row of the logits stands for: bytes, readable text, class; nothing later needs more."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from typing import TYPE_CHECKING, Any

from tracekit import schema

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are written out: controls, direction marks, unassigned, separators."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\u303f\u3040-\u30ff\u3100-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U000323af]"
)
_NUMBER = re.compile(r"\d+([.,]\d+)*")
_IDENTIFIER = re.compile(r"(?=\w*[A-Za-z])\w*([a-z][A-Z]|_|[A-Za-z]\d)\w*", re.ASCII)
"""Letters with a line below, a digit behind one, or a capital behind a small one: names in code."""

_INSIDE_WORDS = "'\u2019-"
"""Characters other than letters and their marks that a word may hold."""


def vocabulary_table(tokenizer: Any, num_rows: int) -> pa.Table:
    """Return the table ``schema.VOCAB``: one row a row of the logits.

    Pieces are exact bytes for byte-level BPE and for SentencePiece with byte fallback; for other
    tokenizers they are the text that the tokenizer gives for the token alone.

    Parameters
    ----------
    tokenizer
        Of transformers.
    num_rows
        Rows of the language-model head; rows beyond the tokenizer are of class ``padded``.
    """
    pieces = token_pieces(tokenizer, num_rows)
    specials = _special_ids(tokenizer)
    rows = []
    for token, (name, piece) in enumerate(pieces):
        text = f"<row {token}>" if piece is None else readable(piece)
        rows.append((token, piece, text, _class(token, name, piece, specials)))
    columns = dict(
        zip(("token_id", "piece", "text", "class"), zip(*rows, strict=True), strict=True)
    )
    return schema.VOCAB.build(num_rows, {name: list(values) for name, values in columns.items()})


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 over what a tokenizer does: its model, added tokens and chat template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        state = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        # What stands before are truncation and padding: they remember the last call.
        state = core.to_str()
        state = state[state.index('"added_tokens"') :]
    told = [getattr(tokenizer, "chat_template", None), tokenizer.special_tokens_map]
    text = state + json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def token_pieces(tokenizer: Any, num_rows: int) -> list[tuple[str | None, bytes | None]]:
    """Return, for each row, the tokenizer's own name of the token and its bytes; None if padded."""
    to_bytes = _byte_rule(tokenizer)
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    pieces = {token: to_bytes(name) for token, name in names.items()}
    # Added tokens stand for themselves, whatever the tokenizer's alphabet.
    pieces |= {t: one.content.encode() for t, one in tokenizer.added_tokens_decoder.items()}
    return [(names.get(token), pieces.get(token)) for token in range(num_rows)]


def readable(piece: bytes) -> str:
    r"""Return bytes as text in which everything is visible.

    Bytes that are no UTF-8 become ``<0xE4>``, line ends and tabs ``\n`` and ``\t``, other control
    and direction characters ``U+202E``; spaces stay.
    """
    # Undecodable bytes come as the surrogates U+DC80 to U+DCFF, which no UTF-8 text holds.
    text = piece.decode("utf-8", errors="surrogateescape")
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"<0x{code - 0xDC00:02X}>"
    if unicodedata.category(character) in _HIDDEN:
        return _ESCAPES.get(character) or f"U+{code:04X}"
    return character


def _byte_rule(tokenizer: Any) -> Callable[[str], bytes]:
    """Return how this tokenizer's names of tokens are turned into bytes."""
    parts = _decoder_parts(tokenizer)
    if "ByteLevel" in parts:
        table = _byte_alphabet()
        return lambda name: name.translate(table).encode("latin-1")
    if "ByteFallback" in parts or "Metaspace" in parts or not parts:
        return _sentencepiece_bytes
    return lambda name: str(tokenizer.convert_tokens_to_string([name])).encode()


def _decoder_parts(tokenizer: Any) -> set[str]:
    """Return the kinds of steps of the tokenizer's decoder; empty if it is not a fast one."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if core is None else json.loads(core.to_str())["decoder"]
    if decoder is None:
        return set()
    return {decoder["type"], *(part["type"] for part in decoder.get("decoders", ()))}


def _sentencepiece_bytes(name: str) -> bytes:
    """Return the bytes of a SentencePiece token: a byte token, or text with spaces as U+2581."""
    byte = _BYTE_PIECE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[int, int]:
    """Return GPT-2's alphabet: the byte that each of its 256 characters stands for."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {256 + n: byte for n, byte in enumerate(others)}


def _special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, one in added if one.special)}


def _class(token: int, name: str | None, piece: bytes | None, specials: set[int]) -> str:
    """Return the class of a token (see ``schema.VOCAB``)."""
    if piece is None:
        return "padded"
    if token in specials:
        return "special"
    is_fallback = _BYTE_PIECE.fullmatch(name or "") is not None
    if is_fallback or (len(piece) == 1 and piece[0] >= 0x80):
        return "byte"
    text = piece.decode("utf-8", errors="replace")
    bare = text.strip()
    if not bare:
        return "whitespace"
    if _NUMBER.fullmatch(bare):
        return "number"
    if _CJK.search(bare):
        return "cjk"
    if _IDENTIFIER.fullmatch(bare):
        return "identifier"
    return "word" if _is_word(bare) else "other"


def _is_word(text: str) -> bool:
    if text.isalpha():
        return True
    kinds = {unicodedata.category(c)[0] for c in text if c not in _INSIDE_WORDS}
    return "L" in kinds and kinds <= {"L", "M"}
