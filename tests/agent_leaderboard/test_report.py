"""Reports: Markdown, and what the web page may contain."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agent_leaderboard.records.manifest import Prices
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import summarise
from agent_leaderboard.report.tables import REPORT, make_markdown, write_reports
from agent_leaderboard.report.visible_text import markdown_cell, visible
from agent_leaderboard.report.web_page import make_page
from tests.agent_leaderboard.runs import HOSTILE, LICENSED, PUBLIC, read_rows, write_rows

QUESTION = "In which country was the director of Red Harbor born?"


@pytest.fixture(scope="module")
def reported(tmp_path_factory, run_folder, data_folder):
    """A run folder with its reports."""
    folder = tmp_path_factory.mktemp("reported") / "run"
    shutil.copytree(run_folder, folder)
    rows, own = read_rows(folder, PUBLIC, "oracle")
    own[-1]["rewards"][0] += 0.5
    write_rows(folder, rows)
    write_reports(folder, data_folder)
    return folder


def payload(path):
    html = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="board">(.*?)</script>', html, re.DOTALL).group(1))


@pytest.fixture(scope="module")
def public(reported):
    return payload(reported / "leaderboard.html")


def test_markdown_has_score_interval_rank_and_models(board):
    made = {"best": {"model": "small", "settings": {"top_p": 0.9, "samples": 3},
                     "made_by": "make it", "date": "2026-01-02", "commit": "abc" * 13 + "a"},
            "hostile": {"model": "other", "train": {"seed": 3}}}  # fmt: skip
    agents = [replace(one, **made.get(one.slug, {})) for one in board.run.manifest.agents]
    run = replace(board.run, manifest=replace(board.run.manifest, agents=agents))
    text = make_markdown(replace(board, run=run))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0].startswith(
        "| agent | on trust | date, commit | mean | `multi-hop` (own measure)"
    )
    cells = dict(zip(["best", "some", "hostile", "oracle"], rows[1:5], strict=True))
    cells = {name: row.strip("| ").split(" | ") for name, row in cells.items()}
    assert cells["oracle"][4] == "100.0 [63.1, 100.0]"  # it has no rank
    assert cells["best"][4] == "**100.0 [63.1, 100.0] · =1**"
    assert cells["best"][1:3] == [
        "author of the actions, costs (not recounted)",
        "2026-01-02 abcabcabc",
    ]
    assert re.fullmatch(r"\*\*37\.5 \[\d+\.\d, \d+\.\d\] · =1\*\*", cells["some"][4])
    for words in ("public since 2018", "significantly better", "default temperature 1",
                  "| best | react | small | top\\_p=0.9, samples=3 | make it |",
                  "| other |  | agent-r1-train --seed 3 |"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("name", ["leaderboard", "leaderboard_smollm2"])
def test_published_tables_are_those_of_their_results(name):
    """`agent-r1-bench report` writes them again."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / name
    assert make_markdown(summarise(read_run(folder))) == (folder / REPORT).read_text("utf-8")


def test_tables_do_not_depend_on_durations(board):
    results = {c: [replace(r, seconds=None) for r in own] for c, own in board.run.results.items()}
    without = summarise(replace(board.run, results=results))
    assert make_markdown(board) == make_markdown(without)


def test_invisible_characters_are_spelled_out_and_markup_is_escaped():
    assert visible("a\u202eb\ud800c\x1b[0m\n\tü\u200d") == (
        "a⟨U+202E⟩b⟨U+D800⟩c⟨U+001B⟩[0m\n\tü\u200d"
    )
    assert markdown_cell("a|b\n<i>*") == "a\\|b \\<i\\>\\*"


def test_licensed_text_is_not_on_the_page(reported, public):
    html = (reported / "leaderboard.html").read_text()
    assert QUESTION not in html
    assert "Ada Holm was born in Norway" not in html
    for episode in public["episodes"][f"{LICENSED}/some"]:
        assert episode["question"] is episode["answers"] is None
        assert "is not published" in episode["note"]
        assert all(step["observation"] is None for step in episode["steps"])


def test_generated_environments_show_everything(public):
    episode = public["episodes"][f"{PUBLIC}/some"][0]
    assert "?" in episode["question"]
    assert episode["answers"]
    assert episode["steps"][0]["error"] == "no_action"
    assert "neither a tool call nor an answer" in episode["steps"][0]["observation"]
    solved = public["episodes"][f"{PUBLIC}/oracle"][0]
    assert solved["steps"][0]["call"].startswith('search(query="')
    assert solved["steps"][0]["terms"]["new_gold_passage"] > 0


def test_the_page_needs_no_other_file_and_hostile_text_stays_text(reported, public):
    html = (reported / "leaderboard.html").read_text(encoding="utf-8")
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert html.count("</script>") == 2  # the data's and the program's
    assert "<img" not in html
    assert "\u202e" not in html
    assert "default-src 'none'" in html
    attack = public["episodes"][f"{PUBLIC}/hostile"][0]
    assert attack["steps"][0]["action"] == visible(HOSTILE)


def test_money_is_shown_with_its_currency_and_compared_in_one_only(board, data_folder):
    def page(**currencies):
        agents = [
            replace(one, prices=Prices(prompt=1, completion=1, currency=currencies[one.slug]))
            if one.slug in currencies else one
            for one in board.run.manifest.agents
        ]  # fmt: skip
        run = replace(board.run, manifest=replace(board.run.manifest, agents=agents))
        html = make_page(replace(board, run=run), data_folder)
        return html, json.loads(re.search(r'id="board">(.*?)</script>', html, re.DOTALL).group(1))

    one, payload = page(some="EUR")
    assert re.search(r"<td[^>]*>0\.\d{5} EUR</td>", one)
    assert "money" in payload["costs"]
    _, payload = page(some="EUR", best="USD")
    assert payload["costs"] == ["tokens", "calls", "turns", "seconds"]


def test_a_replay_that_differs_is_noted_and_not_shown(public):
    (broken,) = [one for one in public["episodes"][f"{PUBLIC}/oracle"] if one["note"]]
    assert "its rewards are not those" in broken["note"]
    assert broken["question"] is None
