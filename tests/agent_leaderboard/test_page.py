"""The page in a real browser, offline; skipped where there is no Playwright or no Chromium."""

import os
import shutil

import pytest

from agent_leaderboard.report.tables import write_reports
from tests.agent_leaderboard.runs import PUBLIC

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the dependency group browser is not installed"
)  # fmt: skip
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def address(tmp_path_factory, run_folder):
    folder = tmp_path_factory.mktemp("page") / "run"
    shutil.copytree(run_folder, folder)
    write_reports(folder)
    return (folder / "leaderboard.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as program:
        # As root, Chromium runs without its sandbox only.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = program.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, address):
    """Open the page; afterwards, check that it made no request and no mistake."""
    contexts, errors = [], []

    def open_page(anchor="", width=1600, height=1000, **options):
        context = browser.new_context(
            viewport={"width": width, "height": height}, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.on(
            "request",
            lambda request: errors.append(request.url) if request.url != address else None,
        )
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.goto(address + anchor)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def test_hostile_names_and_actions_stay_text(open_page):
    page = open_page()
    assert page.title() == "Agent-R1 Gym: leaderboard"
    assert page.locator("img").count() == 0
    page.locator(f'[data-open="{PUBLIC}/hostile"]').first.click()
    said = page.locator(".said.agent pre").first.inner_text()
    assert said.startswith("</script><img src=x")
    assert "⟨U+202E⟩" in said
    assert "⟨U+D800⟩" in said
    assert page.title() == "Agent-R1 Gym: leaderboard"


def test_tables_sort_by_click_and_by_key(open_page):
    page = open_page()
    heading = page.locator(".long th", has_text="success %")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    numbers = page.locator(".long tbody td:nth-child(4)").all_inner_texts()
    values = [float(number) for number in numbers]
    assert values == sorted(values, reverse=True)
    heading.get_by_role("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    rank = page.locator(".long th", has_text="rank")
    rank.get_by_role("button").press("Enter")
    assert rank.get_attribute("aria-sort") == "ascending"
    assert heading.get_attribute("aria-sort") == "none"
    ranks = page.locator(".long tbody td:nth-child(3)").all_inner_texts()
    # Numbers first; the oracle's, which has no rank, last.
    assert ranks == ["=1"] * 5 + ["3"] + ["\N{EN DASH}"] * 2


def test_filters_hide_agents_and_environments_everywhere(open_page):
    page = open_page()
    page.locator("summary", has_text="Agents").click()
    page.get_by_label("best", exact=True).uncheck()
    assert page.locator("[data-agent=best]:visible").count() == 0
    assert "3 agents, 2 environments" in page.locator("#shown").inner_text()
    page.locator("#find").fill("hotpot")
    assert page.locator(".matrix thead th:visible").count() == 3  # agent, mean, hotpotqa
    assert page.locator(".matrix tbody tr:visible").count() == 3
    assert page.locator(".long tbody tr:visible").count() == 3
    assert page.locator("#pair-table tbody tr").count() == 1
    assert "best" not in page.locator("#scatter").inner_text()
    page.get_by_role("button", name="Show all").click()
    assert "4 agents, 2 environments" in page.locator("#shown").inner_text()
    assert page.locator(".long tbody tr:visible").count() == 8


def test_an_episode_is_read_step_by_step_with_the_keyboard(open_page):
    page = open_page()
    cell = page.locator(f'.matrix [data-open="{PUBLIC}/some"]')
    assert "37.5 %" in cell.get_attribute("aria-label")
    cell.focus()
    page.keyboard.press("Enter")
    viewer = page.locator("#viewer")
    assert viewer.is_visible()
    text = page.locator("#viewer-episode").inner_text()
    for shown in ("failure", "no_action", "I think so.", "neither a tool call nor an answer",
                  "wrong", "other attempts (1)"):  # fmt: skip
        assert shown.lower() in text.lower()
    assert page.evaluate("location.hash") == f"#episode/{PUBLIC}/some/0"
    for _ in range(3):  # three failures, then a success
        page.keyboard.press("ArrowRight")
    solved = page.locator("#viewer-episode")
    assert "understood as search(query=" in solved.inner_text()
    assert "new_gold_passage +" in solved.inner_text()
    assert page.locator("#viewer-list [aria-current=true]").count() == 1
    page.keyboard.press("Escape")
    assert not viewer.is_visible()
    assert page.evaluate("document.activeElement.dataset.open") == f"{PUBLIC}/some"


def test_two_agents_are_compared_and_turning_them_turns_the_sign(open_page):
    page = open_page()
    page.locator("#pair-first").select_option("best")
    page.locator("#pair-second").select_option("some")
    row = page.locator("#pair-table tbody tr").first
    cells = row.locator("td").all_inner_texts()
    assert cells[0] == "+62.5"
    assert cells[3:6] == ["5", "3", "0"]
    assert float(cells[7]) == pytest.approx(2 / 2**5, abs=0.001)
    page.locator("#pair-first").select_option("some")
    page.locator("#pair-second").select_option("best")
    cells = row.locator("td").all_inner_texts()
    assert cells[0] == "\N{MINUS SIGN}62.5"
    assert cells[3:6] == ["0", "3", "5"]


@pytest.mark.parametrize("width", [400, 1600])
def test_no_width_breaks_the_layout(open_page, width):
    page = open_page(width=width, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(f'[data-open="{PUBLIC}/hostile"]').first.click()
    box = page.locator("#viewer").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert page.evaluate(
        "[...document.querySelectorAll('#viewer-episode, #viewer-list')]"
        ".every(part => part.scrollWidth <= part.clientWidth)"
    )


def test_the_tables_are_there_without_javascript(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator(".matrix tbody tr").count() == 2
    assert page.locator("#cost").is_hidden()
    assert page.locator("noscript").is_visible()
