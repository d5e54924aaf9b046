from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracles
from tests.kv.cases import make_case, run_family
from tracekit.errors import UsageError
from tracekit.kv.amounts import Frac, parse_kept, parse_part, part_text
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.presets import PRESETS
from tracekit.kv.schedule import Spans
from tracekit.kv.scorer import SCORERS, Preset, Scorer
from tracekit.registry import Registry

SCORER = {
    "h2o": {"reduce": st.sampled_from(["mean", "max", "sum"])},
    "snapkv": {
        "window": st.integers(1, 64),
        "kernel": st.integers(0, 6).map(lambda half: 2 * half + 1),
        "pool": st.sampled_from(["avg", "max"]),
        "reduce": st.sampled_from(["mean", "max"]),
        "order": st.sampled_from(["pool_group", "group_pool"]),
    },
}
FRACTIONS = st.floats(1e-9, 1.0)
TOKENS = st.integers(1, 10**6)
ANCHORS = st.sampled_from(["context", "prompt"]) | FRACTIONS.map(repr) | TOKENS.map(str)
KEPT = FRACTIONS.map(repr) | TOKENS.map(lambda number: f"{number}tok")


@st.composite
def texts(draw, *, kept):
    name = draw(st.sampled_from([name for name in PRESETS.names() if name != "full"]))
    options = {
        **SCORER.get(name, {}),
        "sinks": st.integers(0, 9),
        "recent": FRACTIONS.map(repr) | st.integers(0, 99).map(str),
        **draw(st.sampled_from([{"at": ANCHORS}, {"every": TOKENS, "from": ANCHORS}])),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True))
    if "from" in chosen and "every" not in chosen:
        chosen.append("every")
    parts = [f"{one}={draw(options[one])}" for one in chosen]
    parts += [f"kept={draw(KEPT)}"] if kept else []
    return f"{name}:{','.join(draw(st.permutations(parts)))}"


CACHE = make_case(rows=4).cache


@given(texts(kept=True))
def test_the_canonical_text_gives_the_policy_back(text):
    policy = parse(text)
    assert parse(policy.text) == policy
    assert parse(policy.text).text == policy.text


@given(texts(kept=False), FRACTIONS, FRACTIONS)
def test_a_family_is_one_name_for_all_kept_amounts_and_names_the_same_policy(text, one, other):
    policy = parse(text)
    assert policy.kept is None
    assert (
        policy.with_kept(Frac(one)).family == policy.with_kept(Frac(other)).family == policy.family
    )
    assert parse(policy.family) == policy
    assert policy.with_kept(Frac(one)) == parse(policy.with_kept(Frac(one)).text)


@given(KEPT, st.integers(1, 10**6))
def test_a_kept_amount_is_rounded_down_and_exact_for_the_decimal_as_written(text, whole):
    kept = parse_kept(text)
    assert kept.of(whole) == oracles.entries(kept.amount, kept.unit, whole)
    assert kept.share(whole) == pytest.approx(min(1.0, kept.amount / (whole if kept.unit else 1)))


def test_a_part_is_tokens_unless_it_is_written_as_a_fraction():
    assert parse_kept("1").of(100) == 100
    assert parse_part("1").of(100) == 1
    assert parse_part("1.0").of(100) == 100
    assert parse_kept("0.29").of(100) == 29
    assert [part_text(parse_part(text)) for text in ("0", "32", "0.5")] == ["0", "32", "0.5"]


def test_every_parameter_is_written_in_a_fixed_order():
    assert parse("h2o:every=16,kept=0.3").text == (
        "h2o:kept=0.3,reduce=mean,sinks=0,recent=0.5,every=16,from=prompt"
    )
    assert parse("snapkv:kept=512tok,window=32,at=context").text == (
        "snapkv:kept=512tok,window=32,kernel=5,pool=avg,reduce=mean,order=pool_group,"
        "sinks=0,recent=32,at=context"
    )


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("h2o:kept=0.3", "h2o"),
        ("h2o:kept=0.3,every=1,from=prompt", "h2o"),
        ("h2o:every=16", "h2o:every=16"),
        ("h2o:at=prompt", "h2o:at=prompt"),
        ("snapkv:window=16", "snapkv:window=16"),
        ("snapkv:window=16,recent=32", "snapkv:window=16,recent=32"),
        ("streaming:sinks=4", "streaming"),
        ("full", "full"),
        ("int4", "int4"),
        ("full+int4:group=64", "int4:group=64"),
        ("h2o:kept=0.5,every=16+int4", "h2o:every=16+int4"),
        ("quest:read=0.1", "quest"),
        ("snapkv:kept=0.5+quest:read=0.1,page=8", "snapkv+quest:page=8"),
        ("knorm:layers=pyramid", "knorm:layers=pyramid"),
        ("knorm:layers=pyramid,beta=5", "knorm:layers=pyramid,beta=5.0"),
        ("streamingllm", "streamingllm"),
        ("streamingllm:positions=original", "streamingllm:positions=original"),
        ("pyramidkv:layers=uniform", "pyramidkv:layers=uniform"),
    ],
)
def test_a_family_names_only_what_differs_from_the_preset(text, family):
    assert parse(text).family == family


def test_the_newest_keys_that_stay_follow_the_window():
    assert parse("snapkv:window=16").protection.recent.amount == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h20", "did you mean 'h2o'"),
        ("h2o:kepd=0.5", "did you mean 'kept'"),
        ("streaming:window=3", "unknown parameter 'window'"),
        ("h2o:reduce=median", "unknown reduce 'median'"),
        ("h2o:kept=0", "not in"),
        ("h2o:kept=1.5", "not in"),
        ("h2o:kept=nan", "not in"),
        ("h2o:kept=0tok", "at least 1tok"),
        ("h2o:kept=-3tok", "is no amount"),
        ("h2o:kept=99999999999999999999tok", "more than"),
        ("h2o:recent=99999999999999999999", "more than"),
        ("h2o:kept=half", "write a fraction"),
        ("h2o:kept=0.5tok", "write a fraction"),
        ("h2o:kept=0.5+imt4", "unknown transform or selector 'imt4'"),
        ("h2o:kept=0.5,kept=0.6", "each name once"),
        ("h2o:kept", "name=value"),
        ("h2o:every=1.5", "no number of tokens"),
        ("h2o:every=0", "every=0"),
        ("h2o:at=prompt,every=4", "name one of the two"),
        ("h2o:at=prompt,from=context", "name one of the two"),
        ("knorm:from=context", "name one of the two"),
        ("snapkv:window=0", "window=0"),
        ("snapkv:kernel=4", "kernel=4"),
        ("full:kept=0.5", "keeps everything"),
        ("expected:epsilon=nan", "no number that can be used"),
        ("pyramidkv:beta=inf", "no number that can be used"),
        ("knorm:sinks=99999999999", "no number that can be used"),
        ("expected:future=9999999", "must be 1 to"),
        ("+int4", "a name is missing"),
        ("quest,int4", "lowrank"),
        ("int4+int8", "a second transform"),
        ("snapkv+quest:read=64MiB", "not bytes"),
        ("adakv:positions=cache", "heads of one length"),
        ("", "a name is missing"),
    ],
)
def test_a_wrong_text_is_refused_with_what_to_do(text, words):
    with pytest.raises(UsageError, match=words):
        parse(text)


def test_full_cannot_be_given_an_amount():
    assert parse("full").kept.amount == 1.0
    with pytest.raises(UsageError, match="keeps everything"):
        parse("full").with_kept(Frac(0.5))


def test_the_target_of_tokens_is_their_mean_share_of_the_tokens_seen():
    spans = Spans(num_tokens=40, prompt_end=20)
    assert parse("knorm:kept=0.3").target_frac(spans, CACHE) == 0.3
    assert parse("knorm:kept=10tok").target_frac(spans, CACHE) == 0.5
    assert parse("knorm:kept=99tok").target_frac(spans, CACHE) == 1.0
    assert parse("knorm:kept=10tok,every=20").target_frac(spans, CACHE) == 0.5
    assert parse("knorm:kept=10tok,every=10").target_frac(spans, CACHE) == pytest.approx(5 / 12)
    assert parse("knorm").target_frac(spans, CACHE) is None
    assert parse("knorm:kept=0.3,at=context").target_frac(spans, CACHE) is None


@pytest.mark.parametrize("text", ["knorm:kept=10tok", "knorm:kept=10tok,every=1"])
@pytest.mark.parametrize("num_rows", [23, 22, 21, 20])
def test_the_target_is_the_mean_over_the_decisions_that_a_replay_makes(text, num_rows):
    policy, case = parse(text), make_case(rows=num_rows)
    spans = case.spans(prompt_end=20)
    result = run_family(case, [policy], 20)
    if result is None:
        assert policy.target_frac(spans, case.cache) is None
        return
    decisions = sorted({int(t) for t in np.unique(result.evicted_at_NLGT) if t != NEVER})
    assert policy.target_frac(spans, case.cache) == pytest.approx(
        np.mean([10 / t for t in decisions])
    )


def test_a_preset_that_two_scorers_serve_is_an_error(monkeypatch):
    class Twice(Scorer):
        """Serves the name of another."""

        presets = (Preset(name="h2o"),)

        def score(self, view):
            return view.position_K

    registry = Registry("scorer", package="tracekit.kv.scorers", group="none")
    registry.register("usual")(SCORERS.get("accumulated"))
    registry.register("twice")(Twice)
    none = Registry("budget", package="tracekit.kv.budgets", group="none")
    monkeypatch.setattr(none, "_loaded", True)
    for name in ("LAYER_BUDGETS", "HEAD_BUDGETS"):
        monkeypatch.setattr(f"tracekit.kv.presets.{name}", none)
    monkeypatch.setattr("tracekit.kv.presets.SCORERS", registry)
    with pytest.raises(ValueError, match=r"two presets have one name: .*'h2o', 'h2o'"):
        PRESETS.names()
