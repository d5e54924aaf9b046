"""A results folder of believable numbers from a seeded generator, through the schema's tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tracekit.schema import (
    ALL,
    ANY,
    KV_RESULTS,
    RESULTS_VERSION,
    SHOWN,
    SUMMARY,
    TIMINGS,
    VOCAB_RESULTS,
    Table,
)
from tracekit.spec import HeadSpec, LayerSpec, ModelSpec, RopeSpec

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 30
DOMAINS = ("story", "code", "translation", "dialogue", "summary", "arithmetic", "retrieval")
KEPT = (0.1, 0.25, 0.5, 0.75)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
# Error at half the cache, schedule.
POLICIES = {
    "h2o": (0.09, "every=16,from=prompt"),
    "knorm": (0.31, "at=prompt"),
    "random": (0.55, "at=prompt"),
    "snapkv": (0.06, "at=prompt"),
    "streaming": (0.24, "every=1,from=prompt"),
}
# Share of misses at 1024 candidates, bytes read beside those of the candidates.
ESTIMATORS = {
    "frequency": (0.16, 0.0),
    "lowrank": (0.012, 0.12),
    "oracle": (0.0, 1.0),
    "previous": (0.07, 0.0),
}
KV_MEASURES = (
    "output_error",
    "output_cosine",
    "mass_kept",
    "kept_frac",
    "kv_bytes",
    "full_kv_bytes",
)
VOCAB_MEASURES = (
    "hit_chosen",
    "hit_argmax",
    "mass",
    "neg_log_mass_nats",
    "cost_frac",
    "nll_backoff",
    "set_size_mean",
)
HOSTILE = (
    "<script>alert(1)</script>",
    "\u202eright to left",
    '" onmouseover="alert(2)',
    "$$x^2$$",
    "\x00\x07",
    "\u4f60\u597d",
    "</div>",
    "x" * 200,
    "{{ 7 * 7 }}",
    "http://example.org/a.js",
    "<!-- <script>",
    "]]>",
    "</script></style></title>",
    "\U0001f469\u200d",  # An emoji of two people, cut in the middle.
    "\u200d\U0001f680",
    "\u0301",
    "e\u0301\u0327",
    "\u200b",
)
WORDS = (
    "",
    *[
        "The",
        "river",
        "ran",
        "low",
        ",",
        "and",
        "nobody",
        "in",
        "the",
        "village",
        "could",
        "say",
        "why",
        "it",
        "had",
        "changed",
    ],
)


def spec() -> ModelSpec:
    """Return the spec of a model shaped like SmolLM2-135M."""
    layers = tuple(
        LayerSpec(
            index=number,
            kind="full",
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            value_dim=64,
            scale=0.125,
            rope="default",
        )
        for number in range(LAYERS)
    )
    return ModelSpec(
        name="smollm2-135m",
        revision=None,
        model_type="llama",
        fingerprint="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        dtype="float32",
        layers=layers,
        head=HeadSpec(num_rows=49_152, hidden_size=576, is_tied=True),
        ropes={"default": RopeSpec(kind="default", theta=1e5, inv_freq=(1.0, 0.1))},
        num_tokens=49_152,
        max_positions=8_192,
        attention="sdpa",
    )


def make_results(
    folder: Path,
    *,
    seed: int = 0,
    num_sequences: int = 16,
    questions: tuple[str, ...] = ("kv", "vocab"),
    hostile: tuple[str, ...] = (),
    run: dict[str, Any] | None = None,
) -> Path:
    """Write a results folder.

    Parameters
    ----------
    folder
        New folder.
    seed, num_sequences
        Of the generator.
    questions
        Which of ``kv`` and ``vocab`` have results.
    hostile
        Texts that become tokens, candidates, a domain and reasons of failure.
    run
        Entries of ``run.json`` that replace the usual ones.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    domains = (*DOMAINS, *hostile[:2])
    sequences = [_sequence(rng, number, domains) for number in range(num_sequences)]
    (folder / "run.json").write_text(
        json.dumps(_run(sequences, questions, hostile) | (run or {}), indent=1), encoding="utf-8"
    )
    summary = []
    if "kv" in questions:
        kv = pd.DataFrame([row for seq in sequences for row in _kv_rows(rng, seq)])
        write_table(folder, KV_RESULTS, kv)
        whole = kv[kv["layer"] == ALL].assign(
            name=lambda f: f["policy"], x=lambda f: f["kept_frac"]
        )
        summary += _summaries(rng, "kv", whole.assign(target=whole["target_frac"]), KV_MEASURES)
    if "vocab" in questions:
        vocab = pd.DataFrame([row for seq in sequences for row in _vocab_rows(rng, seq)])
        write_table(folder, VOCAB_RESULTS, vocab)
        frame = vocab.assign(family=vocab["estimator"], name=vocab["estimator"], level="local")
        frame = frame.assign(x=frame["size"], target=frame["size"], num_evicted=1)
        summary += _summaries(rng, "vocab", frame, VOCAB_MEASURES)
    write_table(folder, SUMMARY, pd.DataFrame(summary, columns=[c.name for c in SUMMARY.columns]))
    write_table(folder, TIMINGS, _timings(rng, sequences))
    write_table(folder, SHOWN, _shown(rng, sequences[:3], hostile))
    return folder


def write_table(folder: Path, table: Table, frame: pd.DataFrame) -> None:
    """Write a frame as one table of a results folder."""
    columns = {str(name): frame[name].to_list() for name in frame.columns}
    pq.write_table(table.build(len(frame), columns), folder / f"{table.name}.parquet")


def _sequence(rng: np.random.Generator, number: int, domains: tuple[str, ...]) -> dict[str, Any]:
    prompt_end = int(rng.integers(60, 700))
    domain = domains[number % len(domains)]
    return {
        "sequence_id": f"{domain}-{number:02d}#0",
        "prompt_id": f"{domain}-{number:02d}",
        "domain": domain,
        "num_tokens": prompt_end + 64,
        "context_end": prompt_end - 20 if number % 3 == 0 else None,
        "prompt_end": prompt_end,
        "num_scored": 64,
        "finish_reason": "eos" if number % 4 == 0 else "length",
        "text_source": "generated",
        "mean_entropy_nats": float(rng.uniform(0.6, 2.2)),
        "prompt_sha256": f"prompt of {domain}-{number:02d}",
        "tokens_sha256": f"tokens of {domain}-{number:02d}#0",
    }


def _run(
    sequences: list[dict[str, Any]], questions: tuple[str, ...], hostile: tuple[str, ...]
) -> dict[str, Any]:
    first = sequences[0]["sequence_id"]
    return {
        "schema_version": RESULTS_VERSION,
        "tracekit_version": "0.1.0",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"},
        "command": ["tracekit", "simulate", "demo-trace", "-o", "demo-results"],
        "seed": 0,
        "created": "2026-11-29T15:40:00+00:00",
        "trace": {
            "path": "demo-trace",
            "run_id": "0f3c9a1b",
            "created": "2026-11-29T15:20:00+00:00",
            "capture": "qkv",
            "sampler": {"do_sample": False, "max_new_tokens": 64},
            "host": {"system": "Linux", "cpus": 2, "device": "cpu"},
            "spec": spec().to_json(),
        },
        "sequences": sequences,
        "plan": {
            "kv": list(POLICIES) if "kv" in questions else [],
            "vocab": list(ESTIMATORS) if "vocab" in questions else [],
            "kept": list(KEPT),
            "sizes": list(SIZES),
            "levels": ["local"],
            "kv_bytes": 2,
        },
        "skipped": [
            {"what": "h2o:kept=0.75", "sequence_id": first, "why": "nothing to evict: 60 tokens"}
        ],
        "failed": [{"cell": f"lowrank:size=256 {text}", "why": text} for text in hostile[:4]],
    }


def _kv_rows(rng: np.random.Generator, sequence: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one sequence: all layers together, and each layer."""
    rows = []
    depth_L = 0.6 + 0.8 * np.sin(np.linspace(0.2, 2.9, LAYERS))
    difficulty = rng.lognormal(0, 0.25)
    for family, (half_error, schedule) in POLICIES.items():
        for target in KEPT:
            prompt_share = (sequence["prompt_end"] - 1) / sequence["num_tokens"]
            kept = 1 - (1 - target) * prompt_share
            error = min(
                1.1, half_error * difficulty * ((1 - kept) / 0.5) ** 0.9 * (0.5 / kept) ** 0.4
            )
            error_L = error * depth_L * rng.lognormal(0, 0.2, LAYERS)
            common = _kv_cell(sequence, family, schedule, target, kept)
            for layer in (ALL, *range(LAYERS)):
                value = float(error_L.mean() if layer == ALL else error_L[layer])
                # Streaming keeps all of a short text in the first two layers: nothing to average.
                idle = family == "streaming" and layer in (0, 1)
                rows.append(
                    common
                    | {
                        "layer": layer,
                        "num_evicted": 0 if idle else int(1000 * (1 - kept)),
                        "output_error": value,
                        "output_cosine": max(0.0, 1 - value**2 / 2),
                        "mass_kept": max(0.0, 1 - 0.8 * value),
                    }
                )
    return rows


def _kv_cell(
    sequence: dict[str, Any], family: str, schedule: str, target: float, kept: float
) -> dict[str, Any]:
    """Return what all rows of a policy on a sequence share."""
    full_bytes = spec().kv_bytes(sequence["num_tokens"] - 32)
    return {
        "sequence_id": sequence["sequence_id"],
        "domain": sequence["domain"],
        "policy": f"{family}:kept={target:g}",
        "family": family,
        "level": "local",
        "causal": True,
        "selects": False,
        "steps": ANY,
        "is_idle": False,
        "evict_at": schedule,
        "query_aware": True,
        "kv_head": ALL,
        "bucket": "0-1024",
        "target_frac": target,
        "kept_frac": kept,
        "full_kv_bytes": float(full_bytes),
        "kv_bytes": kept * full_bytes,
        "is_clipped": False,
        "num_scored": 63,
    }


def _vocab_rows(rng: np.random.Generator, sequence: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for estimator, (misses, extra) in ESTIMATORS.items():
        luck = rng.lognormal(0, 0.2)
        for size in SIZES:
            miss = min(0.9, misses * luck * (1024 / size) ** 0.7)
            rows.append(
                {
                    "sequence_id": sequence["sequence_id"],
                    "domain": sequence["domain"],
                    "estimator": estimator,
                    "controller": "fixed",
                    "size": size,
                    "bucket": "0-1024",
                    "hit_chosen": 1 - 1.1 * miss,
                    "hit_argmax": 1 - miss,
                    "mass": 1 - 0.9 * miss - 30 / size**1.3,
                    "neg_log_mass_nats": miss + 0.01,
                    "set_size_mean": size + 270.0,
                    "cost_frac": (size + 270) / 49_152 + extra,
                    "macs_frac": (size + 270) / 49_152 + extra,
                    "nll_full": 1.4,
                    "nll_backoff": 1.4 + 2 * miss,
                    "num_scored": 63,
                }
            )
    return rows


def _summaries(
    rng: np.random.Generator, question: str, frame: pd.DataFrame, measures: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the rows of the summary, for all sequences and by domain."""
    rows = []
    by_domain = [(ANY, frame), *((str(d), part) for d, part in frame.groupby("domain"))]
    for domain, part in by_domain:
        for (family, name, target), cell in part.groupby(["family", "name", "target"]):
            for measure in measures:
                mean, low, high = _interval(rng, cell[measure].to_numpy(dtype=float))
                rows.append(
                    {
                        "question": question,
                        "family": family,
                        "name": name,
                        "level": "local",
                        "domain": domain,
                        "bucket": ANY,
                        "causal": family != "oracle",
                        "x_name": "kept_frac" if question == "kv" else "size",
                        "x": float(cell["x"].mean()),
                        "target": float(str(target)),
                        "measure": measure,
                        "mean": mean,
                        "low": low,
                        "high": high,
                        "n": len(cell),
                        "num_excluded": 1 if question == "kv" and target == 0.75 else 0,
                    }
                )
    return rows


def _interval(rng: np.random.Generator, values: np.ndarray[Any, Any]) -> tuple[float, Any, Any]:
    if len(values) < 3:
        return float(values.mean()), None, None
    means = rng.choice(values, (200, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _timings(rng: np.random.Generator, sequences: list[dict[str, Any]]) -> pd.DataFrame:
    rows = [
        {
            "what": f"kv {family}",
            "sequence_id": sequence["sequence_id"],
            "num_cells": len(KEPT),
            "wall_s": float(rng.uniform(0.1, 0.9)),
        }
        for sequence in sequences
        for family in POLICIES
    ]
    return pd.DataFrame(rows)


def _shown(
    rng: np.random.Generator, sequences: list[dict[str, Any]], hostile: tuple[str, ...]
) -> pd.DataFrame:
    """Return tokens with entropies of a heavy-tailed mix, hostile ones first."""
    rows = []
    for sequence in sequences:
        words = [*hostile, *(f" {WORDS[int(i)]}" for i in rng.integers(0, len(WORDS), 300))]
        words[len(hostile) + 40 : len(hostile) + 43] = [r"\n", "\n\n", "\t"]
        words[len(hostile) + 50] = "   "
        for position, text in enumerate(words[: sequence["num_tokens"]]):
            entropy = float(rng.gamma(0.6, 1.8))
            probs = np.sort(rng.dirichlet(np.full(8, 0.4)))[::-1]
            rows.append(
                {
                    "sequence_id": sequence["sequence_id"],
                    "position": position,
                    "text": text,
                    "is_generated": position >= 150,
                    "role": "assistant" if position >= 150 else "user",
                    "entropy_nats": entropy if position else None,
                    "surprisal_nats": entropy * 1.1 if position else None,
                    "rank": int(rng.integers(0, 5)) if position else None,
                    "top_texts": [*hostile[:2], *WORDS[1:9]][:8] if position else None,
                    "top_probs": probs.tolist() if position else None,
                }
            )
    return pd.DataFrame(rows)
