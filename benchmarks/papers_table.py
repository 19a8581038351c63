"""The papers' tables in miniature: ``python -m benchmarks.papers_table``.

Trains the embedded policy by every method on the synthetic family with the same budget of
environment steps: first with several learning rates, on seeds and tasks of their own, then with the
best of them on ten seeds. It is measured in variants that were trained and in some that were not;
then come the ablations of masks and of context, and credit per step against credit per trajectory
over a long horizon. A run that is done is not repeated: a command that was stopped goes on.
"""

import dataclasses
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_json
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_envs.scoring.statistics import MAX_EXACT_PERMUTATION
from agent_trainers.cli.arguments import parse
from agent_trainers.cli.results import versions
from benchmarks.learning_run import COLUMNS, LONG_HORIZON, MULTI_HOP, LearningRun
from benchmarks.papers_report import NAIVE_RAG, write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of a table."""

    name: str
    method: str
    """See `LearningRun`."""
    options: tuple[str, ...] = ()
    context: dict[str, Any] | None = None
    env_kwargs: dict[str, Any] | None = None
    """What it is trained on, if not on what all are."""
    is_naive_rag: bool = False
    num_shown: int = 0
    """See `LearningRun`."""
    is_taught: bool = False
    """See `LearningRun`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A table."""

    name: str
    title: str
    methods: tuple[Method, ...]
    is_long_horizon: bool = False


def _trained(*names: str) -> tuple[Method, ...]:
    return tuple(Method(name=name, method=name) for name in names)


NUM_SHOWN: Final = 64
"""References, each in the context of its row: no context is new to the policy that is trained."""
_NO_LOSS_MASK: Final = ("--loss_mask", "false")
_NO_ADVANTAGE_MASK: Final = ("--advantage_mask", "false")
_BATCH: Final = ("--per_device_train_batch_size", "32")
"""Over the long horizon, whose budget is three batches of 128: too few for credit to matter."""
_BATCH_WITH_BRANCHES: Final = ("--per_device_train_batch_size", "24")
"""Branches take a third of their environment steps again: batches cost as much as the others'."""
_OVER_THE_LONG_HORIZON: Final = (
    *(Method(name=name, method=name, options=_BATCH) for name in ("grpo", "grpo_step", "gigpo")),
    *(Method(name=name, method=name, options=_BATCH_WITH_BRANCHES) for name in ("vine", "tree")),
)
STUDIES: Final = (
    Study(
        name="rows",
        title="Methods",
        methods=(
            Method(name="base tool call", method="base"),
            Method(name=NAIVE_RAG, method="grpo", env_kwargs={"hops": 1}, is_naive_rag=True),
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
            Method(name="grpo, full", method="grpo", num_shown=NUM_SHOWN),
            Method(name="grpo, window of 1 turn", method="grpo", num_shown=NUM_SHOWN,
                   context={"name": "window", "turns": 1}),
            Method(name="grpo, budget of 90 tokens", method="grpo", num_shown=NUM_SHOWN,
                   context={"name": "budget", "tokens": 90}),
        ),
    ),
    Study(
        name="long_horizon",
        title="Long horizon",
        methods=_OVER_THE_LONG_HORIZON,
        is_long_horizon=True,
    ),
    Study(
        name="long_horizon_taught",
        title="Long horizon, from a policy that solves some of it",
        methods=tuple(
            dataclasses.replace(method, is_taught=True)
            for method in (Method(name="before", method="base"), *_OVER_THE_LONG_HORIZON)
        ),
        is_long_horizon=True,
    ),
)  # fmt: skip
_FACTS: Final = ("jobs", "num_tasks", "seeds", "budget", "long_budget", "learning_rates")
TRAINED_ON: Final = {"outdated": 0.5}
"""Half of the worlds hold outdated facts, so those two columns are in-domain."""
TUNING_SEEDS: Final = (101, 102)
FIRST_TUNING_TASK: Final = 1_000_000
"""Learning rates are chosen on seeds and held-out tasks that no table reports."""
NUM_TUNING_TASKS: Final = 100


@dataclass
class PapersTableArguments:
    """How much to run, and where."""

    seeds: list[int] = HfArg(
        default_factory=lambda: list(range(1, 11)), help="Seeds of each method."
    )
    learning_rates: list[float] = HfArg(
        default_factory=lambda: [1e-3, 2e-3, 4e-3],
        help="Each method is reported with the best of them.",
    )
    budget: int = HfArg(default=10_000, help="Environment steps that each run may train for.")
    long_budget: int = HfArg(default=3_000, help="The same over the long horizon.")
    num_tasks: int = HfArg(default=300, help="Held-out tasks per column.")
    studies: list[str] = HfArg(
        default_factory=lambda: [study.name for study in STUDIES],
        help="Which tables: " + ", ".join(study.name for study in STUDIES) + ".",
    )
    jobs: int = HfArg(default=2, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/papers_table", help="Folder of the runs, done and under way.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the tables.")


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
    if len(options.seeds) > MAX_EXACT_PERMUTATION:
        raise ConfigurationError(f"--seeds: at most {MAX_EXACT_PERMUTATION}, for the exact test.")
    known = {study.name: study for study in STUDIES}
    studies = [lookup(known, name, kind="study") for name in options.studies]
    arms = [(study, method) for study in studies for method in study.methods]
    tried = {
        (study.name, method.name, rate): [
            tuning_run(study, method, seed, rate, options) for seed in TUNING_SEEDS
        ]
        for study, method in arms
        if method.method != "base" and len(options.learning_rates) > 1
        for rate in options.learning_rates
    }
    tuned = _do_all([spec for specs in tried.values() for spec in specs], options)
    tuning: dict[tuple[str, str], dict[float, float]] = {}
    for (study_name, method_name, rate), specs in tried.items():
        scores = [_mean_score(tuned[_folder(spec, options)]) for spec in specs]
        tuning.setdefault((study_name, method_name), {})[rate] = statistics.fmean(scores)
    rates = {
        (study.name, method.name): _best(tuning.get((study.name, method.name)), options)
        for study, method in arms
    }
    wanted = {
        (study.name, method.name): [
            learning_run(study, method, seed, rates[study.name, method.name], options)
            for seed in options.seeds
        ]
        for study, method in arms
    }
    results = _do_all([spec for specs in wanted.values() for spec in specs], options)
    seconds = sum(result["seconds"] for result in (tuned | results).values())
    settings = asdict(options)
    write_report(
        Path(options.output),
        {
            study.name: {
                method.name: [
                    results[_folder(spec, options)] | {"command": _command(spec, options)}
                    for spec in wanted[study.name, method.name]
                ]
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
            "num_runs": len(tuned | results),
            **{name: settings[name] for name in _FACTS},
            "tuning": [
                {"study": study, "method": method, "chosen": rates[study, method], "success": found}
                for (study, method), found in tuning.items()
            ],
            "versions": versions(),
        },
    )


def learning_run(
    study: Study, method: Method, seed: int, rate: float | None, options: PapersTableArguments
) -> LearningRun:
    """Return what to run for one cell of a table, at a learning rate."""
    is_long = study.is_long_horizon
    context = {} if method.context is None else {"context": method.context}
    trained_on = TRAINED_ON if method.env_kwargs is None else method.env_kwargs
    return LearningRun(
        method=method.method,
        seed=seed,
        budget=options.long_budget if is_long else options.budget,
        num_tasks=options.num_tasks,
        columns=("three questions",) if is_long else tuple(COLUMNS),
        env=LONG_HORIZON if is_long else MULTI_HOP,
        env_kwargs=context if is_long else trained_on | context,
        options=method.options + (() if rate is None else ("--learning_rate", f"{rate:g}")),
        is_naive_rag=method.is_naive_rag,
        num_shown=method.num_shown,
        is_taught=method.is_taught,
    )


def tuning_run(
    study: Study, method: Method, seed: int, rate: float, options: PapersTableArguments
) -> LearningRun:
    """Return a run that a learning rate is chosen by: what the method is trained on, elsewhere."""
    spec = learning_run(study, method, seed, rate, options)
    own = ("one hop",) if method.is_naive_rag else ("clean facts", "outdated facts")
    return dataclasses.replace(
        spec,
        columns=spec.columns if study.is_long_horizon else own,
        num_tasks=min(options.num_tasks, NUM_TUNING_TASKS),
        first_task=FIRST_TUNING_TASK,
    )


def _best(success: Mapping[float, float] | None, options: PapersTableArguments) -> float | None:
    """Return the rate with the most success, the lower of two; None for what is not trained."""
    if success is None:
        return options.learning_rates[0] if len(options.learning_rates) == 1 else None
    return max(sorted(success), key=success.__getitem__)


def _mean_score(result: Mapping[str, Any]) -> float:
    return statistics.fmean(result["scores"].values())


def _command(spec: LearningRun, options: PapersTableArguments) -> str:
    """Return what repeats one cell."""
    folder = _folder(spec, options)
    return shlex.join(
        ["python", "-m", "benchmarks.learning_run", str(folder), json.dumps(asdict(spec))]
    )


def _folder(spec: LearningRun, options: PapersTableArguments) -> Path:
    """Return a readable name; the same for the same run in two tables."""
    context = spec.env_kwargs.get("context")
    parts = [
        spec.method,
        *(value.removeprefix("--") for value in spec.options),
        *([context["name"]] if context else []),
        *(["long"] if spec.env == LONG_HORIZON else []),
        *(["naive_rag"] if spec.is_naive_rag else []),
        *(["shown"] if spec.num_shown else []),
        *(["taught"] if spec.is_taught else []),
        *(["tuning"] if spec.first_task else []),
        str(spec.seed),
    ]
    return Path(options.work) / "-".join(parts)


def _do_all(
    specs: Sequence[LearningRun], options: PapersTableArguments
) -> dict[Path, dict[str, Any]]:
    """Do the runs that are not done; return what all found."""
    by_folder = {_folder(spec, options): spec for spec in specs}
    missing = {folder: spec for folder, spec in by_folder.items() if not _is_done(folder, spec)}
    with ThreadPoolExecutor(options.jobs) as pool:
        under_way = {pool.submit(_do, folder, spec): folder for folder, spec in missing.items()}
        num_done = len(by_folder) - len(missing)
        bar = tqdm(as_completed(under_way), total=len(by_folder), initial=num_done, unit="run")
        failed = [under_way[future] for future in bar if future.result() != 0]
    if failed:
        raise ConfigurationError(
            "failed: " + ", ".join(f"{folder} (see {folder / 'log.txt'})" for folder in failed)
        )
    return {folder: _read(folder) for folder in by_folder}


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
        done = LearningRun(**_read(folder)["run"])  # which may be older than the latest field
    except FileNotFoundError:
        return False
    return json.dumps(asdict(done)) == json.dumps(asdict(spec))


def _read(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    main()
