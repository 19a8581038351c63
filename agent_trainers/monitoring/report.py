"""What people would rather look at than read: a page of trajectories, a learning curve."""

import importlib.resources
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from agent_envs.data.files import atomic_path, write_text
from agent_trainers.monitoring.trajectory_samples import TrajectorySample, state_change

MAX_TOKENS_SHOWN: Final = 600
"""Of a turn, or of a stretch of a row; pages with every token of a long run would not open."""


def write_trajectory_page(
    path: str | Path, samples: Sequence[TrajectorySample], *, tokenizer: Any, title: str
) -> None:
    """Write one self-contained HTML page: every step, how the state changed, tokens, rows.

    Args:
        path: The file to write.
        samples: What to show, in order.
        tokenizer: Turns token ids back into text; anything with ``convert_ids_to_tokens`` and
            ``decode``.
        title: Heading of the page.
    """
    source = importlib.resources.files("agent_trainers.monitoring").joinpath("report.html.jinja")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source.read_text(encoding="utf-8"))
    cards = [_card(sample, tokenizer) for sample in samples]
    page = template.render(title=title, cards=cards)
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


def plot_learning_curve(
    path: str | Path,
    history: Sequence[Mapping[str, Any]],
    *,
    before: float | None,
    after: float | None,
) -> None:
    """Draw success and return against optimiser steps.

    Args:
        path: The PNG file to write.
        history: The trainer's log: entries with ``step`` and ``reward``, ``success`` if measured.
        before: Evaluated success before training, if measured.
        after: Evaluated success after training, if measured.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    entries = [entry for entry in history if "reward" in entry]
    for name, label, colour in (
        ("success", "success in training", "#2563eb"),
        ("reward", "mean return", "#d97706"),
    ):
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            axes.plot(steps, _smooth(values), color=colour, linewidth=2, label=label)
    last = max((entry["step"] for entry in entries), default=0)
    measured = [(step, value) for step, value in ((0, before), (last, after)) if value is not None]
    if measured:
        steps, values = zip(*measured, strict=True)
        axes.scatter(steps, values, color="#16a34a", zorder=3, s=60, label="success in evaluation")
        for step, value in measured:
            offset = (0, -18) if value > 0.5 else (0, 8)
            axes.annotate(f"{value:.1%}", (step, value), offset, textcoords="offset points",
                          ha="center", color="#15803d")  # fmt: skip
    axes.set(xlabel="optimiser step", ylabel="success, return")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if entries or measured:
        axes.legend(frameon=False, loc="best")
    with atomic_path(path) as temporary:
        figure.savefig(temporary)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Average each value with those just before it."""
    windows = (values[max(0, i - width + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _card(sample: TrajectorySample, tokenizer: Any) -> dict[str, Any]:
    trajectory = sample.trajectory
    question = ""
    if trajectory.transitions:
        users = [m for m in trajectory.transitions[0].messages if m["role"] == "user"]
        question = users[-1]["content"] if users else ""
    return {
        "label": sample.label,
        "trajectory": trajectory,
        "question": question,
        "steps": [_step(sample, t, tokenizer) for t in range(len(trajectory.transitions))],
        "rows": [_row(sample, number, tokenizer) for number in range(len(sample.rows))],
    }


def _step(sample: TrajectorySample, t: int, tokenizer: Any) -> dict[str, Any]:
    transition = sample.trajectory.transitions[t]
    trained = sample.steps[t] if sample.steps is not None else None
    tokens = [
        _token(sample, t, j, tokenizer)
        for j in range(min(len(transition.completion_ids), MAX_TOKENS_SHOWN))
    ]
    seconds = sample.trajectory.step_seconds
    return {
        "transition": transition,
        "change": state_change(sample.trajectory, t),
        "trained": trained,
        "advantage": _mean(trained.advantages) if trained else None,
        "value": trained.values[0] if trained and trained.values else None,
        "ratio": _mean(trained.ratios) if trained and trained.ratios else None,
        "num_trained": sum(trained.is_trained) if trained else 0,
        "num_hidden": len(transition.completion_ids) - len(tokens),
        "seconds": seconds[t] if t < len(seconds) else None,
        "tokens": tokens,
    }


def _token(sample: TrajectorySample, t: int, j: int, tokenizer: Any) -> dict[str, Any]:
    """Return a token of an action: its text, what to say about it, and the classes it has."""
    transition = sample.trajectory.transitions[t]
    token = transition.completion_ids[j]
    facts = [f"id {token}", f"log-probability {transition.logprobs[j]:.3f}"]
    classes = []
    trained = sample.steps[t] if sample.steps is not None else None
    if trained is None or not trained.is_trained[j]:
        classes.append("masked")
        facts.append("masked")
    if trained is not None:
        facts.append(f"advantage {trained.advantages[j]:+.3f}")
        classes.append("a" + _shade(trained.advantages[j], 0.5))
        if trained.values is not None:
            facts.append(f"value {trained.values[j]:+.3f}")
            classes.append("v" + _shade(trained.values[j], 0.25))
        if trained.ratios is not None:
            facts.append(f"ratio {trained.ratios[j]:.3f}")
            classes.append("r" + _shade(trained.ratios[j] - 1.0, 0.1))
    return {
        "text": tokenizer.decode([token]),
        "facts": " · ".join(facts),
        "classes": " ".join(classes),
    }


def _row(sample: TrajectorySample, number: int, tokenizer: Any) -> dict[str, Any]:
    """Return a training row as stretches of tokens: prompt, actions, what was said between them."""
    row = sample.rows[number]
    stretches = [_stretch("prompt", row.prompt_ids, tokenizer)]
    start = 0
    for end in range(1, len(row.completion_ids) + 1):
        is_over = end == len(row.completion_ids) or (
            (row.steps[end], row.is_action[end], row.is_trained[end])
            != (row.steps[start], row.is_action[start], row.is_trained[start])
        )
        if is_over:
            kind = f"step {row.steps[start] + 1}" if row.is_action[start] else "observation"
            stretch = _stretch(kind, row.completion_ids[start:end], tokenizer)
            stretches.append(stretch | {"is_trained": row.is_trained[start]})
            start = end
    reasons = [step.fork_reason for step in sample.steps or () if step.row == number]
    return {
        "stretches": stretches,
        "num_tokens": len(row.prompt_ids) + len(row.completion_ids),
        "num_trained": sum(row.is_trained),
        "fork_reason": next((reason for reason in reasons if reason), None),
    }


def _stretch(kind: str, ids: Sequence[int], tokenizer: Any) -> dict[str, Any]:
    """Return tokens as one text, from a long one its end."""
    hidden = max(0, len(ids) - MAX_TOKENS_SHOWN)
    text = tokenizer.decode(list(ids[hidden:]))
    return {"kind": kind, "count": len(ids), "text": text, "hidden": hidden, "is_trained": False}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shade(value: float, unit: float) -> str:
    """Return the class of a number: ``p`` or ``n`` with a strength from 1 to 4, or ``0``."""
    if abs(value) <= 1e-6:
        return "0"
    return f"{'p' if value > 0 else 'n'}{min(4, int(abs(value) / unit) + 1)}"
