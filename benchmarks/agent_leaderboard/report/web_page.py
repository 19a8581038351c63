"""The leaderboard as one web page without network requests or other files.

Results contain actions and scores only; other text is found by replay, and shown where it may be
published: in environments that generate their own tasks. Untrusted text (names, actions, tool
results) never becomes markup: the template escapes it, the script sets it as text, and a content
security policy allows only the page's own script.
"""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm

from agent_envs.errors import DataError
from agent_envs.scoring.statistics import Interval
from agent_leaderboard.agents.agent import is_recounted
from agent_leaderboard.play.episodes import ReplayedEpisode, Replayer
from agent_leaderboard.records.results import Cell, EpisodeResult, Run, episode_seed
from agent_leaderboard.records.sealing import MARK
from agent_leaderboard.report.board import (
    COSTS,
    Board,
    comparisons,
    is_upper_bound,
    shown_name,
    under_attack,
)
from agent_leaderboard.report.tables import render
from agent_leaderboard.report.visible_text import visible

MAX_EPISODES: Final = 20
"""Episodes shown of a cell."""
MAX_TEXT_CHARS: Final = 2_000
"""Longer texts are cut."""
FAILURES_PER_SUCCESS: Final = 3
TEXT_IS_LICENSED: Final = "The text of this data set is not published here."


def make_page(board: Board, data: Path | None) -> str:
    """Return the page of a board; episodes are replayed with the data folder."""
    manifest = board.run.manifest
    payload = {
        "environments": [
            {"slug": one.slug, "is_attacked": one.attack_on is not None}
            for one in manifest.environments
        ],
        "agents": [
            {"slug": one.slug, "name": shown_name(one), "is_upper_bound": is_upper_bound(one),
             "is_recounted": is_recounted(one)}
            for one in board.rows
        ],
        "overall": board.overall,
        "costs": _comparable_costs(board),
        "tasks": {
            slug: {entry.task: entry.task_id for entry in entries}
            for slug, entries in board.run.tasks.items()
        },
        "cells": {"/".join(key): cell for key, cell in board.cells.items()},
        "comparisons": {
            "/".join((slug, *pair)):
                dataclasses.asdict(found) | {"difference": found.difference, "p_holm": p_holm}
            for slug in board.environments
            for pair, (found, p_holm) in comparisons(board, slug).items()
        },
        "episodes": {
            "/".join(cell): list(read_episodes(board.run, cell, data))
            for cell in tqdm(board.cells, desc="episodes", leave=False)
        },
    }  # fmt: skip
    text = json.dumps(_plain(payload), separators=(",", ":"), allow_nan=False)  # ASCII
    for character in "<>&":  # the JSON cannot end its script element
        text = text.replace(character, f"\\u{ord(character):04x}")
    style, script = (
        Path(__file__).with_name(f"leaderboard.{suffix}").read_text(encoding="utf-8")
        for suffix in ("css", "js")
    )
    digest = hashlib.sha256(script.encode()).digest()
    return render(
        "leaderboard.html.jinja", board, autoescape=True, attacked=under_attack(board),
        is_upper_bound=is_upper_bound, is_recounted=is_recounted, shown_name=shown_name,
        shown=MAX_EPISODES, style=style, script=script,
        script_hash=base64.b64encode(digest).decode(), payload=text,
    )  # fmt: skip


def _comparable_costs(board: Board) -> list[str]:
    """Return the costs that the plot may show: money only in one currency."""
    currencies = {one.prices.currency for one in board.run.manifest.agents if one.prices}
    return ["tokens", "calls", "turns", "seconds", *(["money"] if len(currencies) == 1 else [])]


def _plain(value: Any) -> Any:
    """Return JSON of six digits, with short text in which every character is visible."""
    match value:
        case str():
            more = len(value) - MAX_TEXT_CHARS
            cut = f"{value[:MAX_TEXT_CHARS]}\n(… {more:,} more characters)" if more > 0 else value
            return visible(cut)
        case float():
            return float(f"{value:.6g}")
        case Interval():
            return [*map(_plain, (value.mean, value.low, value.high)), value.count]
        case Mapping():
            return {visible(str(key)): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


# Episodes


def read_episodes(run: Run, cell: Cell, data: Path | None) -> Iterator[dict[str, Any]]:
    """Yield at most `MAX_EPISODES` episodes of a cell, as the script reads them.

    They are replayed if their text is public; a replay may fail or differ, with a newer
    environment: then a note has the reason.
    """
    manifest = run.manifest
    environment, agent = manifest.environment(cell[0]), manifest.agent(cell[1])
    entries = {entry.task: entry for entry in run.tasks[cell[0]]}
    replayer: Replayer | None = None
    for result in choose(run.results[cell]):
        entry = entries[result.task]
        text, note = None, TEXT_IS_LICENSED
        if environment.is_text_public:
            try:
                replayer = replayer or Replayer(environment, agent, manifest.protocol, data)
                text, note = replayer.replay(result, entry), ""
                if [step.reward for step in text.steps] != result.rewards:
                    raise DataError("its rewards are not those that were recorded")
            except Exception as error:  # noqa: BLE001 - any environment; the note has it
                text, note = None, f"Replay failed: {type(error).__name__}: {error}"
        yield {
            "task": result.task,
            "task_id": entry.task_id,
            "sample": result.sample,
            "seed": episode_seed(manifest.protocol, result.task, result.sample),
            "success": result.success,
            "return": result.return_,
            "stop": str(result.stop_reason.value),
            "fault": result.error,
            "labels": entry.labels,
            "metrics": result.metrics,
            "usage": {name.replace("_", " "): getattr(result, name) for name in COSTS},
            "question": text and text.question,
            "answers": text and text.answers,
            "note": note,
            "steps": [_step(result, i, text) for i in range(len(result.actions))],
            "attempts": [list(map(_recorded, attempt)) for attempt in result.attempts],
        }
    if replayer is not None:
        replayer.close()


def _step(result: EpisodeResult, i: int, text: ReplayedEpisode | None) -> dict[str, Any]:
    call, parsed = None, text.steps[i].info["action"] if text else {}
    if "name" in parsed:
        arguments = (parsed.get("arguments") or {}).items()
        written = (f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in arguments)
        call = f"{parsed['name']}({', '.join(written)})"
    return {
        "action": text.attempts[0][i] if text else _recorded(result.actions[i]),
        "reward": result.rewards[i],
        "terms": {name: value for name, value in result.reward_terms[i].items() if value},
        "error": result.errors[i],
        "call": call,
        "observation": text and text.steps[i].observation,
    }


def _recorded(action: str) -> str:
    return "(sealed: requires the data)" if action.startswith(MARK) else action


def choose(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Choose at most `MAX_EPISODES` episodes: three failures for each success."""
    failures = iter([result for result in results if not result.success])
    successes = iter([result for result in results if result.success])
    chosen: list[EpisodeResult] = []
    while len(chosen) < min(MAX_EPISODES, len(results)):
        chosen += [*islice(failures, FAILURES_PER_SUCCESS), *islice(successes, 1)]
    return chosen[:MAX_EPISODES]
