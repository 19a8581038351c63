"""Rollouts with occasionally slow tools compared with TRL's loop and with a lower bound.

64 episodes of five calls that take 10 ms, or 2 s in 5 % of the cases, by the same draws on both
sides, and a last turn without a call. Model, sampling and texts are the same on both sides.

*TRL's loop* is ``GRPOTrainer._generate``: tokenising, generation and tools. Ours is the whole of
``Rollout.collect``, including resets.

*The ideal* is the larger of two bounds, both measured in this run:

- ``max_e(L_e) + g``: the longest sum of an episode's own latencies, and the time of one episode
  alone without latencies. No scheduler is faster.
- ``G``: the time of all episodes together without latencies, where generation is the limit.
"""

import itertools
import os
import tempfile
import time
from typing import Any, Final

import gymnasium as gym
import numpy as np
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from agent_envs.core.tool import Tool
from agent_envs.envs.synthetic.multi_hop import SyntheticMultiHopEnv
from agent_envs.retrieval import Hit
from agent_envs.tools.search import make_search_tool
from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from benchmarks.performance.interleaved import compare, measure_interleaved, spread
from benchmarks.performance.models import SEED, Settings, load_model, load_tokenizer

ENVIRONMENT: Final = "Benchmark/SlowSearch-v0"
GROUP_SIZE: Final = 8


class ToolLatencies:
    """Latency of each call of each episode, by number of the episode.

    One object per side: both sides must start the same number of episodes in each round.
    """

    def __init__(self, settings: Settings, *, seed: int = SEED) -> None:
        """Set the distribution."""
        self._settings, self._seed = settings, seed
        self._numbers = itertools.count()
        self.is_off = False
        """Whether calls take no time and episodes do not count."""

    def start_episode(self) -> int:
        """Return the number of the next episode."""
        return -1 if self.is_off else next(self._numbers)

    def seconds(self, episode: int, call: int) -> float:
        """Return the latency of a call."""
        settings = self._settings
        if episode < 0 or call >= settings.num_calls:
            return 0.0
        draw = np.random.default_rng([self._seed, episode, call]).random()
        return settings.slow_seconds if draw < settings.slow_share else settings.fast_seconds

    def longest_episode(self, round_number: int) -> float:
        """Return the largest sum of an episode's latencies in a round."""
        first, calls = round_number * self._settings.num_episodes, range(self._settings.num_calls)
        episodes = range(first, first + self._settings.num_episodes)
        return max(sum(self.seconds(episode, call) for call in calls) for episode in episodes)


class SlowSearchEnv(SyntheticMultiHopEnv):
    """`SyntheticMultiHopEnv` with a search that takes time."""

    def __init__(self, *, latencies: ToolLatencies, **shared: Any) -> None:
        """Set the latencies; other arguments are the family's."""
        self._latencies = latencies
        # a tool without a timeout would count as immediate
        search = Tool(make_search_tool(self, top_k=2).function, timeout=30.0)
        super().__init__(tools=[search], **shared)

    def begin_episode(self) -> None:
        """Take the next number."""
        super().begin_episode()
        self._number, self._num_calls = self._latencies.start_episode(), 0

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Wait, then search."""
        time.sleep(self._latencies.seconds(self._number, self._num_calls))
        self._num_calls += 1
        return super().search(query, top_k)


def measure_rollouts(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the seconds of our rollout over those of TRL's loop, and over the ideal."""
    if ENVIRONMENT not in gym.registry:
        gym.register(ENVIRONMENT, f"{__name__}:{SlowSearchEnv.__name__}")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = _OurSide(settings), _TheirSide(settings, folder)
        ours.run(settings.num_episodes, without_latencies=True)  # warm-up
        theirs.run(without_latencies=True)
        sides = {
            "ours": lambda: ours.run(settings.num_episodes),
            "trl": theirs.run,
            "G": lambda: ours.run(settings.num_episodes, without_latencies=True),
            "g": lambda: ours.run(1, without_latencies=True),
        }
        times = measure_interleaved(sides, settings.rounds, description="slow tools")
        ours.close()
    ideal = [
        max(ours.latencies.longest_episode(number) + alone, together)
        for number, (alone, together) in enumerate(zip(times["g"], times["G"], strict=True))
    ]
    details = {
        "model": settings.step_model,
        "episodes": settings.num_episodes,
        "calls_per_episode": settings.num_calls,
        "without_latencies": spread(times["G"]),
        "one_episode_alone": spread(times["g"]),
    }
    return {
        "rollout_vs_trl": compare(times["ours"], times["trl"]) | details,
        "rollout_vs_ideal": compare(times["ours"], ideal) | details,
    }


class _OurSide:
    def __init__(self, settings: Settings) -> None:
        self.latencies = ToolLatencies(settings)
        self._num_turns = settings.num_calls + 1
        model = load_model(settings.step_model, settings.device, is_scripted=True)
        self._rollout = Rollout(
            lambda: gym.make(
                ENVIRONMENT, latencies=self.latencies, max_episode_steps=self._num_turns
            ),
            transformers_policy(
                model.to(settings.device), load_tokenizer(), max_new_tokens=24,
                max_batch_size=settings.num_episodes,
            ),
        )  # fmt: skip

    def run(self, num_episodes: int, *, without_latencies: bool = False) -> float:
        """Return the seconds of a rollout."""
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
    """TRL's loop through the TRL adapter."""

    def __init__(self, settings: Settings, folder: str) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        self.latencies = ToolLatencies(settings)
        self._num_turns = settings.num_calls + 1
        num_tasks = max(1, settings.num_episodes // GROUP_SIZE)
        uncounted = ToolLatencies(settings)  # the dataset starts episodes to get the prompts
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

    def run(self, *, without_latencies: bool = False) -> float:
        """Return the seconds of generation and tools."""
        self.latencies.is_off = without_latencies
        self._trainer._generate_and_score_completions(self._inputs)
        _check({env._episode.num_turns for env in self._trainer.environments}, self._num_turns)
        return self._seconds

    def _timed_generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        generated = self._generate(prompts)
        self._seconds = time.perf_counter() - started
        return generated


def _check(found: set[int], num_turns: int) -> None:
    if found != {num_turns}:
        raise RuntimeError(f"episodes have {sorted(found)} turns instead of {num_turns}")
