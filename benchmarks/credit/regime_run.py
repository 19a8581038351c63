"""One cell of the comparison by regime: make and evaluate a start policy, or train from one."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import TrainerCallback

from agent_trainers import TINY_POLICY
from agent_trainers.cli.environments import inspect_environment
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.recipes import find_turn_length
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.tiny_policy.make import EnvironmentSource, make_tiny_policy
from benchmarks.credit.policies import train_until
from benchmarks.learning_run import MAX_NEW_TOKENS, LearningRun, Sampled, prepare

NUM_START_TASKS: Final = 300
"""Held-out tasks on which a start policy is evaluated."""
START_SEED: Final = 1000
"""Added to the number of a start policy: no run has its seed."""
BY_REWARD: Final[Mapping[str, float]] = {"nine questions": 0.5, "multi-hop": 0.06}
"""Start policies that are the embedded one trained on single questions by reward, and the success
of a batch that ends the training. 50 % of single questions are 0.5 ** 9 = 0.2 % of nine, and more
after the last update."""
OWN_SUCCESS: Final = 0.4
"""Success at most of the start policy that is made for an environment."""
P_CORRECT_TURN: Final = 0.2
"""Share of turns that its careless demonstrations keep; a drawn door is right in a quarter."""


class UpdateKL(TrainerCallback):  # type: ignore[misc] # transformers is untyped
    """KL divergence per token between the sampling policy and the policy after each update.

    The mean of ``r - 1 - log r`` over the trained tokens of the batch, with ``r`` the ratio of
    their probabilities after the update and at sampling (k3, http://joschu.net/blog/kl-approx.html).
    Updates on batches without any advantage are left out.
    """

    def __init__(self, trainer: Any) -> None:
        """Measure the updates of `trainer`."""
        self._trainer = trainer
        self.values: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Measure an update."""
        batch = self._trainer.last_batch
        if not any(episode.has_signal for episode in batch.episodes):
            return
        is_trained = batch.tensors["tool_mask"].bool().numpy()
        old = batch.tensors["sampling_per_token_logps"].numpy()
        log_ratio = (self._trainer.current_logprobs() - old)[is_trained].astype(float)
        self.values.append(float(np.mean(np.expm1(log_ratio) - log_ratio)))


def run_cell(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the result of a cell.

    Args:
        spec: Name and number of a ``start`` with the regime's ``env`` and ``env_kwargs``; instead
            of a name the `LearningRun` that makes it, or None for the embedded policy. Or a
            `LearningRun` as ``run``, whose budget is one of episodes with ``counts_episodes``.
        folder: Folder for the policy.
    """
    if "start" in spec:
        return _make_start(spec, folder)
    counter = Sampled(lambda _: 1) if spec.get("counts_episodes") else None
    return _train(LearningRun(**spec["run"]), folder, counter)


def _make_start(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    policy, seed = folder / "policy", START_SEED + spec.get("number", 0)
    if spec["start"] is None:
        policy = Path(TINY_POLICY)
    else:
        unfinished = folder / "unfinished"
        for old in (unfinished, policy):
            shutil.rmtree(old, ignore_errors=True)
        if isinstance(spec["start"], Mapping):
            train_until(LearningRun(**spec["start"]), unfinished)
        elif spec["start"] in BY_REWARD:
            run = LearningRun(
                method="grpo", seed=seed, budget=20_000, num_tasks=0, columns=(),
                learning_rate=1e-4, num_episodes=64, env_kwargs={"max_episode_steps": 3},
                until=BY_REWARD[spec["start"]],
            )  # fmt: skip
            train_until(run, unfinished)
        else:
            source = EnvironmentSource(inspect_environment(spec["env"], spec["env_kwargs"]))
            make_tiny_policy(
                source, unfinished, seed=seed, success=OWN_SUCCESS, p_correct_turn=P_CORRECT_TURN
            )
        unfinished.rename(policy)
    trained_for = find_turn_length(str(policy))
    sampler = transformers_policy(
        load_model(str(policy)),
        load_tokenizer(str(policy)),
        max_new_tokens=MAX_NEW_TOKENS if trained_for is None else trained_for[0],
        max_batch_size=NUM_START_TASKS,
    )
    make_env = inspect_environment(spec["env"], {**spec["env_kwargs"], "split": "test"}).make_env
    return {
        "success": evaluate_policy(make_env, sampler, range(NUM_START_TASKS)).metrics["success"]
    }


def _train(run: LearningRun, folder: Path, counter: Sampled | None) -> dict[str, Any]:
    trainer, steps = prepare(run, folder, counter)
    divergence = UpdateKL(trainer)
    trainer.add_callback(divergence)
    trainer.train()
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    return {
        "curve": steps.curve,
        "kl": divergence.values,
        "steps": steps.num_steps if steps.has_succeeded else None,
    }
