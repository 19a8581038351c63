"""One episode under way: what is to be played, and what was played so far."""

import math
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np

from agent_trainers.policies.policy import Generation, GenerationRequest
from agent_trainers.trajectory import StopReason, Trajectory, Transition

TextEnv = gym.Env[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What to play."""

    task: int | None
    """The task's index; None lets the environment draw one by `seed`."""
    seed: int
    """Seed of the environment; the same for the members of a group."""
    group_id: str
    """Episodes with the same id are compared with each other."""
    rng: np.random.Generator
    """The policy's draws; another generator for each member of a group."""


@dataclass(slots=True)
class Episode:
    """An episode under way."""

    spec: EpisodeSpec
    env: TextEnv
    info: dict[str, Any] = field(default_factory=dict)
    transitions: list[Transition] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None
    final_prompt_ids: list[int] = field(default_factory=list)
    generation: Generation | None = None
    """The action that is being carried out."""
    generate_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    """How long the environment took: the reset, then each step."""
    started: float = field(default_factory=time.monotonic)

    def reset(self) -> Any:
        """Begin; called where it may take its time."""
        task = self.spec.task
        options = None if task is None else {"task": task}
        return self.env.reset(seed=self.spec.seed, options=options)

    def step(self) -> Any:
        """Carry the action out; called where it may take its time."""
        assert self.generation is not None
        return self.env.step(self.generation.text)

    def request(self) -> GenerationRequest:
        """Ask for an action in the present state."""
        return GenerationRequest(
            messages=self.info["messages"],
            tools=template_tools(self.info),
            previous=self.transitions[-1] if self.transitions else None,
            rng=self.spec.rng,
        )

    def advance(self, outcome: Any) -> None:
        """Note what the environment said to the action."""
        generation = self.generation
        assert generation is not None
        _, reward, terminated, truncated, info = outcome
        if not math.isfinite(reward):
            self.stop(StopReason.ENVIRONMENT_ERROR, f"the reward is {reward}: {info}")
            return
        is_cut = generation.finish_reason == "length" and not terminated
        self.transitions.append(
            Transition(
                messages=self.info["messages"],
                prompt_ids=generation.prompt_ids,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                action=generation.text,
                reward=float(reward),
                reward_terms=info.get("reward_terms", {}),
                terminated=terminated,
                truncated=truncated or is_cut,
                info={k: v for k, v in info.items() if k not in ("messages", "tools")},
            )
        )
        self.info = info
        if terminated:
            self.stop(StopReason.ANSWERED)
        elif is_cut:  # a turn that was cut off leaves no state to go on from
            self.stop(StopReason.TOKEN_LIMIT)
        elif truncated:
            self.stop(StopReason.TURN_LIMIT)

    def overflow(self) -> None:
        """End because the state does not fit the policy; what was played counts."""
        self.stop(StopReason.CONTEXT_OVERFLOW)
        if self.transitions:
            self.transitions[-1] = replace(self.transitions[-1], truncated=True)

    def fail(self, error: BaseException, reason: StopReason | None = None) -> None:
        """End because of an error; it is kept."""
        if reason is None:
            is_timeout = isinstance(error, TimeoutError)
            reason = StopReason.TIMEOUT if is_timeout else StopReason.ENVIRONMENT_ERROR
        self.stop(reason, "".join(traceback.format_exception(error)))

    def stop(self, reason: StopReason, error: str | None = None) -> None:
        """End."""
        self.stop_reason, self.error = reason, error

    def trajectory(self) -> Trajectory:
        """Return what was played."""
        assert self.stop_reason is not None
        return Trajectory(
            task_id=str(self.info.get("task_id", self.spec.task)),
            group_id=self.spec.group_id,
            transitions=list(self.transitions),
            metrics=dict(self.info.get("metrics", {})),
            timings={
                "generate_seconds": self.generate_seconds,
                "environment_seconds": sum(self.step_seconds),
            },
            stop_reason=self.stop_reason,
            error=self.error,
            final_prompt_ids=list(self.final_prompt_ids),
            step_seconds=self.step_seconds[1 : 1 + len(self.transitions)],
        )


def template_tools(info: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template is to describe; None where the state does."""
    tools: list[dict[str, Any]] = info.get("tools") or []
    return tools if info.get("is_native_format", True) else None
