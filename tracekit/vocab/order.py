"""Rankings put in order: what is no token, or comes again, is passed over."""

from __future__ import annotations

import torch


def packed(ids_SK: torch.Tensor, keeps_SK: torch.Tensor) -> torch.Tensor:
    """Return the kept ids of each row in their order, -1 behind them, int64 [S, K]."""
    width = ids_SK.shape[1]
    # Each kept id moves left by the dropped ones before it; the rest lands in a column cut off.
    place_SK = (keeps_SK.cumsum(1) - 1).masked_fill(~keeps_SK, width)
    kept_SK = ids_SK.new_full((len(ids_SK), width + 1), -1)
    return kept_SK.scatter_(1, place_SK, ids_SK)[:, :width]


def first_of_each(ids_SK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return each row with every token at its first place alone, -1 behind them.

    Parameters
    ----------
    ids_SK
        Ids below ``num_rows``, int64 [S, K]; -1 is no token.
    num_rows
        V.
    """
    place_K = torch.arange(ids_SK.shape[1]).expand_as(ids_SK)
    slot_SK = torch.where(ids_SK < 0, num_rows, ids_SK)
    first_SV = torch.full((len(ids_SK), num_rows + 1), ids_SK.shape[1])
    first_SV.scatter_reduce_(1, slot_SK, place_K, "amin")
    return packed(ids_SK, (first_SV.gather(1, slot_SK) == place_K) & (ids_SK >= 0))


def opened(
    order_SJ: torch.Tensor, size_J: torch.Tensor, members_V: torch.Tensor, limit: int
) -> torch.Tensor:
    """Return the members of lists, the lists one after the other, int64 [S, limit].

    Parameters
    ----------
    order_SJ
        Lists of each step, best first.
    size_J
        Members of each list.
    members_V
        All members, list by list.
    limit
        How many are wanted, at most V.
    """
    end_SJ = size_J[order_SJ].cumsum(1)
    slot_SK = torch.arange(limit).repeat(len(order_SJ), 1)
    # What leads from a place in the ranking to a place among all members is one number a list.
    start_J = size_J.cumsum(0) - size_J
    shift_SJ = start_J[order_SJ] - (end_SJ - size_J[order_SJ])
    list_SK = torch.searchsorted(end_SJ, slot_SK, right=True)
    return members_V[slot_SK + shift_SJ.gather(1, list_SK)]
