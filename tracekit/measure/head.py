"""The language-model head: from final hidden states to logits, as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from tracekit.errors import TraceError
from tracekit.measure.memo import Memo

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.spec import HeadSpec

BLOCK_NUMBERS = 1 << 22
"""Numbers of the weight that are widened to float64 at once."""


@dataclass(frozen=True, eq=False)
class Truncation:
    """The head's weight at a lower rank: W ~ weight_VR axes_ER^T, the best in the least squares.

    Parameters
    ----------
    axes_ER
        Leading right singular vectors of W [E, R].
    weight_VR
        W in these axes [V, R]. Both are of W's own type, as a decoder would hold them.
    """

    axes_ER: torch.Tensor
    weight_VR: torch.Tensor


@dataclass(frozen=True, eq=False)
class Head:
    """The last matrix of a model, with its bias, scale and soft-cap.

    Parameters
    ----------
    weight_VE
        Weight [V, E], in the type in which the model multiplies.
    bias_V
        Bias [V], or None.
    spec
        Shape, scale and soft-cap.
    memo
        What was computed from the head alone.

    Raises
    ------
    TraceError
        If the tensors are not of the shape that the spec names.
    """

    weight_VE: torch.Tensor
    bias_V: torch.Tensor | None
    spec: HeadSpec
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    def __post_init__(self) -> None:
        wanted = [self.spec.num_rows, self.spec.hidden_size]
        if list(self.weight_VE.shape) != wanted or (self.bias_V is not None) != self.spec.has_bias:
            msg = (
                f"the head's weight is {list(self.weight_VE.shape)}, "
                f"{'without' if self.bias_V is None else 'with'} a bias, but the model's spec says "
                f"{wanted}, {'with' if self.spec.has_bias else 'without'} one: record again."
            )
            raise TraceError(msg)

    @classmethod
    def load(cls, path: Path, spec: HeadSpec) -> Head:
        """Read a head from a safetensors file with ``head.weight`` and, if any, ``head.bias``.

        Raises
        ------
        TraceError
            If the file is missing, damaged, or holds another head than ``spec`` says.
        """
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                tensors = {
                    name: file.get_tensor(name)
                    for name in ("head.weight", "head.bias")
                    if name in names
                }
        except (OSError, SafetensorError) as error:
            msg = f"{path} cannot be read ({error}): record the trace again with --head store."
            raise TraceError(msg) from error
        if "head.weight" not in tensors:
            msg = f"{path} holds no head.weight: record the trace again with --head store."
            raise TraceError(msg)
        return cls(tensors["head.weight"], tensors.get("head.bias"), spec)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Return softcap(scale * (W h + b)).

        Parameters
        ----------
        hidden_TE
            Inputs of the head [T, E], any floating type.

        Returns
        -------
        Tensor
            float32 [T, V]; the product is taken in the weight's own type, as the model takes it,
            and widened before scale and soft-cap.
        """
        hidden_TE = hidden_TE.to(self.weight_VE)
        return self.capped(
            torch.nn.functional.linear(hidden_TE, self.weight_VE, self.bias_V).float()
        )

    def capped(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return softcap(scale * x), computed in place: it keeps the order of logits."""
        if self.spec.scale != 1.0:
            logits_TV *= self.spec.scale
        if self.spec.softcap is not None:
            logits_TV.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        return logits_TV

    @property
    def macs(self) -> int:
        """Multiply-adds of one row of logits."""
        return self.weight_VE.numel()

    @property
    def bytes_per_row(self) -> int:
        """Bytes that the logit of one token reads: its row of the weight, and its bias."""
        numbers = self.spec.hidden_size + self.spec.has_bias
        return numbers * self.weight_VE.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes that one row of logits reads."""
        return self.spec.num_rows * self.bytes_per_row

    def truncated(self, rank: int) -> Truncation:
        """Return the weight at a lower rank, computed once for a head and a rank.

        Parameters
        ----------
        rank
            Axes to keep, at least 1; E or more keep the whole weight, rotated.

        Returns
        -------
        Truncation
            Truncated singular value decomposition. The axes are eigenvectors of W^T W, taken in
            float64: an E x E problem instead of a V x E one.
        """
        rank = min(rank, self.spec.hidden_size)
        return self.memo.get(("truncated", rank), lambda: self._truncate(rank))

    def _truncate(self, rank: int) -> Truncation:
        dtype, axes_ER = self.weight_VE.dtype, self._axes(rank)
        parts = [(part.double() @ axes_ER).to(dtype) for part in self._row_blocks()]
        return Truncation(axes_ER.to(dtype), torch.cat(parts))

    def _axes(self, rank: int) -> torch.Tensor:
        size = self.spec.hidden_size
        gram_EE = self.weight_VE.new_zeros((size, size), dtype=torch.float64)
        for part_VE in self._row_blocks():
            wide_VE = part_VE.double()
            gram_EE += wide_VE.T @ wide_VE
        ascending_EE: torch.Tensor = torch.linalg.eigh(gram_EE).eigenvectors
        return ascending_EE.flip(1)[:, :rank]

    def _row_blocks(self) -> tuple[torch.Tensor, ...]:
        """Return the weight in blocks of rows that are small enough to be widened."""
        size = max(1, BLOCK_NUMBERS // self.spec.hidden_size)
        blocks: tuple[torch.Tensor, ...] = self.weight_VE.split(size)
        return blocks
