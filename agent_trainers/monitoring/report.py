"""The page of sample trajectories and the learning curve."""

import functools
import importlib.resources
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from agent_envs.data.files import atomic_path, write_text
from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.trajectory_samples import TrajectorySample, state_change

COLOURS: Final = ("advantage", "ratio", "value")
"""Numbers of a token that its colour can show."""
MAX_TOKENS_SHOWN: Final = 600
"""Largest number of tokens shown of a turn or of a part of a row."""


def write_trajectory_page(
    path: str | Path, samples: Sequence[TrajectorySample], *, tokenizer: Any, title: str
) -> None:
    """Write a self-contained HTML page: each step, its state, tokens and rows.

    Without a `tokenizer` actions are shown as text.
    """
    page = _template().render(
        title=title,
        samples=samples,
        has_tokens=tokenizer is not None,
        decode=str if tokenizer is None else tokenizer.decode,
        colours=[mode for mode in COLOURS if _has(samples, mode)],
        state_change=state_change,
        parts=_parts,
        max_tokens=MAX_TOKENS_SHOWN,
    )
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def _template() -> jinja2.Template:
    source = importlib.resources.files("agent_trainers.monitoring").joinpath("report.html.jinja")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shade"] = _shade
    return environment.from_string(source.read_text(encoding="utf-8"))


def plot_learning_curve(
    path: str | Path,
    history: Sequence[Mapping[str, Any]],
    *,
    before: float | None = None,
    after: float | None = None,
) -> None:
    """Write a PNG of success and return by optimiser step.

    `history` is the trainer's log: entries with ``step``, ``reward`` and perhaps ``success``.
    `before` and `after` are success in evaluation before and after training, if measured.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    entries = [entry for entry in history if "reward" in entry]
    axes = figure.add_subplot()
    for name, label, colour in (
        ("success", "success in training", "#2563eb"),
        ("reward", "mean return", "#d97706"),
    ):
        if points := [(entry["step"], entry[name]) for entry in entries if name in entry]:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            smooth = [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
            axes.plot(steps, smooth, color=colour, linewidth=2, label=label)
    last = max((entry.get("step", 0) for entry in history), default=0)  # not all log a reward
    measured = [(step, value) for step, value in ((0, before), (last, after)) if value is not None]
    if measured:
        steps, values = zip(*measured, strict=True)
        axes.scatter(steps, values, color="#16a34a", zorder=3, s=60, label="success in evaluation")
        for step, value in measured:
            offset = (0, -18) if value > 0.5 else (0, 8)
            axes.annotate(f"{value:.1%}", (step, value), offset, textcoords="offset points",
                          ha="center", color="#15803d")  # fmt: skip
    axes.set(ylabel="success, return", xlabel="optimiser step")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if entries or measured:
        axes.legend(frameon=False, loc="best", fontsize="small")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _has(samples: Sequence[TrajectorySample], mode: str) -> bool:
    """Return whether a trained step has the numbers of a colour."""
    return any(getattr(step, f"{mode}s") for sample in samples for step in sample.steps or ())


def _parts(row: Row) -> Iterator[tuple[str, list[int], bool]]:
    """Yield the parts of a row: name, tokens, and whether they are trained."""
    yield "prompt", list(row.prompt_ids), False
    tokens = zip(row.completion_ids, row.steps, row.is_action, row.is_trained, strict=True)
    for (step, is_action, is_trained), run in itertools.groupby(tokens, lambda token: token[1:]):
        kind = f"step {step + 1}" if is_action else "observation"
        yield kind, [token[0] for token in run], is_trained


def _shade(value: float, unit: float) -> str:
    """Return the CSS class of a number: ``p`` or ``n`` with a strength from 1 to 4, or ``0``."""
    if abs(value) <= 1e-6:
        return "0"
    return f"{'p' if value > 0 else 'n'}{min(4, int(abs(value) / unit) + 1)}"
