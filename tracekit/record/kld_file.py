"""The base file of llama.cpp's perplexity tool: log-probabilities of a text in 16 bits.

Little-endian: 8 bytes ``_logits_``; int32 n_ctx, n_vocab, n_chunk; int32 tokens [n_chunk, n_ctx];
then, for each scored position, uint16 [2 * ceil(n_vocab / 2) + 4], whose first 8 bytes are two
float32, scale and floor, and the next n_vocab its codes: ln p = scale * code + floor. Source:
``log_softmax`` and ``perplexity`` of llama.cpp's tools/perplexity/perplexity.cpp.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC = b"_logits_"

HEADER = struct.Struct("<8s3i")

BLOCK_BYTES = 32 << 20
"""Log-probabilities that are decoded at once."""

CLAMPS_NATS = (16.0, 24.0)
"""A logit so far below the highest is raised to there: by llama.cpp, by ik_llama.cpp."""

_CLAMP_TOLERANCE = 1e-3
"""The clamp is taken in float32, of logits of any size."""


@dataclass(frozen=True, eq=False)
class KldRows:
    """Decoded rows.

    Parameters
    ----------
    log_prob_TV
        Log-probabilities, nats, float32.
    num_clamped_T
        Entries of each row at its clamp: the file says only that they are no higher, int64.
    """

    log_prob_TV: np.ndarray
    num_clamped_T: np.ndarray


@dataclass(frozen=True, eq=False)
class KldFile:
    """A base file: its header in memory, its rows on disk.

    Parameters
    ----------
    path
        The file.
    num_vocab
        Logits a row.
    token_CT
        The text, int32 [chunks, tokens a chunk], as the file has it.
    num_whole
        Chunks whose rows are all there.
    sha256
        Of the header, the tokens and the rows of the first chunk: the same for a longer copy of a
        file that was cut.
    """

    path: Path
    num_vocab: int
    token_CT: np.ndarray
    num_whole: int
    sha256: str

    @property
    def num_chunks(self) -> int:
        """Chunks that the header announces."""
        return len(self.token_CT)

    @property
    def first(self) -> int:
        """First position of a chunk whose logits are in the file; they predict the next token."""
        return int(self.token_CT.shape[1] // 2)

    @property
    def num_scored(self) -> int:
        """Rows of a chunk: positions ``first`` to the last but one."""
        return _num_scored(self.token_CT.shape[1])

    def begins_with(self, bos_id: int | None) -> bool:
        """Whether the text begins with this token: then llama.cpp adds it as BOS."""
        return bool(self.token_CT[0, 0] == bos_id)

    def tokens(self, chunk: int, bos_id: int | None) -> np.ndarray:
        """Return a chunk's tokens as the model read them.

        Where the vocabulary asks for BOS, the text begins with it, and llama.cpp puts it in place
        of the first token of every chunk, after it wrote the tokens to the file.
        """
        ids: np.ndarray = self.token_CT[chunk].copy()
        if self.begins_with(bos_id):
            ids[0] = bos_id
        return ids

    def rows(self, chunk: int) -> Iterator[KldRows]:
        """Yield the decoded rows of one chunk, in blocks; only those are read."""
        code_TN = self._raw(chunk)
        size = max(1, BLOCK_BYTES // (4 * self.num_vocab))
        for start in range(0, len(code_TN), size):
            yield decode(code_TN[start : start + size], self.num_vocab)

    def num_clamped(self, chunk: int) -> int:
        """Return the entries of one chunk that stand at their row's clamp."""
        return int(_num_clamped(self._raw(chunk), self.num_vocab).sum())

    def _raw(self, chunk: int) -> np.ndarray:
        """Return one chunk's rows as they are in the file, uint16, mapped and not read."""
        width = _row_width(self.num_vocab)
        start = HEADER.size + self.token_CT.nbytes + 2 * width * self.num_scored * chunk
        shape = (self.num_scored, width)
        return np.memmap(self.path, dtype="<u2", mode="r", offset=start, shape=shape)


def read_kld(path: Path) -> KldFile:
    """Return a base file, its header and tokens read and checked.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    InputError
        If it is no such file, its header cannot be true, or not one chunk is whole.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            num_ctx, num_vocab, num_chunks = _read_header(path, head)
            token_bytes = 4 * num_ctx * num_chunks
            chunk_bytes = 2 * _row_width(num_vocab) * _num_scored(num_ctx)
            rows_bytes = size - HEADER.size - token_bytes
            _check_size(path, rows_bytes, chunk_bytes, num_chunks)
            raw = file.read(token_bytes)
            digest = hashlib.sha256(head + raw)
            digest.update(file.read(chunk_bytes))
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}."
        raise InputError(msg) from error
    token_CT = np.frombuffer(raw, "<i4").reshape(num_chunks, num_ctx)
    if outside := int(((token_CT < 0) | (token_CT >= num_vocab)).sum()):
        msg = f"{path} names {outside} tokens outside its vocabulary of {num_vocab}; it is damaged."
        raise InputError(msg)
    return KldFile(path, num_vocab, token_CT, rows_bytes // chunk_bytes, digest.hexdigest())


def decode(code_TN: np.ndarray, num_vocab: int) -> KldRows:
    """Return the log-probabilities of rows as they are in the file, uint16 [T, N]."""
    scale_T, floor_T = _scale_and_floor(code_TN)
    # A row whose logits were not finite has a scale and a floor that are not: it stays so.
    with np.errstate(invalid="ignore", over="ignore"):
        log_prob_TV = code_TN[:, 4 : 4 + num_vocab].astype(np.float32)
        log_prob_TV *= scale_T[:, None]
        log_prob_TV += floor_T[:, None]
    return KldRows(log_prob_TV, _num_clamped(code_TN, num_vocab))


def _num_clamped(code_TN: np.ndarray, num_vocab: int) -> np.ndarray:
    """Return the entries of each row at its clamp: code 0, where the codes span all of a clamp."""
    range_T = _scale_and_floor(code_TN)[0].astype(np.float64) * 65535
    gap_T = np.abs(range_T[:, None] - CLAMPS_NATS).min(axis=1)
    num_zero_T = num_vocab - np.count_nonzero(code_TN[:, 4 : 4 + num_vocab], axis=1)
    return np.where(gap_T < _CLAMP_TOLERANCE, num_zero_T, 0)


def _scale_and_floor(code_TN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two float32 at the head of each row."""
    head_T2 = np.ascontiguousarray(code_TN[:, :4]).view("<f4")
    return head_T2[:, 0], head_T2[:, 1]


def _row_width(num_vocab: int) -> int:
    """Return the uint16 of one row: two float32, the codes, one more if they are odd."""
    return 2 * ((num_vocab + 1) // 2) + 4


def _num_scored(num_ctx: int) -> int:
    return num_ctx - 1 - num_ctx // 2


def _read_header(path: Path, head: bytes) -> tuple[int, int, int]:
    """Return n_ctx, n_vocab and n_chunk."""
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        msg = (
            f"{path} is no base file of llama-perplexity: it does not begin with {MAGIC.decode()}; "
            "write one with llama-perplexity --kl-divergence-base."
        )
        raise InputError(msg)
    _, num_ctx, num_vocab, num_chunks = HEADER.unpack(head)
    if num_ctx < 3 or num_vocab < 1 or num_chunks < 1:
        msg = (
            f"the header of {path} announces {num_chunks} chunks of {num_ctx} tokens, vocabulary "
            f"{num_vocab}: no text is like that; write the file again."
        )
        raise InputError(msg)
    return num_ctx, num_vocab, num_chunks


def _check_size(path: Path, rows_bytes: int, chunk_bytes: int, num_chunks: int) -> None:
    """Refuse a file without a whole chunk, or with more than its header announces."""
    if rows_bytes < chunk_bytes:
        msg = f"{path} ends before its first chunk is whole; copy or write it again."
        raise InputError(msg)
    if rows_bytes > chunk_bytes * num_chunks:
        msg = (
            f"{path} has {rows_bytes} bytes of rows, but its header announces "
            f"{chunk_bytes * num_chunks}: it is of another format or damaged."
        )
        raise InputError(msg)
