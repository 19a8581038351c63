"""Optimiser steps of our trainer compared with TRL's, and rollouts with slow tools with an ideal.

Both trainers run the same environment with the same batch size from the same weights: before each
pair TRL's trainer gets a copy of ours, since the length of episodes depends on the policy.

With *slow tools*, episodes have five calls that take 10 ms, or 2 s in 5 % of the cases, the same on
both sides, and a last turn without a call; a script makes the model call the tool in every turn.

The *ideal* rollout takes the larger of two times, both measured in this run:

- ``max_e(L_e) + g``: the longest sum of an episode's own latencies, and the time of one episode
  alone without latencies. No scheduler is faster.
- ``G``: the time of all episodes together without latencies, where generation is the limit.
"""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import gymnasium as gym
import numpy as np

from agent_envs.core.tool import Tool
from agent_envs.envs.synthetic.multi_hop import SyntheticMultiHopEnv
from agent_envs.retrieval import Hit
from agent_envs.tools.search import make_search_tool
from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trainers.grpo import StepGRPOTrainer
from benchmarks.performance.interleaved import StepTimer, compare, measure_interleaved, seconds_of
from benchmarks.performance.models import (
    EMBEDDED,
    ENVIRONMENT,
    SEED,
    Settings,
    load_model,
    load_tokenizer,
    make_config,
)
from benchmarks.trl_peer import batch_of, make_trl_trainer

PAIRS_PER_ROUND: Final = 4
"""Steps without slow tools are short and differ in their episodes, so the median needs many."""
SLOW: Final = "Benchmark/SlowSearch-v0"


class Waits:
    """Latencies of tool calls in the order of the calls, recorded by episode."""

    def __init__(self, seconds: Iterator[float]) -> None:
        """Take the latencies of `seconds`; after its end, calls take no time."""
        self._left, self.episodes = seconds, list[list[float]]()

    def wait(self, episode: list[float]) -> None:
        """Take the time of the next call, and record it in its episode."""
        episode.append(next(self._left, 0.0))
        time.sleep(episode[-1])


class Latencies(Waits):
    """The latencies of a batch's tool calls."""

    def __init__(self, settings: Settings) -> None:
        """Set the distribution; `restart` before each batch."""
        self._settings = settings
        self.restart(None)

    def restart(self, number: int | None) -> None:
        """Draw the latencies of batch `number`; None turns them off."""
        super().__init__(iter(()))
        if number is not None:
            settings, rng = self._settings, np.random.default_rng([SEED, number])
            is_slow = rng.random(settings.num_slow_episodes * settings.num_calls)
            is_slow = is_slow < settings.slow_share
            self._left = iter(
                np.where(is_slow, settings.slow_seconds, settings.fast_seconds).tolist()
            )


class SlowSearchEnv(SyntheticMultiHopEnv):
    """`SyntheticMultiHopEnv` with a search that takes time."""

    def __init__(self, *, latencies: Waits, **shared: Any) -> None:
        """Set the latencies; other arguments are the family's."""
        self._latencies = latencies
        # a tool without a timeout would count as immediate
        search = Tool(make_search_tool(self, top_k=2).function, timeout=30.0)
        super().__init__(tools=[search], **shared)

    def begin_episode(self) -> None:
        """Record the latencies of the episode."""
        super().begin_episode()
        self._waits: list[float] = []
        self._latencies.episodes.append(self._waits)

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Wait, then search."""
        self._latencies.wait(self._waits)
        return super().search(query, top_k)


gym.register(SLOW, SlowSearchEnv)


def measure_steps(settings: Settings, *, has_slow_tools: bool = False) -> dict[str, Any]:
    """Return the seconds of our step over those of TRL's."""
    latencies, rounds = Latencies(settings), settings.rounds * PAIRS_PER_ROUND
    env, env_kwargs, num_episodes = ENVIRONMENT, dict[str, Any](), settings.num_episodes
    if has_slow_tools:
        env_kwargs = {"latencies": latencies, "max_episode_steps": settings.num_calls + 1}
        env, num_episodes, rounds = SLOW, settings.num_slow_episodes, settings.rounds
    is_scripted = has_slow_tools or settings.step_model != EMBEDDED
    load = functools.partial(
        load_model, settings.step_model, settings.device, is_scripted=is_scripted
    )
    tokenizer = load_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        options = settings.trainer_options | {
            "num_generations": settings.num_generations, "max_steps": rounds, "output_dir": folder,
            "per_device_train_batch_size": num_episodes, "save_strategy": "no",
            "steps_per_generation": 1,
            "num_eval_tasks": 0, "lr_scheduler_type": "constant", "warmup_steps": 0,
        }  # fmt: skip
        config = make_config(options)
        if is_scripted:
            config.max_logprob_drift = None
        make_env = functools.partial(gym.make, env, **env_kwargs)
        ours = StepGRPOTrainer(load(), make_env, config, processing_class=tokenizer)
        theirs, last_batch = make_trl_trainer(env, env_kwargs, config, tokenizer, model=load())
        theirs.max_completion_length = 100 * (settings.num_calls + 1)  # of a whole episode

        def side(
            trainer: Any, batch: Callable[[], tuple[int, float]]
        ) -> Callable[[], tuple[float, int]]:
            timer = StepTimer(trainer)

            def step() -> tuple[float, int]:
                latencies.restart(trainer.args.seed if has_slow_tools else None)
                seconds, _ = timer.step()
                return seconds, batch()[0]

            return step

        steps = measure_interleaved(
            {
                "ours": side(ours, functools.partial(batch_of, ours)),
                "trl": side(theirs, last_batch),
            },
            rounds,
            description="ours vs trl",
            before_round=lambda: theirs.model.load_state_dict(ours.model.state_dict()),
        )
    seconds = {name: [seconds for seconds, _ in timed] for name, timed in steps.items()}
    return compare(seconds["ours"], seconds["trl"]) | {
        "model": settings.step_model,
        "episodes": num_episodes,
        "environment_steps": {name: [n for _, n in timed] for name, timed in steps.items()},
    }


def measure_rollouts(settings: Settings) -> dict[str, Any]:
    """Return the seconds of our rollout with slow tools over the ideal."""
    latencies, num_episodes = Latencies(settings), settings.num_slow_episodes
    model = load_model(settings.step_model, settings.device, is_scripted=True)
    rollout = Rollout(
        lambda: gym.make(SLOW, latencies=latencies, max_episode_steps=settings.num_calls + 1),
        transformers_policy(
            model.to(settings.device), load_tokenizer(), max_new_tokens=24,
            max_batch_size=num_episodes,
        ),
    )  # fmt: skip
    specs = plan_samples(range(num_episodes), 1, SEED)

    def run(count: int, number: int | None) -> tuple[float, float]:
        """Return the seconds of a rollout, and the longest sum of an episode's latencies."""
        latencies.restart(number)
        seconds = seconds_of(rollout.collect, specs[:count])
        return seconds, max(map(sum, latencies.episodes))

    numbers = itertools.count()
    run(num_episodes, None)  # warm-up
    sides = {
        "ours": lambda: run(num_episodes, next(numbers)),
        "G": lambda: run(num_episodes, None),
        "g": lambda: run(1, None),
    }
    times = measure_interleaved(sides, settings.rounds, description="slow tools")
    rollout.close()
    rounds = zip(times["ours"], times["g"], times["G"], strict=True)
    ideal = [max(longest + alone, together) for (_, longest), (alone, _), (together, _) in rounds]
    return compare([seconds for seconds, _ in times["ours"]], ideal) | {
        "model": settings.step_model,
        "episodes": num_episodes,
    }
