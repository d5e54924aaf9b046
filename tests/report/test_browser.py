from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.report.fake import HOSTILE, make_results
from tests.report.fake_shown import BAD_NAME, TRIED_FROM, add_shown, rename_badly
from tracekit.report import write_report
from tracekit.report.sections.tokens_shown import MOST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = Path("/usr/bin/chromium")
GROUND = "getComputedStyle(document.documentElement).backgroundColor"
LOOKS = "[...document.querySelectorAll('.tokens')[0].children].map(one => one.className)"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(CHROMIUM))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    add_shown(make_results(folder / "results", hostile=HOSTILE, num_sequences=9))
    return write_report(folder / "results", folder / "report.html")


@pytest.fixture(scope="module")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    results = make_results(folder / "results", num_sequences=3)
    add_shown(results, num_tokens=MOST_TOKENS)
    return write_report(results, folder / "report.html")


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Page]:
    yield from opened(browser, report, request.param)


@pytest.fixture
def light(browser: Browser, report: Path) -> Iterator[Page]:
    yield from opened(browser, report, "light")


def opened(browser: Browser, report: Path, scheme: Any) -> Iterator[Page]:
    """Open the report from disk; afterwards nothing was complained of and nothing fetched."""
    context = browser.new_context(color_scheme=scheme)
    page, complaints, requests = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("request", lambda sent: requests.append(sent.url))
    page.goto(report.as_uri())
    yield page
    context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]


def test_the_theme_follows_the_system_and_the_button(page: Page) -> None:
    system = page.evaluate(GROUND)
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (system == "rgb(20, 23, 26)") == dark
    seen = set()
    for _ in range(3):
        page.click("#theme")
        seen.add(page.evaluate(GROUND))
    assert seen == {"rgb(255, 255, 255)", "rgb(20, 23, 26)"}
    assert page.evaluate(GROUND) == system


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_page(light: Page, width: int) -> None:
    light.set_viewport_size({"width": width, "height": 900})
    assert light.evaluate("document.documentElement.scrollWidth") <= width
    light.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert light.evaluate("document.documentElement.scrollWidth") <= width


def test_captions_of_wide_tables_end_on_the_screen_and_figures_stay_readable(light: Page) -> None:
    light.set_viewport_size({"width": 400, "height": 900})
    light.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    rights = "all => all.map(one => one.getBoundingClientRect().right)"
    assert max(light.locator("caption span").evaluate_all(rights)) <= 400
    sizes = "all => all.map(one => one.getBoundingClientRect().width / one.viewBox.baseVal.width)"
    assert min(light.locator("svg.drawing").evaluate_all(sizes)) * 11 > 10


def test_the_list_of_sections_stays_beside_a_wide_page(light: Page) -> None:
    light.set_viewport_size({"width": 1400, "height": 900})
    light.locator("#limits").scroll_into_view_if_needed()
    light.evaluate("document.getElementById('policies').scrollIntoView({behavior: 'instant'})")
    link = light.locator("nav a[href='#policies']")
    assert link.is_visible()
    box = link.bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 900
    light.locator("nav a[href='#policies'][aria-current=true]").wait_for()
    assert light.locator("nav [aria-current]").count() == 1


def test_axe_finds_nothing_serious(page: Page) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.set_viewport_size({"width": 1400, "height": 900})
    page.evaluate("for (const one of document.querySelectorAll('#tokens details')) one.open = true")
    assert _serious(axe.Axe().run(page)) == []
    for view in ("missed", "held"):
        page.check(f"#views input[value={view}]")
        assert _serious(axe.Axe().run(page, context=".tokens")) == []


def test_axe_finds_nothing_serious_on_a_narrow_page(light: Page) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    light.set_viewport_size({"width": 400, "height": 900})
    assert _serious(axe.Axe().run(light)) == []


def _serious(found: Any) -> list[Any]:
    """Return the findings that keep somebody from reading the page, and where they are."""
    return [
        (one["id"], node["html"][:200], node["failureSummary"][:300])
        for one in found.response["violations"]
        if one["impact"] in {"serious", "critical"}
        for node in one["nodes"][:3]
    ]


def test_a_click_sorts_a_table_by_number(light: Page) -> None:
    table = light.locator("#tokens figure .scroll:has(table)").first
    light.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    button = table.locator("thead th").nth(3).locator("button")
    keys = "one => [...one.querySelectorAll('tbody tr')].map(row => +row.cells[3].dataset.key)"
    button.click()
    rising = table.evaluate(keys)
    assert rising == sorted(rising)
    button.press("Enter")
    assert table.evaluate(keys) == sorted(rising, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1


def test_tokens_tell_their_numbers_to_mouse_and_keyboard(page: Page) -> None:
    facts = page.locator("#facts")
    assert facts.inner_text() == ""
    page.locator(".tokens > span").nth(20).hover()
    told = facts.inner_text()
    assert "position 20, given" in told
    for part in ("entropy", "surprisal", "rank", "likely:", "of the heads by snapkv"):
        assert part in told
    page.locator(".tokens").first.focus()
    for key, position in (
        ("ArrowRight", 21),
        ("ArrowLeft", 20),
        ("ArrowDown", 30),
        ("ArrowUp", 20),
        ("Home", 0),
        ("ArrowLeft", 0),
    ):
        page.keyboard.press(key)
        assert f"position {position}, given" in facts.inner_text()
    assert "not predicted" in facts.inner_text()
    page.keyboard.press("End")
    last = page.locator(".tokens").first.locator("span").count() - 1
    assert f"position {last}, generated" in facts.inner_text()
    assert "under lowrank" in facts.inner_text()
    page.keyboard.press("Escape")
    assert facts.inner_text() == ""


def test_hostile_tokens_are_told_as_text(light: Page) -> None:
    light.locator(".tokens").first.focus()
    seen = []
    for _ in HOSTILE:
        seen.append(light.locator("#facts strong").inner_text())
        light.keyboard.press("ArrowRight")
    assert seen[:2] == ["<script>alert(1)</script>", "<U+202E>right\u2423to\u2423left"]
    assert seen[4] == "<U+0000><U+0007>"
    assert seen[7] == "x" * 200
    assert "likely: <script>alert(1)</script> " in light.locator("#facts").inner_text()


def test_hostile_names_are_shown_as_they_are_and_do_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    results = add_shown(make_results(tmp_path / "results", hostile=HOSTILE, num_sequences=9))
    pages = opened(browser, write_report(rename_badly(results), tmp_path / "report.html"), "light")
    page = next(pages)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.locator("script").count() == 2 + page.locator(".tokens").count()
    assert page.locator("img[src=x]").count() == 0
    assert BAD_NAME.format("model") in page.locator("h1").inner_text()
    told = page.locator("main").inner_text()
    for what in ("family", "estimator", "domain", "sequence_id", "cell", "why"):
        assert BAD_NAME.format(what) in told, what
    page.select_option("#held", BAD_NAME.format("family"))
    page.select_option("#missed", BAD_NAME.format("estimator"))
    page.locator(".tokens").first.focus()
    page.keyboard.press("End")
    assert f"under {BAD_NAME.format('estimator')}" in page.locator("#facts").inner_text()
    assert next(pages, None) is None


def test_the_view_is_switched_by_mouse_and_keyboard(light: Page) -> None:
    before = light.evaluate(LOOKS)
    assert before[0].split()[0] == "q"
    light.check("#views input[value=missed]")
    missed = light.evaluate(LOOKS)
    assert {one.split()[0] for one in missed[:TRIED_FROM]} == {"q"}
    marks = [one.split()[0] for one in missed[TRIED_FROM:]]
    assert set(marks) <= {"m", "e0"}
    told = light.locator(".told").first.inner_text()
    assert (
        "lowrank with 1\u202f024 candidates has no candidate for the most likely token at " in told
    )
    assert f"at {marks.count('m')} of {len(marks)} steps" in told
    assert light.locator(".legend:visible").all_inner_texts()[0].startswith("wrongly pruned")
    # A choice in a list switches to its view.
    light.select_option("#held", "streaming")
    assert light.is_checked("#views input[value=held]")
    held = light.evaluate(LOOKS)
    assert {one.split()[0] for one in held[:20]} == {"q"}
    assert {one.split()[0] for one in held[20:TRIED_FROM]} <= {"x", "e1", "e2", "e3", "e4"}
    assert held[TRIED_FROM].split() == ["e5", "c", "g", "b"]
    assert "streaming, asked to keep 25" in light.locator(".told").first.inner_text()
    light.locator("#views input[value=held]").focus()
    light.keyboard.press("ArrowRight")
    assert light.is_checked("#views input[value=entropy]")
    assert light.evaluate(LOOKS) == before
    assert light.locator(".told").first.inner_text() == ""


def test_four_thousand_tokens_are_shown_and_switched_at_once(
    browser: Browser, long_report: Path
) -> None:
    pages = opened(browser, long_report, "light")
    page = next(pages)
    assert page.locator(".tokens > span").count() == MOST_TOKENS
    start = time.perf_counter()
    page.check("#views input[value=held]")
    page.locator(".tokens").first.focus()
    page.keyboard.press("End")
    assert f"position {MOST_TOKENS - 1}, " in page.locator("#facts").inner_text()
    # So slow only where each token is looked for from the start.
    assert time.perf_counter() - start < 30
    assert len(set(page.evaluate(LOOKS))) > 5
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert next(pages, None) is None


def test_print_shows_what_is_folded_and_no_controls(light: Page) -> None:
    light.emulate_media(media="print")
    light.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert light.locator("details:not([open], .numbers)").count() == 0
    assert light.locator(".tokens").last.is_visible()
    for hidden in ("#views", "#theme", "nav"):
        assert not light.locator(hidden).first.is_visible()


def test_motion_is_smooth_only_where_it_is_wanted(light: Page) -> None:
    scrolling = "getComputedStyle(document.documentElement).scrollBehavior"
    assert light.evaluate(scrolling) == "smooth"
    light.emulate_media(reduced_motion="reduce")
    assert light.evaluate(scrolling) == "auto"


def test_the_page_is_whole_without_script(browser: Browser, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("svg.drawing").first.is_visible()
    looks = page.locator(".tokens > span").evaluate_all("all => all.map(one => one.className)")
    assert {f"e{n}" for n in range(6)} <= {one.split()[0] for one in looks}
    assert page.locator(".legend:visible").count() == 2
    assert page.locator("#views, button, select").locator("visible=true").count() == 0
    assert page.locator("table caption", has_text="highest entropy").count() == 3
    context.close()
