"""Plant forgeries of twelve kinds at random places of true runs: verification must find them all.

Each changes a copy of a run to its advantage and hides the change: checksums, digests and counts
are made again, and text is sealed again, because a forger may have the data::

    python -m benchmarks.forgeries --data FOLDER    # a hundred on ten true runs

`FOLDER` contains ``hotpotqa_dev_distractor.jsonl.gz``. Forgeries depend only on their seeds.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.environments import environment_seal
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import DataFile, make_slug
from agent_leaderboard.records.results import (
    Cell,
    EpisodeResult,
    Run,
    episode_seed,
    read_run,
    task_list_sha256,
    write_run,
)
from agent_leaderboard.records.sealing import episode_place
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import check_run
from agent_trainers.trajectory import StopReason

MODELS: Final = ("checkpoint", "best_of_n")


class Forger:
    """A run folder with its text opened."""

    def __init__(self, path: Path, rng: np.random.Generator, data: Path) -> None:
        """Open the run `path`; `rng` chooses the places."""
        self.path, self.rng = path, rng
        true = read_run(path)
        self.manifest, self.tasks = true.manifest, {k: list(own) for k, own in true.tasks.items()}
        self._seals = {e.id: environment_seal(e, data) for e in true.manifest.environments}
        self.results = {
            cell: [self._convert(one, "open") for one in own] for cell, own in true.results.items()
        }

    def choose(self, things: Sequence[Any]) -> Any:
        """Return a random element."""
        return things[int(self.rng.integers(len(things)))]

    def cell(self, *kinds: str) -> Cell:
        """Return a random cell, of agents of these kinds if any are given."""
        agents = [a.slug for a in self.manifest.agents if not kinds or a.kind in kinds]
        return self.choose([e.slug for e in self.manifest.environments]), self.choose(agents)

    def change(
        self, is_eligible: Callable[[EpisodeResult], bool], cell: Cell, **fields: Any
    ) -> bool:
        """Change fields of a random eligible episode; values may be functions of it."""
        places = [i for i, one in enumerate(self.results[cell]) if is_eligible(one)]
        if not places:
            return False
        place = self.choose(places)
        one = self.results[cell][place]
        changed = {name: v(one) if callable(v) else v for name, v in fields.items()}
        self.results[cell][place] = replace(one, **changed)
        return self.results[cell][place] != one

    def alter(self, record: Any, **fields: Any) -> None:
        """Change fields of an agent or an environment; a new slug is written everywhere."""
        new = replace(record, **fields)
        kind = "agents" if record in self.manifest.agents else "environments"
        records = [new if one is record else one for one in getattr(self.manifest, kind)]
        self.manifest = replace(self.manifest, **{kind: records})
        name, names = kind[:-1], {record.slug: new.slug}
        if kind == "environments":
            self.tasks = {names.get(slug, slug): own for slug, own in self.tasks.items()}
        self.results = {
            (names.get(e, e), a) if kind == "environments" else (e, names.get(a, a)): [
                replace(one, **{name: names.get(getattr(one, name), getattr(one, name))})
                for one in own
            ]
            for (e, a), own in self.results.items()
        }

    def write(self) -> None:
        """Write the run, with everything that can be made again."""
        environments = [
            replace(one, tasks_sha256=task_list_sha256(self.tasks[one.slug]),
                    num_tasks=len(self.tasks[one.slug]))
            for one in self.manifest.environments
        ]  # fmt: skip
        self.manifest = replace(self.manifest, environments=environments)
        closed = {
            cell: [self._convert(one, "close") for one in own] for cell, own in self.results.items()
        }
        write_run(self.path, Run(manifest=self.manifest, tasks=self.tasks, results=closed))

    def _convert(self, one: EpisodeResult, how: str) -> EpisodeResult:
        environment = self.manifest.environment(one.environment)
        (entry,) = [entry for entry in self.tasks[one.environment] if entry.task == one.task]
        seed = episode_seed(self.manifest.protocol, one.task, one.sample)
        place = episode_place(environment, self.manifest.agent(one.agent), task=entry.sha256,
                              sample=one.sample, seed=seed)  # fmt: skip
        seal = self._seals.get(environment.id, next(iter(self._seals.values())))
        actions, *attempts = getattr(seal, how)([one.actions, *one.attempts], place)
        return replace(one, actions=actions, attempts=attempts)


def success(forger: Forger) -> bool:
    """Turn a failure into a success."""
    return forger.change(
        lambda one: not one.success, forger.cell(), success=True,
        metrics=lambda one: {**one.metrics, "success": 1.0},
    )  # fmt: skip


def rewards(forger: Forger) -> bool:
    """Raise a reward."""
    return forger.change(
        lambda one: bool(one.rewards), forger.cell(),
        rewards=lambda one: [one.rewards[0] + 1.0, *one.rewards[1:]],
        return_=lambda one: float(sum([one.rewards[0] + 1.0, *one.rewards[1:]])),
    )  # fmt: skip


def declared_faults(forger: Forger) -> bool:
    """Declare a failure of a rule agent an infrastructure failure."""
    return forger.change(
        lambda one: not one.success, forger.cell("random", "heuristic"), actions=[], rewards=[],
        reward_terms=[], errors=[], return_=0.0, metrics={}, error="OSError: gone",
        stop_reason=StopReason.POLICY_ERROR,
    )  # fmt: skip


def chosen_tasks(forger: Forger) -> bool:
    """Leave out a task."""
    slug = forger.choose(list(forger.tasks))
    entries = forger.tasks[slug]
    out = entries.pop(int(forger.rng.integers(len(entries) - 1))).task  # not the last: a prefix
    for cell in forger.results:
        if cell[0] == slug:
            forger.results[cell] = [one for one in forger.results[cell] if one.task != out]
    return True


def borrowed_actions(forger: Forger) -> bool:
    """Give the oracle's episodes to a model."""
    environment, model = forger.cell(*MODELS)
    (oracle,) = [agent.slug for agent in forger.manifest.agents if agent.kind == "oracle"]
    forger.results[environment, model] = [
        replace(one, agent=model) for one in forger.results[environment, oracle]
    ]
    return True


def cheaper(forger: Forger) -> bool:
    """Lower a model's calls or tokens."""
    name = forger.choose(["calls", "prompt_tokens", "completion_tokens"])
    return forger.change(lambda one: one.calls > 0, forger.cell(*MODELS), **{name: 0})


def taken_name(forger: Forger) -> bool:
    """Take the name of another agent or environment."""
    kind = forger.choose(["agent", "display", "environment"])
    if kind == "environment":
        record = forger.choose(forger.manifest.environments)
        forger.alter(record, slug=forger.choose(["math-hard", "gsm8k"]))
        return True
    agent = forger.choose([one for one in forger.manifest.agents if one.kind in MODELS])
    name = forger.choose(["Oracle", "rules", "random", "The Oracle"])
    slug = make_slug(name) if kind == "agent" else agent.slug
    if any(other.slug == slug for other in forger.manifest.agents if other is not agent):
        return False
    forger.alter(agent, name=name, slug=slug)
    return True


def page(forger: Forger) -> bool:
    """Change a digit of a table."""
    path = forger.path / forger.choose(["leaderboard.md", "leaderboard.csv"])
    text = path.read_text()
    at = forger.choose([i for i, c in enumerate(text) if c.isdigit()])
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    return True


def seconds(forger: Forger) -> bool:
    """Claim an impossible duration."""
    return forger.change(lambda one: True, forger.cell(), seconds=forger.choose([-1.0, 1e300]))


def settings(forger: Forger) -> bool:
    """Change a record of an agent or an environment."""
    record = forger.choose([*forger.manifest.agents, *forger.manifest.environments])
    of_agents = {"weights_sha256": {"a": "0"}, "tool_format": "tags", "packages": {"x": "1"},
                 "settings": {"best": 1}}  # fmt: skip
    of_environments = {"max_turns": 99, "reward_terms": {"exact_match": 9.0}, "kwargs": {"hops": 1},
                       "data": [DataFile(name="x", sha256="0")],
                       "id": "AgentR1/SyntheticArithmetic-v0"}  # fmt: skip
    changes: dict[str, Any] = of_agents if hasattr(record, "kind") else of_environments
    key = forger.choose(list(changes))
    forger.alter(record, **{key: changes[key]})
    return True


def other_seed(forger: Forger) -> bool:
    """Change the protocol's seed."""
    protocol = forger.manifest.protocol
    forger.manifest = replace(forger.manifest, protocol=replace(protocol, seed=protocol.seed + 1))
    return True


def edited_actions(forger: Forger) -> bool:
    """Change an action of a rule agent."""
    return forger.change(
        lambda one: bool(one.actions), forger.cell("random", "heuristic", "oracle"),
        actions=lambda one: [*one.actions[:-1], one.actions[-1] + "x"],
    )  # fmt: skip


KINDS: Final[Sequence[Callable[[Forger], bool]]] = (
    success, rewards, declared_faults, chosen_tasks, borrowed_actions, cheaper, taken_name, page,
    seconds, settings, other_seed, edited_actions,
)  # fmt: skip
CONFIG: Final = """
protocol: {{samples_per_task: {samples}, concurrency: {concurrency}, seed: {seed}}}
environments:
  - {{id: AgentR1/SyntheticTable-v0, name: table, kwargs: {{split: test}}, tasks: 2,
     contamination: none}}
  - {{id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: 3,
     kwargs: {{split: {split}, hops: {hops}}}, contamination: none}}
  - {{id: AgentR1/HotpotQA-v0, kwargs: {{data: "${{data}}/{rows}"}}, tasks: 2,
     contamination: public}}
agents:
  - {{name: guessing, kind: random}}
  - {{name: rules, kind: heuristic}}
  - {{name: oracle, kind: oracle}}
  - {{name: small, kind: checkpoint, settings: {{model: embedded}}}}
  - {{name: voting, kind: best_of_n, settings: {{model: embedded, samples: 2}}}}
"""
TRUE_RUNS: Final[Sequence[Mapping[str, Any]]] = (
    {}, {"seed": 0}, {"seed": 7, "samples": 2}, {"seed": 2**40, "concurrency": 1},
    {"hops": 1, "split": "train"}, {"hops": "[1, 2]", "concurrency": 3},
    {"hops": 3, "samples": 3}, {"seed": 11, "concurrency": 64},
    {"seed": 12, "samples": 2, "split": "train"}, {"seed": 13, "hops": 2},
)  # fmt: skip


def make_run(folder: Path, data: Path, rows: str, **values: Any) -> Path:
    """Make a small true run with its reports; return its folder."""
    values = {"samples": 1, "concurrency": 8, "seed": 5, "split": "test", "hops": 2} | values
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(rows=rows, **values), encoding="utf-8")
    made = run(load_configs([config]), folder / "run", data=data)
    write_reports(made, data)
    return made


def plant_many(
    runs: Sequence[Path], count: int, scratch: Path, data: Path
) -> Iterator[tuple[str, int, Path]]:
    """Yield kind, seed and folder of `count` forgeries; each replaces the one before."""
    seeds = itertools.count()
    for number in range(count):
        forge, is_planted = KINDS[number % len(KINDS)], False
        while not is_planted:
            seed = next(seeds)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(runs[seed % len(runs)], scratch)
            forger = Forger(scratch, np.random.default_rng(seed), data)
            is_planted = forge(forger)
        forger.write()
        yield forge.__name__, seed, scratch


def main() -> None:
    """Plant forgeries on true runs, and print how many of each kind are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = "hotpotqa_dev_distractor.jsonl.gz"
        runs = [
            make_run(Path(scratch) / str(i), options.data, rows, **values)
            for i, values in enumerate(TRUE_RUNS)
        ]
        alarms = [problem for made in runs for problem in check_run(made, options.data).problems]
        planted, found = Counter[str](), Counter[str]()
        forgeries = plant_many(runs, options.count, Path(scratch) / "forged", options.data)
        for kind, seed, folder in forgeries:
            planted[kind] += 1
            if check_run(folder, options.data).problems:
                found[kind] += 1
            else:
                print(f"MISSED: {kind}, seed {seed}")  # noqa: T201
    for kind, count in planted.items():
        print(f"{kind:20} {found[kind]} of {count} found")  # noqa: T201
    print(f"{len(runs)} true runs: {len(alarms)} false alarms")  # noqa: T201
    sys.exit(bool(alarms) or found != planted)


if __name__ == "__main__":
    main()
