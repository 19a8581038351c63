"""One episode of a rollout: its specification, and its transitions so far."""

import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from agent_envs.core.async_bridge import resolve
from agent_trainers.policies.policy import Generation, GenerationRequest, Usage
from agent_trainers.rollout.environments import TextEnv, describe_env, read_step, template_tools
from agent_trainers.trajectory import StopReason, Trajectory, Transition

MAX_ACTION_CHARS: Final = 2_000
"""Length to which an error message cuts the action at which the environment failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Specification of an episode."""

    task: int | None
    """The task's index; None lets the environment draw one by `seed`."""
    seed: int
    """Seed of the environment; the same for the members of a group."""
    group_id: str
    """Episodes with the same id are compared with each other."""
    rng: np.random.Generator
    """Generator of the policy; a different one for each member of a group."""
    env: str = ""
    """The name of the environment, where there are several."""


@dataclass(slots=True)
class Episode:
    """A running episode."""

    number: int
    """Index of its spec in the call of `collect`."""
    spec: EpisodeSpec
    env: TextEnv = field(init=False, repr=False)
    """Its environment, from the start of the episode."""
    info: dict[str, Any] = field(default_factory=dict)
    """``info`` of the current state."""
    transitions: list[Transition] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None
    final_prompt_ids: list[int] = field(default_factory=list)
    generation: Generation | None = None
    """The action that the environment executes."""
    usage: Usage = field(default_factory=Usage)
    generate_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of the reset, then of each step."""
    started: float = 0.0
    start: int = 0
    """Its first own step; earlier ones are those of the episode it branched off."""

    def reset(self, timeout: float | None = None) -> Any:
        """Reset the environment; an async reset is cancelled after `timeout` seconds."""
        options = None if self.spec.task is None else {"task": self.spec.task}
        return resolve(self.env.reset(seed=self.spec.seed, options=options), timeout)

    def step(self, timeout: float | None = None) -> Any:
        """Execute the action; an async step is cancelled after `timeout` seconds."""
        assert self.generation is not None
        return resolve(self.env.step(self.generation.text), timeout)

    def request(self) -> GenerationRequest:
        """Return the request for an action in the current state."""
        return GenerationRequest(
            episode_id=self.number,
            messages=self.info["messages"],
            tools=template_tools(self.info),
            previous=self.transitions[-1] if self.transitions else None,
            rng=self.spec.rng,
        )

    def advance(self, answer: Any) -> None:
        """Record the result of `step`; raise TypeError if it is malformed."""
        generation = self.generation
        assert generation is not None
        step = read_step(answer)
        is_cut = generation.finish_reason == "length" and not step.terminated
        info = {k: v for k, v in step.info.items() if k not in ("messages", "tools")}
        if generation.policy_version is not None:
            info["policy_version"] = generation.policy_version
        self.transitions.append(
            Transition(
                messages=self.info["messages"],
                prompt_ids=generation.prompt_ids,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                action=generation.text,
                reward=step.reward,
                reward_terms=step.info.get("reward_terms", {}),
                terminated=step.terminated,
                # Gymnasium's turn limit also truncates an answer in the last turn.
                truncated=(step.truncated or is_cut) and not step.terminated,
                info=info,
            )
        )
        self.info = step.info
        if step.terminated:
            self.stop(StopReason.ANSWERED)
        elif is_cut:  # a truncated turn leaves no state to continue from
            self.stop(StopReason.TOKEN_LIMIT)
        elif step.truncated:
            self.stop(StopReason.TURN_LIMIT)

    def overflow(self) -> None:
        """Truncate the episode because its state does not fit the policy; its steps count."""
        self.stop(StopReason.CONTEXT_OVERFLOW)
        if self.transitions:
            self.transitions[-1] = replace(self.transitions[-1], truncated=True)

    def fail(self, error: BaseException, reason: StopReason | None = None) -> None:
        """End with an error, and record it with the action at which the environment failed."""
        text = "".join(traceback.format_exception(error))
        if reason is None:
            is_timeout = isinstance(error, TimeoutError)
            reason = StopReason.TIMEOUT if is_timeout else StopReason.ENVIRONMENT_ERROR
        if self.generation is not None and reason is not StopReason.POLICY_ERROR:
            text = f"At the action {self.generation.text[:MAX_ACTION_CHARS]!r}:\n{text}"
        self.stop(reason, text)

    def stop(self, reason: StopReason, error: str | None = None) -> None:
        """End the episode."""
        self.stop_reason, self.error = reason, error

    def trajectory(self) -> Trajectory:
        """Return the finished episode."""
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
            usage=asdict(self.usage),
            final_prompt_ids=list(self.final_prompt_ids),
            step_seconds=self.step_seconds[1 : 1 + len(self.transitions)],
            env=self.spec.env,
            **(describe_env(self.env) if hasattr(self, "env") else {}),
            task=self.spec.task,
            seed=self.spec.seed,
            start=self.start,
        )
