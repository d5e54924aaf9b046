"""The scored steps of a policy that was run inside the model, as rows of ``schema.LOGITS``."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema

if TYPE_CHECKING:
    import pyarrow as pa

    from tracekit.kv.policy import Policy
    from tracekit.measure.token_rows import NextToken
    from tracekit.simulate.rerun import Rerun


def logit_rows(rerun: Rerun, policy: Policy, steps: NextToken, point: int) -> pa.Table:
    """Return a row for each scored step.

    Parameters
    ----------
    rerun
        The sequence.
    policy
        What was run.
    steps
        What its last rows gave, in order.
    point
        The eviction point.
    """
    recorded, num_steps = rerun.recorded, len(steps)
    position_R = np.arange(rerun.run.num_rows - num_steps, rerun.run.num_rows) + 1
    target_R = rerun.target_T[position_R - 1].cpu().numpy()
    needle_ids = rerun.target_T[recorded.needle_T[recorded.needle_T > 0] - 1].cpu().numpy()
    columns = {
        "sequence_id": recorded.sequence_id,
        "domain": recorded.row["domain"],
        "policy": policy.text,
        "family": policy.family,
        "position": position_R,
        "distance": position_R - point,
        "is_given": recorded.row["text_source"] == "given",
        "is_answer": np.isin(position_R, recorded.answer_T),
        "is_needle": np.isin(target_R, needle_ids),
    }
    columns |= {field.name: getattr(steps, field.name) for field in fields(steps)}
    return schema.LOGITS.build(num_steps, columns)
