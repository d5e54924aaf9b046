from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import tracekit.report
from tests.report.fake import ESTIMATORS, HOSTILE, POLICIES, make_results
from tests.report.page import Page
from tracekit.errors import InputError
from tracekit.report import write_report
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


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_results(tmp_path / name / "results", num_sequences=4)
        write_report(tmp_path / name / "results", tmp_path / name / "report.html")
    first = sorted(p for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(first) > 12
    for path in first:
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.read_bytes() == other.read_bytes(), path.name


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
