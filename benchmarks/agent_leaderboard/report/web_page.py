"""The leaderboard as one web page that needs nothing else: no network, no other file.

What others wrote (names, actions, tool results) is text to the page and never markup: the template
escapes it, the script sets it as text only, and a content security policy allows the page's own
script and nothing else.
"""

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import jinja2
from tqdm.auto import tqdm

from agent_envs.scoring.statistics import CONFIDENCE, Comparison, Interval, p_value_text
from agent_leaderboard.records.sealing import MARK
from agent_leaderboard.report.episodes import EpisodeView, TextSource, view_episodes
from agent_leaderboard.report.families import slices, under_attack
from agent_leaderboard.report.summary import Board, Cell, is_upper_bound, shown_name
from agent_leaderboard.report.uncertainty import FAULT_RULE, RANK_RULE
from agent_leaderboard.report.visible_text import visible

MAX_EPISODE_CHARS: Final = 3_000_000
"""Episodes take about as much of the page; cells show fewer of them where there are many cells."""
MAX_TEXT_CHARS: Final = 2_000
"""Longer texts are cut off: a flood of output is no reading."""


def make_page(
    board: Board,
    *,
    title: str,
    data: Path | None,
    with_licensed_text: bool,
    max_episodes: int,
) -> str:
    """Return the page of a board; the `title` stands beside the progress.

    It shows at most `max_episodes` of a cell. What was said in them is found with the data sets
    below the folder `data`, and shown of licensed ones only on request.
    """
    episodes: dict[str, list[dict[str, Any]]] = {}
    with closing(TextSource(board.run.manifest, data)) as source:
        for cell in tqdm(board.cells, desc=f"{title}: episodes", leave=False):
            is_public = board.run.manifest.environment(cell[0]).is_text_public
            own = source if is_public or with_licensed_text else None
            views = view_episodes(board.run, cell, own, limit=max_episodes)
            episodes["/".join(cell)] = list(map(_episode, views))
    shown = _fit(episodes, max_episodes)
    episodes = {key: own[:shown] for key, own in episodes.items()}
    payload = _payload(board) | {
        "texts": _share_texts(episodes),
        "episodes": episodes,
        "episodesShown": shown,
    }
    return _render(board, payload, shown)


def _render(board: Board, payload: Mapping[str, Any], shown: int) -> str:
    folder = importlib.resources.files("agent_leaderboard.report")
    template, style, script = (
        folder.joinpath(f"leaderboard.{suffix}").read_text(encoding="utf-8")
        for suffix in ("html.jinja", "css", "js")
    )
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"visible": visible, "p_value": p_value_text}
    digest = hashlib.sha256(script.encode()).digest()
    return environment.from_string(template).render(
        board=board,
        manifest=board.run.manifest,
        rank_rule=RANK_RULE,
        fault_rule=FAULT_RULE,
        confidence=f"{CONFIDENCE:.0%}",
        slices=slices(board),
        attacked=under_attack(board),
        is_upper_bound=is_upper_bound,
        shown=shown,
        style=style,
        script=script,
        script_hash=base64.b64encode(digest).decode(),
        payload=_script_json(payload),
    )


def _script_json(value: Any) -> str:
    """Return JSON that may stand in a script element: nothing in it ends the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _payload(board: Board) -> dict[str, Any]:
    manifest = board.run.manifest
    return {
        "environments": [
            {
                "slug": record.slug,
                "id": record.id,
                "isTextPublic": record.is_text_public,
                "isAttacked": record.attack_on is not None,
            }
            for record in manifest.environments
        ],
        "agents": [
            {
                "slug": record.slug,
                "name": visible(shown_name(record)),
                "isUpperBound": is_upper_bound(record),
                "currency": visible(record.prices.currency) if record.prices else "",
            }
            for record in manifest.agents
        ],
        "overall": {agent: _interval(one) for agent, one in board.overall.items()},
        "tasks": {
            environment: {line.task: visible(line.task_id) for line in lines}
            for (environment, _), lines in board.run.lines.items()
        },
        "scores": {
            "/".join(key): {t: _short(s) for t, s in board.run.task_scores(*key).items()}
            for key in board.cells
        },
        "cells": {"/".join(key): _cell(cell) for key, cell in board.cells.items()},
        "comparisons": {
            "/".join(key): _comparison(*one) for key, one in board.comparisons().items()
        },
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "success": _interval(cell.success),
        "return": _short(cell.return_),
        "rank": cell.rank,
        "isTied": cell.is_tied,
        "episodes": cell.num_episodes,
        "faults": cell.num_faults,
        "cost": {
            "turns": _short(cell.num_steps),
            **{n: _short(getattr(cell.cost, n)) for n in ("calls", "tokens", "seconds", "money")},
        },
        "groups": [
            [visible(group.label), visible(group.value), _interval(group.success)]
            for group in cell.groups
        ],
        "terms": {visible(name): _short(value) for name, value in cell.reward_terms.items()},
        "errors": {visible(e.code): [e.num_steps, e.num_episodes] for e in cell.errors},
        "stops": dict(cell.stop_reasons),
        "metrics": {visible(name): _short(value) for name, value in cell.metrics.items()},
        "passAt": {str(k): _short(value) for k, value in cell.pass_at.items()},
        "passHat": {str(k): _short(value) for k, value in cell.pass_hat.items()},
    }


def _interval(interval: Interval | None) -> list[float | None] | None:
    if interval is None:
        return None
    return [*map(_short, (interval.mean, interval.low, interval.high)), interval.count]


def _comparison(comparison: Comparison, p_holm: float) -> dict[str, Any]:
    return {
        "difference": _interval(comparison.difference),
        "pValue": _short(comparison.p_value),
        "pHolm": _short(p_holm),
        "better": comparison.num_better,
        "worse": comparison.num_worse,
        "equal": comparison.num_equal,
    }


def _short(value: float | None) -> float | None:
    """Return a number to six digits: the page shows fewer."""
    return None if value is None else float(f"{value:.6g}")


def _cut(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        rest = len(text) - MAX_TEXT_CHARS
        text = f"{text[:MAX_TEXT_CHARS]}\n(… {rest:,} more characters)"
    return visible(text)


def _written(action: str) -> str:
    """Return an action as it is recorded; what is sealed says only that it is."""
    return "(sealed: who holds the data can read it)" if action.startswith(MARK) else _cut(action)


def _episode(view: EpisodeView) -> dict[str, Any]:
    line, text = view.line, view.text
    return {
        "task": line.task,
        "taskId": visible(line.task_id),
        "sample": line.sample,
        "seed": line.seed,
        "success": line.success,
        "return": _short(line.return_),
        "stop": line.stop_reason.value,
        "fault": None if line.error is None else _cut(line.error),
        "why": list(map(visible, view.why)),
        "labels": {visible(key): visible(str(value)) for key, value in line.labels.items()},
        "metrics": {visible(key): _short(value) for key, value in line.metrics.items()},
        "usage": {
            "calls": line.usage.calls,
            "prompt tokens": line.usage.prompt_tokens,
            "completion tokens": line.usage.completion_tokens,
            "money": line.usage.money,
            "seconds": _short(view.seconds),
        },
        "question": None if text is None else _cut(text.question),
        "answers": None if text is None else list(map(_cut, text.answers)),
        "note": None if view.note is None else _cut(view.note),
        "steps": [_step(view, i) for i in range(len(line.actions))],
        "attempts": [list(map(_written, attempt)) for attempt in line.attempts],
    }


def _step(view: EpisodeView, i: int) -> dict[str, Any]:
    line, text = view.line, view.text
    step = {
        "action": _written(line.actions[i]) if text is None else _cut(text.steps[i].action),
        "reward": _short(line.rewards[i]),
        "terms": {visible(k): _short(v) for k, v in line.reward_terms[i].items() if v},
        "error": None if line.errors[i] is None else visible(str(line.errors[i])),
    }
    if text is not None:
        action, observation = text.steps[i].understood, text.steps[i].observation
        if "name" in action:
            arguments = (action.get("arguments") or {}).items()
            written = (f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in arguments)
            step["call"] = _cut(f"{action['name']}({', '.join(written)})")
        if observation:
            step["observation"] = _cut(observation)
    return step


def _fit(episodes: Mapping[str, Sequence[Mapping[str, Any]]], limit: int) -> int:
    """Return how many episodes of each cell the page has room for, at most `limit`."""
    sizes = [[len(json.dumps(one)) for one in own] for own in episodes.values()]
    while limit > 1 and sum(sum(own[:limit]) for own in sizes) > MAX_EPISODE_CHARS:
        limit -= 1
    return limit


def _share_texts(episodes: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Return each question and observation once, and put its number where it stood."""
    positions: dict[str, int] = {}
    for own in episodes.values():
        for episode in own:
            steps = ((step, "observation") for step in episode["steps"])
            for holder, key in ((episode, "question"), *steps):
                if holder.get(key) is not None:
                    holder[key] = positions.setdefault(holder[key], len(positions))
    return list(positions)
