"""Two results folders held against each other: pairs, intervals, ledger, what cannot compare, gate."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.fake import ESTIMATORS, KEPT, POLICIES, SIZES, make_results, write_table
from tracekit.errors import GateFailedError, InputError, UsageError
from tracekit.report.compare import compare
from tracekit.report.compare.gate import parse_condition
from tracekit.report.compare.ledger import ledger, what_changed
from tracekit.report.compare.match import Match, match_sequences
from tracekit.report.compare.measures import MEASURES, find_measure
from tracekit.report.compare.names import number, short_names
from tracekit.report.compare.pairs import differences
from tracekit.report.compare.parts import parts
from tracekit.report.compare.select import Selector
from tracekit.report.compare.side import Side
from tracekit.schema import ALL, ANY, KV_RESULTS, LAYER_RESULTS, VOCAB_RESULTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tracekit.report.compare import Comparison
    from tracekit.report.compare.pairs import Difference

ERROR = find_measure("error")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write results once; a comparison reads no single layer of them."""
    folder = make_results(tmp_path_factory.mktemp("made") / "results", num_sequences=16)
    kv(folder, lambda frame: frame[frame["layer"] == ALL])
    run(folder, add_hashes)
    return folder


def add_hashes(content: dict[str, Any]) -> None:
    """Say of which prompt and tokens each sequence is."""
    for one in content["sequences"]:
        one |= {"prompt_sha256": one["prompt_id"], "tokens_sha256": one["sequence_id"]}


@pytest.fixture
def sides(tmp_path: Path, made: Path) -> tuple[Path, Path]:
    """Return the same results twice, recorded by two runs."""
    for name in "ab":
        shutil.copytree(made, tmp_path / name)
    run(tmp_path / "b", lambda one: one["trace"].update(run_id="another"))
    return tmp_path / "a", tmp_path / "b"


def run(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change ``run.json``."""
    content = json.loads((folder / "run.json").read_text())
    change(content)
    (folder / "run.json").write_text(json.dumps(content))


def kv(folder: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change the table of policies."""
    frame = pq.read_table(folder / "kv.parquet").to_pandas()
    frame = frame.astype(dict.fromkeys(frame.select_dtypes("category"), object))
    write_table(folder, KV_RESULTS, change(frame).convert_dtypes())


def row(made: Comparison, measure: str, name: str, domain: str = ANY) -> Difference:
    """Return the difference of one cell."""
    found = [
        one
        for one in made.rows
        if (one.measure.name, one.domain) == (measure, domain) and one.name == name
    ]
    assert len(found) == 1
    return found[0]


def of(made: Comparison, measure: str) -> list[Difference]:
    """Return the differences of one measure."""
    return [one for one in made.rows if one.measure.name == measure]


# Pairs and intervals, against a plain loop


def slow_difference(rows: list[dict[str, Any]]) -> tuple[float | None, Any, Any, int]:
    """Average samples of a prompt, then prompts; sort the means of 1 000 draws of prompts."""
    by_prompt: dict[str, list[float]] = {one["prompt"]: [] for one in rows}
    for one in rows:
        if one["idle_a"] or one["idle_b"] or one["a"] is None or one["b"] is None:
            continue
        by_prompt[one["prompt"]].append(one["b"] - one["a"])
    means = [math.fsum(found) / len(found) for found in by_prompt.values() if found]
    n = len(means)
    if n == 0:
        return None, None, None, 0
    mean = math.fsum(means) / n
    if n < 3:
        return mean, None, None, n
    drawn = np.random.default_rng(0).integers(n, size=(1000, n))
    draws = sorted(math.fsum(means[i] for i in one) / n for one in drawn)
    return mean, draws[24], draws[974], n


VALUE = st.one_of(st.none(), st.floats(0, 4, width=32))
ROW = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from("pqrstu"),
        "a": VALUE,
        "b": VALUE,
        "idle_a": st.sampled_from([False, False, False, True]),
        "idle_b": st.sampled_from([False, False, False, True]),
    }
)


def frame_of(rows: list[dict[str, Any]], side: str) -> pd.DataFrame:
    values = [math.nan if one[side] is None else one[side] for one in rows]
    return pd.DataFrame(
        {
            "level": "local",
            "name": "p",
            "place": 0,
            "sequence_id": [f"{one['prompt']}#{number}" for number, one in enumerate(rows)],
            "target": 0.5,
            "is_causal": True,
            "is_idle": [one[f"idle_{side}"] for one in rows],
            "is_flagged": False,
            "output_error": np.array(values, dtype=np.float64),
        }
    )


@settings(deadline=None, max_examples=40)
@given(rows=st.lists(ROW, min_size=1, max_size=9))
def test_a_paired_difference_is_that_of_a_plain_loop(rows: list[dict[str, Any]]) -> None:
    frames = frame_of(rows, "a"), frame_of(rows, "b").iloc[::-1]
    names = frames[0]["sequence_id"].tolist()
    known = {name: {"prompt_id": name.split("#")[0], "domain": "d"} for name in names}
    side: Any = Side(None, {}, known, {})  # type: ignore[arg-type]
    nothing: frozenset[str] = frozenset()
    match = Match(
        paired=tuple(names),
        only_a=(),
        only_b=(),
        mismatched=(),
        other_text=nothing,
        same_given=nothing,
    )
    found = list(differences(frames, (side, side), match, [ERROR], seed=0))
    mean, low, high, n = slow_difference(rows)
    if all(one["a"] is None and one["b"] is None for one in rows):
        assert found == []
        return
    interval = found[0].interval
    assert interval.n == n
    for value, expected in zip(
        (interval.mean, interval.low, interval.high), (mean, low, high), strict=True
    ):
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-12))
    counted = found[0].num_sequences + found[0].num_idle + found[0].num_missing
    assert counted == len(rows)


def test_the_same_results_are_equal_in_everything_and_bytes_do_not_change(
    sides: tuple[Path, Path],
) -> None:
    first, second = compare(*sides), compare(*sides)
    assert {one.verdict for one in first.rows} == {"equal"}
    assert json.dumps(first.to_json()) == json.dumps(second.to_json())
    error = row(first, "output_error", "h2o:kept=0.5")
    assert (error.interval.mean, error.interval.n, error.a) == (0, 16, error.b)


def test_a_worse_b_is_worse_by_the_known_amount_and_a_better_one_better(
    sides: tuple[Path, Path],
) -> None:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        shift = frame["policy"].map({"h2o:kept=0.5": 0.25, "knorm:kept=0.5": -0.125}).fillna(0)
        return frame.assign(output_error=frame["output_error"] + shift)

    kv(sides[1], change)
    made = compare(*sides)
    worse, better = (row(made, "output_error", f"{one}:kept=0.5") for one in ("h2o", "knorm"))
    assert worse.interval.mean == pytest.approx(0.25, abs=1e-6)
    assert (worse.verdict, better.verdict) == ("worse", "better")
    assert row(made, "output_error", "snapkv:kept=0.5").verdict == "equal"


def test_sequences_of_one_side_are_named_and_counted_not_compared(
    sides: tuple[Path, Path],
) -> None:
    run(sides[0], lambda one: one["sequences"].pop(0))
    run(sides[1], lambda one: one["sequences"].pop(3))
    made = compare(*sides)
    assert made.match.only_a == ("dialogue-03#0",)
    assert made.match.only_b == ("story-00#0",)
    assert row(made, "output_error", "h2o:kept=0.5").interval.n == 14


def test_idle_sequences_are_left_out_and_clipped_ones_flagged(sides: tuple[Path, Path]) -> None:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        is_one = frame["sequence_id"] == "code-01#0"
        is_two = frame["sequence_id"] == "story-00#0"
        return frame.assign(is_idle=is_one, is_clipped=is_two)

    kv(sides[1], change)
    found = row(compare(*sides), "output_error", "h2o:kept=0.5")
    assert (found.num_idle, found.num_flagged, found.interval.n) == (1, 1, 15)


def test_a_domain_has_its_own_rows_from_eight_prompts_and_is_counted_below(
    sides: tuple[Path, Path],
) -> None:
    def change(one: dict[str, Any]) -> None:
        for place, sequence in enumerate(one["sequences"]):
            sequence["domain"] = "story" if place < 8 else f"few-{place % 2}"
        one["sequences"].pop()

    for side in sides:
        run(side, change)
    made = compare(*sides)
    assert {one.domain for one in made.rows} == {ANY, "story"}
    assert row(made, "output_error", "h2o:kept=0.5", "story").interval.n == 8
    assert made.few == {"few-0": 4, "few-1": 3}


# Which sequences are the same


def change_sequence(folder: Path, place: int, **changed: Any) -> None:
    """Change what ``run.json`` says of one sequence."""
    run(folder, lambda one: one["sequences"][place].update(changed))


def test_another_prompt_under_one_name_is_no_pair(sides: tuple[Path, Path]) -> None:
    change_sequence(sides[1], 2, prompt_sha256="another")
    found = compare(*sides).match
    assert found.mismatched == ("translation-02#0",)
    assert "translation-02#0" not in found.paired


def test_generated_texts_that_differ_are_pairs_of_other_texts(sides: tuple[Path, Path]) -> None:
    change_sequence(sides[1], 2, tokens_sha256="another")
    found = compare(*sides).match
    assert found.other_text == {"translation-02#0"}
    assert (len(found.paired), found.mismatched) == (16, ())


def test_plain_texts_are_told_apart_by_their_tokens(sides: tuple[Path, Path]) -> None:
    for side in sides:
        for place in (0, 1):
            change_sequence(side, place, text_source="given", prompt_sha256=None)
    change_sequence(sides[1], 1, tokens_sha256="another")
    found = compare(*sides).match
    assert found.mismatched == ("code-01#0",)
    assert found.same_given == {"story-00#0"}
    run(sides[1], lambda one: one["trace"]["spec"].update(num_tokens=50_000))
    assert compare(*sides).match.mismatched == ()


def slow_match(a: dict[str, Any], b: dict[str, Any], same_tokenizer: bool) -> dict[str, list[str]]:
    """Sort each sequence into the fields of a match by plain questions."""
    found: dict[str, list[str]] = {one.name: [] for one in fields(Match)}
    for name in sorted({*a, *b}):
        if name not in b:
            found["only_a"].append(name)
        elif name not in a:
            found["only_b"].append(name)
        elif a[name]["text_source"] != b[name]["text_source"] or (
            same_tokenizer and a[name]["prompt_sha256"] != b[name]["prompt_sha256"]
        ):
            found["mismatched"].append(name)
        elif a[name]["tokens_sha256"] == b[name]["tokens_sha256"]:
            found["paired"].append(name)
            if a[name]["text_source"] == "given":
                found["same_given"].append(name)
        elif a[name]["text_source"] == "given" and same_tokenizer:
            found["mismatched"].append(name)
        else:
            found["paired"].append(name)
            found["other_text"].append(name)
    return found


SAID = st.fixed_dictionaries(
    {
        "text_source": st.sampled_from(["given", "generated"]),
        "prompt_sha256": st.sampled_from([None, "p", "q"]),
        "tokens_sha256": st.sampled_from("st"),
    }
)
SEQUENCES = st.dictionaries(st.sampled_from("uvwxyz"), SAID)


@given(a=SEQUENCES, b=SEQUENCES, same_tokenizer=st.booleans())
def test_sequences_are_matched_as_plain_questions_sort_them(
    made: Path, a: dict[str, Any], b: dict[str, Any], same_tokenizer: bool
) -> None:
    runs = [json.loads((made / "run.json").read_text()) for _ in "ab"]
    if not same_tokenizer:
        runs[1]["trace"]["spec"]["num_tokens"] = 50_000
    side_a, side_b = (Side(made, one, said, {}) for one, said in zip(runs, (a, b), strict=True))
    expected = slow_match(a, b, same_tokenizer)
    if not expected["paired"]:
        with pytest.raises(InputError, match="no sequence to compare"):
            match_sequences(side_a, side_b)
        return
    found = match_sequences(side_a, side_b)
    assert {one.name: sorted(getattr(found, one.name)) for one in fields(Match)} == expected


def test_perplexity_compares_only_on_the_same_given_text(sides: tuple[Path, Path]) -> None:
    for side in sides:
        kv(side, lambda frame: frame.assign(nll_full=1.0, nll_pruned=1.5))
    assert not [one for one in compare(*sides).rows if one.measure.needs_given]
    with pytest.raises(InputError, match="same on both sides: 16 of 16"):
        compare(*sides, measures=["ppl"])
    for side in sides:
        run(side, lambda one: [s.update(text_source="given") for s in one["sequences"][:5]])
    made = compare(*sides, measures=["ppl"])
    assert {one.interval.n for one in of(made, "nll_change")} == {5}
    assert "11 of 16" in made.left_out["nll_change"]


def test_with_another_tokenizer_nothing_a_token_is_compared(sides: tuple[Path, Path]) -> None:
    run(sides[1], lambda one: one["trace"]["spec"].update(num_tokens=50_000))
    made = compare(*sides)
    assert {one.measure.name for one in made.rows} == {"kept_frac", "kv_bytes", "cost_frac"}
    assert "tokenizers differ" in made.left_out["output_error"]
    with pytest.raises(InputError, match="tokenizers differ"):
        compare(*sides, measures=["error"])
    with pytest.raises(InputError, match=r"tests nothing.*tokenizers differ"):
        compare(*sides, conditions=["error>0"])


# Policies


def test_two_policies_of_one_folder_pair_by_what_they_were_asked_to_keep(
    sides: tuple[Path, Path],
) -> None:
    made = compare(sides[0], sides[0], policy="snapkv", against="h2o", measures=["error"])
    rows = of(made, "output_error")
    assert len(rows) == len(KEPT)
    frame = pq.read_table(sides[0] / "kv.parquet").to_pandas()
    means = frame.groupby(["policy"], observed=True)["output_error"].mean()
    for one, kept in zip(rows, KEPT, strict=True):
        expected = means[f"snapkv:kept={kept:g}"] - means[f"h2o:kept={kept:g}"]
        assert one.interval.mean == pytest.approx(expected, abs=1e-6)
        assert one.name == f"snapkv against h2o, kept={kept:g}"


def test_two_policies_of_other_kept_fractions_pair_where_each_is_one(
    sides: tuple[Path, Path],
) -> None:
    one, other = "h2o:kept=0.25", "knorm:kept=0.5"
    made = compare(sides[0], sides[1], policy=one, against=other, measures=["error"])
    assert [found.name for found in of(made, "output_error")] == [f"{one} against {other}"]


def test_two_schemes_pair_at_one_size_or_at_each(sides: tuple[Path, Path]) -> None:
    a = sides[0]
    each = compare(a, a, policy="lowrank", against="previous", measures=["hit"])
    one = compare(a, a, policy="lowrank:512", against="previous:1024", measures=["hit"])
    assert [found.place for found in each.rows] == [256, 512, 1024, 2048, 4096, 8192]
    assert len(one.rows) == 1


def test_policies_of_one_side_are_listed(sides: tuple[Path, Path]) -> None:
    kv(sides[1], lambda frame: frame[frame["family"] != "knorm"])
    made = compare(*sides)
    assert made.only_a == tuple(("kv", "local", f"knorm:kept={one:g}", ALL) for one in KEPT)
    assert made.only_b == ()


def test_what_b_lacks_is_counted_and_no_gate_passes_on_it(sides: tuple[Path, Path]) -> None:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        is_gone = frame["family"].eq("knorm") | frame["sequence_id"].eq("code-01#0")
        return frame[~is_gone]

    kv(sides[1], change)
    made = compare(*sides, conditions=["error>9", "error@h2o>9"])
    assert row(made, "output_error", "h2o:kept=0.5").num_missing == 1
    assert [one.passed for one in made.gate] == [False, True]
    assert [one.name for one in made.gate[0].unknown] == [f"knorm:kept={one:g}" for one in KEPT]
    back = compare(sides[1], sides[0], conditions=["error>9"])
    assert row(back, "output_error", "h2o:kept=0.5").num_missing == 1
    assert back.gate[0].passed


def test_layers_are_compared_one_by_one_where_both_sides_have_them(
    sides: tuple[Path, Path],
) -> None:
    for side, value in zip(sides, (0.1, 0.3), strict=True):
        ids = [
            one["sequence_id"] for one in json.loads((side / "run.json").read_text())["sequences"]
        ]
        rows = [
            {
                "sequence_id": name,
                "rule": "rows:drop=0.03",
                "layer": layer,
                "kv_head": head,
                "level": "propagated",
                "kl_nats": value * (layer + 1),
            }
            for name in ids
            for layer, head in itertools.product((0, 1), (ALL, 0))
        ]
        write_table(side, LAYER_RESULTS, pd.DataFrame(rows))
    made = compare(*sides, measures=["layer_kl"])
    assert [one.place for one in of(made, "layer_kl_nats")] == [0, 1]
    assert [one.interval.mean for one in of(made, "layer_kl_nats")] == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("h2o", True),
        ("h2o:kept=0.5", True),
        ("h2o:every=1,kept=0.5", True),
        ("h2o:kept=0.5,recent=0.5,every=1", True),
        ("h2o:kept=0.25", False),
        ("h2", False),
        ("h2o+int4", False),
        ("h2o:kept=0.5:3", True),
        ("h2o:kept=0.5:4", False),
    ],
)
def test_a_text_means_the_policies_that_have_all_that_it_says(text: str, taken: bool) -> None:
    assert Selector(text).takes("h2o:kept=0.5,recent=0.5,every=1", 3) is taken


def test_short_names_say_what_differs_and_what_is_kept_and_stay_apart() -> None:
    names = [
        "h2o:kept=0.5,recent=0.5,every=1",
        "h2o:kept=0.5,recent=0.5,every=16",
        "snapkv:kept=0.5,window=32",
        "snapkv:kept=0.5,window=32+int4:group=32",
    ]
    short = short_names(names)
    assert list(short.values()) == [
        "h2o:kept=0.5,every=1",
        "h2o:kept=0.5,every=16",
        "snapkv:kept=0.5",
        "snapkv:kept=0.5+int4",
    ]


@given(
    st.sets(
        st.builds(
            "{}:kept={},w={}".format,
            st.sampled_from(["h2o", "tova"]),
            st.sampled_from([0.1, 0.5]),
            st.sampled_from([1, 2, 3]),
        )
    )
)
def test_no_two_short_names_are_alike(names: set[str]) -> None:
    assert len(set(short_names(names).values())) == len(names)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (-0.0, "0"), (0.25, "+0.25"), (-3.34e-15, "-3.34e-15"), (999.7, "+1000")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value, signed=True) == text


# The ledger


def test_the_ledger_says_what_changed_in_a_sentence(sides: tuple[Path, Path]) -> None:
    def change(one: dict[str, Any]) -> None:
        one["trace"] |= {"versions": {"torch": "2.13"}, "tokenizer": {"sha256": "a"}}
        one["versions"]["torch"] = "2.14"

    run(
        sides[0],
        lambda one: one["trace"].update(versions={"torch": "2.12"}, tokenizer={"sha256": "a"}),
    )
    run(sides[1], change)
    made = compare(*sides)
    assert made.changed.startswith(
        "the same model; the same tokenizer; recording: torch 2.12 -> 2.13"
    )
    assert "replay: torch 2.13.0 -> 2.14" in made.changed
    status = {(one.group, one.what): one.status for one in made.entries}
    assert status["recording", "torch"] == "changed"
    assert status["tokenizer", "hash"] == "same"
    assert status["replay", "seed"] == "same"


def test_an_unknown_tokenizer_is_said_to_be_unknown(sides: tuple[Path, Path]) -> None:
    content = json.loads((sides[0] / "run.json").read_text())
    entries = ledger(content, content)
    assert "tokenizer is not recorded on both sides" in what_changed(entries)


# The gate


def test_a_gate_is_on_the_difference_and_fails_with_what_it_found(
    sides: tuple[Path, Path],
) -> None:
    kv(
        sides[1],
        lambda f: f.assign(output_error=f["output_error"] + 0.25 * (f["policy"] == "h2o:kept=0.5")),
    )
    made = compare(*sides, conditions=["error>0.02", "error.low@snapkv > 0"])
    first, second = made.gate
    assert [one.name for one in first.failed] == ["h2o:kept=0.5"]
    assert (first.num_cells, first.unknown) == (len(POLICIES) * len(KEPT), ())
    assert (second.num_cells, second.passed) == (len(KEPT), True)
    with pytest.raises(
        GateFailedError, match=r"h2o:kept=0.5 worse by 0.25 \[0.25, 0.25\]"
    ) as error:
        made.raise_if_failed()
    assert error.value.exit_code == 6


def test_a_bound_is_tested_only_where_a_condition_names_it(sides: tuple[Path, Path]) -> None:
    for side in sides:
        kv(side, lambda frame: frame.assign(causal=frame["family"] != "random"))
    texts = ["B.error>-1", "B.error@random>-1", "B.cost>-1", "B.cost@oracle>-1"]
    found = compare(*sides, conditions=texts).gate
    num_kv, num_vocab = len(POLICIES) - 1, len(ESTIMATORS) - 1
    tested = [num_kv * len(KEPT), len(KEPT), num_vocab * len(SIZES), len(SIZES)]
    assert [one.num_cells for one in found] == [len(one.failed) for one in found] == tested
    assert [one.num_bounds for one in found] == [len(KEPT), 0, len(SIZES), 0]
    assert all(row.is_causal for one in found[::2] for row in one.failed)
    assert not any(row.is_causal for one in found[1::2] for row in one.failed)
    assert found[0].to_json()["num_bounds"] == len(KEPT)
    told = next(one for one in parts(compare(*sides, conditions=texts)) if one.title == "gate")
    assert f"no @ names them: {len(KEPT) + len(SIZES)}." in told.lines[0]


def test_a_gate_on_bounds_alone_says_how_to_name_them(sides: tuple[Path, Path]) -> None:
    for side in sides:
        kv(side, lambda frame: frame.assign(causal=False))
    with pytest.raises(InputError, match="bounds only where @ names them"):
        compare(*sides, conditions=["error>0"])


def test_a_gate_may_be_on_b_itself_and_on_a_size(sides: tuple[Path, Path]) -> None:
    made = compare(*sides, conditions=["B.error@random:kept=0.1>0.5", "hit@previous:1024<=-0.01"])
    assert [one.passed for one in made.gate] == [False, True]
    assert [one.num_cells for one in made.gate] == [1, 1]


def test_an_interval_that_is_not_there_fails_loudly(sides: tuple[Path, Path]) -> None:
    run(sides[1], lambda one: one.update(sequences=one["sequences"][:2]))
    made = compare(*sides, conditions=["error.high>9", "error>9"])
    assert [one.passed for one in made.gate] == [False, True]
    assert len(made.gate[0].unknown) == len(POLICIES) * len(KEPT)
    with pytest.raises(GateFailedError, match=r"20 without a value.*no interval, 2 of at least 3"):
        made.raise_if_failed()


def test_a_gate_on_cells_without_any_value_fails(sides: tuple[Path, Path]) -> None:
    kv(sides[1], lambda frame: frame.assign(is_idle=True))
    made = compare(*sides, conditions=["error>9"])
    assert not made.gate[0].passed
    with pytest.raises(GateFailedError, match="16 evicted nothing"):
        made.raise_if_failed()


@pytest.mark.parametrize("text", ["error@nix>1", "kl>1", "layer_kl>1", "error@h2o:kept=0.3>1"])
def test_a_gate_that_tests_nothing_is_refused(sides: tuple[Path, Path], text: str) -> None:
    with pytest.raises(InputError, match="tests nothing"):
        compare(*sides, conditions=[text])


@pytest.mark.parametrize(
    "text",
    ["", "kl", "kl>", "kl>x", "kl>nan", "kl>inf", "kl=1", "nix>1", "B.kl.low>1", "kl@>1", ">1"],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_condition(text)


@given(
    st.sampled_from([one.name for one in MEASURES]),
    st.sampled_from(["", ".low", ".high", ".mean"]),
    st.sampled_from(
        ["", "@h2o", "@snapkv:kept=0.25,window=32+int4", "@previous:top=256@rate:1024"]
    ),
    st.sampled_from([">", ">=", "<", "<="]),
    st.floats(-9, 9),
    st.sampled_from(["", " "]),
)
def test_a_condition_is_read_as_it_was_written(
    measure: str, end: str, name: str, sign: str, bound: float, gap: str
) -> None:
    found = parse_condition(f"{measure}{end}{name}{gap}{sign}{gap}{bound!r}")
    assert (found.measure.name, found.sign, found.bound) == (measure, sign, bound)
    assert found.end == (end[1:] or "mean")
    assert (found.selector.text if found.selector else "") == name[1:]
    for value in (bound - 1, bound, bound + 1):
        expected = {
            ">": value > bound,
            ">=": value >= bound,
            "<": value < bound,
            "<=": value <= bound,
        }
        assert found.holds(value) is expected[sign]


# What cannot be compared at all


def test_bad_input_is_one_sentence(sides: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results folder"):
        compare(sides[0], tmp_path)
    with pytest.raises(UsageError, match="given twice"):
        compare(sides[0], sides[0])
    with pytest.raises(UsageError, match="needs --policy"):
        compare(*sides, against="h2o")
    with pytest.raises(UsageError, match="unknown level"):
        compare(*sides, level="locl")
    with pytest.raises(InputError, match="has no policy or scheme 'nix'"):
        compare(*sides, policy="nix")
    run(sides[1], lambda one: one.update(schema_version=1))
    with pytest.raises(InputError, match="version 1"):
        compare(*sides)


def test_a_damaged_file_and_rows_that_are_there_twice_are_refused(
    sides: tuple[Path, Path],
) -> None:
    kv(sides[1], lambda frame: pd.concat([frame, frame]))
    with pytest.raises(InputError, match="twice"):
        compare(*sides)
    run(sides[0], lambda one: one["sequences"][1].pop("tokens_sha256"))
    with pytest.raises(InputError, match=r"lacks sequences\[1\]\.tokens_sha256"):
        compare(*sides)
    change_sequence(sides[0], 1, tokens_sha256="there")
    (sides[1] / "kv.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="is damaged"):
        compare(*sides)


def test_sides_without_a_common_policy_or_prompt_are_refused(sides: tuple[Path, Path]) -> None:
    (sides[0] / "vocab.parquet").unlink()
    (sides[1] / "kv.parquet").unlink()
    with pytest.raises(InputError, match="nothing in common"):
        compare(*sides)
    run(
        sides[1],
        lambda one: [s.update(sequence_id="x" + s["sequence_id"]) for s in one["sequences"]],
    )
    with pytest.raises(InputError, match="no sequence to compare"):
        compare(*sides)


def test_vocabulary_results_of_both_sides_are_compared_by_scheme_and_size(
    sides: tuple[Path, Path],
) -> None:
    frame = pq.read_table(sides[1] / "vocab.parquet").to_pandas()
    shift = 0.01 * (frame["size"] == 1024)
    frame = frame.assign(hit_argmax=frame["hit_argmax"] - shift)
    write_table(sides[1], VOCAB_RESULTS, frame)
    made = compare(*sides, measures=["hit"])
    worse = {one.place for one in made.rows if one.verdict == "worse"}
    assert worse == {1024}


def test_comparing_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys, tracekit.report.compare, tracekit.report.compare.markdown;"
        "import tracekit.report.compare.parts; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
