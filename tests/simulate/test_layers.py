"""Layer results of recorded sequences, and their summary, against plain loops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests import tiny
from tracekit import schema
from tracekit.cli.layers import layers_text
from tracekit.errors import ModelError
from tracekit.live.layer_rule import parse_rule
from tracekit.live.one_layer import sweep_layers
from tracekit.model.load import LoadedModel, load_model
from tracekit.simulate.layers import sweep_sequence
from tracekit.simulate.rerun import rerun
from tracekit.simulate.sensitivity import summarise_layers
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

RULES = [parse_rule(text) for text in ("rows:0.2", "h2o:kept=0.3,every=4", "snapkv:kept=0.3")]


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return load_model(str(model_folder))


@pytest.fixture(scope="module")
def trace(trace_folder: Path) -> Trace:
    return Trace(trace_folder)


@pytest.fixture(scope="module")
def rows(trace: Trace, loaded: LoadedModel) -> pd.DataFrame:
    parts = [
        sweep_sequence(trace, loaded, row, RULES, heads=True, seed=1).to_pandas()
        for _, row in trace.sequences.iterrows()
    ]
    return pd.concat(parts, ignore_index=True)


def test_every_layer_and_head_has_a_row_for_each_rule(rows: pd.DataFrame, trace: Trace) -> None:
    places = {(layer, head) for layer in range(4) for head in (schema.ALL, 0, 1)}
    for (_, _), cells in rows.groupby(["sequence_id", "rule"], observed=True):
        assert set(zip(cells["layer"], cells["kv_head"], strict=True)) == places
    assert set(rows["sequence_id"]) == set(trace.sequence_ids)
    assert set(rows["rule"]) == {rule.text for rule in RULES}
    assert (rows["level"] == "propagated").all()


def test_kl_and_surprisal_are_those_of_the_logits(
    rows: pd.DataFrame, trace: Trace, loaded: LoadedModel
) -> None:
    sequence = trace.sequences.iloc[2]
    again = rerun(trace, loaded, sequence, seed=0)
    assert again is not None
    point = RULES[0].point(again.setting.spans)
    assert point is not None
    ids = [int(again.run.ids_1T[0, 0]), *again.target_T.tolist()]
    head = loaded.model.get_output_embeddings()
    full_TV = head(again.run.hidden_TE).double().log_softmax(-1)
    own = rows[rows["sequence_id"] == sequence["sequence_id"]]
    for swept in sweep_layers(again.run, RULES, again.setting, heads=False):
        pruned_RV = head(swept.hidden_RE).double().log_softmax(-1)
        kl, nll, same = [], [], []
        for at, logq_V in enumerate(pruned_RV):
            logp_V = full_TV[point + at]
            kl.append(float((logp_V.exp() * (logp_V - logq_V)).sum()))
            nll.append(-float(logq_V[ids[point + at + 1]]))
            same.append(int(logp_V.argmax()) == int(logq_V.argmax()))
        row = own[
            (own["rule"] == swept.rule.text)
            & (own["layer"] == swept.layer)
            & (own["kv_head"] == schema.ALL)
        ].iloc[0]
        assert row["num_scored"] == len(ids) - 1 - point
        assert row["kl_nats"] == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-9)
        assert row["nll_pruned"] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
        assert row["same_top_frac"] == sum(same) / len(same)


def test_what_does_not_apply_is_null(rows: pd.DataFrame) -> None:
    is_rows = rows["rule"] == RULES[0].text
    assert rows.loc[is_rows, ["kept_frac", "target_frac"]].isna().all(axis=None)
    assert rows.loc[~is_rows, "dropped_entries_frac"].isna().all()
    assert rows.loc[is_rows, "dropped_entries_frac"].between(0.1, 0.2).all()
    assert rows.loc[~is_rows, "kept_frac"].between(0.2, 1).all()
    assert np.allclose(rows.loc[~is_rows, "target_frac"], 0.3)
    assert rows["kl_predicted_nats"].isna().all()
    assert not rows["is_idle"].any()
    assert rows["noise_kl_nats"].between(0, 1e-9).all()


def test_a_rule_that_finds_nothing_to_drop_is_idle(trace: Trace, loaded: LoadedModel) -> None:
    rules = [parse_rule("rows:0.001"), parse_rule("h2o:kept=4000tok,every=1")]
    found = sweep_sequence(
        trace, loaded, trace.sequences.iloc[0], rules, heads=False, seed=0
    ).to_pandas()
    assert found["is_idle"].all()
    assert (found["kl_nats"] < 1e-9).all()
    summary = pd.DataFrame(summarise_layers(found, seed=0))
    assert summary["kl_nats"].isna().all()
    assert (summary["num_excluded"] == 1).all()
    assert summary["rank"].isna().all()


def test_rows_that_the_window_before_has_scored_do_not_count(
    trace: Trace, loaded: LoadedModel
) -> None:
    sequence = trace.sequences.iloc[0].copy()
    last = int(sequence["num_tokens"]) - 2
    sequence["scored_from"] = last
    found = sweep_sequence(trace, loaded, sequence, RULES, heads=False, seed=0).to_pandas()
    assert (found["num_scored"] == 2).all()
    sequence["scored_from"] = last + 5
    assert not sweep_sequence(trace, loaded, sequence, RULES, heads=False, seed=0).num_rows


def test_a_rule_whose_point_is_not_there_has_no_rows(trace: Trace, loaded: LoadedModel) -> None:
    rules = [parse_rule("rows:0.2,at=4000"), parse_rule("rows:0.2")]
    table = sweep_sequence(trace, loaded, trace.sequences.iloc[0], rules, heads=False, seed=0)
    assert set(table["rule"].to_pylist()) == {rules[1].text}


def test_another_model_is_refused(trace: Trace, tmp_path: Path) -> None:
    tiny.model(seed=5).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    other = load_model(str(tmp_path))
    with pytest.raises(ModelError, match="is not the model of the trace"):
        sweep_sequence(trace, other, trace.sequences.iloc[0], RULES, heads=False, seed=0)


def made(kl_SL: np.ndarray, *, noise: float = 0.0) -> pd.DataFrame:
    """Return layer results of one rule with the KL given."""
    return pd.DataFrame(
        [
            {
                "sequence_id": f"s{s}",
                "rule": "rows:0.03,at=prompt",
                "layer": layer,
                "kv_head": schema.ALL,
                "level": "propagated",
                "is_idle": False,
                "nll_full": 2.0,
                "nll_pruned": 2.0 + kl,
                "kl_nats": kl,
                "noise_kl_nats": noise,
            }
            for s, kl_L in enumerate(kl_SL)
            for layer, kl in enumerate(kl_L)
        ]
    )


def test_the_summary_is_the_mean_share_and_place_of_each_layer() -> None:
    kl_SL = np.random.default_rng(0).gamma(2.0, size=(5, 6))
    kl_SL[:, 2] += 9
    summary = pd.DataFrame(summarise_layers(made(kl_SL), seed=3))
    means = [sum(column) / 5 for column in kl_SL.T]
    for layer, row in summary.iterrows():
        assert row["layer"] == layer
        assert row["kl_nats"] == pytest.approx(means[layer])
        assert row["nll_change"] == pytest.approx(means[layer])
        assert row["share"] == pytest.approx(means[layer] / sum(means))
        assert row["rank"] == 1 + sum(one > means[layer] for one in means)
        assert row["low"] <= row["kl_nats"] <= row["high"]
    assert summary["is_protected"].tolist() == [False, False, True, False, False, False]


def test_texts_that_differ_in_all_layers_at_once_hide_no_layer() -> None:
    kl_SL = np.geomspace(0.01, 10, 8)[:, None] * np.array([1.0, 1.0, 1.3, 1.0])
    assert pd.DataFrame(summarise_layers(made(kl_SL), seed=3))["is_protected"].tolist() == [
        False, False, True, False,
    ]  # fmt: skip


def test_nothing_is_claimed_of_two_sequences_nor_below_rounding() -> None:
    kl_SL = np.array([[1.0, 9.0], [1.0, 8.0]])
    summary = pd.DataFrame(summarise_layers(made(kl_SL), seed=0))
    assert summary["is_protected"].isna().all()
    assert summary["low"].isna().all()
    three = np.vstack([kl_SL, [2.0, 9.0]])
    assert pd.DataFrame(summarise_layers(made(three), seed=0))["is_protected"].tolist() == [
        False, True,
    ]  # fmt: skip
    assert not any(summarise_layers(made(three, noise=20.0), seed=0)["is_protected"])


def test_the_map_fits_a_terminal(rows: pd.DataFrame) -> None:
    summary = summarise_layers(rows, seed=0)
    text = layers_text(summary)
    assert max(map(len, text.splitlines())) <= 100
    for rule in RULES:
        assert rule.text in "".join(text.split())
    assert "propagated" in text
    assert "KV head" in text
    assert layers_text(summary, "A gain.") == f"{text}\n\nA gain."


def test_the_summary_is_a_table_of_the_schema(rows: pd.DataFrame) -> None:
    columns: dict[str, Any] = summarise_layers(rows, seed=0)
    table = schema.LAYER_SUMMARY.build(len(columns["layer"]), columns)
    assert table.schema.equals(schema.LAYER_SUMMARY.schema)
    assert table.num_rows == 3 * 4 * 3
    shares = table.to_pandas()
    of_layers = shares[shares["kv_head"] == schema.ALL].groupby("rule", observed=True)["share"]
    assert all(math.isclose(one, 1) for one in of_layers.sum())
    assert torch.tensor(shares["rank"].to_numpy()).min() == 1
