"""Forgeries of runs, of twelve kinds and planted at random places: what verification has to find.

Each takes a copy of a true run, changes what would pay, and hides it: checksums, digests and counts
are made anew, and what is sealed is opened and sealed again, for a forger may hold the data. It
returns False where there is nothing to forge::

    python -m benchmarks.forgeries --data FOLDER    # a hundred on ten true runs

A hundred take 69 s of CPU time. `FOLDER` holds ``hotpotqa_dev_distractor.jsonl.gz``. The same
seed plants the same.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.episodes import environment_seal
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, make_slug
from agent_leaderboard.records.reading import file_sha256, validated
from agent_leaderboard.records.results import write_line
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.records.sealing import Seal, Texts, episode_place
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import check_run


class Folder:
    """A run's folder in a forger's hands."""

    def __init__(self, path: Path, rng: np.random.Generator, data: Path) -> None:
        """Take the folder `path` and open what is sealed in it; `rng` says where to forge."""
        self.path, self.rng = path, rng
        self.manifest = json.loads((path / "manifest.json").read_text())
        true = RunFolder(path).read_manifest()
        self._seals = [environment_seal(environment, data) for environment in true.environments]
        self._rewrite(Seal.open)

    def any_of(self, things: Sequence[Any]) -> Any:
        """Return one of some things."""
        return things[int(self.rng.integers(len(things)))]

    def cells(self, *kinds: str) -> list[tuple[Any, Any]]:
        """Return every environment with every agent, of these kinds if any are named."""
        agents = [a for a in self.manifest["agents"] if not kinds or a["kind"] in kinds]
        return [(e, a) for e in self.manifest["environments"] for a in agents]

    def results(self, environment: Any, agent: Any) -> tuple[Path, list[Any]]:
        """Return a results file and its lines."""
        path = self.path / "results" / environment["slug"] / f"{agent['slug']}.jsonl"
        return path, [json.loads(line) for line in path.read_text().splitlines()]

    def _rewrite(self, how: Callable[[Seal, Texts, str], list[list[str]]]) -> None:
        """Open or close every line, at the place that the manifest now says."""
        agents = [validated(AgentRecord, agent, "agent") for agent in self.manifest["agents"]]
        for seal, record in zip(self._seals, self.manifest["environments"], strict=True):
            environment = validated(EnvironmentRecord, record, "environment")
            for agent in agents if seal.key else ():
                path, lines = self.results({"slug": environment.slug}, {"slug": agent.slug})
                for line in lines:
                    place = episode_place(
                        environment, agent,
                        task=line["task_sha256"], sample=line["sample"], seed=line["seed"],
                    )  # fmt: skip
                    texts = how(seal, [line["actions"], *line["attempts"]], place)
                    line["actions"], *line["attempts"] = texts
                write(path, lines)

    def seal(self) -> None:
        """Make every digest, and every seal, that a forger can make anew."""
        self._rewrite(Seal.close)
        for environment in self.manifest["environments"]:
            path = self.path / environment["tasks_path"]
            environment["tasks_sha256"] = file_sha256(path)
            environment["num_tasks"] = len(json.loads(path.read_text()))
        (self.path / "manifest.json").write_text(json.dumps(self.manifest, indent=2) + "\n")
        names = json.loads((self.path / "checksums.json").read_text())
        digests = {name: file_sha256(self.path / name) for name in names}
        (self.path / "checksums.json").write_text(json.dumps(digests))


def write(path: Path, records: Sequence[Any]) -> None:
    """Write lines."""
    path.write_text("".join(map(write_line, records)))


MODELS = ("checkpoint", "best_of_n")


def success(folder: Folder) -> bool:
    """A failure becomes a success."""
    path, lines = folder.results(*folder.any_of(folder.cells()))
    failed = [line for line in lines if not line["success"]]
    if not failed:
        return False
    line = folder.any_of(failed)
    line["success"] = True
    line["metrics"]["success"] = 1.0
    write(path, lines)
    return True


def rewards(folder: Folder) -> bool:
    """More is earned."""
    path, lines = folder.results(*folder.any_of(folder.cells()))
    line = folder.any_of([line for line in lines if line["rewards"]])
    step = int(folder.rng.integers(len(line["rewards"])))
    line["rewards"][step] += 1.0
    line["return"] = float(sum(line["rewards"]))
    write(path, lines)
    return True


def declared_faults(folder: Folder) -> bool:
    """Failures of an agent that could be asked again become faults."""
    path, lines = folder.results(*folder.any_of(folder.cells("random", "heuristic")))
    failed = [line for line in lines if not line["success"]]
    if not failed:
        return False
    for line in failed:
        line |= {"actions": [], "rewards": [], "reward_terms": [], "errors": [], "return": 0.0}
        line |= {"stop_reason": "policy_error", "error": "OSError: away", "metrics": {}}
    write(path, lines)
    return True


def chosen_tasks(folder: Folder) -> bool:
    """Tasks that went badly are left out, and the counts are adjusted."""
    environment = folder.any_of(folder.manifest["environments"])
    path = folder.path / environment["tasks_path"]
    tasks = json.loads(path.read_text())
    out = tasks.pop(int(folder.rng.integers(len(tasks) - 1)))["task"]  # a prefix is a shorter run
    path.write_text(json.dumps(tasks, indent=2) + "\n")
    for agent in folder.manifest["agents"]:
        for part in ("results", "seconds"):
            own = folder.path / part / environment["slug"] / f"{agent['slug']}.jsonl"
            lines = [json.loads(line) for line in own.read_text().splitlines()]
            write(own, [line for line in lines if line["task"] != out])
    return True


def borrowed_actions(folder: Folder) -> bool:
    """The oracle's episodes stand under a model's name."""
    environment, model = folder.any_of(folder.cells(*MODELS))
    (oracle,) = [a for a in folder.manifest["agents"] if a["kind"] == "oracle"]
    _, lines = folder.results(environment, oracle)
    path, _ = folder.results(environment, model)
    write(path, [line | {"agent": model["slug"]} for line in lines])
    return True


def cheaper(folder: Folder) -> bool:
    """A model's calls or tokens shrink."""
    path, lines = folder.results(*folder.any_of(folder.cells(*MODELS)))
    line = folder.any_of([line for line in lines if line["usage"]["calls"]])
    name = folder.any_of(["calls", "prompt_tokens", "completion_tokens"])
    line["usage"][name] = folder.any_of([0, 1, -line["usage"][name]]) if name != "calls" else 0
    if line["usage"]["completion_tokens"] == 1 and len(line["actions"]) < 2:
        line["usage"]["completion_tokens"] = 0
    write(path, lines)
    return True


def taken_name(folder: Folder) -> bool:
    """An agent or an environment takes a name that stands for another."""
    kind = folder.any_of(["agent", "display", "environment"])
    if kind == "environment":
        environment = folder.any_of(folder.manifest["environments"])
        new = folder.any_of(["math-hard", "gsm8k", "humaneval-plus"])
        rename(folder, environment["slug"], new)
        environment["slug"], environment["tasks_path"] = new, f"tasks/{new}.json"
        return True
    agent = folder.any_of([a for a in folder.manifest["agents"] if a["kind"] in MODELS])
    agent["name"] = folder.any_of(["Oracle", "rules", "random", "The Oracle"])
    if kind == "agent":
        new = make_slug(agent["name"])
        if any(other["slug"] == new for other in folder.manifest["agents"]):
            return False
        rename(folder, agent["slug"], new)
        agent["slug"] = new
    return True


def rename(folder: Folder, old: str, new: str) -> None:
    """Rename an agent or an environment in all that names it."""
    for path in sorted(folder.path.rglob(f"{old}*"), reverse=True):
        path.rename(path.with_name(path.name.replace(old, new)))
    for path in folder.path.glob("results/*/*.jsonl"):
        path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))
    names = json.loads((folder.path / "checksums.json").read_text())
    moved = {f"/{name}".replace(f"/{old}", f"/{new}")[1:]: 0 for name in names}
    (folder.path / "checksums.json").write_text(json.dumps(moved))


def page(folder: Folder) -> bool:
    """A page says otherwise than the results."""
    name = folder.any_of(["leaderboard.md", "leaderboard.csv", "leaderboard.html"])
    path = folder.path / name
    text = path.read_text()
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    at = folder.any_of(digits)
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    return True


def seconds(folder: Folder) -> bool:
    """Time that cannot be."""
    files = sorted(folder.path.glob("seconds/*/*.jsonl"))
    path = folder.any_of(files)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    how = folder.any_of(["negative", "fewer", "words"])
    if how == "fewer":
        lines.pop()
    else:
        lines[0]["seconds"] = -1.0 if how == "negative" else "fast"
    write(path, lines)
    return True


def settings(folder: Folder) -> bool:
    """What the agent or the environment is said to be."""
    record = folder.any_of([*folder.manifest["agents"], *folder.manifest["environments"]])
    if "kind" in record:
        key, value = folder.any_of(
            [("weights_sha256", {"a": "0"}), ("tool_format", "tags"), ("packages", {"x": "1"}),
             ("settings", {"best": 1})]
        )  # fmt: skip
    else:
        key, value = folder.any_of(
            [("max_turns", 99), ("reward_terms", {"exact_match": 9.0}), ("kwargs", {"hops": 1}),
             ("data", [{"name": "x", "sha256": "0"}]), ("id", "AgentR1/SyntheticArithmetic-v0")]
        )  # fmt: skip
    record[key] = value
    return True


def other_seed(folder: Folder) -> bool:
    """A protocol, or an episode, under another seed."""
    if folder.rng.random() < 0.5:
        folder.manifest["protocol"]["seed"] += 1
        return True
    path, lines = folder.results(*folder.any_of(folder.cells()))
    folder.any_of(lines)["seed"] += 1
    write(path, lines)
    return True


def edited_actions(folder: Folder) -> bool:
    """An episode with other actions, or with those of another task."""
    path, lines = folder.results(*folder.any_of(folder.cells("random", "heuristic", "oracle")))
    acting = [line for line in lines if line["actions"]]
    line, other = folder.any_of(acting), folder.any_of(acting)
    if line["actions"] == other["actions"]:
        line["actions"][-1] += "x"
    else:
        line["actions"] = other["actions"]
    write(path, lines)
    return True


KINDS: dict[str, Callable[[Folder], bool]] = {
    forge.__name__: forge
    for forge in (
        success, rewards, declared_faults, chosen_tasks, borrowed_actions, cheaper, taken_name,
        page, seconds, settings, other_seed, edited_actions,
    )
}  # fmt: skip


def plant(path: Path, kind: str, seed: int, data: Path) -> bool:
    """Forge a run in place; the same seed forges the same. Returns whether there was a way."""
    folder = Folder(path, np.random.default_rng(seed), data)
    is_forged = KINDS[kind](folder)
    if is_forged:
        folder.seal()
    return is_forged


# True runs, and all forgeries on them

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
    {},
    {"seed": 0},
    {"seed": 7, "samples": 2},
    {"seed": 2**40, "concurrency": 1},
    {"hops": 1, "split": "train"},
    {"hops": "[1, 2]", "concurrency": 3},
    {"hops": 3, "samples": 3},
    {"seed": 11, "concurrency": 64},
    {"seed": 12, "samples": 2, "split": "train"},
    {"seed": 13, "hops": 2},
)


def play(folder: Path, data: Path, rows: str, **values: Any) -> Path:
    """Play a small run and write its pages; return its folder."""
    values = {"samples": 1, "concurrency": 8, "seed": 5, "split": "test", "hops": 2} | values
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(rows=rows, **values), encoding="utf-8")
    made = run(load_configs([config]), folder / "run", data=data).path
    write_reports(made, data)
    return made


def plant_many(
    runs: Sequence[Path], count: int, scratch: Path, data: Path
) -> Iterator[tuple[str, int, Path]]:
    """Yield kind, seed and folder of forgeries, of all kinds in turn; each replaces the last."""
    seeds = itertools.count()
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        is_planted = False
        while not is_planted:
            seed = next(seeds)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(runs[seed % len(runs)], scratch)
            is_planted = plant(scratch, kind, seed, data)
        yield kind, seed, scratch


def main() -> None:
    """Plant forgeries on true runs, and print what was found of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [
            play(Path(scratch) / str(i), options.data, "hotpotqa_dev_distractor.jsonl.gz", **values)
            for i, values in enumerate(TRUE_RUNS)
        ]
        alarms = [problem for made in runs for problem in check_run(made, options.data).problems]
        planted, found = Counter[str](), Counter[str]()
        for kind, seed, folder in plant_many(
            runs, options.count, Path(scratch) / "forged", options.data
        ):
            planted[kind] += 1
            is_found = bool(check_run(folder, options.data).problems)
            found[kind] += is_found
            if not is_found:
                print(f"MISSED: {kind}, seed {seed}")  # noqa: T201
    for kind, count in planted.items():
        print(f"{kind:20} {found[kind]} of {count} found")  # noqa: T201
    print(f"{len(runs)} true runs: {len(alarms)} alarms")  # noqa: T201
    sys.exit(bool(alarms) or found != planted)


if __name__ == "__main__":
    main()
