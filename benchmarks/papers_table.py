"""The papers' tables in miniature: ``python -m benchmarks.papers_table``.

Trains the embedded policy by every method on the synthetic family, three seeds each, with the same
budget of environment steps, and measures it in variants that were trained and one that was not;
then the ablations of masks and of context, and credit per step against credit per trajectory over a
long horizon. A run that is done is not repeated: a command that was stopped goes on.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_json
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.cli.arguments import parse
from agent_trainers.cli.results import PACKAGES
from benchmarks.learning_run import COLUMNS, LONG_HORIZON, MULTI_HOP, LearningRun
from benchmarks.papers_report import write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of a table."""

    name: str
    method: str
    """See `LearningRun`."""
    options: tuple[str, ...] = ()
    context: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A table."""

    name: str
    title: str
    methods: tuple[Method, ...]
    is_long_horizon: bool = False


def _trained(*names: str) -> tuple[Method, ...]:
    return tuple(Method(name=name, method=name) for name in names)


_NO_LOSS_MASK: Final = ("--loss_mask", "false")
_NO_ADVANTAGE_MASK: Final = ("--advantage_mask", "false")
_HALF_BATCH: Final = ("--per_device_train_batch_size", "64")
"""Branches take as many environment steps again, so batches cost as much as the others'."""
STUDIES: Final = (
    Study(
        name="rows",
        title="Methods",
        methods=(
            Method(name="base tool call", method="base"),
            Method(name="naive RAG", method="naive_rag"),
            *_trained("ppo", "grpo", "reinforce++", "reinforce++-baseline", "rloo"),
            *_trained("gigpo", "step_ppo"),
            Method(name="TRL environment_factory", method="trl"),
        ),
    ),
    Study(
        name="masks",
        title="Masks",
        methods=(
            Method(name="ppo, both masks", method="ppo"),
            Method(name="ppo, no advantage mask", method="ppo", options=_NO_ADVANTAGE_MASK),
            Method(name="ppo, no mask", method="ppo", options=_NO_ADVANTAGE_MASK + _NO_LOSS_MASK),
            Method(name="grpo, loss mask", method="grpo"),
            Method(name="grpo, no loss mask", method="grpo", options=_NO_LOSS_MASK),
        ),
    ),
    Study(
        name="context",
        title="Context",
        methods=(
            Method(name="grpo, full", method="grpo"),
            Method(name="grpo, window of 1 turn", method="grpo",
                   context={"name": "window", "turns": 1}),
            Method(name="grpo, budget of 90 tokens", method="grpo",
                   context={"name": "budget", "tokens": 90}),
        ),
    ),
    Study(
        name="long_horizon",
        title="Long horizon",
        methods=(
            *_trained("grpo", "grpo_step", "gigpo"),
            Method(name="vine", method="vine", options=_HALF_BATCH),
            Method(name="tree", method="tree", options=_HALF_BATCH),
        ),
        is_long_horizon=True,
    ),
)  # fmt: skip
_FACTS: Final = ("jobs", "num_tasks", "seeds", "budget", "long_budget")
TRAINED_ON: Final = {"outdated": 0.5}
"""Half of the worlds hold outdated facts, so the first two columns are in-domain."""


@dataclass
class PapersTableArguments:
    """How much to run, and where."""

    seeds: list[int] = field(
        default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of each method."}
    )
    budget: int = field(
        default=24_000, metadata={"help": "Environment steps that each run may train for."}
    )
    long_budget: int = field(default=8_000, metadata={"help": "The same over the long horizon."})
    num_tasks: int = field(default=300, metadata={"help": "Held-out tasks per column."})
    studies: list[str] = field(
        default_factory=lambda: [study.name for study in STUDIES],
        metadata={"help": "Which tables: " + ", ".join(study.name for study in STUDIES) + "."},
    )
    jobs: int = field(default=2, metadata={"help": "Runs at the same time, on one core each."})
    work: str = field(
        default="runs/papers_table", metadata={"help": "Folder of the runs, done and under way."}
    )
    output: str = field(default="benchmarks/results", metadata={"help": "Folder of the tables."})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(
        arguments,
        PapersTableArguments,
        program="python -m benchmarks.papers_table",
        description="Train the embedded policy by every method and write the papers' tables.",
    )
    try:
        run(options, shlex.join(["python", "-m", "benchmarks.papers_table", *arguments]))
    except AgentEnvsError as error:
        sys.exit(f"papers_table: {error}")


def run(options: PapersTableArguments, command: str) -> None:
    """Do the runs that are missing, then write the tables."""
    known = {study.name: study for study in STUDIES}
    studies = [lookup(known, name, kind="study") for name in options.studies]
    wanted = {
        (study.name, method.name, seed): learning_run(study, method, seed, options)
        for study in studies
        for method in study.methods
        for seed in options.seeds
    }
    folders = {key: Path(options.work) / _folder(spec) for key, spec in wanted.items()}
    _do_all({folders[key]: spec for key, spec in wanted.items()}, options.jobs)
    results = {folder: _read(folder) for folder in folders.values()}
    seconds = sum(result["seconds"] for result in results.values())
    settings = asdict(options)
    write_report(
        Path(options.output),
        {
            study.name: {
                method.name: [results[folders[study.name, method.name, s]] for s in options.seeds]
                for method in study.methods
            }
            for study in studies
        },
        titles={study.name: study.title for study in studies},
        facts={
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "wall_seconds": round(seconds / options.jobs),
            "run_seconds": round(seconds),
            "num_runs": len(results),
            **{name: settings[name] for name in _FACTS},
            "versions": {"python": platform.python_version()}
            | {package: importlib.metadata.version(package) for package in PACKAGES},
        },
    )


def learning_run(
    study: Study, method: Method, seed: int, options: PapersTableArguments
) -> LearningRun:
    """Return what to run for one cell of a table."""
    is_long = study.is_long_horizon
    context = {} if method.context is None else {"context": method.context}
    return LearningRun(
        method=method.method,
        seed=seed,
        budget=options.long_budget if is_long else options.budget,
        num_tasks=options.num_tasks,
        columns=("three questions",) if is_long else tuple(COLUMNS),
        env=LONG_HORIZON if is_long else MULTI_HOP,
        env_kwargs=context if is_long else TRAINED_ON | context,
        options=method.options,
    )


def _folder(spec: LearningRun) -> str:
    """Return a readable name; the same for the same run in two tables."""
    context = spec.env_kwargs.get("context")
    parts = [
        spec.method,
        *(value.removeprefix("--") for value in spec.options),
        *([context["name"]] if context else []),
        *(["long"] if spec.env == LONG_HORIZON else []),
        str(spec.seed),
    ]
    return "-".join(parts)


def _do_all(specs: dict[Path, LearningRun], jobs: int) -> None:
    missing = {folder: spec for folder, spec in specs.items() if not _is_done(folder, spec)}
    with ThreadPoolExecutor(jobs) as pool:
        under_way = {pool.submit(_do, folder, spec): folder for folder, spec in missing.items()}
        num_done = len(specs) - len(missing)
        bar = tqdm(as_completed(under_way), total=len(specs), initial=num_done, unit="run")
        failed = [under_way[future] for future in bar if future.result() != 0]
    if failed:
        raise ConfigurationError(
            "failed: " + ", ".join(f"{folder} (see {folder / 'log.txt'})" for folder in failed)
        )


def _do(folder: Path, spec: LearningRun) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", asdict(spec))
    command = [sys.executable, "-m", "benchmarks.learning_run", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.run(  # noqa: S603 - this interpreter, our own module
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode


def _is_done(folder: Path, spec: LearningRun) -> bool:
    """Return whether this very run is done, not one of the same name with other settings."""
    try:
        done = _read(folder)["run"]
    except FileNotFoundError:
        return False
    return bool(done == json.loads(json.dumps(asdict(spec))))


def _read(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    main()
