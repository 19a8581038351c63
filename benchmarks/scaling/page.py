"""The page about scaling: tables and a chart, made from the measured JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import atomic_path, write_text
from agent_envs.errors import DataError
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.scaling.measure import TERMS

BEGIN: Final = "<!-- begin {name}: made by python -m benchmarks.scaling -->"
END: Final = "<!-- end {name} -->"
_QUIET: Final = 0.8
"""Share of a core below which a measurement is not to be trusted."""
_COLOURS: Final = ("#4477aa", "#ccbb44", "#aa3377", "#228833", "#ee6677")


def write_page(page: Path, result: Mapping[str, Any]) -> None:
    """Put the tables of `result` between the page's markers, and the chart beside it.

    Raises:
        DataError: If a marker is missing.
    """
    text = page.read_text(encoding="utf-8")
    for name, table in (
        ("measured", measured_table(result["cases"])),
        ("check", check_sentence(result)),
        ("assumptions", assumptions_table(result["assumptions"])),
        ("extrapolated", extrapolated_table(result["extrapolated"])),
    ):
        text = replace_between(text, name, table, page)
    write_text(page, text)
    draw(page.with_suffix(".png"), result)


def replace_between(text: str, name: str, content: str, page: Path) -> str:
    """Return `text` with `content` between the markers of `name`."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise DataError(f"{page}: needs the lines {begin!r} and {end!r}.")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def measured_table(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per measured case: medians by term, and what the model says."""
    head = ["processes", "turns", "observation", "group", *TERMS, "total", "spread", "model"]
    rows = []
    for entry in cases:
        case, seconds = entry["case"], entry["seconds"]
        total = seconds["total"]
        mark = " (held out)" if case["is_held_out"] else ""
        rows.append(
            [
                *(str(case[n]) for n in ("processes", "turns", "observation_tokens", "group_size")),
                *(f"{seconds[term]['median']:.3f}" for term in TERMS),
                f"{total['median']:.2f}",
                f"{total['least']:.2f} to {total['most']:.2f}",
                f"{entry['model']['total']:.2f}{mark}",
            ]
        )
    return markdown_table(head, rows, len(head))


def check_sentence(result: Mapping[str, Any]) -> str:
    """Say how far the model is from the cases that it was not fitted on."""
    error = result["held_out_error"]
    return (
        f"On the {error['num_cases']} cases left out of the fit the model's total is off by "
        f"{error['median']:.0%} in the median and {error['most']:.0%} at most; on those of the "
        f"fit by {result['fit_error']['median']:.0%} and {result['fit_error']['most']:.0%}. While "
        f"it was measured, a process had {result['core_share']:.0%} of its core{_warning(result)}."
    )


def _warning(result: Mapping[str, Any]) -> str:
    if result["core_share"] >= _QUIET:
        return ""
    return ": **the machine was busy with other things, so the times are too long and uneven**"


def assumptions_table(assumptions: Mapping[str, float]) -> str:
    """Return a row per assumption."""
    rows = [[name.replace("_", " "), f"{value:g}"] for name, value in assumptions.items()]
    return markdown_table(["assumed, not measured", "value"], rows, 2)


def extrapolated_table(extrapolated: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per number of GPUs."""
    base = extrapolated[0]
    rows = []
    for entry in extrapolated:
        seconds = entry["seconds"]
        speed_up = base["seconds"]["total"] / seconds["total"]
        efficiency = speed_up * base["processes"] / entry["processes"]
        terms = [f"{seconds[term]:.2f}" for term in (*TERMS, "total")]
        rows.append([str(entry["processes"]), *terms, f"{speed_up:.1f}", f"{efficiency:.0%}"])
    head = ["GPUs", *TERMS, "total", "speed-up", "efficiency"]
    return markdown_table(head, rows, len(head))


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the model against the measurements, and the extrapolation beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_check(left, result["cases"])
    _draw_extrapolation(right, result["extrapolated"])
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, metadata={"Software": None})


def _draw_check(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    for is_held_out, label, marker in ((False, "fitted", "o"), (True, "held out", "D")):
        chosen = [c for c in cases if c["case"]["is_held_out"] == is_held_out]
        axes.scatter(
            [c["seconds"]["total"]["median"] for c in chosen],
            [c["model"]["total"] for c in chosen],
            marker=marker,
            color="#4477aa" if not is_held_out else "#ee6677",
            label=label,
            zorder=3,
        )
    totals = [c["seconds"]["total"]["median"] for c in cases]
    end = 1.1 * max(*totals, *(c["model"]["total"] for c in cases))
    axes.plot((0, end), (0, end), color="#bbbbbb", linewidth=1)
    axes.set(
        xlim=(0, end), ylim=(0, end), xlabel="measured (s)", ylabel="model (s)",
        title="A step on CPU, measured and modelled",
    )  # fmt: skip
    axes.legend(frameon=False)


def _draw_extrapolation(axes: Any, extrapolated: Sequence[Mapping[str, Any]]) -> None:
    places = range(len(extrapolated))
    bottom = [0.0] * len(extrapolated)
    for term, colour in zip(TERMS, _COLOURS, strict=True):
        shares = [e["seconds"][term] / e["seconds"]["total"] for e in extrapolated]
        axes.bar(places, shares, bottom=bottom, color=colour, label=term, width=0.7)
        bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
    for place, entry in zip(places, extrapolated, strict=True):
        axes.text(place, 1.01, f"{entry['seconds']['total']:.3g} s", ha="center", va="bottom")
    axes.set_xticks(list(places), [str(e["processes"]) for e in extrapolated])
    axes.set(
        ylim=(0, 1.1), xlabel="GPUs", ylabel="share of the step",
        title="Extrapolated to GPUs, not measured",
    )  # fmt: skip
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
