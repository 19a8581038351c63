"""What people would rather look at than read: a page of trajectories, a learning curve."""

import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from agent_trainers.files import atomic_path, write_text
from agent_trainers.trajectory import Trajectory, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySample:
    """A trajectory worth showing."""

    label: str
    """Where it comes from: ``training, step 1``."""
    trajectory: Trajectory
    """What was played."""
    advantages: Sequence[float] | None
    """One per transition, shape (S,); None where nothing was trained on it."""


def write_trajectory_page(
    path: str | Path, samples: Sequence[TrajectorySample], *, tokenizer: Any, title: str
) -> None:
    """Write one self-contained HTML page: every step, reward terms, tool results, tokens.

    Args:
        path: The file to write.
        samples: What to show, in order.
        tokenizer: Turns token ids back into text; anything with ``convert_ids_to_tokens`` and
            ``decode``.
        title: Heading of the page.
    """
    source = importlib.resources.files("agent_trainers").joinpath("report.html.jinja")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source.read_text(encoding="utf-8"))
    cards = [_card(sample, tokenizer) for sample in samples]
    page = template.render(title=title, cards=cards)
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


def plot_learning_curve(
    path: str | Path,
    history: Sequence[Mapping[str, Any]],
    *,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> None:
    """Draw success and return against optimiser steps.

    Args:
        path: The PNG file to write.
        history: The trainer's log: entries with ``step`` and ``reward``, ``success`` if measured.
        before: Evaluated ``success`` before training; may be empty.
        after: Evaluated ``success`` after training; may be empty.
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
    measured = [(s, m["success"]) for s, m in ((0, before), (last, after)) if "success" in m]
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
        "steps": [
            _step(sample, t, transition, tokenizer)
            for t, transition in enumerate(trajectory.transitions)
        ],
    }


def _step(
    sample: TrajectorySample, t: int, transition: Transition, tokenizer: Any
) -> dict[str, Any]:
    previous = sample.trajectory.transitions[t - 1] if t else None
    advantage = None if sample.advantages is None else sample.advantages[t]
    return {
        "transition": transition,
        "new_messages": _new_messages(transition, previous),
        "advantage": advantage,
        "colour": _colour(advantage),
        "tokens": [
            {"text": tokenizer.decode([token]), "id": token, "logprob": float(logprob)}
            for token, logprob in zip(transition.completion_ids, transition.logprobs, strict=True)
        ],
    }


def _new_messages(transition: Transition, previous: Transition | None) -> list[Any]:
    """Return what the state added since the step before; all of it where the prefix broke."""
    if previous is None:
        return list(transition.messages)
    length = len(previous.messages) + 1  # and the action
    if transition.messages[: length - 1] == previous.messages:
        return list(transition.messages[length:])
    return list(transition.messages)


def _colour(advantage: float | None) -> str:
    """Return the class of a token: good, bad, or neither; and how much, from 1 to 4."""
    if advantage is None:
        return "untrained"
    strength = min(4, int(abs(advantage) * 2) + 1) if abs(advantage) > 1e-6 else 0
    return f"{'good' if advantage > 0 else 'bad'}{strength}" if strength else "zero"
