"""Budgets fitted from the KL of layers, against brute force; files that the engine reads."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit import schema
from tracekit.errors import UsageError
from tracekit.kv.allotment import Allotment
from tracekit.kv.amounts import Frac
from tracekit.kv.budget import Cache
from tracekit.kv.parse import parse
from tracekit.kv.plan import make_shares
from tracekit.kv.replay import Setting
from tracekit.kv.schedule import Spans
from tracekit.live.layer_rule import parse_rule
from tracekit.measure.stats import Interval
from tracekit.model.load import load_model
from tracekit.simulate import held_out
from tracekit.simulate.fit_budget import Fit, allocate, at, fit_budget, hull, write_budget
from tracekit.simulate.held_out import Gain, fit_and_try, split
from tracekit.simulate.layers import sweep_sequence
from tracekit.simulate.rerun import rerun
from tracekit.spec import LayerSpec
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

FRACTIONS = (0.25, 0.5)


def layer(index: int, *, heads: int = 2, size: int = 8) -> LayerSpec:
    return LayerSpec(
        index=index, kind="full", num_heads=heads, num_kv_heads=heads, head_dim=size, value_dim=size
    )


def rows_of(kl_LF: Any, *, fractions: Any = FRACTIONS, sequences: int = 1) -> pd.DataFrame:
    """Return layer results of ``snapkv`` with the KL given, by layer and fraction."""
    return pd.DataFrame(
        [
            {
                "sequence_id": f"s{s}",
                "rule": parse(f"snapkv:kept={frac}").text,
                "layer": number,
                "kv_head": schema.ALL,
                "kl_nats": float(kl),
            }
            for s in range(sequences)
            for number, kl_F in enumerate(kl_LF)
            for frac, kl in zip(fractions, kl_F, strict=True)
        ]
    )


@given(
    kl_LF=st.lists(
        st.tuples(*[st.integers(0, 50)] * 3).map(lambda one: sorted(one, reverse=True)),
        min_size=1,
        max_size=3,
    ),
    eighths=st.integers(1, 8),
)
def test_the_allocation_is_the_best_of_all_on_a_grid(kl_LF: list[list[int]], eighths: int) -> None:
    """Fractions in eighths; all layers weigh the same: some best point of the hulls is on it."""
    fractions = (0.125, 0.375, 0.625)
    curves = {
        number: hull([*zip(fractions, map(float, kl_F), strict=True), (1.0, 0.0)])
        for number, kl_F in enumerate(kl_LF)
    }
    given_by = allocate(curves, dict.fromkeys(curves, 16), eighths / 8)
    assert sum(given_by.values()) == pytest.approx(len(curves) * eighths / 8)
    total = sum(at(curves[number], frac) for number, frac in given_by.items())
    grid = [eighth / 8 for eighth in range(1, 9)]
    best = min(
        sum(at(curves[number], frac) for number, frac in enumerate(some))
        for some in itertools.product(grid, repeat=len(curves))
        if sum(some) == len(curves) * eighths / 8
    )
    assert total <= best + 1e-9
    assert total == pytest.approx(best, abs=1e-9)


@given(
    points=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 30)),
        min_size=1,
        max_size=6,
        unique_by=lambda one: one[0],
    )
)
def test_a_hull_is_the_highest_convex_line_below_the_points(
    points: list[tuple[int, int]],
) -> None:
    points = [*points, (10, 0)]
    curve = hull([(float(x), float(y)) for x, y in points])
    assert curve[0][0] == min(x for x, _ in points)
    assert curve[-1] == (10.0, 0.0)
    for x, y in points:
        chords = [
            y0 + (y1 - y0) * (x - x0) / (x1 - x0)
            for (x0, y0), (x1, y1) in itertools.combinations(sorted(points), 2)
            if x0 <= x <= x1
        ]
        assert at(curve, x) == pytest.approx(min([y, *chords]), abs=1e-9)


@settings(max_examples=30)
@given(
    kl_LF=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=3, max_size=3),
    kept=st.sampled_from([0.25, 0.3, 0.5, 0.8, 1.0]),
)
def test_a_fit_weighs_what_uniform_weighs(kl_LF: Any, kept: float) -> None:
    layers = (layer(0), layer(1, heads=4), layer(2, size=24))
    cache = Cache(layers)
    fit = fit_budget(rows_of(kl_LF), cache, kept_frac=kept)
    weight = [
        one.num_kv_heads * size for one, size in zip(layers, cache.entry_bytes_L, strict=True)
    ]
    held = sum(fit.kept_frac_by_layer[number] * weight[number] for number in range(3))
    assert held == pytest.approx(kept * sum(weight))
    assert all(0.25 <= frac <= 1 + 1e-9 for frac in fit.kept_frac_by_layer.values())
    assert fit.kl_nats <= fit.uniform_kl_nats + 1e-9
    assert fit.policy == parse(f"snapkv:kept={kept}")


def test_the_layer_that_suffers_gets_the_bytes() -> None:
    cache = Cache((layer(0), layer(1)))
    fit = fit_budget(rows_of([[9.0, 0.1], [0.3, 0.1]]), cache, kept_frac=0.375)
    assert fit.kept_frac_by_layer == {0: 0.5, 1: 0.25}
    assert fit.kl_nats == pytest.approx(0.4)
    assert fit.uniform_kl_nats == pytest.approx((9.1 + 0.4) / 2)


def test_a_policy_reads_the_file_and_gets_the_same_bytes(tmp_path: Path) -> None:
    cache = Cache((layer(0), layer(1)))
    fit = fit_budget(rows_of([[9.0, 0.1], [0.3, 0.1]]), cache, kept_frac=0.375)
    policy = write_budget(fit, tmp_path / "b.json", cache, {"seed": 4})
    assert parse(policy.text) == policy
    setting = Setting(layers=(), cache=cache, spans=Spans(num_tokens=101, prompt_end=80), seed=0)
    shares = make_shares((policy,), [], setting)
    assert shares is not None
    entries_1LG = Allotment(cache, [Frac(0.375)], shares).entries(80, [0, 1])
    assert torch.equal(entries_1LG, torch.tensor([[[40, 40], [20, 20]]]))
    about = json.loads((tmp_path / "b.about.json").read_text())
    assert about["policy"] == policy.text
    assert about["sha256"] == policy.layers.content
    assert about["seed"] == 4


@pytest.mark.parametrize("name", ["b.tsv", "a,b.json", "a+b.json"])
def test_a_name_that_no_policy_can_read_is_refused(name: str, tmp_path: Path) -> None:
    cache = Cache((layer(0),))
    fit = fit_budget(rows_of([[1.0, 0.5]]), cache, kept_frac=0.3)
    with pytest.raises(UsageError, match="no name for a budget"):
        write_budget(fit, tmp_path / name, cache, {})
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_fitted_is_refused() -> None:
    cache = Cache((layer(0), layer(1)))
    rows = rows_of([[1.0, 0.5]] * 2)
    with pytest.raises(UsageError, match=r"measured from 0.25 to 1"):
        fit_budget(rows, cache, kept_frac=0.1)
    with pytest.raises(UsageError, match="two kept fractions or more, not from none"):
        fit_budget(rows_of([[1.0]] * 2, fractions=(0.5,)), cache, kept_frac=0.5)
    with pytest.raises(UsageError, match="two kept fractions or more, not from none"):
        fit_budget(rows, cache, "h2o", kept_frac=0.5)
    with pytest.raises(UsageError, match="layer 1 has no KL under snapkv"):
        fit_budget(rows[rows["layer"] == 0], cache, kept_frac=0.5)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_a_split_is_two_halves_that_share_nothing(n: int) -> None:
    names = [f"s{number}" for number in range(n)]
    fitting, other = split(names * 2, 3)
    assert sorted(fitting + other) == names
    assert len(fitting) - len(other) in (0, 1)
    assert split(reversed(names), 3) == (fitting, other)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (Interval(None, None, None, 0), "tried on no other sequence"),
        (Interval(-0.1, None, None, 2), "fewer than 3 give no interval, no gain is claimed"),
        (Interval(-0.1, -0.2, -0.05, 4), "a gain"),
        (Interval(-0.1, -0.2, 0.05, 4), "undecided"),
        (Interval(0.1, 0.02, 0.3, 4), "a loss"),
    ],
)
def test_a_gain_says_what_may_be_said(difference: Interval, words: str) -> None:
    fit = Fit(
        policy=parse("snapkv:kept=0.3"),
        kept_frac_by_layer={},
        kl_nats=0.0,
        uniform_kl_nats=0.0,
        num_sequences=4,
    )
    gain = Gain(fit=fit, text="", difference=difference, uniform_kl_nats=1.0, held_out=())
    assert words in gain.message


def test_a_budget_is_fitted_on_one_half_and_tried_on_the_other(
    trace_folder: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, loaded = Trace(trace_folder), load_model(str(model_folder))
    rules = [parse_rule(f"snapkv:window=4,kept={frac}") for frac in (0.2, 0.6)]
    parts = [
        sweep_sequence(trace, loaded, row, rules, heads=False, seed=0).to_pandas()
        for _, row in trace.sequences.iterrows()
    ]
    rows = pd.concat(parts, ignore_index=True)
    opened = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        opened.append(str(args[2]["sequence_id"]))
        return rerun(*args, **kwargs)

    monkeypatch.setattr(held_out, "rerun", watched)
    file = tmp_path / "budget.json"
    gain = fit_and_try(trace, loaded, rows, file, kept_frac=0.4, seed=1)
    fitting, other = split(trace.sequence_ids, 1)
    assert opened == list(gain.held_out) == other
    cache = Cache(loaded.spec.layers)
    expected = fit_budget(rows[rows["sequence_id"].isin(fitting)], cache, kept_frac=0.4)
    assert gain.fit == expected
    written = json.loads(file.read_text())
    assert {int(key): row[0] for key, row in written.items()} == expected.kept_frac_by_layer
    assert gain.difference.n == len(other)
    assert gain.uniform_kl_nats is not None
    assert np.isfinite(gain.uniform_kl_nats)
    assert str(gain.fit.num_sequences) in gain.message
