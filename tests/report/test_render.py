from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pandas as pd
import pytest

import tracekit.report
from tests.report import fake
from tests.report.fake import ESTIMATORS, HOSTILE, POLICIES, make_results
from tests.report.fake_shown import BAD_NAME, add_shown, rename_badly
from tests.report.page import Page
from tracekit.errors import InputError
from tracekit.report import write_report
from tracekit.report.figures.figure import Drawing
from tracekit.report.sections import ORDER


@pytest.fixture(scope="module", params=["fake", "rich"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of believable numbers and hostile words, and one of all that there is."""
    folder = tmp_path_factory.mktemp("report")
    if request.param == "rich":
        return write_report(request.getfixturevalue("rich_results"), folder / "report.html")
    make_results(folder / "results", hostile=HOSTILE, num_sequences=18)
    return write_report(folder / "results", folder / "report.html")


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    return Page(report.read_text(encoding="utf-8"))


def test_the_page_is_complete_and_nests_well(page: Page) -> None:
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    assert len(page.all("main")) == 1


def test_the_page_forbids_all_foreign_content(page: Page) -> None:
    policies = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; img-src data:;")
    assert page.all("link") == []


def test_no_attribute_names_another_host(page: Page) -> None:
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert "http" not in value, (tag, name, value)
            assert not name.startswith("on"), (tag, name)
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))


def test_style_and_script_reach_for_nothing(page: Page) -> None:
    for source in (*page.text("style"), *_scripts(page)):
        assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp|eval|innerHTML", source)
    assert sum(map(len, _scripts(page))) < 10_000


def _scripts(page: Page) -> list[str]:
    """Return what runs; data blocks do not."""
    sources, kinds = page.text("script"), [script.get("type") for script in page.all("script")]
    return [source for source, kind in zip(sources, kinds, strict=True) if kind is None]


def test_ids_are_unique_and_anchors_resolve(page: Page, report: Path) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-labelledby",):
            if name in attributes:
                assert attributes[name] in ids
        if (target := attributes.get("href", "")).startswith("#"):
            assert target[1:] in ids
        for reference in re.findall(r"url\(#([^)]+)\)", str(attributes)):
            assert reference in ids
    links = [a["href"] for a in page.all("a") if not a["href"].startswith("#")]
    assert links
    assert all((report.parent / link).is_file() for link in links)


def test_every_figure_has_words_numbers_and_files(page: Page, report: Path) -> None:
    names = {one["id"].removeprefix("figure-") for one in page.all("figure") if "class" not in one}
    assert len(names) > 6
    assert len(page.all("figcaption")) == len(page.all("figure"))
    assert all("alt" in image for image in page.all("img"))
    drawings = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(drawings) == len(page.all("svg"))
    assert all("aria-labelledby" in svg for svg in drawings)
    folder = report.parent / "report-files"
    assert {path.stem for path in folder.iterdir()} == names
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".png", ".csv"}


def test_every_table_has_a_caption_and_scopes(page: Page) -> None:
    assert len(page.all("caption")) == len(page.all("table")) > 8
    assert {head["scope"] for head in page.all("th")} == {"col", "row"}


def test_hostile_text_is_shown_and_does_nothing(report: Path, page: Page) -> None:
    html = report.read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "\u202e" not in html
    assert "\x00" not in html
    assert len(_scripts(page)) == 2
    assert all(script.get("type") in (None, "application/json") for script in page.all("script"))


def test_hostile_names_are_written_out(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", hostile=HOSTILE, num_sequences=18)
    page = Page(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "<script>alert(1)</script>" in page.text("th")
    assert "<U+202E>right to left" in page.text("th")


def test_the_answer_comes_first_and_the_limits_last(page: Page) -> None:
    order = [section["id"] for section in page.all("section")]
    assert order[0] == "answer"
    assert [name for name in order if name != "absent"][-2:] == ["cells", "limits"]


def test_results_of_everything_lack_no_section(rich_results: Path, tmp_path: Path) -> None:
    page = Page(write_report(rich_results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(page.all("section")) == len(ORDER)


def test_all_policies_and_estimators_are_named(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results")
    page = Page(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert set(POLICIES) | set(ESTIMATORS) <= set(page.text("th"))
    assert set(POLICIES) | set(ESTIMATORS) <= set(page.text("text"))


def test_the_same_results_give_the_same_bytes_in_every_process(
    rich_results: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from tracekit.report import write_report\n"
        "write_report(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    for seed in ("1", "2"):
        out = str(tmp_path / seed / "report.html")
        arguments = [sys.executable, "-c", program, str(rich_results), out]
        subprocess.run(arguments, check=True, env=os.environ | {"PYTHONHASHSEED": seed})
    first = sorted(p for p in (tmp_path / "1").rglob("*") if p.is_file())
    assert len(first) > 12
    for path in first:
        other = tmp_path / "2" / path.relative_to(tmp_path / "1")
        assert path.read_bytes() == other.read_bytes(), path.name


def test_the_style_sheet_keeps_text_readable() -> None:
    """Contrast of WCAG 2.1 for every text on every ground it stands on, light and dark."""
    sheet = (Path(tracekit.report.__file__).parent / "templates/style.css").read_text()
    found = re.findall(r"--([a-z0-9]+): light-dark\((#\w{6}), (#\w{6})\)", sheet)
    colors = {name: both for name, *both in found}
    tokens = ["ground", "e1", "e2", "e3", "e4", "e5"]
    pairs = [("given", ground) for ground in tokens] + [("ink", ground) for ground in tokens]
    pairs += [(text, ground) for text in ("ink", "soft", "link") for ground in ("ground", "raised")]
    for text, ground in pairs:
        for one, other in zip(colors[text], colors[ground], strict=True):
            assert _contrast(one, other) >= 4.5, (text, ground, one, other)
    for mark in ("accent", "soft"):
        for one, other in zip(colors[mark], colors["ground"], strict=True):
            assert _contrast(one, other) >= 3, (mark, one, other)


def _contrast(one: str, other: str) -> float:
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_headings_are_in_order_and_every_alt_has_a_number(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[:2] == [1, 2]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    figures = [one["id"] for one in page.all("figure") if "class" not in one]
    alts = [text for tag, text in page.texts if tag == "strong" and re.search(r"\d", text)]
    assert len(alts) >= len(figures)
    assert all(re.search(r"\d", image["alt"]) for image in page.all("img"))


def test_hostile_names_break_nothing(tmp_path: Path) -> None:
    bad = "\"><img src=x onerror=alert(1)>' <!-- ]]> </script> # a b \u202e\x00"
    spec = fake.spec().to_json() | {"name": bad}
    results = make_results(tmp_path / "results", hostile=(bad, bad + "2"), num_sequences=9)
    run = json.loads((results / "run.json").read_text(encoding="utf-8"))
    run["trace"] |= {"spec": spec, "path": bad, "host": {"system": f"{bad}\ud800"}, "created": bad}
    run["tracekit_version"] = bad
    run["skipped"] = [{"what": bad, "sequence_id": bad, "why": f"{bad}\ud800"}]
    (results / "run.json").write_text(json.dumps(run), encoding="utf-8")
    page = Page(write_report(results, tmp_path / "r #1.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert not any(name.startswith("on") for _, one in page.elements for name in one)
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(_scripts(page)) == 2
    ids = [one["id"] for _, one in page.elements if "id" in one]
    assert len(ids) == len(set(ids))
    assert not any(re.search(r"\s", one) for one in ids)
    links = [unquote(a["href"]) for a in page.all("a") if not a["href"].startswith("#")]
    assert all((tmp_path / link).is_file() for link in links)


def test_texts_of_prompts_are_no_formulas_in_csv_files(tmp_path: Path) -> None:
    rename_badly(add_shown(make_results(tmp_path / "results", num_sequences=9)))
    write_report(tmp_path / "results", tmp_path / "r.html")
    files = sorted((tmp_path / "r-files").glob("*.csv"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    cells = {cell for text in texts for row in csv.reader(text.splitlines()) for cell in row}
    assert "'" + BAD_NAME.format("family") in cells
    for cell in cells:
        if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            float(cell)


def test_numbers_stay_numbers_in_csv_files() -> None:
    table = pd.DataFrame({"@x": ["=1", "1", None], "y": [-1.5, 2.0, math.nan], "n": [-1, 2, 3]})
    figure = Drawing(name="f", caption="c", alt="a 1", table=table, svg="<svg></svg>")
    assert figure.csv == b"'@x,y,n\n'=1,-1.5,-1\n1,2,2\n,,3\n"


def test_no_path_of_the_machine_is_in_the_page(tmp_path: Path) -> None:
    host = {"system": "Linux-6.1-of-this-machine-x86_64", "device": "cpu"}
    results = make_results(tmp_path / "results-folder", num_sequences=3)
    run = json.loads((results / "run.json").read_text(encoding="utf-8"))
    run["trace"] |= {"path": "/home/somebody/trace-folder", "host": host}
    run["command"] = ["/opt/bin/tracekit", "simulate", run["trace"]["path"], "-o", str(results)]
    (results / "run.json").write_text(json.dumps(run), encoding="utf-8")
    html = write_report(results, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "system Linux, device cpu" in html
    for path in ("results-folder", "trace-folder", "somebody", "/opt", str(tmp_path), "6.1-of"):
        assert path not in html


def test_the_report_is_small_and_leaves_no_temporary_file(report: Path) -> None:
    assert report.stat().st_size < 1_000_000
    assert not list(report.parent.rglob("*.tmp"))


def test_writing_again_replaces_the_report(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", num_sequences=3, questions=("vocab",))
    out = tmp_path / "sub folder" / "r.html"
    assert write_report(results, out) == out
    before = out.read_bytes()
    out.write_text("old")
    write_report(results, out)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("questions", "absent", "command"),
    [(("vocab",), "error-by-layer", "--kv"), (("kv",), "coverage-mass", "--vocab")],
)
def test_a_question_without_results_is_absent_and_says_what_to_run(
    tmp_path: Path, questions: tuple[str, ...], absent: str, command: str
) -> None:
    results = make_results(tmp_path / "results", num_sequences=3, questions=questions)
    page = Page(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert f"figure-{absent}" not in [figure["id"] for figure in page.all("figure")]
    advice = [text for text in page.text("code") if text.startswith("tracekit simulate TRACE")]
    assert any(command in one for one in advice)
    assert not (tmp_path / "r-files" / f"{absent}.csv").exists()


def test_results_without_shown_or_timings_still_make_a_report(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", num_sequences=3)
    (results / "shown.parquet").unlink()
    (results / "timings.parquet").unlink()
    page = Page(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "tokens" not in [section["id"] for section in page.all("section")]


def test_svg_files_are_valid_alone_and_have_no_black_of_their_own(report: Path) -> None:
    for path in (report.parent / "report-files").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "currentColor" in text
        assert "#010203" not in text
        assert text.count("http") == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", num_sequences=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"r\.html cannot be written"):
        write_report(results, tmp_path / "file" / "r.html")


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", num_sequences=3)
    pipe, link = tmp_path / "pipe.html", tmp_path / "link.html"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for target in (pipe, link):
        with pytest.raises(InputError, match=r"\.html is no regular file; give -o an HTML file"):
            write_report(results, target)
        assert not target.with_name(f"{target.stem}-files").exists()
    assert pipe.is_fifo()
    assert link.is_symlink()
    with pytest.raises(InputError, match="is a folder"):
        write_report(results, tmp_path)
    assert not list(tmp_path.glob("*-files"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("x" * 300, "cannot be written .File name too long"), ("", "-o names no file")],
)
def test_a_name_that_no_file_can_have_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    results = make_results(tmp_path / "results", num_sequences=3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        write_report(results, Path(name))
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_what_is_absent_is_one_sentence(report: Path) -> None:
    assert ".; to get it" not in report.read_text(encoding="utf-8")


def test_lone_surrogates_in_the_run_are_written_out(tmp_path: Path) -> None:
    run = {"failed": [{"cell": "x", "why": "bad \ud800 text"}]}
    results = make_results(tmp_path / "results", num_sequences=3, questions=("vocab",), run=run)
    html = write_report(results, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "bad &lt;U+D800&gt; text" in html


def test_a_report_is_made_without_torch(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", num_sequences=3)
    program = (
        "import sys; from pathlib import Path; from tracekit.report import write_report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "write_report(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "banned = {'torch', 'transformers', 'matplotlib.pyplot', 'seaborn'} & set(sys.modules)\n"
        "assert not banned, banned\n"
    )
    arguments = [
        sys.executable,
        "-W",
        "error",
        "-c",
        program,
        str(results),
        str(tmp_path / "r.html"),
    ]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_templates_hold_no_control_or_foreign_character() -> None:
    templates = Path(tracekit.report.__file__).parent / "templates"
    for path in templates.rglob("*.*"):
        assert path.read_text(encoding="utf-8").isascii(), path.name
