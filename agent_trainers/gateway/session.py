"""A session: one episode of a program, from its calls to a trajectory."""

import asyncio
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pydantic

from agent_envs.core.command_line import refusal
from agent_envs.core.tool import Tool
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.gateway.requests import (
    ApiError,
    ApiMessage,
    Request,
    read_tools,
    refused,
)
from agent_trainers.gateway.turns import Turn, TurnEnd, read_calls, read_conversation
from agent_trainers.policies.control_tokens import clean
from agent_trainers.policies.policy import Generation, GenerationRequest, Usage
from agent_trainers.trajectory import LARGEST_REWARD, Number, StopReason, Trajectory, Transition

if TYPE_CHECKING:
    from agent_trainers.gateway.gateway import Gateway

Reward = float | Mapping[str, float]
Generate = Callable[[int, GenerationRequest], Awaitable[Generation]]
"""Waits for the turn of a request under a key of the policy's stream."""
_METRICS: Final = pydantic.TypeAdapter(dict[str, Number])
_LIMITS: Final = (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW)


class SessionClosedError(AgentEnvsError, RuntimeError):
    """A session was used after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session. Calls beyond them are refused; other sessions are not affected."""

    max_calls: int = 256
    """Number of calls."""
    max_tokens: int = 1_000_000
    """Sampled tokens of all calls; the last turn is cut off there."""
    max_concurrent_calls: int = 16
    """Concurrent calls; client libraries retry those beyond it."""
    max_body_bytes: int = 8_000_000
    """Size of one request."""
    call_timeout_seconds: float = 600.0
    """Duration of one call."""
    timeout_seconds: float = 3_600.0
    """Duration of the session: then its calls are refused, and it counts as failed."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if (value := getattr(self, limit.name)) <= 0:
                raise ConfigurationError(f"{limit.name} ({value}) must be positive.")


class Session:
    """One episode. Its owner opens, rewards and closes it; its program gets `base_url` and `key`.

    Any thread may use it.
    """

    def __init__(
        self,
        gateway: "Gateway",
        *,
        number: int,
        task_id: str,
        group_id: str,
        seed: int | Sequence[int],
        limits: SessionLimits,
    ) -> None:
        self.id, self.key = secrets.token_urlsafe(24), secrets.token_urlsafe(32)
        self.base_url = f"{gateway.address}/{self.id}/v1"
        """The URL of the API for this session."""
        self.task_id, self.group_id, self.limits = task_id, group_id, limits
        self._number = number
        self._entropy = np.atleast_1d(seed).tolist()
        self._rng = np.random.default_rng(seed)
        self._gateway = gateway
        self._lock = threading.Lock()
        self._turns: list[Turn] = []  # in the order in which they ended
        self._usage, self._generate_seconds = Usage(), 0.0
        self._tokens_left = limits.max_tokens  # besides one for each running turn
        self._encoding = asyncio.Lock()
        self._free_keys: list[int] = []  # the newest last
        self._busy_keys: set[int] = set()
        self._num_calls = 0
        self._failure: tuple[StopReason, str] | None = None  # of the newest call
        self._started = self._last_used = time.monotonic()
        self._trajectory: Trajectory | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the session's timeout."""
        return self._started + self.limits.timeout_seconds - time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last call ended; 0 while one is running."""
        with self._lock:
            return 0.0 if self._busy_keys else time.monotonic() - self._last_used

    @property
    def is_cut_off(self) -> bool:
        """Whether the newest turn was cut off."""
        with self._lock:
            return bool(self._turns) and self._turns[-1].finish_reason == "length"

    def reward(self, reward: Reward) -> None:
        """Add to the reward of the newest turn.

        It is a number, which is the term ``process``, or one number per reward term.
        """
        with self._lock:
            if self._trajectory is not None:
                raise SessionClosedError("The session is closed: reward turns before closing it.")
            self._add_reward(reward, "process")

    def close(
        self,
        reward: Reward | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        stop_reason: StopReason | str | None = None,
        error: str | None = None,
        default_reason: StopReason = StopReason.ANSWERED,
    ) -> Trajectory:
        """End the episode and refuse running calls. Closing again returns the same trajectory.

        `reward` is for the newest turn, as in `reward`; a plain number is the term ``outcome``.
        The stop reason, if it is not given, is `default_reason`, unless the newest call failed
        because of a limit, a timeout or the policy.

        Raises:
            ConfigurationError: If a metric is no finite number; the session stays open.
        """
        try:
            numbers = _METRICS.validate_python(dict(metrics or {}))
        except pydantic.ValidationError as invalid:
            raise refusal("metrics", invalid) from None
        with self._lock:
            if self._trajectory is None:
                if stop_reason is not None:
                    reason, message = StopReason(stop_reason), None
                elif self._failure is not None:
                    reason, message = self._failure
                elif self._turns:
                    reason, message = default_reason, None
                else:
                    reason = StopReason.ENVIRONMENT_ERROR
                    message = "The program never called the model."
                if self._turns and reward is not None:
                    self._add_reward(reward, "outcome")
                self._trajectory = self._make_trajectory(numbers, reason, error or message)
                for key in (*self._free_keys, *self._busy_keys):
                    self._gateway.drop(key)
        self._gateway.sessions.pop(self.id, None)
        return self._trajectory

    async def sample(self, request: Request, role: str, generate: Generate) -> Turn:
        """Sample and record the turn of a request."""
        policy = self._gateway.policy
        tools, shown, conversation = read_tools(request, are_shown=self._gateway.shows_tools)
        with self._lock:
            self._check_limits()
            messages, previous = read_conversation(conversation, self._turns, shown)
            rng = self._rng
            if request.seed is not None:
                rng = np.random.default_rng([*self._entropy, request.seed % 2**64])
            max_tokens = min(self._tokens_left, request.max_tokens or self._tokens_left)
            self._tokens_left -= 1
            self._num_calls += 1
            key = self._free_keys.pop() if self._free_keys else next(self._gateway.keys)
            self._busy_keys.add(key)
        end = TurnEnd(policy.decode, max_tokens, tuple(filter(None, request.stop)))
        sampling = GenerationRequest(
            episode_id=self._number,
            messages=messages,
            tools=shown,
            previous=previous.transition if previous else None,
            rng=rng,
            is_over=end,
            guide=request.guide,
        )
        started, turn = time.perf_counter(), None
        try:
            async with self._encoding:  # one at a time, so that a session delays itself only
                sampling = await asyncio.to_thread(self._encode, sampling)
            generation = await generate(key, sampling)
            with self._lock:
                self._generate_seconds += time.perf_counter() - started
                turn = self._record(request, role, tools, sampling, end, generation)
                self._free_keys.append(key)
                return turn
        finally:
            with self._lock:
                self._last_used = time.monotonic()
                self._busy_keys.discard(key)
                if turn is None:
                    self._tokens_left += 1
                    self._gateway.drop(key)  # not reused: its turn may still arrive

    def _encode(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with the tokens of its state."""
        policy = self._gateway.policy
        if request.guide is not None:
            try:
                policy.check_guide(request.guide)
            except AgentEnvsError as error:
                is_call = request.guide["format"]["type"] == "tags_with_separator"
                name = "tool_choice" if is_call else "response_format"
                raise refused(name, f"{name}: {error}") from None
        try:
            prompt_ids = policy.encode(request)
        except Exception as error:  # noqa: BLE001 - a template may refuse a program's messages
            raise ApiError(400, f"The messages cannot be rendered: {error}") from None
        if prompt_ids is None:
            raise _overflow()
        return replace(request, prompt_ids=prompt_ids or None)

    def record_error(self, error: ApiError) -> None:
        """Record why a call failed: the episode's stop reason if no later call succeeds."""
        with self._lock:
            if error.stop_reason is not None:
                self._failure = error.stop_reason, str(error)

    def _check_open(self) -> None:
        if self._trajectory is not None:
            raise ApiError(403, "The session is closed: its episode is over.")

    def _check_limits(self) -> None:
        self._check_open()
        limits = self.limits
        for name, reason, is_reached in (
            ("timeout_seconds", StopReason.TIMEOUT, self.seconds_left <= 0),
            ("max_calls", StopReason.TURN_LIMIT, self._num_calls >= limits.max_calls),
            ("max_tokens", StopReason.TOKEN_LIMIT, self._tokens_left < 1),
        ):
            if is_reached:
                text = f"The session has reached its limit {name}={getattr(limits, name):g}."
                raise ApiError(403, f"{text} The episode is over.", reason)
        if len(self._busy_keys) >= (most := limits.max_concurrent_calls):
            text = f"The session has {most} concurrent calls (max_concurrent_calls). Wait for one."
            raise ApiError(429, text)

    def _record(
        self,
        request: Request,
        role: str,
        tools: Mapping[str, Tool],
        sampling: GenerationRequest,
        end: TurnEnd,
        generation: Generation,
    ) -> Turn:
        self._check_open()
        if generation.finish_reason == "overflow":
            raise _overflow()
        self._usage += generation.spent
        kept = min(generation.spent.completion_tokens, 1 + self._tokens_left)
        self._tokens_left -= kept - 1
        generation, text = end.cut(generation, kept)
        number = len(self._turns)
        content, calls, action = read_calls(text, tools, request, f"call_{number}")
        info: dict[str, Any] = {"action": action, "finish_reason": generation.finish_reason}
        if role:
            info["agent_role"] = role
        if generation.policy_version is not None:
            info["policy_version"] = generation.policy_version
        transition = Transition(
            messages=list(sampling.messages),
            prompt_ids=generation.prompt_ids,
            completion_ids=generation.completion_ids,
            logprobs=generation.logprobs,
            action=generation.text,
            reward=0.0,
            reward_terms={},
            terminated=False,
            truncated=False,
            info=info,
        )
        turn = Turn(
            transition=transition,
            tools=sampling.tools,
            # Without lone surrogates, which clients could not send back.
            message=ApiMessage(role="assistant", content=clean(content), calls=calls),
            text=text,
            reply_id=f"turn-{number}",
        )
        self._turns.append(turn)
        self._failure = None
        return turn

    def _add_reward(self, reward: Reward, term: str) -> None:
        terms = reward if isinstance(reward, Mapping) else {term: reward}
        for name, value in terms.items():
            if not isinstance(value, bool | int | float) or not abs(value) <= LARGEST_REWARD:
                given = "too large" if isinstance(value, int) else repr(value)
                raise ValueError(
                    f"The reward {name!r} is {given}; it must be a finite number of at most "
                    f"{LARGEST_REWARD:g}."
                )
        if not self._turns:
            raise ValueError("There is no turn yet to reward.")
        totals = self._turns[-1].transition.reward_terms
        for name, value in terms.items():
            totals[name] = totals.get(name, 0.0) + float(value)

    def _make_trajectory(
        self, metrics: dict[str, float], stop_reason: StopReason, error: str | None
    ) -> Trajectory:
        steps = [turn.transition for turn in self._turns]
        transitions = [replace(s, reward=math.fsum(s.reward_terms.values())) for s in steps]
        final_prompt_ids: list[int] = []
        if transitions:
            last, is_truncated = transitions[-1], stop_reason in _LIMITS
            is_terminated = stop_reason is StopReason.ANSWERED
            transitions[-1] = replace(last, terminated=is_terminated, truncated=is_truncated)
            final_prompt_ids = [*last.prompt_ids, *last.completion_ids] if is_truncated else []
        seconds = time.monotonic() - self._started
        return Trajectory(
            task_id=self.task_id,
            group_id=self.group_id,
            transitions=transitions,
            metrics=metrics,
            timings={
                "generate_seconds": self._generate_seconds,
                "environment_seconds": max(0.0, seconds - self._generate_seconds),
            },
            stop_reason=stop_reason,
            error=error,
            usage=asdict(self._usage),
            final_prompt_ids=final_prompt_ids,
        )


def _overflow() -> ApiError:
    text = "The messages do not fit into the model's context. Send fewer, or shorter."
    return ApiError(400, text, StopReason.CONTEXT_OVERFLOW)
