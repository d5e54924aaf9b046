"""Statistics of steps against plain loops, llama.cpp's own error formulas, and numbers by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.measure.stats import bootstrap_mean
from tracekit.measure.token_errors import SequenceBootstrap, TokenGaussian
from tracekit.measure.token_rows import NextToken
from tracekit.measure.token_stats import exact_match, token_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from tracekit.measure.token_stats import Statistic

ORDER = [
    "ppl_pruned",
    "ppl_full",
    "nll_correlation",
    "ln_ppl_change",
    "ppl_quotient",
    "ppl_difference",
    "kl_mean",
    "kl_max",
    "kl_p99.9",
    "kl_p99",
    "kl_p95",
    "kl_p90",
    "kl_median",
    "kl_p10",
    "kl_p5",
    "kl_p1",
    "kl_p0.1",
    "kl_min",
    "delta_p_mean",
    "delta_p_max",
    "delta_p_p99.9",
    "delta_p_p99",
    "delta_p_p95",
    "delta_p_p90",
    "delta_p_p75",
    "delta_p_median",
    "delta_p_p25",
    "delta_p_p10",
    "delta_p_p5",
    "delta_p_p1",
    "delta_p_p0.1",
    "delta_p_min",
    "delta_p_rms",
    "same_top_frac",
    "jsd_mean",
    "margin_full_mean",
    "margin_pruned_mean",
    "num_flips",
    "num_left_out",
]


def rows(nll_full: ArrayLike, nll_pruned: ArrayLike, kl: ArrayLike, **changed: Any) -> NextToken:
    """Return steps whose other columns follow from these."""
    full, pruned = (np.asarray(x, dtype=np.float64) for x in (nll_full, nll_pruned))
    columns: dict[str, Any] = {
        "nll_full": full,
        "nll_pruned": pruned,
        "kl_nats": np.asarray(kl, dtype=np.float64),
        "jsd_nats": np.asarray(kl, dtype=np.float64) / 4,
        "delta_p": np.exp(-pruned) - np.exp(-full),
        "same_top": np.abs(full - pruned) < 0.5,
        "entropy_full_nats": full,
        "top1_margin_full": full,
        "margin_pruned": 2 * pruned - 1,
        "hit": pruned < 1,
        "hit_full": full < 1,
    }
    return NextToken(**(columns | changed))


def random_rows(lengths: Sequence[int], seed: int = 0) -> list[NextToken]:
    draw = np.random.default_rng(seed)
    made = []
    for n in lengths:
        full = draw.gamma(2, 1, n)
        made.append(rows(full, np.abs(full + draw.normal(0, 0.4, n)), draw.gamma(1, 0.05, n)))
    return made


def by_name(statistics: list[Statistic]) -> dict[str, Statistic]:
    return {one.name: one for one in statistics}


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    """``mean_and_uncertainty`` of perplexity.cpp."""
    f = mean(values)
    return math.sqrt(max(mean([v * v for v in values]) - f * f, 0) / (len(values) - 1))


def covariance(a: Sequence[float], b: Sequence[float]) -> float:
    products = [x * y for x, y in zip(a, b, strict=True)]
    return (mean(products) - mean(a) * mean(b)) / (len(a) - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate as ``percentile`` of perplexity.cpp."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return (1 - (place - below)) * ordered[below] + (place - below) * ordered[above]


def slow_values(a: list[float], b: list[float], w: list[float], x: NextToken) -> dict[str, float]:
    """Return the statistics of means, each step with a weight that sums to 1 in all."""

    def weighted(values: Sequence[float]) -> float:
        return math.fsum(v * u for v, u in zip(values, w, strict=True))

    ma, mb, dp = weighted(a), weighted(b), x.delta_p.tolist()
    va = weighted([(v - ma) ** 2 for v in a])
    vb = weighted([(v - mb) ** 2 for v in b])
    cov = weighted([(v - ma) * (u - mb) for v, u in zip(a, b, strict=True)])
    return {
        "ppl_pruned": math.exp(ma),
        "ppl_full": math.exp(mb),
        "nll_correlation": cov / math.sqrt(va * vb),
        "ln_ppl_change": ma - mb,
        "ppl_quotient": math.exp(ma - mb),
        "ppl_difference": math.exp(ma) - math.exp(mb),
        "kl_mean": weighted(x.kl_nats.tolist()),
        "delta_p_mean": weighted(dp),
        "delta_p_rms": math.sqrt(weighted([d * d for d in dp])),
        "same_top_frac": weighted(x.same_top.tolist()),
        "jsd_mean": weighted(x.jsd_nats.tolist()),
        "margin_full_mean": weighted(x.top1_margin_full.tolist()),
        "margin_pruned_mean": weighted(x.margin_pruned.tolist()),
    }


def joined(sequences: Sequence[NextToken]) -> NextToken:
    names = NextToken.__dataclass_fields__
    return NextToken(**{n: np.concatenate([getattr(s, n) for s in sequences]) for n in names})


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(lambda x: sum(x) > 2),
    st.integers(0, 999),
)
def test_micro_and_macro_averages_are_those_of_a_plain_loop(lengths: list[int], seed: int) -> None:
    sequences = random_rows(lengths, seed)
    found = by_name(token_statistics(sequences, TokenGaussian()))
    everything = joined(sequences)
    a, b = everything.nll_pruned.tolist(), everything.nll_full.tolist()
    alike = [1 / len(a)] * len(a)
    by_text = [1 / n / len(lengths) for n in lengths for _ in range(n)]
    micro, macro = (slow_values(a, b, w, everything) for w in (alike, by_text))
    for name in micro:
        assert found[name].value == pytest.approx(micro[name], rel=1e-9, abs=1e-12), name
        assert found[name].macro == pytest.approx(macro[name], rel=1e-9, abs=1e-12), name
    for measure, values in (("kl", everything.kl_nats), ("delta_p", everything.delta_p)):
        for percent, place in (
            (100, "max"),
            (99.9, "p99.9"),
            (50, "median"),
            (5, "p5"),
            (0, "min"),
        ):
            wanted = percentile(values.tolist(), percent)
            assert found[f"{measure}_{place}"].value == pytest.approx(wanted, abs=1e-12)
    assert found["num_flips"].value == np.count_nonzero(~everything.same_top)


@settings(max_examples=40)
@given(st.integers(2, 60), st.integers(0, 999))
def test_errors_of_llama_cpp_are_those_of_its_formulas(n: int, seed: int) -> None:
    (steps,) = random_rows([n], seed)
    found = by_name(token_statistics([steps], TokenGaussian()))
    a, b, dp = steps.nll_pruned.tolist(), steps.nll_full.tolist(), steps.delta_p.tolist()
    sa, sb, cov = standard_error(a), standard_error(b), covariance(a, b)
    ppl_a, ppl_b = math.exp(mean(a)), math.exp(mean(b))
    change = math.sqrt(max(sa * sa + sb * sb - 2 * cov, 0))
    difference = (ppl_a * sa) ** 2 + (ppl_b * sb) ** 2 - 2 * ppl_a * ppl_b * cov
    rms = math.sqrt(mean([d * d for d in dp]))
    p = mean(steps.same_top.tolist())
    wanted = {
        "ppl_pruned": ppl_a * sa,
        "ppl_full": ppl_b * sb,
        "ln_ppl_change": change,
        "ppl_quotient": ppl_a / ppl_b * change,
        "ppl_difference": math.sqrt(max(difference, 0)),
        "kl_mean": standard_error(steps.kl_nats.tolist()),
        "delta_p_mean": standard_error(dp),
        "delta_p_rms": 0.5 / rms * standard_error([d * d for d in dp]),
        "same_top_frac": math.sqrt(p * (1 - p) / (n - 1)),
    }
    for name, error in wanted.items():
        assert found[name].error == pytest.approx(error, rel=1e-6, abs=1e-6), name
        assert found[name].low is found[name].high is None
    assert found["nll_correlation"].error is None


def test_intervals_are_those_of_a_loop_over_resampled_sequences() -> None:
    sequences = random_rows([3, 9, 4, 7])
    found = by_name(token_statistics(sequences, SequenceBootstrap(seed=5)))
    drawn = np.random.default_rng(5).integers(4, size=(1000, 4))
    values = []
    for row in drawn:
        x = joined([sequences[i] for i in row])
        a, b = x.nll_pruned.tolist(), x.nll_full.tolist()
        values.append(slow_values(a, b, [1 / len(a)] * len(a), x))
    for name in values[0]:
        ordered = sorted(one[name] for one in values)
        low, high = (ordered[math.ceil(1000 * end) - 1] for end in ((1 - 0.95) / 2, 1.95 / 2))
        assert found[name].low == pytest.approx(low, rel=1e-9), name
        assert found[name].high == pytest.approx(high, rel=1e-9), name
        assert found[name].error is None


def test_the_interval_of_mean_kl_is_that_of_the_weighted_bootstrap_of_sequences() -> None:
    sequences = random_rows([3, 9, 4, 7, 2])
    found = by_name(token_statistics(sequences, SequenceBootstrap(seed=1)))["kl_mean"]
    wanted = bootstrap_mean(
        [s.kl_nats.mean() for s in sequences], seed=1, weights=[len(s) for s in sequences]
    )
    assert found.low == pytest.approx(wanted.low)
    assert found.high == pytest.approx(wanted.high)


def test_two_sequences_worked_by_hand() -> None:
    ln2 = math.log(2)
    first = rows([0.0, 2 * ln2], [0.0, 3 * ln2], [0.0, 0.3])
    second = rows([ln2], [ln2], [0.6])
    found = by_name(token_statistics([first, second], TokenGaussian()))
    assert found["ppl_pruned"].value == pytest.approx(2 ** (4 / 3))
    assert found["ppl_pruned"].macro == pytest.approx(2 ** (5 / 4))
    assert found["ppl_full"].value == pytest.approx(2)
    assert found["ppl_quotient"].value == pytest.approx(2 ** (1 / 3))
    assert found["ppl_difference"].value == pytest.approx(2 ** (4 / 3) - 2)
    assert found["ln_ppl_change"].value == pytest.approx(ln2 / 3)
    # Changes of 0, ln 2 and 0: variance 2/9 (ln 2)^2, over n - 1 = 2.
    assert found["ln_ppl_change"].error == pytest.approx(ln2 / 3)
    assert found["kl_mean"].value == pytest.approx(0.3)
    assert found["kl_mean"].macro == pytest.approx(0.375)
    assert found["kl_median"].value == pytest.approx(0.3)
    assert found["kl_p90"].value == pytest.approx(0.54)
    assert found["kl_max"].value == pytest.approx(0.6)
    # Probabilities 1, 1/4, 1/2 became 1, 1/8, 1/2.
    assert found["delta_p_mean"].value == pytest.approx(-1 / 24)
    assert found["delta_p_rms"].value == pytest.approx(math.sqrt(1 / 192))
    assert found["delta_p_min"].value == pytest.approx(-1 / 8)
    assert found["same_top_frac"].value == pytest.approx(2 / 3)
    assert found["same_top_frac"].error == pytest.approx(1 / 3)
    assert found["num_flips"].value == 1


@pytest.mark.parametrize("errors", [SequenceBootstrap(seed=0), TokenGaussian()])
def test_the_order_is_that_of_llama_cpp_also_where_there_is_nothing(errors: Any) -> None:
    assert [one.name for one in token_statistics(random_rows([5, 5, 5]), errors)] == ORDER
    empty = token_statistics([], errors)
    assert [one.name for one in empty] == ORDER
    assert {one.value for one in empty if one.name != "num_left_out"} == {None}
    assert {one.macro for one in empty} == {None}


def test_what_does_not_apply_is_none_and_not_a_number_that_misleads() -> None:
    one_step = by_name(token_statistics([rows([1.0], [1.5], [0.2])], TokenGaussian()))
    assert one_step["ppl_full"].value == pytest.approx(math.e)
    assert one_step["ppl_full"].error is one_step["nll_correlation"].value is None
    two = by_name(token_statistics(random_rows([4, 4]), SequenceBootstrap(seed=0)))
    assert two["kl_mean"].low is two["kl_mean"].high is None
    same = rows([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    equal = by_name(token_statistics([same], TokenGaussian()))
    assert equal["nll_correlation"].value == pytest.approx(1)
    assert equal["delta_p_rms"].value == 0
    assert equal["delta_p_rms"].error is None
    flat = by_name(token_statistics([rows([0.1] * 7, [0.3] * 7, [0.0] * 7)], TokenGaussian()))
    assert flat["nll_correlation"].value is None


def test_steps_without_a_distribution_are_left_out_and_counted() -> None:
    good = random_rows([4, 6, 5])
    nan = np.full(2, math.nan)
    bad = rows(nan, nan, nan, delta_p=nan, hit=np.zeros(2, bool))
    found = by_name(token_statistics([*good, bad], SequenceBootstrap(seed=0)))
    wanted = by_name(token_statistics(good, SequenceBootstrap(seed=0)))
    assert found.pop("num_left_out").value == 2
    assert wanted.pop("num_left_out").value == 0
    assert found == wanted


def test_an_infinite_kl_makes_mean_and_maximum_infinite_and_leaves_the_median() -> None:
    sequences = [*random_rows([6, 6, 6]), rows([1.0], [math.inf], [math.inf])]
    found = by_name(token_statistics(sequences, SequenceBootstrap(seed=0)))
    assert found["kl_mean"].value == found["kl_max"].value == found["ppl_pruned"].value == math.inf
    assert found["kl_mean"].high == math.inf
    assert math.isfinite(found["kl_median"].value or math.inf)
    assert found["nll_correlation"].value is None
    assert by_name(token_statistics(sequences, TokenGaussian()))["kl_mean"].error is None


def test_an_answer_is_right_if_every_step_of_it_is() -> None:
    steps = [
        rows([0.1, 3.0, 0.2], [0.1, 3.0, 0.2], [0.0] * 3),
        rows([0.1, 0.1], [0.1, 2.0], [0.0] * 2),
        rows([0.3], [0.3], [0.0]),
        rows([0.3], [9.0], [0.0]),
    ]
    marks = [np.array(m, bool) for m in ([1, 0, 1], [1, 1], [1], [0])]
    pruned, full = exact_match(steps, marks, TokenGaussian())
    assert (pruned.name, full.name) == ("exact_match_pruned", "exact_match_full")
    # The fourth has no answer, the second loses its own.
    assert pruned.value == pytest.approx(2 / 3)
    assert pruned.error == pytest.approx(1 / 3)
    assert full.value == 1
    assert exact_match(steps, marks, SequenceBootstrap(seed=0))[0].low is not None
    assert exact_match([], [], TokenGaussian())[0].value is None
    with pytest.raises(UsageError, match="mark"):
        exact_match(steps, marks[:2], TokenGaussian())


def test_the_same_seed_gives_the_same_intervals_and_bad_settings_are_refused() -> None:
    sequences = random_rows([4, 6, 5, 9])
    first = token_statistics(sequences, SequenceBootstrap(seed=3))
    assert first == token_statistics(sequences, SequenceBootstrap(seed=3))
    assert first != token_statistics(sequences, SequenceBootstrap(seed=4))
    with pytest.raises(UsageError, match="1000"):
        SequenceBootstrap(seed=0, resamples=10)
    with pytest.raises(UsageError, match="level"):
        SequenceBootstrap(seed=0, level=1.0)


def test_statistics_are_read_without_torch() -> None:
    code = "import sys, tracekit.measure.token_stats as _; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
