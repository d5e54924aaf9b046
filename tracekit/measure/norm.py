"""The final norm: from the hidden state that leaves a layer to what the head reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from tracekit.errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.spec import NormSpec


@dataclass(frozen=True, eq=False)
class Norm:
    """The norm between the last layer and the language-model head.

    RMSNorm (Zhang and Sennrich 2019, eq. 4) or LayerNorm (Ba et al. 2016, section 3), with eps under
    the root as transformers has it. On the hidden states that leave an earlier layer it is the first
    half of the logit lens (nostalgebraist 2020), the head being the second.

    Parameters
    ----------
    weight_E
        Weight [E], or None.
    bias_E
        Bias [E], or None.
    spec
        Its kind, eps and offset.

    Raises
    ------
    TraceError
        If there is a tensor that the spec does not have, or the other way round.
    """

    weight_E: torch.Tensor | None
    bias_E: torch.Tensor | None
    spec: NormSpec

    def __post_init__(self) -> None:
        found = (self.weight_E is not None, self.bias_E is not None)
        if found != (self.spec.has_weight, self.spec.has_bias):
            msg = (
                f"the final norm comes {_with(*found)}, but the model's spec says "
                f"{_with(self.spec.has_weight, self.spec.has_bias)}: record again."
            )
            raise TraceError(msg)

    @classmethod
    def load(cls, path: Path, spec: NormSpec) -> Norm:
        """Read a norm from a safetensors file with ``norm.weight`` and ``norm.bias``, if any.

        Raises
        ------
        TraceError
            If the file is missing, damaged, or holds another norm than ``spec`` says.
        """
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                weight, bias = (
                    file.get_tensor(name) if name in names else None
                    for name in ("norm.weight", "norm.bias")
                )
        except (OSError, SafetensorError) as error:
            msg = f"{path} cannot be read ({error}): record the trace again with --head store."
            raise TraceError(msg) from error
        return cls(weight, bias, spec)

    def apply(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Return what the head reads.

        Parameters
        ----------
        hidden_TE
            Hidden states [..., E] that leave a decoder layer, on any device.

        Returns
        -------
        Tensor
            [..., E] in the wider of the types of state and weight: computed in float32 and rounded
            where the module rounds. States that were stored narrower are not rounded once more.
        """
        spec, wide_TE = self.spec, hidden_TE.float()
        dtype = hidden_TE.dtype
        if self.weight_E is not None:
            dtype = torch.promote_types(dtype, self.weight_E.dtype)
        if spec.kind == "layer":
            wide_TE = wide_TE - wide_TE.mean(-1, keepdim=True)
        mean_square_T1 = wide_TE.square().mean(-1, keepdim=True)
        normal_TE = wide_TE * torch.rsqrt(mean_square_T1 + spec.eps)
        if spec.rounds_first:
            normal_TE = normal_TE.to(dtype)
        if self.weight_E is not None:
            normal_TE = normal_TE * (spec.weight_offset + self.weight_E.to(normal_TE))
        if self.bias_E is not None:
            normal_TE = normal_TE + self.bias_E.to(normal_TE)
        return normal_TE.to(dtype)


def _with(has_weight: bool, has_bias: bool) -> str:
    """Return which tensors a norm has, in words."""
    return (
        f"{'with' if has_weight else 'without'} weight and {'with' if has_bias else 'without'} bias"
    )
