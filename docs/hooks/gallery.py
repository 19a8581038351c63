# ruff: noqa: INP001 - mkdocs loads it by its path
"""The card of an environment: what its code declares, a transcript, and measured baselines."""

import inspect
import itertools
import json
import re
import runpy
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from docstring_parser import parse
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_envs import AgentEnvsError, DatasetEnv, ToolEnv
from agent_envs.catalogue import make_section

ROOT: Final = Path(__file__).parents[2]
EXAMPLE_ROWS: Final = runpy.run_path(str(ROOT / "tests" / "example_rows.py"))["EXAMPLE_ROWS"]
RESULTS: Final = ROOT / "benchmarks" / "results"
BASELINES: Final = {"leaderboard": ("random", "oracle"), "leaderboard_smollm2": ("SmolLM2",)}
"""Agents that cards show, by the folder of a published run."""
EXTRAS: Final = {
    "math": ("GSM8K", "MATH", "ReasoningGym"),
    "textworld": ("TextWorld",),
    "alfworld": ("ALFWorld",),
    "scienceworld": ("ScienceWorld",),
    "textworldexpress": ("TextWorldExpress",),
    "webshop": ("WebShop",),
    "bfcl": ("BFCL",),
    "tau2": ("Tau2Retail", "Tau2Airline"),
    "agentdojo": ("AgentDojo",),
}
MAX_CHARS: Final = 600
"""Longer messages of a transcript are cut."""


def card(spec: EnvSpec) -> str:
    """Return the section of an environment in Markdown."""
    heading, _, rest = make_section(spec).partition("\n\n")
    facts = re.sub(r"^- Arguments: .*\n", "", rest, flags=re.MULTILINE)
    arguments = table(("argument", "default", "meaning"), list(_arguments(spec)))
    line = f'```python\nenv = gym.make("{spec.id}")\n```'
    parts = [heading, line, facts, _needs(spec), arguments, _baselines(spec), _transcript(spec)]
    return "\n\n".join(filter(None, parts))


def table(heads: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def _name(spec: EnvSpec) -> str:
    """Return the id without namespace and version."""
    return spec.id.removeprefix("AgentR1/").removesuffix("-v0")


def needs(spec: EnvSpec) -> str:
    """Return the extra of an environment, and whether it reads a data set."""
    extras = [f"`{extra}`" for extra, names in EXTRAS.items() if _name(spec) in names]
    is_data = issubclass(load_env_creator(str(spec.entry_point)), DatasetEnv)
    return ", ".join([*extras, *["data set"] * is_data])


def _needs(spec: EnvSpec) -> str:
    extra = needs(spec).partition("`")[2].partition("`")[0]
    return f"Needs the extra `{extra}`." if extra else ""


def _arguments(spec: EnvSpec) -> Iterator[tuple[str, ...]]:
    """Yield name, default and meaning of each argument of a class and its bases."""
    kind: Any = load_env_creator(str(spec.entry_point))
    seen = set()
    for base in itertools.takewhile(lambda base: base is not ToolEnv, kind.__mro__):
        if "__init__" not in vars(base):
            continue
        documented = {
            p.arg_name: p.description for p in parse(inspect.getdoc(base.__init__) or "").params
        }
        for parameter in inspect.signature(base).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in seen:
                seen.add(parameter.name)
                default = spec.kwargs.get(parameter.name, parameter.default)
                meaning = (documented.get(parameter.name) or "").replace("``", "`")
                yield f"`{parameter.name}`", f"`{default!r}`", meaning


def _baselines(spec: EnvSpec) -> str:
    """Return the success of agents that published runs have in the environment without attacks."""
    cells = [
        f"{agent} {cell}"
        for run, agents in BASELINES.items()
        for agent, cell in _success(run).get(spec.id, {}).items()
        if agent in agents
    ]
    return f"**Success** in %, with its 95 % interval: {'; '.join(cells)}." if cells else ""


@cache
def _success(run: str) -> dict[str, dict[str, str]]:
    """Return the cells of a published table, by environment and agent."""
    manifest = json.loads((RESULTS / run / "manifest.json").read_text("utf-8"))
    ids = {
        env["slug"]: env["id"]
        for env in manifest["environments"]
        if not re.search(r"-(?:edited|injected)$", env["slug"])
    }
    lines = (RESULTS / run / "leaderboard.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head = next(row for row in rows if row[0] == "agent")
    success: dict[str, dict[str, str]] = {}
    for row in rows[rows.index(head) + 2 :][: len(manifest["agents"])]:
        for name, cell in zip(head, row, strict=True):
            if (slug := name.partition("`")[2].partition("`")[0]) in ids and cell != "-":
                text = cell.replace("*", "").split(" · ")[0]
                success.setdefault(ids[slug], {})[row[0]] = text
    return success


def _transcript(spec: EnvSpec) -> str:
    """Return the reference solution of a task, if the environment is available."""
    rows = EXAMPLE_ROWS.get(_name(spec))
    kind = "a made-up row" if rows else "a task"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kwargs = {}
        if rows:
            kwargs["data"] = str(Path(folder) / "rows.json")
            Path(kwargs["data"]).write_text(json.dumps(rows), "utf-8")
        try:
            lines = list(_episode(gym.make(spec.id, **kwargs)))
        except AgentEnvsError:
            return "**Transcript**: none, since it needs what was not installed for this site."
    body = "\n".join(lines).replace("```", "'''")
    return f"**Transcript** of the reference solution of {kind}:\n\n```text\n{body}\n```"


def _episode(env: gym.Env[str, str]) -> Iterator[str]:
    observation, _ = env.reset(options={"task": 0})
    yield f"[observation] {_cut(observation)}"
    for action in env.unwrapped.reference_actions():  # type: ignore[attr-defined]
        observation, reward, terminated, truncated, info = env.step(action)
        terms = ", ".join(f"{name} {value:g}" for name, value in info["reward_terms"].items())
        yield f"[model] {_cut(action)}"
        if not (terminated or truncated):
            yield f"[observation] {_cut(observation)}"
        yield f"[reward] {reward:g} ({terms})"
    yield f"[end] success {info['metrics']['success']:g}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} [... {len(text)} characters]"
