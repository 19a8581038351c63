"""One episode under way: what is to be played, and what was played so far."""

import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import gymnasium as gym
import numpy as np

from agent_envs.core.async_bridge import resolve
from agent_trainers.experimental.branching.saved_states import can_be_saved, save_environment
from agent_trainers.policies.generation import Generation, GenerationRequest, Usage
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.answers import read_reset, read_step
from agent_trainers.trajectory import StopReason, Trajectory, Transition

TextEnv = gym.Env[str, str]
MAX_ACTION_CHARS: Final = 2_000
"""Of an action at which an environment failed, in the error that is kept."""
_KNOWN_WRAPPERS: Final = ("gymnasium.", "agent_envs.")


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
    env: str = ""
    """The name of the environment, where several are played."""


@dataclass(slots=True)
class Episode:
    """An episode under way."""

    number: int
    """Its place among the episodes of one `collect`."""
    spec: EpisodeSpec
    env: TextEnv = field(init=False, repr=False)
    """Where it is played; given to it when it begins."""
    keeps_states: bool = False
    """Whether its states are saved on the way."""
    info: dict[str, Any] = field(default_factory=dict)
    transitions: list[Transition] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None
    final_prompt_ids: list[int] = field(default_factory=list)
    generation: Generation | None = None
    """The action that is being carried out."""
    usage: Usage = field(default_factory=Usage)
    """What all its actions took."""
    generate_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    """How long the environment took: the reset, then each step."""
    started: float = 0.0
    num_first_calls: int = 1
    """How many resets and steps it takes to begin: so often the time limit of one."""
    start: int = 0
    """Its first step that is played here."""
    saved: bytes | None = None
    """The environment as it is now, where it is saved."""

    def reset(self, timeout: float | None = None) -> Any:
        """Begin; called where it may take its time.

        What has to be awaited is cancelled after `timeout` seconds.
        """
        task = self.spec.task
        options = None if task is None else {"task": task}
        answer = resolve(self.env.reset(seed=self.spec.seed, options=options), timeout)
        self._save()
        return answer

    def step(self, timeout: float | None = None) -> Any:
        """Carry the action out; called where it may take its time, as `reset`."""
        assert self.generation is not None
        answer = resolve(self.env.step(self.generation.text), timeout)
        self._save()
        return answer

    def _save(self) -> None:
        """Save the environment as it is now, if it is wanted and can be."""
        self.saved = None
        if self.keeps_states and can_be_saved(self.env):
            try:
                self.saved = save_environment(self.env)
            except Exception:  # noqa: BLE001 - foreign code; the state is reached by replay then
                self.keeps_states = False

    def request(self) -> GenerationRequest:
        """Ask for an action in the present state."""
        return GenerationRequest(
            episode_id=self.number,
            messages=self.info["messages"],
            tools=template_tools(self.info),
            previous=self.transitions[-1] if self.transitions else None,
            rng=self.spec.rng,
        )

    def begin(self, answer: Any) -> None:
        """Note the first state; a TypeError says why `answer` is none."""
        self.info = read_reset(answer)

    def advance(self, answer: Any) -> None:
        """Note what the environment said to the action; a TypeError says why it is no state."""
        generation = self.generation
        assert generation is not None
        reward, terminated, truncated, info = read_step(answer)
        is_cut = generation.finish_reason == "length" and not terminated
        self.transitions.append(
            Transition(
                messages=self.info["messages"],
                prompt_ids=generation.prompt_ids,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                action=generation.text,
                reward=reward,
                reward_terms=info.get("reward_terms", {}),
                terminated=terminated,
                # Gymnasium's turn limit also claims an answer in the last turn: nothing was cut off
                truncated=(truncated or is_cut) and not terminated,
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
        self.cut_off(StopReason.CONTEXT_OVERFLOW)

    def cut_off(self, reason: StopReason) -> None:
        """End here although the task is not over; what was played counts."""
        self.stop(reason)
        if self.transitions:
            self.transitions[-1] = replace(self.transitions[-1], truncated=True)

    def fail(self, error: BaseException, reason: StopReason | None = None) -> None:
        """End because of an error; it is kept, and the action that the environment failed at."""
        text = "".join(traceback.format_exception(error))
        if reason is None:
            is_timeout = isinstance(error, TimeoutError)
            reason = StopReason.TIMEOUT if is_timeout else StopReason.ENVIRONMENT_ERROR
        if self.generation is not None and reason is not StopReason.POLICY_ERROR:
            text = f"At the action {self.generation.text[:MAX_ACTION_CHARS]!r}:\n{text}"
        self.stop(reason, text)

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
            usage=asdict(self.usage),
            final_prompt_ids=list(self.final_prompt_ids),
            step_seconds=self.step_seconds[1 : 1 + len(self.transitions)],
            env=self.spec.env,
            task=self.spec.task,
            seed=self.spec.seed,
            start=self.start,
        )


def template_tools(info: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template is to describe; None where the state does."""
    tools: list[dict[str, Any]] = info.get("tools") or []
    return tools if info.get("is_native_format", True) else None


def lend_tokenizer(policy: Policy, env: TextEnv, info: dict[str, Any]) -> None:
    """Let the context policy of an environment count in the policy's own tokens."""
    inner = env.unwrapped
    if hasattr(inner, "set_token_counter"):
        tools = template_tools(info)
        inner.set_token_counter(lambda messages: policy.count_tokens(messages, tools))


def is_immediate(env: TextEnv) -> bool:
    """Return whether an environment only computes, so that it needs no thread and no deadline.

    It says so itself, but cannot speak for a wrapper around it that waits for something; a wrapper
    that only computes says so with an attribute ``is_immediate`` of its class.
    """
    try:
        return _says_immediate(env)
    except Exception:  # noqa: BLE001 - foreign code; a thread and a deadline are never wrong
        return False


def _says_immediate(env: TextEnv) -> bool:
    while isinstance(env, gym.Wrapper):
        only_computes = vars(type(env)).get("is_immediate", False)
        if not (only_computes or type(env).__module__.startswith(_KNOWN_WRAPPERS)):
            return False
        env = env.env
    return bool(getattr(env, "is_immediate", False))
