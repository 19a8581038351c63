"""The leaderboard as one web page without network requests or other files.

Untrusted text (names, actions, tool results) never becomes markup: the template escapes it, the
script sets it as text, and a content security policy allows only the page's own script.
"""

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from tqdm.auto import tqdm

from agent_envs.scoring.statistics import CONFIDENCE, Comparison, Interval, p_value_text
from agent_leaderboard.records.results import episode_seed
from agent_leaderboard.records.sealing import MARK
from agent_leaderboard.report.board import (
    FAULT_RULE,
    RANK_RULE,
    Board,
    CellStats,
    is_upper_bound,
    shown_name,
    slices,
    under_attack,
)
from agent_leaderboard.report.transcripts import Transcript, make_transcripts
from agent_leaderboard.report.visible_text import visible

MAX_EPISODES: Final = 20
"""Episodes shown of a cell."""
MAX_EPISODE_CHARS: Final = 3_000_000
"""Approximate size of all episodes; with many cells, fewer of each are shown."""
MAX_TEXT_CHARS: Final = 2_000
"""Longer texts are cut."""


def make_page(board: Board, data: Path | None, *, with_licensed_text: bool) -> str:
    """Return the page of a board; episodes are replayed with the data folder."""
    episodes: dict[str, list[dict[str, Any]]] = {}
    for cell in tqdm(board.cells, desc="episodes", leave=False):
        is_public = board.run.manifest.environment(cell[0]).is_text_public
        shown = make_transcripts(
            board.run, cell, data, with_text=is_public or with_licensed_text, limit=MAX_EPISODES
        )
        episodes["/".join(cell)] = [_episode(board, one) for one in shown]
    limit = _fit(episodes)
    episodes = {key: own[:limit] for key, own in episodes.items()}
    payload = _payload(board) | {
        "texts": _share_texts(episodes),
        "episodes": episodes,
        "episodesShown": limit,
    }
    return _render(board, payload, limit)


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
        shown_name=shown_name,
        shown=shown,
        style=style,
        script=script,
        script_hash=base64.b64encode(digest).decode(),
        payload=_script_json(payload),
    )


def _script_json(value: Any) -> str:
    """Return JSON that cannot end a script element."""
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
            slug: {entry.task: visible(entry.task_id) for entry in entries}
            for slug, entries in board.run.tasks.items()
        },
        "scores": {
            "/".join(key): {t: _short(s) for t, s in cell.scores.items()}
            for key, cell in board.cells.items()
        },
        "cells": {"/".join(key): _cell(cell) for key, cell in board.cells.items()},
        "comparisons": {
            "/".join(key): _comparison(*one) for key, one in board.comparisons().items()
        },
    }


def _cell(cell: CellStats) -> dict[str, Any]:
    costs = {name: _short(cell.cost[name]) for name in ("calls", "tokens", "seconds", "money")}
    return {
        "success": _interval(cell.success),
        "return": _short(cell.return_),
        "rank": cell.rank,
        "isTied": cell.is_tied,
        "episodes": cell.num_episodes,
        "faults": cell.num_faults,
        "cost": {"turns": _short(cell.num_steps), **costs},
        "groups": [
            [visible(label), visible(value), _interval(success)]
            for label, value, success in cell.groups
        ],
        "terms": _numbers(cell.reward_terms),
        "errors": {visible(code): counts for code, counts in cell.errors.items()},
        "stops": dict(cell.stop_reasons),
        "metrics": _numbers(cell.metrics),
        "passAt": {str(k): _short(value) for k, value in cell.pass_at.items()},
        "passHat": {str(k): _short(value) for k, value in cell.pass_hat.items()},
    }


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {visible(name): _short(value) for name, value in values.items()}


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
    """Round to six digits: the page shows fewer."""
    return None if value is None else float(f"{value:.6g}")


def _cut(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        more = len(text) - MAX_TEXT_CHARS
        text = f"{text[:MAX_TEXT_CHARS]}\n(… {more:,} more characters)"
    return visible(text)


def _recorded(action: str) -> str:
    """Return a recorded action, or a note that it is sealed."""
    return "(sealed: requires the data)" if action.startswith(MARK) else _cut(action)


def _episode(board: Board, shown: Transcript) -> dict[str, Any]:
    result, text = shown.result, shown.text
    seed = episode_seed(board.run.manifest.protocol, result.task, result.sample)
    return {
        "task": result.task,
        "taskId": visible(shown.entry.task_id),
        "sample": result.sample,
        "seed": seed,
        "success": result.success,
        "return": _short(result.return_),
        "stop": result.stop_reason.value,
        "fault": None if result.error is None else _cut(result.error),
        "why": list(map(visible, shown.reasons)),
        "labels": {visible(k): visible(str(v)) for k, v in shown.entry.labels.items()},
        "metrics": _numbers(result.metrics),
        "usage": {
            "calls": result.calls,
            "prompt tokens": result.prompt_tokens,
            "completion tokens": result.completion_tokens,
            "money": result.money,
            "seconds": _short(result.seconds),
        },
        "question": None if text is None else _cut(text.question),
        "answers": None if text is None else list(map(_cut, text.answers)),
        "note": None if shown.note is None else _cut(shown.note),
        "steps": [_step(shown, i) for i in range(len(result.actions))],
        "attempts": [list(map(_recorded, attempt)) for attempt in result.attempts],
    }


def _step(shown: Transcript, i: int) -> dict[str, Any]:
    result, text = shown.result, shown.text
    error = result.errors[i]
    step = {
        "action": _recorded(result.actions[i]) if text is None else _cut(text.steps[i].action),
        "reward": _short(result.rewards[i]),
        "terms": {visible(k): _short(v) for k, v in result.reward_terms[i].items() if v},
        "error": None if error is None else visible(error),
    }
    if text is not None:
        action, observation = text.steps[i].parsed, text.steps[i].observation
        if "name" in action:
            arguments = (action.get("arguments") or {}).items()
            written = (f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in arguments)
            step["call"] = _cut(f"{action['name']}({', '.join(written)})")
        if observation:
            step["observation"] = _cut(observation)
    return step


def _fit(episodes: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """Return how many episodes of each cell fit on the page."""
    sizes = [[len(json.dumps(one)) for one in own] for own in episodes.values()]
    limit = MAX_EPISODES
    while limit > 1 and sum(sum(own[:limit]) for own in sizes) > MAX_EPISODE_CHARS:
        limit -= 1
    return limit


def _share_texts(episodes: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Return each distinct question and observation, and replace them by their index."""
    positions: dict[str, int] = {}
    for own in episodes.values():
        for episode in own:
            steps = ((step, "observation") for step in episode["steps"])
            for holder, key in ((episode, "question"), *steps):
                if holder.get(key) is not None:
                    holder[key] = positions.setdefault(holder[key], len(positions))
    return list(positions)
