from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.report.fake import make_results
from tracekit.report.blocks import Absent, Section, Text
from tracekit.report.figures.entropy_histogram import BIN_NATS, MOST_PANELS, histogram
from tracekit.report.figures.regimes import MOST_STEPS, timeline
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections.entropy import chosen, section
from tracekit.schema import SCORED


def make_steps(
    lengths: dict[str, list[int]], *, seed: int = 0, scale_nats: float = 1.0
) -> pd.DataFrame:
    """Return scored steps: by domain the lengths of its sequences, a regime every 20 steps."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "sequence_id": f"{domain}-{number}#0",
            "domain": domain,
            "bucket": "< 256",
            "position": 50 + step + (30 if step >= 10 else 0),
            "entropy_nats": float(rng.gamma(0.6, scale_nats)),
            "nll_full": float(rng.gamma(0.6, scale_nats)),
            "regime": step // 20,
        }
        for domain, sizes in lengths.items()
        for number, size in enumerate(sizes)
        for step in range(size)
    ]
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(make_results(tmp_path_factory.mktemp("e") / "r", num_sequences=3))


def _with(results: Results, steps: pd.DataFrame) -> Results:
    return replace(results, _frames={SCORED.name: steps})


def test_drawn_are_the_sequences_with_the_most_regimes_of_three_domains() -> None:
    steps = make_steps({"code": [10, 50], "story": [90, 90], "essay": [30], "talk": [50]})
    assert chosen(steps) == ["story-0#0", "code-1#0", "talk-0#0"]
    assert chosen(steps.iloc[::-1]) == chosen(steps)


def test_without_scored_steps_the_section_says_what_to_run(results: Results) -> None:
    absent = section(_with(results, make_steps({"story": [5]}).head(0)), Options())
    assert isinstance(absent, Absent)
    assert "--vocab" in absent.command


@pytest.mark.parametrize(
    ("scale_nats", "verdict"), [(1.0, "do not agree"), (1e-4, "These steps agree")]
)
def test_the_section_says_whether_the_steps_agree_with_the_paper(
    results: Results, scale_nats: float, verdict: str
) -> None:
    steps = make_steps({"story": [40, 30, 20], "code": [60]}, scale_nats=scale_nats)
    made = section(_with(results, steps), Options())
    assert isinstance(made, Section)
    first = made.blocks[0]
    assert isinstance(first, Text)
    assert verdict in first.text
    share = (steps["entropy_nats"] < 0.01).mean()
    table = next(block for block in made.parts() if block.kind == "table")
    assert float(table.rows[0][5].key) == pytest.approx(share)
    assert [row[0].text for row in table.rows] == ["all", "code", "story"]
    mark = float(np.quantile(steps["entropy_nats"], 0.8, method="inverted_cdf"))
    assert float(table.rows[0][7].key) == pytest.approx(mark)


def test_one_sequence_of_one_step_has_a_section_without_intervals(results: Results) -> None:
    made = section(_with(results, make_steps({"story": [1]})), Options())
    assert isinstance(made, Section)
    tables = [block for block in made.parts() if block.kind == "table"]
    assert tables[0].rows[0][4].text == "n/a"


def test_a_long_sequence_is_cut_and_the_caption_counts_what_is_left_out() -> None:
    steps = make_steps({"story": [MOST_STEPS + 7]})
    figure = timeline(steps)
    assert len(figure.table) == MOST_STEPS
    assert "7 later steps are not drawn" in figure.caption
    assert f"{MOST_STEPS // 20 + 1} stretches" in figure.alt


def test_the_timeline_is_the_same_picture_each_time() -> None:
    steps = make_steps({"story": [30], "<b>": [25]})
    first = timeline(steps)
    assert first.svg == timeline(steps).svg
    assert "<b>" not in first.svg
    assert list(first.table["position"].head(11)) == [*range(50, 60), 90]


def test_histogram_shares_are_counts_over_the_steps_of_the_domain() -> None:
    steps = make_steps({"code": [40], "story": [30, 50]})
    figure = histogram(steps, 0.8)
    for row in figure.table.itertuples():
        part = steps[steps["domain"] == row.domain]["entropy_nats"]
        last = row.below_nats >= steps["entropy_nats"].max()
        inside = sum(
            row.from_nats <= one < row.below_nats or (last and one == row.below_nats)
            for one in part
        )
        assert row.share_of_steps == pytest.approx(inside / len(part))
    assert (figure.table.groupby("domain")["share_of_steps"].sum() - 1).abs().max() < 1e-9
    assert set((figure.table["below_nats"] - figure.table["from_nats"]).round(9)) == {BIN_NATS}


def test_domains_beyond_the_panels_are_counted() -> None:
    steps = make_steps({f"d{number:02d}": [3 + number] for number in range(MOST_PANELS + 2)})
    figure = histogram(steps, 0.8)
    assert figure.table["domain"].nunique() == MOST_PANELS
    assert "d00" not in set(figure.table["domain"])
    assert "2 smaller domains are not drawn" in figure.caption
