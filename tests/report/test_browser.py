from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.report.fake import HOSTILE, make_results
from tracekit.report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = Path("/usr/bin/chromium")

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
    make_results(folder / "results", hostile=HOSTILE, num_sequences=18)
    return write_report(folder / "results", folder / "report.html")


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Page]:
    """Open the report from disk; afterwards nothing was complained of and nothing fetched."""
    context = browser.new_context(color_scheme=request.param)
    opened, complaints, requests = context.new_page(), [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: complaints.append(dialog.message))
    opened.on("request", lambda sent: requests.append(sent.url))
    opened.goto(report.as_uri())
    yield opened
    context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]


def test_the_theme_follows_the_system_and_the_button(page: Page) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    system = page.evaluate(ground)
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (system == "rgb(20, 23, 26)") == dark
    seen = set()
    for _ in range(3):
        page.click("#theme")
        seen.add(page.evaluate(ground))
    assert seen == {"rgb(255, 255, 255)", "rgb(20, 23, 26)"}
    assert page.evaluate(ground) == system


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_page(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_click_sorts_a_table_by_number(page: Page) -> None:
    cells = (
        "[...document.querySelectorAll('#cache tbody')[0].rows].map(r => r.cells[3].dataset.key)"
    )
    button = page.locator("#cache thead").first.locator("th").nth(3).locator("button")
    button.click()
    rising = [float(key) for key in page.evaluate(cells)]
    assert rising == sorted(rising)
    button.click()
    assert [float(key) for key in page.evaluate(cells)] == sorted(rising, reverse=True)


def test_tokens_tell_their_numbers_to_mouse_and_keyboard(page: Page) -> None:
    facts = page.locator("#facts")
    assert not facts.is_visible()
    page.locator(".tokens .t").nth(20).hover()
    assert "position 20: entropy" in facts.inner_text()
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    assert "position 21: entropy" in facts.inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "position 19: entropy" in facts.inner_text()


def test_the_page_is_whole_without_script(browser: Browser, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator(".verdict").count() == 2
    assert page.locator("svg.drawing").first.is_visible()
    assert "entropy" in (page.locator(".tokens .t").nth(5).get_attribute("title") or "")
    assert page.locator("button:visible").count() == 0
    context.close()
