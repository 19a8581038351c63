"""Rollouts with tools that are sometimes slow: ours against TRL's loop, and against the ideal.

64 episodes of five calls that take time, and a last turn that takes none. A call takes 10 ms, or
2 s in 5 % of the cases, by the same draws on both sides. Model, settings of sampling and texts are
the same as well: a model with real computation that says what a script says.

*TRL's loop* is ``GRPOTrainer._generate``: tokenising, generation, tools; without resets, scores and
training. Ours is the whole of ``Rollout.collect``, resets included.

*The ideal* waits for nothing but what an episode itself must wait for. It is the greater of two
bounds, both of this run:

- ``max_e(L_e) + g``: ``L_e`` is the sum of the latencies of episode e's own calls, and ``g`` the
  time that one episode takes alone and without latencies: its generation, turn after turn;
- ``G``: the time that all episodes take together without latencies, where generation is the limit.

No scheduler can be faster than the first; the second is what ours needs if no tool ever waits.
"""

import os
import tempfile
import time
from typing import Any, Final

import gymnasium as gym
import numpy as np
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.collector import EpisodeSpec, Rollout
from benchmarks.performance.comparison import compare, measure_in_turns, spread
from benchmarks.performance.models import load_model, load_tokenizer
from benchmarks.performance.settings import SEED, Settings
from benchmarks.performance.slow_search import ENVIRONMENT, ToolLatencies, register

TRL_TARGET: Final = 1 / 3
IDEAL_TARGET: Final = 1.2
MAX_NEW_TOKENS: Final = 24
GROUP_SIZE: Final = 8


def measure_rollouts(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return seconds of our rollout over those of TRL's loop, and over the ideal."""
    register()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = _OurSide(settings), _TheirSide(settings, folder)
        times = _play_in_turns(settings, ours, theirs)
        ours.close()
    details = {
        "model": settings.step_model,
        "episodes": settings.num_episodes,
        "calls_per_episode": settings.num_calls,
        "without_latencies": spread(times["G"]),
        "one_episode_alone": spread(times["g"]),
    }
    return {
        "rollout_vs_trl": compare(times["ours"], times["trl"], target=TRL_TARGET) | details,
        "rollout_vs_ideal": compare(times["ours"], times["ideal"], target=IDEAL_TARGET) | details,
    }


def _play_in_turns(
    settings: Settings, ours: "_OurSide", theirs: "_TheirSide"
) -> dict[str, list[float]]:
    """Return the seconds of each side, of the ideal, and of its bounds, by round."""
    ours.play(settings.num_episodes, without_latencies=True)  # the first time is slower
    theirs.play(without_latencies=True)
    sides = {
        "ours": lambda: ours.play(settings.num_episodes),
        "trl": theirs.play,
        "G": lambda: ours.play(settings.num_episodes, without_latencies=True),
        "g": lambda: ours.play(1, without_latencies=True),
    }
    times = measure_in_turns(sides, settings.rounds, description="slow tools")
    times["ideal"] = [
        max(ours.latencies.longest_episode(number) + alone, together)
        for number, (alone, together) in enumerate(zip(times["g"], times["G"], strict=True))
    ]
    return times


def _latencies(settings: Settings) -> ToolLatencies:
    names = ("num_episodes", "num_calls", "fast_seconds", "slow_seconds", "slow_share")
    return ToolLatencies(seed=SEED, **{name: getattr(settings, name) for name in names})


class _OurSide:
    """`Rollout`, with transformers' ``generate``."""

    def __init__(self, settings: Settings) -> None:
        self.latencies = _latencies(settings)
        num_turns = settings.num_calls + 1
        self._rollout = Rollout(
            lambda: gym.make(ENVIRONMENT, latencies=self.latencies, max_episode_steps=num_turns),
            transformers_policy(
                load_model(settings.step_model, settings.device, is_scripted=True).to(
                    settings.device
                ),
                load_tokenizer(),
                max_new_tokens=MAX_NEW_TOKENS,
                max_batch_size=settings.num_episodes,
            ),
        )
        self._num_turns = num_turns

    def play(self, num_episodes: int, *, without_latencies: bool = False) -> float:
        """Play; return the seconds it took."""
        self.latencies.is_off = without_latencies
        groups = [number // GROUP_SIZE for number in range(num_episodes)]
        specs = [
            EpisodeSpec(task=g, seed=g, group_id=str(g), rng=np.random.default_rng([SEED, number]))
            for number, g in enumerate(groups)
        ]
        started = time.perf_counter()
        trajectories = self._rollout.collect(specs)
        seconds = time.perf_counter() - started
        _check({len(trajectory.transitions) for trajectory in trajectories}, self._num_turns)
        return seconds

    def close(self) -> None:
        """Close the environments."""
        self._rollout.close()


class _TheirSide:
    """TRL's loop, through the TRL adapter."""

    def __init__(self, settings: Settings, folder: str) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        self.latencies = _latencies(settings)
        self._num_turns = settings.num_calls + 1
        num_tasks = max(1, settings.num_episodes // GROUP_SIZE)
        uncounted = _latencies(settings)  # the dataset begins an episode to see the prompt
        limit = {"max_episode_steps": self._num_turns}
        rows = tasks_dataset(ENVIRONMENT, num_tasks, latencies=uncounted, **limit)
        self._inputs = [row for row in rows for _ in range(settings.num_episodes // num_tasks)]
        self._trainer = GRPOTrainer(
            model=load_model(settings.step_model, settings.device, is_scripted=True),
            reward_funcs=environment_return,
            args=GRPOConfig(
                output_dir=folder,
                num_generations=settings.num_episodes // num_tasks,
                per_device_train_batch_size=settings.num_episodes,
                max_completion_length=100 * self._num_turns,  # of the whole episode
                max_tool_calling_iterations=settings.num_calls,
                **settings.trainer_options,
            ),
            train_dataset=rows,
            processing_class=load_tokenizer(),
            environment_factory=environment_factory(ENVIRONMENT, latencies=self.latencies, **limit),
        )
        self._trainer.model.train()
        self._generate = self._trainer._generate
        self._trainer._generate = self._timed_generate
        self._seconds = 0.0

    def play(self, *, without_latencies: bool = False) -> float:
        """Play; return the seconds that generation and tools took."""
        self.latencies.is_off = without_latencies
        self._trainer._generate_and_score_completions(self._inputs)
        _check({env._num_steps for env in self._trainer.environments}, self._num_turns)
        return self._seconds

    def _timed_generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        generated = self._generate(prompts)
        self._seconds = time.perf_counter() - started
        return generated


def _check(found: set[int], num_turns: int) -> None:
    """Make sure that both sides play the same."""
    if found != {num_turns}:
        raise RuntimeError(f"episodes have {sorted(found)} turns, and should all have {num_turns}")
