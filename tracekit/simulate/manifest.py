"""What ``run.json`` says of a simulation: the trace, its sequences, the plan."""

from __future__ import annotations

import datetime as dt
import hashlib
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.simulate.calibration_cells import choose_calibrated

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.simulate.plan import Plan
    from tracekit.trace.reader import Trace


def make_manifest(trace: Trace, plan: Plan) -> dict[str, Any]:
    """Return the content of ``run.json``, before anything is computed."""
    starts = _starts(trace)
    means = _mean_entropy(trace, starts)
    needles, hashes = _needle_positions(trace), _token_hashes(trace)
    columns = (
        "sequence_id prompt_id domain num_tokens context_end prompt_end finish_reason text_source"
    )
    sequences = [
        {name: _json(row[name]) for name in columns.split()}
        | {"num_scored": int(row["num_tokens"] - starts[row["sequence_id"]])}
        | {"mean_entropy_nats": _json(means.get(row["sequence_id"], np.nan))}
        | {"prompt_sha256": _prompt_hash(row["prompt_text"])}
        | {"tokens_sha256": hashes[row["sequence_id"]]}
        | _needle(row, needles.get(row["sequence_id"]))
        for _, row in trace.sequences.iterrows()
    ]
    names = ("run_id", "created", "host", "versions")
    return {
        "schema_version": schema.RESULTS_VERSION,
        "tracekit_version": version("tracekit"),
        "versions": {name: version(name) for name in ("tracekit", "torch", "numpy", "pyarrow")},
        "command": sys.argv,
        "seed": plan.seed,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "trace": {
            "path": str(trace.path),
            "capture": trace.capture,
            "sampler": trace.manifest["settings"]["sampler"],
            "spec": trace.spec.to_json(),
            # Older traces do not say which tokenizer cut their text.
            "tokenizer": {"sha256": trace.manifest.get("tokenizer_sha256")},
            **{name: trace.manifest[name] for name in names},
        },
        "sequences": sequences,
        "plan": plan.to_json(),
        "calibrated": list(choose_calibrated(trace.sequences, plan.calibrate or 0, plan.seed)),
        "skipped": [],
        "failed": [],
        # What is read after a crash must not be taken for all that was asked for.
        "finished": False,
    }


def _starts(trace: Trace) -> pd.Series[float]:
    """Return the first position that counts, by sequence: after the prompt, or in its window."""
    frame = trace.sequences.set_index("sequence_id")
    starts: pd.Series[float] = frame["prompt_end"].fillna(frame["scored_from"])
    return starts


def _token_hashes(trace: Trace) -> dict[str, str]:
    """Return the SHA-256 of the token ids (little-endian int32) of each sequence."""
    tokens = trace.table("tokens", columns=["sequence_id", "token_id"])
    ids = tokens["token_id"].groupby(tokens["sequence_id"].astype(str), sort=False)
    return {
        str(name): hashlib.sha256(one.to_numpy(dtype="<i4").tobytes()).hexdigest()
        for name, one in ids
    }


def _prompt_hash(text: Any) -> str | None:
    """Return the SHA-256 of a prompt as the model read it; None where there is none."""
    if type(text) is not str:
        return None
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _mean_entropy(trace: Trace, starts: pd.Series[float]) -> dict[str, float]:
    """Return the mean entropy of the steps that count, by sequence."""
    steps = trace.table("steps", columns=["sequence_id", "position", "entropy_nats"])
    ids = steps["sequence_id"].astype(str)
    made = steps["position"].to_numpy() >= ids.map(starts).to_numpy()
    means = steps[made].groupby(ids[made])["entropy_nats"].mean()
    return {str(name): float(mean) for name, mean in means.items()}


def _needle_positions(trace: Trace) -> dict[str, int]:
    """Return the position of the first needle token, by sequence; none where none is marked."""
    tokens = trace.table("tokens", columns=["sequence_id", "position", "span"])
    marked = tokens[tokens["span"] == "needle"]
    first = marked.groupby(marked["sequence_id"].astype(str))["position"].min()
    return {str(name): int(position) for name, position in first.items()}


def _needle(row: pd.Series[Any], position: int | None) -> dict[str, Any]:
    """Return where the needle of a sequence lies: its position, and that over the haystack."""
    ends = [_json(row[name]) for name in ("context_end", "prompt_end", "num_tokens")]
    haystack = next(end for end in ends if end is not None)
    depth = None if position is None else position / haystack
    return {"needle_position": position, "needle_depth_frac": depth}


def _json(value: Any) -> Any:
    """Return a plain value, missing numbers as None."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    return value.item() if isinstance(value, np.generic) else value
