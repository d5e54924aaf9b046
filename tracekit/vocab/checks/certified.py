"""Prove that no token outside of a set can matter, from bounds on the logits that were not taken."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tracekit.errors import UsageError
from tracekit.measure.clusters import Clusters, cluster_rows, largest, row_blocks
from tracekit.vocab.check import CHECKS, Check
from tracekit.vocab.estimator import Cost
from tracekit.vocab.truth import MIN_P
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.measure.head import Head
    from tracekit.vocab.check import Scored
    from tracekit.vocab.view import View

Rule = Literal["argmax", "minp"]

MARGIN = {"argmax": 0.0, "minp": math.log(MIN_P)}
"""By rule, what a token has to reach relative to the best logit of the set."""

SEED = 0
"""Of the clusters."""

SINGLE = torch.finfo(torch.float32)


@dataclass(frozen=True, eq=False)
class Groups:
    """Tokens in groups that are bounded together, none of them empty.

    Parameters
    ----------
    group_V
        Group of each token, int64.
    length_J
        Longest row of a group, float64.
    bias_J
        Largest bias, -inf where all are masked.
    size_J
        Largest finite bias by magnitude.
    """

    group_V: torch.Tensor
    length_J: torch.Tensor
    bias_J: torch.Tensor
    size_J: torch.Tensor

    @classmethod
    def of(cls, head: Head, group_V: torch.Tensor) -> Groups:
        """Return the groups of a head's tokens, numbered from 0."""
        num = int(group_V.max()) + 1
        weight_VE = head.weight_VE.cpu()
        parts = [weight_VE[rows].double().norm(dim=1) for rows in row_blocks(weight_VE)]
        length_V = torch.cat(parts)
        bias_V = torch.zeros_like(length_V) if head.bias_V is None else head.bias_V.cpu().double()
        size_V = torch.where(bias_V.isfinite(), bias_V, 0).abs()
        return cls(group_V, *(largest(one, group_V, num) for one in (length_V, bias_V, size_V)))


class Bounded(Check):
    """Base of checks that bound what was not taken: sure only where nothing outside can matter.

    Sure for ``rule=argmax``: the most likely token is in the set. For ``rule=minp``: so are all
    that have 0.05 of its probability.

    Raises
    ------
    UsageError
        If a number is below 1.
    """

    rule: Rule

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            if isinstance(value := getattr(self, one.name), int) and value < 1:
                msg = f"{self.text}: {one.name} must be at least 1."
                raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The hidden state and the head's weight."""
        return Needs(hidden=True, head=True)

    def is_sure(self, view: View, scored: Scored) -> torch.Tensor:
        """Return where the largest bound outside of each set is below what matters."""
        head = view.head
        groups = self.groups(head)
        hidden_SE = view.hidden_SE.to(head.weight_VE).cpu().double()
        bound_SJ = _ceiling(head, groups, hidden_SE, self.products(head, hidden_SE))
        last_SJ = _last_places(groups, scored)
        open_SN = torch.stack(
            [
                bound_SJ.masked_fill(last_SJ < count_S[:, None], -torch.inf).amax(1)
                for count_S in scored.count_SN.T
            ],
            dim=1,
        )
        return open_SN < scored.best_SN + MARGIN[self.rule]

    @abstractmethod
    def groups(self, head: Head) -> Groups:
        """Return the groups."""

    @abstractmethod
    def products(self, head: Head, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Return what no product of a group's rows with a state exceeds, float64 [S, J]."""


@CHECKS.register("certified")
@dataclass(frozen=True)
class Certified(Bounded):
    """By clusters of rows: h . w <= h . c + |h| r, centroid c and radius r (Cauchy-Schwarz).

    A cluster counts until all of its tokens are in the set. Clusters by k-means in the Euclidean
    metric, which makes radii small; on the built-in model they are still so wide that no step was
    proven with 8 192 candidates, the best ones included.

    Parameters
    ----------
    lists
        Clusters of the head's rows; at most the distinct ones.
    rule
        What has to be exact.
    """

    name: ClassVar[str] = "certified"
    lists: int = 512
    rule: Rule = "argmax"

    def groups(self, head: Head) -> Groups:
        """Return the clusters."""
        key = ("certified groups", self.lists)
        return head.memo.get(key, lambda: Groups.of(head, self._clusters(head).cluster_V))

    def products(self, head: Head, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Return the bound of each cluster."""
        clusters = self._clusters(head)
        mean_SJ = hidden_SE @ clusters.centroid_JE.double().T
        return mean_SJ.addcmul_(hidden_SE.norm(dim=1, keepdim=True), clusters.radius_J)

    def cost(self, view: View) -> Cost:
        """Return a product with the centroids; a radius, and a bias if any, beside each."""
        spec = view.head_spec
        num = min(self.lists, spec.num_rows)
        numbers = num * (spec.hidden_size + 1 + spec.has_bias)
        return Cost(macs=num * (spec.hidden_size + 1), bytes=numbers * view.bytes_per_number)

    def _clusters(self, head: Head) -> Clusters:
        key = ("certified clusters", self.lists)
        return head.memo.get(key, lambda: cluster_rows(head.weight_VE, self.lists, SEED))


@CHECKS.register("certified-lowrank")
@dataclass(frozen=True)
class CertifiedLowRank(Bounded):
    """By a low-rank copy of the head, token by token: h . w <= preview + |h'| |w'|.

    h' and w' are what the copy leaves of the state and of the row. Dearer than clusters,
    and paid for even where the estimator has taken the same preview.

    Parameters
    ----------
    rank
        Axes of the copy.
    rule
        What has to be exact.

    Notes
    -----
    The copy P and its axes A are rounded as a decoder would hold them. With R = W - P A^T and
    q = A^T h, h . w = P q + R (h - A q) + R A q whatever they are, so that the bound
    P q + |R| |h - A q| + |R A| |q| needs neither exact.
    """

    name: ClassVar[str] = "certified-lowrank"
    rank: int = 64
    rule: Rule = "argmax"

    def groups(self, head: Head) -> Groups:
        """Return each token as a group of its own."""
        tokens_V = torch.arange(head.spec.num_rows)
        return head.memo.get(("token groups",), lambda: Groups.of(head, tokens_V))

    def products(self, head: Head, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Return the bound of each token."""
        axes_ER, copy_VR = self._copy(head)
        length_V, leak = head.memo.get(("rest", self.rank), lambda: self._rest(head))
        short_SR = hidden_SE @ axes_ER
        apart_S1 = (hidden_SE - short_SR @ axes_ER.T).norm(dim=1, keepdim=True)
        leak_S1 = short_SR.norm(dim=1, keepdim=True) * leak
        preview_SV = short_SR @ copy_VR.T
        return preview_SV.addcmul_(apart_S1, length_V).add_(leak_S1)

    def cost(self, view: View) -> Cost:
        """Return products with the axes, there and back, and the copy; a length beside each row."""
        spec = view.head_spec
        rank = min(self.rank, spec.hidden_size)
        macs = rank * (2 * spec.hidden_size + spec.num_rows) + spec.num_rows
        numbers = rank * (spec.hidden_size + spec.num_rows) + spec.num_rows * (1 + spec.has_bias)
        return Cost(macs=macs, bytes=numbers * view.bytes_per_number)

    def _copy(self, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        copy = head.truncated(self.rank)
        return copy.axes_ER.cpu().double(), copy.weight_VR.cpu().double()

    def _rest(self, head: Head) -> tuple[torch.Tensor, float]:
        """Return the length of each row of R, and the longest row of R A."""
        axes_ER, copy_VR = self._copy(head)
        weight_VE = head.weight_VE.cpu()
        lengths, leak = [], 0.0
        for rows in row_blocks(weight_VE):
            rest_XE = weight_VE[rows].double() - copy_VR[rows] @ axes_ER.T
            lengths.append(rest_XE.norm(dim=1))
            leak = max(leak, float((rest_XE @ axes_ER).norm(dim=1).max()))
        return torch.cat(lengths), leak


def _ceiling(
    head: Head, groups: Groups, hidden_SE: torch.Tensor, product_SJ: torch.Tensor
) -> torch.Tensor:
    """Return what no logit of a group exceeds as the head computes it, float64 [S, J].

    A product of E float32 numbers, summed in any order, is off by at most E eps |h| |w| (Higham,
    Accuracy and Stability, section 3.1, with eps twice the unit roundoff); bias and result are
    rounded once each, in the weight's own type. Kernels are taken to sum in float32 at least, with
    at most two more roundings in the weight's type. Scale and soft-cap are four float32 operations
    of small relative error, for which 16 eps are plenty.
    """
    spec, own = head.spec, torch.finfo(head.weight_VE.dtype)
    relative = (spec.hidden_size + 2) * SINGLE.eps + 4 * max(own.eps, SINGLE.eps)
    length_S1 = hidden_SE.norm(dim=1, keepdim=True)
    slack_SJ = relative * (length_S1 * groups.length_J + groups.size_J)
    underflow = (spec.hidden_size + 2) * max(own.tiny, SINGLE.tiny)
    logit_SJ = head.capped(product_SJ + groups.bias_J + slack_SJ + underflow)
    return logit_SJ * (1 + 16 * SINGLE.eps * logit_SJ.sign()) + SINGLE.tiny


def _last_places(groups: Groups, scored: Scored) -> torch.Tensor:
    """Return where in the ranking the last token of each group stands, int64 [S, J].

    Pinned tokens stand before its first place; what it does not hold stands behind all.
    """
    num_steps, width = scored.ids_SK.shape
    num_rows = len(groups.group_V)
    slot_SK = torch.where(scored.ids_SK < 0, num_rows, scored.ids_SK)
    place_SV = torch.full((num_steps, num_rows + 1), width)
    place_SV.scatter_(1, slot_SK, torch.arange(width).expand(num_steps, -1))
    place_SV[:, scored.pinned_P] = -1
    last_SJ = torch.full((num_steps, len(groups.length_J)), -1)
    group_SV = groups.group_V.expand(num_steps, -1)
    return last_SJ.scatter_reduce_(1, group_SV, place_SV[:, :num_rows], "amax")
