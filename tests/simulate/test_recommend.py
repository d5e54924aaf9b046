"""Recommended kept fractions of made-up sequences of two layers."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest

from tests import oracles_attention
from tests.simulate.test_attention import make_layer, make_sequence, make_trace
from tracekit import schema
from tracekit.errors import UsageError
from tracekit.measure.attention_shape import MASS_PERCENT
from tracekit.simulate.attention import ROW_QUANTILE, attention_rows
from tracekit.simulate.recommend import recommend


def sequences(num: int, seed: int = 0) -> pd.DataFrame:
    """Return the rows of some made-up sequences of two layers."""
    layers = [make_layer(0, scale=0.2), make_layer(1, scale=3.0)]
    frames = []
    for at in range(num):
        sequence = make_sequence(90 + at, prompt_end=70)
        sequence["sequence_id"] = f"one#{at}"
        table = attention_rows(make_trace(layers, 90 + at, seed + at), sequence)
        frames.append(table.to_pandas())
    joined: pd.DataFrame = pd.concat(frames, ignore_index=True)
    return joined


def test_a_layer_that_looks_at_few_keys_is_recommended_to_keep_fewer() -> None:
    rows = sequences(4)
    found = recommend(rows, seed=0)
    table = schema.RECOMMENDED.build(len(found["layer"]), found).to_pandas()
    assert table["layer"].tolist() == [0, 1]
    assert table["kept_frac"][1] < table["kept_frac"][0] <= 1
    assert (table["n"] == 4).all()
    assert (table["low"] <= table["kept_frac"] + 1e-6).all()
    assert (table["kept_frac"] <= table["high"] + 1e-6).all()
    assert (table["oracle_frac"] <= table["mean_frac"]).all()
    assert (table["head_mean_frac"] <= table["head_max_frac"]).all()
    assert table["next_layer_jaccard"].isna().tolist() == [False, True]
    for layer, cells in rows[rows["kv_head"] == schema.ALL].groupby("layer"):
        expected = oracles_attention.quantile(cells["needed_frac_95"].tolist(), ROW_QUANTILE)
        assert found["kept_frac"][int(str(layer))] == pytest.approx(expected)
        assert found["num_scored"][int(str(layer))] == sum(20 + at for at in range(4))


def test_more_mass_asks_for_more_keys_and_the_seed_fixes_the_interval() -> None:
    rows = sequences(4)
    by_mass = [recommend(rows, seed=0, mass_percent=percent) for percent in MASS_PERCENT]
    for less, more in pairwise(by_mass):
        assert all(a <= b for a, b in zip(less["kept_frac"], more["kept_frac"], strict=True))
    one, other = (schema.RECOMMENDED.build(2, recommend(rows, seed=3)) for _ in range(2))
    assert one.equals(other)


def test_two_sequences_have_no_interval() -> None:
    found = recommend(sequences(2), seed=0)
    assert found["low"] == found["high"] == [None, None]
    assert found["n"] == [2, 2]


def test_a_mass_that_was_not_counted_and_mixed_quantiles_are_refused() -> None:
    rows = sequences(1)
    with pytest.raises(UsageError, match="no keys were counted for 80 %"):
        recommend(rows, seed=0, mass_percent=80)
    mixed = pd.concat([rows, rows.assign(row_quantile=0.5)])
    with pytest.raises(UsageError, match="measure all at one"):
        recommend(mixed, seed=0)
