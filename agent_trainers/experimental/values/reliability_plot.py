"""A picture of how far values mean what they say."""

import io
from collections.abc import Mapping

from agent_trainers.experimental.values.calibration import Reliability


def reliability_png(measured: Mapping[str, Reliability]) -> bytes:
    """Draw what came true against what was predicted, a line for each kind of prediction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    numbers = [x for r in measured.values() for b in r.bins for x in (b.predicted, b.observed)]
    low, high = min([0.0, *numbers]), max([1.0, *numbers])
    axes.plot([low, high], [low, high], color="#9ca3af", linestyle="--", linewidth=1)
    for (name, found), colour in zip(measured.items(), ("#2563eb", "#d97706"), strict=False):
        axes.plot(
            [b.predicted for b in found.bins], [b.observed for b in found.bins],
            marker="o", color=colour, label=f"{name}: error {found.calibration_error:.3f}",
        )  # fmt: skip
    axes.set(xlabel="value", ylabel="mean outcome of branches", aspect="equal")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()
