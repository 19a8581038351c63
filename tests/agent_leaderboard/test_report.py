"""Reports: terminal, Markdown, CSV, and what the web page may contain."""

import csv
import dataclasses
import io
import json
import re
import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from agent_envs.errors import ConfigurationError, UnknownNameError
from agent_envs.scoring.statistics import Interval
from agent_leaderboard.report import web_page
from agent_leaderboard.report.board import summarise
from agent_leaderboard.report.tables import make_csv, make_markdown, write_reports
from agent_leaderboard.report.terminal import print_comparison, print_table
from agent_leaderboard.report.transcripts import choose
from agent_leaderboard.report.visible_text import csv_cell, markdown_cell, visible
from tests.agent_leaderboard.runs import HOSTILE, LICENSED, PUBLIC, read_rows, write_rows

QUESTION = "In which country was the director of Red Harbor born?"


@pytest.fixture(scope="module")
def reported(tmp_path_factory, run_folder, data_folder):
    """A run folder with its reports, the one with licensed text included."""
    folder = tmp_path_factory.mktemp("reported") / "run"
    shutil.copytree(run_folder, folder)
    write_reports(folder, data_folder, text=True)
    return folder


def payload(path):
    html = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="board">(.*?)</script>', html, re.DOTALL).group(1))


def printed(function, *arguments, width=120):
    console = Console(file=io.StringIO(), width=width)
    function(*arguments, console)
    return console.file.getvalue()


def test_markdown_has_score_interval_and_rank(board):
    text = make_markdown(board)
    row = next(
        line for line in text.splitlines() if line.startswith("| `multi-hop` (own measure) |")
    )
    cells = [cell.strip() for cell in row.split(" | ")]
    assert cells[1] == "100.0 [63.1, 100.0]"  # the oracle has no rank
    assert cells[2] == "**100.0 [63.1, 100.0] · =1**"
    assert re.fullmatch(r"\*\*37\.5 \[\d+\.\d, \d+\.\d\] · =1\*\*", cells[3])
    assert "public since 2018" in text
    assert "Holm's correction" in text


def test_tables_do_not_depend_on_durations(board):
    results = {c: [replace(r, seconds=None) for r in own] for c, own in board.run.results.items()}
    without = summarise(replace(board.run, results=results))
    assert make_markdown(board) == make_markdown(without)
    assert make_csv(board) == make_csv(without)


def test_csv_has_a_row_for_each_cell_and_no_formula(board):
    rows = list(csv.DictReader(io.StringIO(make_csv(board))))
    assert len(rows) == 2 * 4
    by_agent = {row["agent"]: row for row in rows if row["environment"] == PUBLIC}
    assert float(by_agent["some"]["success"]) == 3 / 8
    assert by_agent["oracle"]["rank"] == ""
    assert by_agent["some"]["is_tied"] == "True"
    assert float(by_agent["some"]["money"]) > 0


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_spreadsheet_reads_a_name_as_a_formula(text):
    assert csv_cell(text) == f"'{text}"
    assert csv_cell("plain") == "plain"


def test_invisible_characters_are_spelled_out():
    assert visible("a\u202eb\ud800c\x1b[0m\n\tü\u200d") == (
        "a⟨U+202E⟩b⟨U+D800⟩c⟨U+001B⟩[0m\n\tü\u200d"
    )
    assert markdown_cell("a|b\n<i>*") == "a\\|b \\<i\\>\\*"


def test_the_terminal_shows_a_table_for_each_environment(run_folder):
    text = printed(print_table, run_folder)
    assert "multi-hop (own measure) · AgentR1/SyntheticMultiHop-v0 · 8 tasks" in text
    assert re.search(r"=1 +some +37\.5 \[\d+\.\d, \d+\.\d\] +·*━+●━+·* +0\.45 ", text)
    assert "\u202e" not in text
    assert "McNemar" in text


def test_the_terminal_shows_a_comparison(run_folder):
    text = printed(print_comparison, run_folder, "best", "some")
    assert re.search(r"multi-hop +\+62\.5 +\+\d+\.\d to \+\d+\.\d +5 +3 +0 ", text)
    assert "0.062" in text  # sign test: 2 / 2**5
    with pytest.raises(UnknownNameError, match="Did you mean 'best'"):
        print_comparison(run_folder, "bets", "some")


def test_every_file_is_written_into_the_run_folder(reported):
    names = {path.name for path in reported.iterdir() if path.name.startswith("leaderboard")}
    assert names == {
        "leaderboard.md", "leaderboard.csv", "leaderboard.html", "leaderboard_with_text.html",
    }  # fmt: skip


def test_licensed_text_is_not_on_the_public_page(reported):
    public = (reported / "leaderboard.html").read_text()
    assert QUESTION not in public
    assert "Ada Holm was born in Norway" not in public
    for episode in payload(reported / "leaderboard.html")["episodes"][f"{LICENSED}/some"]:
        assert episode["question"] is None
        assert episode["answers"] is None
        assert "is not published" in episode["note"]
        assert all("observation" not in step for step in episode["steps"])
    private = payload(reported / "leaderboard_with_text.html")
    assert any(QUESTION in text for text in private["texts"])
    assert private["episodes"][f"{LICENSED}/oracle"][0]["answers"] == ["Norway"]


def test_text_without_data_is_refused(run_folder):
    with pytest.raises(ConfigurationError, match="give --data DIR with --text"):
        write_reports(run_folder, text=True)


def test_generated_environments_show_everything(reported):
    data = payload(reported / "leaderboard.html")
    episode = data["episodes"][f"{PUBLIC}/some"][0]
    assert "?" in data["texts"][episode["question"]]
    assert episode["answers"]
    assert episode["steps"][0]["error"] == "no_action"
    assert "neither a tool call nor an answer" in data["texts"][episode["steps"][0]["observation"]]
    assert episode["why"] == [
        "The episode ended by itself, but the task was not solved.",
        "No reward for exact_match.",
        "Errors: step 1 (no_action).",
    ]
    solved = data["episodes"][f"{PUBLIC}/oracle"][0]
    assert solved["steps"][0]["call"].startswith('search(query="')
    assert solved["steps"][0]["terms"]["new_gold_passage"] > 0


def test_the_page_needs_no_other_file_and_hostile_text_stays_text(reported):
    html = (reported / "leaderboard.html").read_text(encoding="utf-8")
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert html.count("</script>") == 2  # the data's and the program's
    assert "<img" not in html
    assert "\u202e" not in html
    assert "default-src 'none'" in html
    attack = payload(reported / "leaderboard.html")["episodes"][f"{PUBLIC}/hostile"][0]
    assert attack["steps"][0]["action"] == visible(HOSTILE)


def test_a_replay_that_differs_is_noted_and_not_shown(tmp_path, run_folder):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    rows, own = read_rows(folder, PUBLIC, "oracle")
    own[0]["rewards"][0] += 0.5
    write_rows(folder, rows)
    write_reports(folder)
    episodes = payload(folder / "leaderboard.html")["episodes"][f"{PUBLIC}/oracle"]
    (broken,) = [one for one in episodes if one["note"]]
    assert "step 1 has reward 0.1, 0.6 was recorded" in broken["note"]
    assert broken["question"] is None


def test_three_failures_are_shown_for_each_success(board):
    line = board.run.results[PUBLIC, "some"][0]
    lines = [replace(line, task=task, success=task % 2 == 0) for task in range(20)]
    assert [one.task for one in choose(lines, 9)] == [1, 3, 5, 0, 7, 9, 11, 2, 13]
    assert choose(lines, 5) == choose(lines, 9)[:5]
    assert len(choose(lines, 100)) == 20
    assert [one.task for one in choose(lines[:3], 9)] == [1, 0, 2]


def test_a_page_of_many_cells_shows_fewer_episodes_of_each(board, tmp_path, monkeypatch):
    monkeypatch.setattr(web_page, "MAX_EPISODE_CHARS", 12_000)
    monkeypatch.setattr(web_page, "MAX_EPISODES", 8)
    page = web_page.make_page(board, None, with_licensed_text=False)
    (tmp_path / "page.html").write_text(page)
    data = payload(tmp_path / "page.html")
    limit = data["episodesShown"]
    assert 1 <= limit < 8
    assert {len(own) for key, own in data["episodes"].items() if key.startswith(PUBLIC)} == {limit}
    assert f"at most {limit} of a cell" in (tmp_path / "page.html").read_text()


def test_agents_share_the_text_of_their_tasks(reported):
    data = payload(reported / "leaderboard.html")
    assert len(set(data["texts"])) == len(data["texts"])
    first = [data["episodes"][f"{PUBLIC}/{agent}"] for agent in ("oracle", "best")]
    assert [one["question"] for one in first[0]] == [one["question"] for one in first[1]]


def test_an_interval_is_drawn_to_scale():
    from agent_leaderboard.report.terminal import draw_interval

    interval = Interval(mean=0.5, low=0.25, high=1.0, count=9)
    # positions round(19 * 0.25) = 5, round(19 * 0.5) = 10, 19
    assert draw_interval(interval) == "·····━━━━━●━━━━━━━━━"


def test_models_are_listed_with_how_they_are_made(board):
    made = {"best": {"model": "small", "made_by": "make it"},
            "hostile": {"model": "other", "train": {"seed": 3}}}  # fmt: skip
    agents = [dataclasses.replace(one, **made.get(one.slug, {"model": None}))
              for one in board.run.manifest.agents]  # fmt: skip
    manifest = dataclasses.replace(board.run.manifest, agents=agents)
    changed = dataclasses.replace(board, run=dataclasses.replace(board.run, manifest=manifest))
    table = make_markdown(changed).partition("## Models")[2].partition("## Environments")[0]
    assert "| best | react | small | make it |" in table
    assert "| other | agent-r1-train --seed 3 |" in table
    assert "oracle" not in table
