"""Prompts choose, others judge; what is certified holds; what is pasted is read back."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report import fake
from tracekit import schema
from tracekit.kv.parse import parse
from tracekit.report.blocks import Absent, Code, Section, Text
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.recommendation.damage import answer_damage, kl_damage
from tracekit.report.recommendation.order import safest_first
from tracekit.report.recommendation.paste import config_text, quoted, tiered_policy, two_tiers
from tracekit.report.recommendation.recommend import recommend
from tracekit.report.sections.recommendation import section
from tracekit.simulate.plan import make_plan

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    "snapkv:kept={},window=32,at=prompt": ("snapkv", 0.004, True, False),
    "h2o:kept={},reduce=mean,sinks=0,recent=0.5,every=16,from=prompt": ("h2o", 0.03, True, False),
    "oracle:kept={},sinks=0,recent=0,at=prompt": ("oracle", 0.001, False, False),
    "full:kept=1.0,sinks=0,recent=0,at=prompt+quest:read={}": ("quest", 0.001, True, True),
}
KEPT = (0.1, 0.25, 0.5, 0.75)


def cells(num_prompts: int, *, seed: int = 0, samples: int = 1) -> pd.DataFrame:
    """Return cells of level propagated: KL of each policy on each sequence, from a seed."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_prompts):
        domain = fake.DOMAINS[number % len(fake.DOMAINS)]
        for sample in range(samples):
            sequence = {
                "sequence_id": f"{domain}-{number:02d}#{sample}",
                "domain": domain,
                "num_tokens": 400,
            }
            luck = rng.lognormal(0, 0.5)
            for text, (family, half, causal, selects) in KINDS.items():
                for kept in KEPT:
                    cell = fake._kv_cell(sequence, family, "at=prompt", kept, kept)
                    kl = half * luck * ((1 - kept) / kept) ** 1.5
                    own = {"level": "propagated", "policy": text.format(kept), "layer": schema.ALL}
                    own |= {"causal": causal, "selects": selects, "kl_nats": kl}
                    rows.append(cell | own | {"noise_kl_nats": 1e-9, "num_evicted": 9})
    return pd.DataFrame(rows)


def results_of(
    folder: Path, rows: pd.DataFrame, extra: dict[str, pd.DataFrame] | None = None
) -> Results:
    """Return the results of these cells, with other tables beside them."""
    usual = fake._sequence(np.random.default_rng(0), 0, fake.DOMAINS)
    sequences = [
        usual | {"sequence_id": name, "prompt_id": name[:-2], "domain": domain}
        for name, domain in rows[["sequence_id", "domain"]]
        .drop_duplicates()
        .itertuples(index=False)
    ]
    fake.make_results(folder, num_sequences=1, questions=(), run={"sequences": sequences})
    fake.write_table(folder, schema.KV_RESULTS, rows)
    fake.write_table(folder, schema.SUMMARY, pd.DataFrame([{"question": "kv", "family": "h2o"}]))
    for name, frame in (extra or {}).items():
        fake.write_table(folder, getattr(schema, name), frame)
    return load_results(folder)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0.1, 0.5]), st.sampled_from([0.0, 1.0]), st.integers(1, 6)),
        max_size=12,
    )
)
def test_the_front_is_what_nobody_beats(rows: list[tuple[float, float, int]]) -> None:
    found = safest_first(*(np.array([row[i] for row in rows], dtype=float) for i in range(3)))
    unbeaten = [
        number
        for number, (damaged, severity, saving) in enumerate(rows)
        if not any(
            (other[:2] <= (damaged, severity) and other[2] > saving)
            or (other[:2] < (damaged, severity) and other[2] >= saving)
            or (other == (damaged, severity, saving) and place < number)
            for place, other in enumerate(rows)
        )
    ]
    assert sorted(found) == unbeaten
    assert found == sorted(found, key=lambda number: rows[number][2])
    assert found == sorted(found, key=lambda number: rows[number][:2])


@settings(max_examples=10, deadline=None)
@given(st.integers(3, 36), st.integers(0, 99), st.integers(1, 2), st.sampled_from([0.05, 0.2, 0.4]))
def test_the_recommendation_is_that_of_loops_over_prompts(
    tmp_path_factory: pytest.TempPathFactory, num: int, seed: int, samples: int, alpha: float
) -> None:
    rows, options = cells(num, seed=seed, samples=samples), Options(alpha=alpha, delta=0.2)
    results = results_of(tmp_path_factory.mktemp("r") / "r", rows)
    damage = kl_damage(results, options)
    found = recommend(damage, options, seed=0)
    domains = dict(zip(rows["sequence_id"].str[:-2], rows["domain"], strict=True))
    prompts = sorted(domains, key=lambda name: domains[name])
    judging = [name for number, name in enumerate(prompts) if number % 3 != 2]
    assert (found.num_judging, found.num_choosing) == (len(judging), len(prompts) - len(judging))
    still: bool = True
    best = None
    for one in found.overall.candidates:
        of = rows[(rows["policy"] == one.policy) & rows["sequence_id"].str[:-2].isin(judging)]
        bad = sum(any(part["kl_nats"] > 0.1) for _, part in of.groupby(of["sequence_id"].str[:-2]))
        assert (one.damaged, one.n) == (bad, len(judging))
        assert one.is_tested == still
        tail = sum(
            np.prod([(len(judging) - i) / (i + 1) for i in range(k)])
            * alpha**k
            * (1 - alpha) ** (len(judging) - k)
            for k in range(bad + 1)
        )
        assert one.p_value == pytest.approx(tail, rel=1e-9)
        still = bool(still and tail <= 0.2)
        best = one if still else best
        assert one.is_certified == still
    assert found.overall.certified == best
    savings = [1 - (one.kept.mean or 0.0) for one in found.overall.candidates]
    assert savings == sorted(savings)


def test_bounds_recall_and_what_lacks_a_sequence_are_counted_and_never_recommended(
    tmp_path: Path,
) -> None:
    rows = cells(45)
    snapkv = rows["policy"].str.startswith("snapkv:kept=0.75")
    rows = rows[~(snapkv & rows["sequence_id"].str.startswith("code-01"))]
    damage = kl_damage(results_of(tmp_path / "r", rows), Options())
    assert (damage.num_bounds, damage.num_selecting, damage.num_incomplete) == (4, 4, 1)
    assert set(damage.families) == {"snapkv", "h2o"}
    assert not any("snapkv:kept=0.75" in policy for policy in damage.policies)


def test_what_was_not_evicted_is_not_damaged_but_counted(tmp_path: Path) -> None:
    rows = cells(45)
    rows.loc[rows["sequence_id"] == "story-00#0", ["is_idle", "kl_nats"]] = [True, None]
    rows.loc[rows["sequence_id"] == "code-01#0", "is_clipped"] = True
    damage = kl_damage(results_of(tmp_path / "r", rows), Options())
    story = damage.prompts.index("story-00")
    assert not damage.is_damaged_CP[:, story].any()
    assert damage.is_idle_CP[:, story].all()
    assert damage.num_incomplete == 0
    found = recommend(damage, Options(), seed=0)
    flags = [(one.num_idle, one.num_clipped) for one in found.overall.candidates]
    judges = ~damage.is_choosing_P
    wanted = (int(judges[story]), int(judges[damage.prompts.index("code-01")]))
    assert set(flags) == {wanted}


def test_the_choosing_prompts_alone_make_the_order(tmp_path: Path) -> None:
    rows = cells(60)
    damage = kl_damage(results_of(tmp_path / "a", rows), Options())
    names = [p for p, chooses in zip(damage.prompts, damage.is_choosing_P, strict=True) if chooses]
    judges = ~rows["sequence_id"].str[:-2].isin(names)
    worse = rows.assign(kl_nats=rows["kl_nats"].mask(judges, 9.0))
    other = kl_damage(results_of(tmp_path / "b", worse), Options())
    one, two = (recommend(part, Options(), seed=0) for part in (damage, other))
    assert one.order == two.order
    assert one.favourite is not None
    assert two.favourite is not None
    assert one.favourite.policy == two.favourite.policy
    assert one.overall.certified is not None
    assert two.overall.certified is None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.05, 0.2, 0.5]))
def test_the_lead_saves_most_of_what_damages_few_of_the_judging_prompts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, alpha: float
) -> None:
    options = Options(alpha=alpha)
    folder = tmp_path_factory.mktemp("lead") / "r"
    found = recommend(kl_damage(results_of(folder, cells(7, seed=seed)), options), options, seed=0)
    candidates = found.overall.candidates
    wanted = next((one for one in reversed(candidates) if one.damaged / one.n <= alpha), None)
    if wanted is None:
        wanted = min(candidates, key=lambda one: one.damaged)
    assert found.lead == wanted


def test_a_wrong_marked_answer_is_a_loss_of_its_own(tmp_path: Path) -> None:
    rows = cells(45)
    steps = rows.assign(position=9, distance=1, is_answer=True, hit_full=True, is_given=False)
    # One prompt's answer the full cache got wrong, another has none.
    steps["same_top"] = steps["kl_nats"] < 0.5
    steps.loc[steps["sequence_id"] == "story-00#0", "hit_full"] = False
    steps.loc[steps["sequence_id"] == "code-01#0", "is_answer"] = False
    names = [one.name for one in schema.LOGITS.columns if one.name in steps]
    results = results_of(tmp_path / "r", rows, {"LOGITS": steps[names]})
    damage = answer_damage(results)
    assert len(damage.prompts) == 43
    assert damage.num_prompts_without == 2
    wide = rows.assign(prompt=rows["sequence_id"].str[:-2]).pivot_table(
        index="policy", columns="prompt", values="kl_nats"
    )
    wanted = wide.loc[list(damage.policies), list(damage.prompts)].to_numpy() >= 0.5
    assert (damage.is_damaged_CP == wanted).all()
    assert "By marked answers" in [getattr(one, "text", "") for one in _section(results).parts()]


def test_without_propagated_results_the_command_that_gets_them_is_named(tmp_path: Path) -> None:
    results = load_results(fake.make_results(tmp_path / "r"))
    made = section(results, Options())
    assert isinstance(made, Absent)
    assert "--level local,propagated" in made.command


@pytest.mark.parametrize(
    ("num", "words"),
    [
        (1, "1 judge, and at least 22 without a damaged one"),
        (2, "2 judge"),
        (12, "8 judge"),
        (31, "21 judge, and at least 22 without a damaged one must (32 in all"),
        (60, "With a confidence of 90\u00a0%, it damages at most 10\u00a0% of prompts"),
    ],
)
def test_the_verdict_says_how_many_judge_and_how_many_are_needed(
    tmp_path: Path, num: int, words: str
) -> None:
    made = _section(results_of(tmp_path / "r", cells(num)))
    assert words in _words(made)
    code = [block for block in made.parts() if isinstance(block, Code)]
    assert all(("NOT CERTIFIED for" in one.text) == (num < 60) for one in code)
    assert len(code) == (num >= 3)


def test_a_policy_that_fails_is_not_certified_and_said_to_fail(tmp_path: Path) -> None:
    rows = cells(60)
    made = _section(results_of(tmp_path / "r", rows.assign(kl_nats=rows["kl_nats"] + 1)))
    assert "the safest candidate" in _words(made)
    assert "40 of 40 prompts that judged it" in _words(made)


def test_rounding_above_the_bound_is_said(tmp_path: Path) -> None:
    made = _section(results_of(tmp_path / "r", cells(45).assign(noise_kl_nats=0.2)))
    assert "within rounding" in _words(made)


def test_the_pasted_file_is_read_back_by_the_command_line(tmp_path: Path) -> None:
    results = results_of(tmp_path / "r", cells(60), {"RECOMMENDED": _layers()})
    (code,) = [block for block in _section(results).parts() if isinstance(block, Code)]
    found = tomllib.loads(code.text)["simulate"]
    plan = make_plan(found["kv"], levels=found["level"], seed=found["seed"])
    assert [policy.text for policy in plan.policies] == [parse(found["kv"][0]).text]
    assert "Certified at level propagated" in code.text
    other = code.text.replace("\nkv = ", "\n# kv = ", 1)
    head, _, tail = other.rpartition("# kv = ")
    tiers = tomllib.loads(f"{head}kv = {tail}")["simulate"]["kv"]
    assert "layers=tiers,shallow=" in tiers[0]
    assert "NOT CERTIFIED, not replayed here" in code.text
    assert make_plan(tiers).policies


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.02, 1).map(lambda one: round(one, 3)), min_size=2, max_size=40),
    st.sampled_from(["snapkv:kept=0.25,window=8", "h2o:kept=512tok+int4", "tova:kept=64MiB"]),
)
def test_two_tiers_split_where_squares_are_least_and_are_a_policy(
    kept: list[float], policy: str
) -> None:
    split, shallow, deep = two_tiers(np.array(kept))
    squares = {
        at: sum((x - np.mean(part)) ** 2 for part in (kept[:at], kept[at:]) for x in part)
        for at in range(1, len(kept))
    }
    assert squares[split] <= min(squares.values()) + 1e-9
    assert -1e-9 <= np.mean(kept[:split]) - shallow < 0.01 + 1e-9
    assert -1e-9 <= np.mean(kept[split:]) - deep < 0.01 + 1e-9

    made = tiered_policy(_given(kept), policy)
    if np.ceil(100 * np.mean(kept)) >= 100 or shallow == deep:
        assert made is None
        return
    assert made is not None
    budget: Any = parse(made[0]).layers
    places = range(len(kept))
    least = [budget._least(place, len(kept)) for place in places]
    assert least == [shallow if place < split else deep for place in places]


def test_what_evicts_nothing_or_has_its_own_tiers_gets_no_others() -> None:
    assert tiered_policy(_given(), "full:kept=1.0+int4") is None
    assert tiered_policy(_given(), "h2o:kept=0.3,layers=pyramid") is None


@pytest.mark.parametrize("kept", [[1.0, 1.0, 0.999], [0.5, 0.5, 0.5]])
def test_tiers_that_evict_nothing_or_are_equal_are_not_proposed(kept: list[float]) -> None:
    assert tiered_policy(_given(kept), "h2o:kept=0.3") is None


def test_the_confidence_is_said_to_be_that_of_the_procedure(tmp_path: Path) -> None:
    made = _section(results_of(tmp_path / "r", cells(12)))
    assert "chance that it certifies anything wrong is at most 0.1" in _words(made)
    assert "not the share of wrong ones among certified" in _words(made)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_no_name_breaks_the_pasted_file(text: str) -> None:
    assert tomllib.loads(f"x = {quoted(text)}")["x"] == text


@pytest.mark.parametrize(
    "name", ["a\nkv = ['x']", '"]\x00\x7f\x1b', "\u2028\u202e", "\ud800", "x\r#"]
)
def test_no_name_of_a_model_breaks_a_comment(tmp_path: Path, name: str) -> None:
    results = results_of(tmp_path / "r", cells(4))
    object.__setattr__(results.spec, "name", name)
    text = config_text(results, f"h2o:kept=0.3,note={name[:2]}".replace("\ud800", ""), [name])
    found = tomllib.loads(text.encode("utf-8", "strict").decode())
    assert list(found) == ["simulate"]
    assert set(found["simulate"]) == {"kv", "level", "seed", "kv-bytes"}


def test_the_section_is_the_same_twice(tmp_path: Path) -> None:
    results = results_of(tmp_path / "r", cells(45))
    assert str(section(results, Options())) == str(section(load_results(tmp_path / "r"), Options()))


def _section(results: Any) -> Section:
    made = section(results, Options())
    assert isinstance(made, Section)
    return made


def _words(made: Section) -> str:
    return " ".join(block.text for block in made.parts() if isinstance(block, Text))


def _layers(kept: list[float] | None = None) -> pd.DataFrame:
    kept = kept or [0.9, 0.8, 0.5, 0.4, 0.45]
    names = [one.name for one in schema.RECOMMENDED.columns]
    rows = pd.DataFrame({"layer": range(len(kept)), "kept_frac": kept, "n": 8, "mass_frac": 0.95})
    return rows.reindex(columns=names).assign(level="local").astype({"num_scored": object})


def _given(kept: list[float] | None = None) -> Any:
    """Return what has recommended fractions and nothing else."""
    return SimpleNamespace(table=lambda table: _layers(kept))
