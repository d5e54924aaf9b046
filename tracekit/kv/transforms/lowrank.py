"""Keys and values as a few coefficients of a basis that the prompt gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from torch.linalg import eigh

from tracekit.errors import InputError, UsageError
from tracekit.kv.amounts import Frac
from tracekit.kv.transform import TRANSFORMS, Entries, Fitted, Transform
from tracekit.measure.rope import rotate

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View
    from tracekit.spec import LayerSpec


class Rank(float):
    """Directions that are kept: a whole number from 1 on, or a fraction of a head's size below 1."""

    def __str__(self) -> str:
        return str(int(self)) if self.is_integer() else float.__repr__(self)

    def of(self, size: int) -> int:
        """Return the number of directions of a head of ``size`` numbers, at least 1."""
        return min(int(self), size) if self >= 1 else max(1, Frac(self).of(size))


_QUARTER = Rank(0.25)


@TRANSFORMS.register("lowrank")
@final
@dataclass(frozen=True)
class LowRank(Transform):
    """Coefficients of the leading singular vectors of the rows before the first decision.

    As ShadowKV does with keys (Sun et al. 2024, arXiv:2410.21465, section 3.1: an SVD of the
    prompt's keys before the rotary embedding); values here too. The basis is fixed at the first
    decision and serves all later rows; rows are not centred.

    Differences: ShadowKV factorises the heads of a layer side by side, whose coefficients only a
    head that evicts nothing could share; here each head has coefficients of its own, and
    ``basis=layer`` shares the basis alone. Its values stay whole, in a slower tier. Keys are turned
    back by their rotary angle but keep its attention scaling, which is a factor of what attention
    sees.

    Parameters
    ----------
    rank
        Directions kept: a whole number, or below 1 a fraction of the head's size (rounded down, at
        least 1).
    basis
        ``head``: each KV head has a basis of its own; ``layer``: those of a layer share one.
    residual
        Newest entries that stay as they were written.
    """

    rank: Rank = _QUARTER
    basis: Literal["head", "layer"] = "head"
    residual: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", Rank(self.rank))
        if not (0 < self.rank < 1 or (self.rank >= 1 and self.rank.is_integer())):
            msg = f"rank={self.rank} is neither a whole number from 1 on nor a fraction below 1."
            raise UsageError(msg)
        if self.residual < 0:
            msg = f"residual={self.residual} is a number of entries, not negative."
            raise UsageError(msg)

    def fit(self, view: View) -> Fitted:
        """Return the bases of keys and values, [X, D, rank] each.

        Raises
        ------
        InputError
            If keys or values are not finite.
        UsageError
            If the rotary embedding cannot be undone.
        """
        key_LGKD = view.key_LGKD
        if view.rope is not None:
            key_LGKD = rotate(key_LGKD, -view.position_K, view.rope)
        return self._vectors(key_LGKD, view), self._vectors(view.value_LGKD, view)

    def store(self, entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Return projections on the bases, keys turned to their place again.

        Raises
        ------
        UsageError
            If the rotary embedding cannot be undone.
        """
        key_XCD, value_XCD, position_XC, (key_XDR, value_XDR), rope = entries
        if rope is None:
            key_XCD = key_XCD @ key_XDR @ key_XDR.mT
        else:
            key_XCD = rotate(key_XCD, -position_XC, rope) @ key_XDR @ key_XDR.mT
            key_XCD = rotate(key_XCD, position_XC, rope)
        return key_XCD, value_XCD @ value_XDR @ value_XDR.mT

    def entry_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the coefficients of a key and a value."""
        return bytes_per_number * (self.rank.of(layer.head_dim) + self.rank.of(layer.value_dim))

    def fixed_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the two bases, or the head's part of the layer's."""
        numbers = sum(self.rank.of(size) * size for size in (layer.head_dim, layer.value_dim))
        shared_by = layer.num_kv_heads if self.basis == "layer" else 1
        return bytes_per_number * numbers / shared_by

    def _vectors(self, row_LGKD: torch.Tensor, view: View) -> torch.Tensor:
        """Return leading right singular vectors, as eigenvectors of the rows' products."""
        wide_LGKD = row_LGKD.double()
        product_LGDD = wide_LGKD.mT @ wide_LGKD
        if self.basis == "layer":
            product_LGDD = product_LGDD.sum(1, keepdim=True).expand_as(product_LGDD)
        if not bool(product_LGDD.isfinite().all()):
            layer = view.layers[int((~product_LGDD.isfinite()).nonzero()[0, 0])]
            msg = (
                f"lowrank finds no basis in layer {layer}: keys or values recorded there are not "
                "finite, so leave that layer out."
            )
            raise InputError(msg)
        rank = self.rank.of(row_LGKD.shape[-1])
        vector_LGDR: torch.Tensor = eigh(product_LGDD).eigenvectors[..., -rank:]
        return vector_LGDR.to(row_LGKD).flatten(0, 1)
