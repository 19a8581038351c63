"""``python -m agent_trainers.experimental.values``: train a process value.

Collects episodes and, from states on the way, continuations (`Rollout.branch`); the critic, a copy
of the policy's model with a value head, learns their mean outcome. Tasks are collected in portions,
one file each, so that the same command resumes after an interruption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.core.lookup import lookup
from agent_envs.data.files import atomic_path, write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import first_tasks
from agent_trainers.cli.output_folder import (
    check_unchanged,
    lock_folder,
    settings_of,
    write_settings,
)
from agent_trainers.cli.policies import (
    FittedEnvironment,
    PolicyArguments,
    check_episodes,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.experimental.branching.saved_states import StateStore, can_be_saved
from agent_trainers.policies import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory, load_trajectories, save_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.values"
RESULTS_FILE: Final = "value.json"
PLOT_FILE: Final = "reliability.png"
_TINY_VOCABULARY: Final = 1000
notify = notifier(PROGRAM)
_TARGETS: Final = {
    "success": "the chance that the episode succeeds",
    "return": "the discounted return from the state on, as PPO's critic",
}


@dataclass
class ValueArguments(PolicyArguments):
    """Options of the command."""

    num_tasks: int = HfArg(
        default=1500,
        help="Number of tasks, from the first. Generalisation depends on it more than on the "
        "number of episodes and branches per task.",
    )
    samples_per_task: int = HfArg(default=1, help="Episodes per task.")
    states_per_episode: int = HfArg(default=1, help="Random states of an episode to branch from.")
    branches: int = HfArg(default=1, help="Continuations from each of these states.")
    target: str = HfArg(
        default="success",
        help="Meaning of a value. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in _TARGETS.items())
        + ".",
    )
    gamma: float = HfArg(default=1.0, help="Discount per step of the return target.")
    epochs: int = HfArg(default=6, help="Passes over the examples; the best epoch is kept.")
    learning_rate: float | None = HfArg(
        default=None,
        help="By default 1e-3 with --head_only and for tiny models, else 1e-5.",
    )
    head_only: bool = HfArg(default=False, help="Freeze the model below the value head.")
    tasks_at_once: int = HfArg(default=64, help="Tasks per saved portion.")
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output_dir: str = HfArg(default="runs/value", help="Folder for the critic.")


def run(arguments: Sequence[str]) -> None:
    """Collect, train, calibrate and measure."""
    options = parse(
        arguments,
        ValueArguments,
        program=PROGRAM,
        description="Train a critic on how branches of episodes end.",
    )
    _check(options)
    folder = Path(options.output_dir)
    with lock_folder(folder):
        if (folder / RESULTS_FILE).exists():
            raise ConfigurationError(
                f"--output_dir {folder} contains a trained value. Choose another folder."
            )
        env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
        settings = settings_of({"env": options.env, "env_kwargs": env_kwargs}, options)
        check_unchanged(folder, settings, "--output_dir")
        environment = open_environment(options, notify)
        write_settings(folder, settings)
        with open_policy(options, environment) as policy:
            episodes = _collect(options, environment, policy, folder / "branches")
        _train(options, environment, episodes, folder)


def _check(options: ValueArguments) -> None:
    check_range(options, "at least 1", lambda value: value >= 1, "samples_per_task", "epochs",
                "states_per_episode", "branches", "tasks_at_once")  # fmt: skip
    check_range(options, "at least 3 (training, calibration and test)",
                lambda value: value >= 3, "num_tasks")  # fmt: skip
    check_range(options, "in [0, 1]", lambda value: 0 <= value <= 1, "gamma")
    check_range(options, "positive", lambda value: value > 0, "learning_rate")
    lookup(_TARGETS, options.target, kind="target")
    check_policy(options)
    if options.base_url is not None:
        raise ConfigurationError(
            "--base_url: the critic starts from the weights of the policy's model, which a server "
            "does not provide. Pass a local --model."
        )


def _collect(
    options: ValueArguments, environment: FittedEnvironment, policy: Policy, parts: Path
) -> list[Trajectory]:
    """Collect missing portions and return all episodes and branches."""
    tasks = first_tasks(environment.facts.num_tasks, options.num_tasks)
    portions = [
        tasks[i : i + options.tasks_at_once] for i in range(0, len(tasks), options.tasks_at_once)
    ]
    parts.mkdir(exist_ok=True)
    episodes: list[Trajectory] = []
    with tqdm(total=len(tasks), desc="collecting", unit="task") as bar:
        for number, portion in enumerate(portions):
            part = parts / f"{number:06d}.jsonl.gz"
            if not part.exists():
                rollout = Rollout(environment.make_env, policy, states=StateStore())
                found = _branch_out(options, rollout, portion)
                rollout.close()
                check_episodes(found)
                save_trajectories(part, found)
            episodes += load_trajectories(part)
            bar.update(len(portion))
    return episodes


def _branch_out(
    options: ValueArguments, rollout: Rollout, tasks: Sequence[int]
) -> list[Trajectory]:
    """Collect episodes and continuations from some of their states."""
    episodes = rollout.collect(plan_samples(tasks, options.samples_per_task, options.seed))
    rng = np.random.default_rng([options.seed, *tasks, len(tasks)])
    states = []
    for episode in episodes:
        if episode.is_scorable:
            steps = rng.permutation(len(episode.transitions))[: options.states_per_episode]
            states += [(episode, int(step)) for step in sorted(steps)]
    branches = rollout.branch_many(states, options.branches, rng=rng)
    return [*episodes, *(branch for same in branches.continuations for branch in same)]


def _train(
    options: ValueArguments,
    environment: FittedEnvironment,
    episodes: Sequence[Trajectory],
    folder: Path,
) -> None:
    import torch

    from agent_trainers.experimental.values import training
    from agent_trainers.experimental.values.reliability import reliability_png
    from agent_trainers.trainers.ppo import CriticModel, save_critic

    rng = np.random.default_rng(options.seed)
    sets = training.make_sets(episodes, options.target, options.gamma, rng)
    torch.manual_seed(options.seed)
    critic = CriticModel(environment.model)
    if torch.accelerator.is_available():
        critic.to(torch.accelerator.current_accelerator())
    is_tiny = critic.body.config.get_text_config().vocab_size < _TINY_VOCABULARY
    settings = training.FitSettings(
        epochs=options.epochs,
        learning_rate=options.learning_rate or (1e-3 if is_tiny or options.head_only else 1e-5),
        head_only=options.head_only,
    )
    losses = list(
        tqdm(training.fit(critic, sets, settings, rng), total=options.epochs, desc="training",
             unit="epoch")
    )  # fmt: skip
    line = training.calibrate(critic, sets.calibration)
    measured = training.measure(critic, sets.test)
    critic.body.config.save_pretrained(folder)
    environment.tokenizer.save_pretrained(folder)
    save_critic(critic.cpu(), folder)
    with atomic_path(folder / PLOT_FILE) as path:
        path.write_bytes(reliability_png(measured))
    results: dict[str, Any] = {
        "env": options.env,
        "env_kwargs": environment.env_kwargs,
        "model": options.model,
        "target": options.target,
        "gamma": options.gamma,
        "num_episodes": len(episodes),
        "environment_steps": _num_steps(environment, episodes),
        "num_examples": {
            name: sum(len(row.examples) for row in rows) for name, rows in sets._asdict().items()
        },
        "losses": losses,
        "calibration": line._asdict(),
        "reliability": {kind: found._asdict() for kind, found in measured.items()},
    }
    write_json(folder / RESULTS_FILE, results)
    _print_table(options, results)
    notify(f"Search with it: python -m agent_trainers.experimental.search --value {folder}")
    notify(f"Initialise PPO with it: agent-r1-train --algorithm step_ppo --critic_model {folder}")


def _num_steps(environment: FittedEnvironment, episodes: Sequence[Trajectory]) -> int:
    """Return the number of environment steps, replayed ones included."""
    env = environment.make_env()
    replays = not can_be_saved(env)
    env.close()
    return sum(len(t.transitions) - (0 if replays else t.start) for t in episodes)


def _print_table(options: ValueArguments, results: dict[str, Any]) -> None:
    columns = [Column(name, justify="right") for name in
               ("squared error", "of the mean", "noise", "correlation", "ceiling",
                "calibration error")]  # fmt: skip
    table = Table("value of", *columns, title=f"{options.target}, on held-out tasks")
    for kind, found in results["reliability"].items():
        table.add_row(
            kind, *(f"{found[name]:.3f}" for name in ("mean_squared_error",
            "mean_squared_error_of_mean", "least_squared_error", "correlation", "best_correlation",
            "calibration_error")),
        )  # fmt: skip
    table.caption = (
        f"{results['num_episodes']} episodes and branches, {results['environment_steps']:,} "
        f"environment steps; {PLOT_FILE} and {RESULTS_FILE} in "
        f"{options.output_dir}"
    )
    Console().print(table)


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
