"""``python -m agent_trainers.experimental.values``: train a process value.

Collects episodes and, from states on the way, continuations (`Rollout.branch`); the critic, a copy
of the policy's model with a value head, learns their mean outcome. Tasks are collected in portions,
one file each, so that the same command resumes after an interruption.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.collect import open_portions, play_portions
from agent_trainers.cli.policies import (
    FittedEnvironment,
    PolicyArguments,
    check_episodes,
    check_policy,
    open_policy,
)
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory

PROGRAM: Final = "python -m agent_trainers.experimental.values"
RESULTS_FILE: Final = "value.json"
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
        "number of branches.",
    )
    branches: int = HfArg(default=1, help="Continuations from a random state of each episode.")
    target: str = HfArg(
        default="success",
        help=f"Meaning of a value. {'; '.join(f'{k}: {v}' for k, v in _TARGETS.items())}.",
    )
    gamma: float = HfArg(default=1.0, help="Discount per step of the return target.")
    epochs: int = HfArg(default=6, help="Passes over the examples; the best epoch is kept.")
    learning_rate: float | None = HfArg(
        default=None, help="By default 1e-3 for tiny models, else 1e-5."
    )
    tasks_at_once: int = HfArg(default=64, help="Tasks per saved portion.")
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output_dir: str = HfArg(default="runs/value", help="Folder for the critic.")


def run(arguments: Sequence[str]) -> None:
    """Collect, train and measure."""
    options = parse(
        arguments,
        ValueArguments,
        program=PROGRAM,
        description="Train a critic on how branches of episodes end.",
    )
    _check(options)
    folder = Path(options.output_dir)
    result = folder / RESULTS_FILE
    with open_portions(options, folder, "--output_dir", result, notify) as environment:
        episodes = _collect(options, environment, folder / "branches")
        _train(options, environment, episodes, folder)


def _check(options: ValueArguments) -> None:
    check_range(options, "at least 1", lambda value: value >= 1, "epochs", "branches",
                "tasks_at_once")  # fmt: skip
    check_range(options, "at least 3 (training, choice and test)",
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
    options: ValueArguments, environment: FittedEnvironment, parts: Path
) -> list[Trajectory]:
    """Return all episodes, and continuations from some of their states."""
    with open_policy(options, environment) as policy:

        def play(tasks: Sequence[int]) -> list[Trajectory]:
            rng = np.random.default_rng([options.seed, *tasks, len(tasks)])
            rollout = Rollout(environment.make_env, policy)
            with contextlib.closing(rollout):
                episodes = rollout.collect(plan_samples(tasks, 1, options.seed))
                states = [
                    (episode, int(rng.integers(len(episode.transitions))))
                    for episode in episodes
                    if episode.is_scorable
                ]
                branches = rollout.branch_many(states, options.branches, rng=rng)
            episodes += [branch for same in branches.continuations for branch in same]
            check_episodes(episodes)
            return episodes

        parts.mkdir(exist_ok=True)
        return [t for part in play_portions(options, environment, parts, play) for t in part]


def _train(
    options: ValueArguments,
    environment: FittedEnvironment,
    episodes: Sequence[Trajectory],
    folder: Path,
) -> None:
    import torch

    from agent_trainers.experimental.values import training
    from agent_trainers.trainers.ppo import CriticModel, save_critic

    rng = np.random.default_rng(options.seed)
    sets = training.make_sets(episodes, options.target, options.gamma, rng)
    torch.manual_seed(options.seed)
    critic = CriticModel(environment.model)
    if torch.accelerator.is_available():
        critic.to(torch.accelerator.current_accelerator())
    is_tiny = critic.body.config.get_text_config().vocab_size < _TINY_VOCABULARY
    learning_rate = options.learning_rate or (1e-3 if is_tiny else 1e-5)
    epochs = training.fit(critic, sets, epochs=options.epochs, learning_rate=learning_rate, rng=rng)
    errors = list(tqdm(epochs, total=options.epochs, desc="training", unit="epoch"))
    measured = training.measure(critic, sets.test)
    critic.body.config.save_pretrained(folder)
    environment.tokenizer.save_pretrained(folder)
    save_critic(critic.cpu(), folder)
    results = {
        **dataclasses.asdict(options),
        "env_kwargs": environment.env_kwargs,
        "num_episodes": len(episodes),
        "errors": errors,
        "reliability": measured._asdict(),
    }
    write_json(folder / RESULTS_FILE, results)
    notify(
        f"Held-out tasks: squared error {measured.mean_squared_error:.3f} (of the mean "
        f"{measured.mean_squared_error_of_mean:.3f}), correlation {measured.correlation:.3f}, "
        f"calibration error {measured.calibration_error:.3f}"
    )
    notify(f"Search with it: python -m agent_trainers.experimental.search --value {folder}")
    notify(f"Initialise PPO with it: agent-r1-train --algorithm step_ppo --critic_model {folder}")


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
