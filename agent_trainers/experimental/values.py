"""Train a process value: ``python -m agent_trainers.experimental.values episodes.jsonl.gz``.

A process value predicts the outcome of an episode from an intermediate state. It is a critic that
starts as a copy of the policy's model with a value head; its folder has the format of PPO's critic,
so it can initialise ``--critic_model``, and the folder of a run with a critic is a process value.

Every state of the episodes, and every action in it, has the outcome of its episode as its label.
Labels are fitted by least squares (a proper scoring rule), so a value is an expectation on the
scale of PPO's critic. Tasks are split into three sets: training, choice of the epoch, and test.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import get_linear_schedule_with_warmup
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range
from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import StepEvent
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.batching.collate import pad_rows
from agent_trainers.batching.micro_batch import pack
from agent_trainers.batching.probe import is_tiny
from agent_trainers.cli.arguments import notifier, parse, run_command
from agent_trainers.cli.output_folder import check_unused
from agent_trainers.experimental.diagnose import name_file
from agent_trainers.policies.models import load_tokenizer, model_path
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import template_tools
from agent_trainers.trainers.ppo import CRITIC_FILE, CriticModel, save_critic
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.values"
RESULTS_FILE: Final = "value.json"
MAX_TOKENS: Final = 16_384
"""Largest batch in tokens, padding included."""
ROWS_PER_STEP: Final = 16
"""Rows per optimiser step; larger batches take too few steps to learn more than the mean."""
NUM_BINS: Final = 10
_HELD_OUT: Final = 0.1
T = TypeVar("T")
_MAX_GRADIENT_NORM: Final = 1.0
_WARMUP: Final = 0.1
notify = notifier(PROGRAM)
_TARGETS: Final = {
    "success": "the chance that the episode succeeds",
    "return": "the discounted return from the state on, as PPO's critic",
}


@dataclass
class ValueArguments:
    """Options of the command."""

    trajectories: str = HfArg(
        help="File of episodes, as agent-r1-eval collect writes it. Generalisation depends on the "
        "number of its tasks.",
    )
    model: str | None = HfArg(
        default=None,
        help="The model that acted: its name on the hub, or a folder; the embedded policy if not "
        "given.",
    )
    target: str = HfArg(
        default="success",
        help=f"Meaning of a value. {'; '.join(f'{k}: {v}' for k, v in _TARGETS.items())}.",
    )
    gamma: float = HfArg(default=1.0, help="Discount per step of the return target.")
    epochs: int = HfArg(default=6, help="Passes over the examples; the best epoch is kept.")
    learning_rate: float | None = HfArg(
        default=None, help="By default 1e-3 for tiny models, else 1e-5."
    )
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output_dir: str = HfArg(default="runs/value", help="Folder for the critic.")


def run(arguments: Sequence[str]) -> None:
    """Train a critic on the episodes of a file, and measure it."""
    options = parse(
        name_file(arguments),
        ValueArguments,
        program=PROGRAM,
        description="Train a critic on how episodes end.",
    )
    check_range(options, "at least 1", "epochs")
    check_range(options, "in [0, 1]", "gamma")
    check_range(options, "positive", "learning_rate")
    lookup(_TARGETS, options.target, kind="target")
    folder = Path(options.output_dir)
    check_unused(folder, RESULTS_FILE)
    rng = np.random.default_rng(options.seed)
    episodes = list(load_trajectories(options.trajectories))
    train, choice, test = make_sets(episodes, options.target, options.gamma, rng)
    if len({label for example in test for label in example.outcomes}) < 2:
        raise DataError(
            f"{options.trajectories}: all episodes of the tasks held out for the test end alike, "
            "so no value can be measured. Collect at least 100 tasks with --keep_failures, some of "
            "which the model solves."
        )
    torch.manual_seed(options.seed)
    model = model_path(options)
    critic, tokenizer = CriticModel(model), load_tokenizer(model)
    if torch.accelerator.is_available():
        critic.to(torch.accelerator.current_accelerator())
    learning_rate = options.learning_rate or (1e-3 if is_tiny(critic.body) else 1e-5)
    epochs = fit(critic, train, choice, epochs=options.epochs, learning_rate=learning_rate, rng=rng)
    errors = list(tqdm(epochs, total=options.epochs, desc="training", unit="epoch", disable=None))
    measured = measure(critic, test)
    critic.body.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_critic(critic.cpu(), folder)
    results = {"num_episodes": len(episodes), "errors": errors, "reliability": measured}
    write_json(folder / RESULTS_FILE, dataclasses.asdict(options) | results)
    figures = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
    notify(f"Held-out tasks: {figures}")
    notify(f"Choose with it: python -m agent_trainers.experimental.search FILE --value {folder}")
    notify(f"Initialise PPO with it: agent-r1-train --algorithm step_ppo --critic_model {folder}")


class Example(NamedTuple):
    """A sequence of tokens with labels at some of them."""

    ids: list[int]
    places: list[int]
    """Positions of the last token of each state and of each action."""
    outcomes: list[float]
    """Their labels."""


def make_examples(trajectory: Trajectory, target: str, gamma: float) -> list[Example]:
    """Label states and actions with the success, or with the discounted return from the step on.

    Steps that extend each other share an example. A branch shares the steps before its start with
    its episode, which counts them.
    """
    found: list[Example] = []
    for step in range(trajectory.start, len(trajectory.transitions)):
        transition = trajectory.transitions[step]
        outcome = float(trajectory.success)
        if target == "return":
            outcome = sum(r * gamma**i for i, r in enumerate(trajectory.rewards[step:]))
        if not transition.prompt_ids:
            raise DataError("The file has no token ids; a served model returns none.")
        state = list(transition.prompt_ids)
        if not (found and state[: len(found[-1].ids)] == found[-1].ids):
            found.append(Example([], [], []))
        found[-1].ids[:] = [*state, *transition.completion_ids]
        found[-1].places.extend([len(state) - 1, len(found[-1].ids) - 1])
        found[-1].outcomes.extend([outcome, outcome])
    return found


def make_sets(
    trajectories: Sequence[Trajectory], target: str, gamma: float, rng: np.random.Generator
) -> list[list[Example]]:
    """Return the examples of disjoint sets of tasks: training, choice of the epoch, and test."""
    by_task: dict[str, list[Example]] = {}
    for trajectory in trajectories:
        if trajectory.is_scorable:
            examples = make_examples(trajectory, target, gamma)
            by_task.setdefault(trajectory.task_id, []).extend(examples)
    return split_tasks(by_task, rng)


def split_tasks(by_task: Mapping[str, Sequence[T]], rng: np.random.Generator) -> list[list[T]]:
    """Return the examples of 80 %, 10 % and 10 % of the tasks.

    Raises:
        DataError: If there are too few tasks.
    """
    order = [list(by_task)[i] for i in rng.permutation(len(by_task))]
    held_out = max(1, round(_HELD_OUT * len(order)))
    if len(order) <= 2 * held_out:
        raise DataError(
            f"{len(order)} tasks with scorable episodes are too few for training, choice and test "
            "sets. Collect at least 100 tasks."
        )
    splits = order[: -2 * held_out], order[-2 * held_out : -held_out], order[-held_out:]
    return [[e for name in names for e in by_task[name]] for names in splits]


def fit(
    critic: CriticModel,
    examples: Sequence[Example],
    choice: Sequence[Example],
    *,
    epochs: int,
    learning_rate: float,
    rng: np.random.Generator,
) -> Iterator[float]:
    """Train a critic on `examples` and restore the weights of its best epoch on `choice`.

    Yields the mean squared error of each epoch on that set.

    Raises:
        ConfigurationError: If training diverged.
    """
    critic.eval()  # without dropout
    optimizer = torch.optim.AdamW(critic.parameters(), lr=learning_rate, weight_decay=0.0)
    head = critic.head.linear
    if not (bool(head.weight.any()) or bool(head.bias.any())):  # it predicts the mean at first
        outcomes = [outcome for example in examples for outcome in example.outcomes]
        nn.init.constant_(head.bias, float(np.mean(outcomes)))
    num_steps = epochs * -(-len(examples) // ROWS_PER_STEP)
    schedule = get_linear_schedule_with_warmup(optimizer, round(_WARMUP * num_steps), num_steps)
    best, best_state = float("inf"), critic.state_dict()
    for _ in range(epochs):
        order = rng.permutation(len(examples))
        for start in range(0, len(order), ROWS_PER_STEP):
            batch = [examples[i] for i in order[start : start + ROWS_PER_STEP]]
            num_labels = sum(len(example.outcomes) for example in batch)
            for values, labels in _values(critic, batch):
                torch.autograd.backward(((values - labels) ** 2).sum() / num_labels)
            nn.utils.clip_grad_norm_(critic.parameters(), _MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        error = measure(critic, choice)["mean_squared_error"]
        if error < best:
            best = error
            best_state = {name: value.clone() for name, value in critic.state_dict().items()}
        yield error
    if not np.isfinite(best):
        raise ConfigurationError("No epoch has a finite error: lower --learning_rate.")
    critic.load_state_dict(best_state)


@torch.no_grad()
def measure(critic: CriticModel, examples: Sequence[Example]) -> dict[str, float]:
    """Return the reliability of the values of states, and of actions in them."""
    batches = [torch.stack(batch).cpu() for batch in _values(critic, examples)]
    return reliability(*torch.cat(batches, dim=1).tolist())


def reliability(predicted: Sequence[float], observed: Sequence[float]) -> dict[str, float]:
    """Return the agreement of predictions with outcomes, (N,) each, in the outcomes' unit.

    The expected calibration error is over bins of equal size (Naeini et al., AAAI 2015;
    arXiv:1909.10155); the squared error of the mean is that of this constant prediction; the
    correlation is NaN if predictions or outcomes are constant.
    """
    p, y = np.asarray(predicted, np.float64), np.asarray(observed, np.float64)
    bins = np.array_split(np.argsort(p, kind="stable"), NUM_BINS)
    varies = min(p.std(), y.std()) > 1e-9
    return {
        "calibration_error": sum(abs(float((p[one] - y[one]).sum())) for one in bins) / len(p),
        "mean_squared_error": float(np.mean((p - y) ** 2)),
        "mean_squared_error_of_mean": float(np.var(y)),
        "correlation": float(np.corrcoef(p, y)[0, 1]) if varies else np.nan,
    }


def _values(
    critic: CriticModel, examples: Sequence[Example]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield values and labels of each batch of limited tokens, each (N,)."""
    for numbers in split_by_tokens([example.ids for example in examples]):
        batch = [examples[i] for i in numbers]
        rows = [row for row, example in enumerate(batch) for _ in example.places]
        places = [place for example in batch for place in example.places]
        values = critic.head(hidden_states(critic, [e.ids for e in batch]))[rows, places]
        yield values, values.new_tensor([o for example in batch for o in example.outcomes])


class ProcessValue:
    """Value of states and of actions in states, by a critic."""

    def __init__(self, critic: CriticModel, renderer: ChatRenderer) -> None:
        self.critic, self.tokenizer = critic.eval(), renderer.tokenizer
        self._renderer = renderer

    @classmethod
    def load(cls, folder: str | Path) -> "ProcessValue":
        """Load the folder of a trained value, or of a run with a critic.

        Raises:
            ConfigurationError: If the folder has no critic.
        """
        if not (Path(folder) / CRITIC_FILE).is_file():
            raise ConfigurationError(
                f"{folder}: no {CRITIC_FILE} found. Train a value with "
                "python -m agent_trainers.experimental.values, or pass the output folder of a run "
                "with a critic."
            )
        critic = CriticModel(str(folder))
        if torch.accelerator.is_available():
            critic.to(torch.accelerator.current_accelerator())
        return cls(critic, ChatRenderer(load_tokenizer(str(folder))))

    @torch.no_grad()
    def values(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the value after the last token of each sequence."""
        found: dict[int, float] = {}
        for numbers in split_by_tokens(sequences):
            batch = [sequences[i] for i in numbers]
            values = self.critic.head(hidden_states(self.critic, batch))
            last = torch.tensor([len(sequence) - 1 for sequence in batch], device=values.device)
            found |= zip(numbers, values.gather(1, last[:, None])[:, 0].tolist(), strict=True)
        return [found[i] for i in range(len(sequences))]

    def potential(self, env: gym.Env[str, str]) -> float:
        """Return the value of the environment's current state, a potential for shaping."""
        return self.values([self._state_ids(env)])[0]

    def advantage(self, env: gym.Env[str, str], event: StepEvent) -> float:
        """Return by how much the action raised the value: a reward term (arXiv:2410.08146).

        Both values are of the state before the step, without the environment's reply. Unlike a
        potential, this term changes the optimal policy.
        """
        state = self._state_ids(env)
        before, after = self.values([state, [*state, *self._renderer.turn_ids(event.text)]])
        return after - before

    def _state_ids(self, env: gym.Env[str, str]) -> list[int]:
        info: dict[str, Any] = env.unwrapped.state  # type: ignore[attr-defined]
        return self._renderer.prompt_ids(info["messages"], template_tools(info), None)


def hidden_states(critic: CriticModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return last hidden states (B, T, H) of B right-padded sequences of at most T tokens."""
    input_ids = pad_rows(sequences)
    if int(input_ids.max()) >= critic.body.get_input_embeddings().num_embeddings:
        raise DataError(
            "The episodes have token ids that the model does not know, so another model acted. "
            "Pass that one by --model, or a value of it by --value."
        )
    input_ids = input_ids.to(critic.head.linear.weight.device)
    states: torch.Tensor = critic.body(input_ids=input_ids, use_cache=False).last_hidden_state
    return states


def split_by_tokens(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the numbers of the sequences of each batch of at most `MAX_TOKENS` tokens."""
    lengths = [len(sequence) for sequence in sequences]
    return pack([0] * len(lengths), lengths, max_rows=len(lengths), max_tokens=MAX_TOKENS)


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
