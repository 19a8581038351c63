"""A session: one episode of a program, from its calls to a trajectory."""

import functools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_envs.errors import AgentEnvsError
from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError, refusal
from agent_trainers.gateway.ask import Ask
from agent_trainers.gateway.conversation import ApiCall, ApiMessage, Conversations, State, Turn
from agent_trainers.gateway.limits import SessionLimits
from agent_trainers.gateway.record import Record, Reward
from agent_trainers.gateway.token_budget import TokenBudget
from agent_trainers.gateway.tool_calls import read_calls
from agent_trainers.gateway.turn_end import Decode, TurnEnd
from agent_trainers.policies.control_tokens import clean
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.trajectory import StopReason, Trajectory, Transition


class SessionClosedError(AgentEnvsError, RuntimeError):
    """A session was used after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A turn that is being sampled."""

    key: int
    """Whose turn it is in the policy's stream."""
    state: State
    request: GenerationRequest
    end: TurnEnd


class Session:
    """One episode. Its owner opens, rewards and closes it; its program knows `base_url` and `key`.

    Any thread may use it.
    """

    def __init__(
        self,
        *,
        number: int,
        task_id: str,
        group_id: str,
        seed: int | Sequence[int],
        limits: SessionLimits,
        tool_format: ToolFormat,
        decode: Decode,
        new_key: Callable[[], int],
        drop: Callable[[int], None],
        on_close: Callable[["Session"], None],
        address: str,
    ) -> None:
        """Begin an episode; `Gateway.open` does."""
        self.id, self.key = secrets.token_urlsafe(24), secrets.token_urlsafe(32)
        self.base_url = f"{address}/{self.id}/v1"
        """Where the API begins, for this session alone."""
        self.task_id, self.group_id, self.limits = task_id, group_id, limits
        self.responses: dict[str, list[ApiMessage]] = {}
        """The conversations that ``previous_response_id`` may go on from, by the reply's id."""
        self._number = number
        self._entropy = np.atleast_1d(seed).tolist()
        self._rng = np.random.default_rng(seed)
        self._format, self._decode = tool_format, decode
        self._new_key, self._drop, self._on_close = new_key, drop, on_close
        self._lock = threading.Lock()
        self._conversations = Conversations(tool_format)
        self._record = Record()
        self._budget = TokenBudget(limits.max_tokens)
        self._free_keys: dict[int, Turn] = {}  # with the turn sampled there last
        self._busy_keys: set[int] = set()
        self._num_calls = self._num_replies = 0
        self._trouble: ApiError | None = None  # of the newest call, if it failed
        self._started = self._last_used = time.monotonic()
        self._trajectory: Trajectory | None = None

    @property
    def seconds_left(self) -> float:
        """How long the session may still last."""
        return self._started + self.limits.timeout_seconds - time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """For how long no call has been under way."""
        with self._lock:
            return 0.0 if self._busy_keys else time.monotonic() - self._last_used

    @property
    def is_cut_off(self) -> bool:
        """Whether the newest turn was cut off before the model ended it."""
        with self._lock:
            steps = self._record.steps
            return bool(steps) and steps[-1].transition.info["finish_reason"] == "length"

    def reward(self, reward: Reward, *, reply_id: str | None = None) -> None:
        """Reward the newest turn, beside what it has been rewarded with.

        Args:
            reward: A number, or one per reward term; a mere number is the term ``process``.
            reply_id: The ``id`` of the reply whose turn is meant; of several choices the last.

        Raises:
            ValueError: If there is no such turn, or a reward is no finite number.
            SessionClosedError: If the session is closed.
        """
        with self._lock:
            if self._trajectory is not None:
                raise SessionClosedError("The session is closed: rewards come before its end.")
            self._record.reward(reward, "process", reply_id)

    def close(
        self,
        reward: Reward | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        stop_reason: StopReason | str | None = None,
        error: str | None = None,
        default_reason: StopReason = StopReason.ANSWERED,
    ) -> Trajectory:
        """End the episode; calls under way are refused. Closing it again gives the same.

        Args:
            reward: For the newest turn, as in `reward`; a mere number is the term ``outcome``. None
                where `reward` has said all.
            metrics: What was measured; ``success`` among them where it is known.
            stop_reason: Why it ended. If not given: `default_reason`, or, where the program's
                newest call failed for a limit, for the time or for the policy, that.
            error: What went wrong, where it failed.
            default_reason: Why it ended, unless its newest call failed.

        Raises:
            ValueError: If a reward is no finite number, or there is no such reason; the session
                stays open.
        """
        with self._lock:
            if self._trajectory is None:
                reason, why = self._end(default_reason)
                reason = StopReason(stop_reason or reason)
                if self._record.steps and reward is not None:
                    self._record.reward(reward, "outcome")
                self._trajectory = self._record.trajectory(
                    task_id=self.task_id,
                    group_id=self.group_id,
                    metrics=dict(metrics or {}),
                    seconds=time.monotonic() - self._started,
                    stop_reason=reason,
                    error=error or (why if stop_reason is None else None),
                )
                for key in (*self._free_keys, *self._busy_keys):
                    self._drop(key)
        self._on_close(self)
        return self._trajectory

    def admit(self, ask: Ask) -> list[Sampling]:
        """Begin a call; return what is to be sampled, one for each choice. Then `release` it.

        Raises:
            ApiError: If the call is refused.
        """
        with self._lock:
            self._check(ask)
            state = self._conversations.read(ask.messages, ask.shown_tools)
            rng = self._rng if ask.seed is None else self._seeded(ask.seed)
            previous = state.previous.transition if state.previous else None
            samplings = []
            for _ in range(ask.num_choices):
                key = self._take_key(state.previous)
                self._budget.begin(key)
                affords = functools.partial(self._budget.affords, key)
                end = TurnEnd(self._decode, ask.max_tokens, affords, ask.stops)
                request = GenerationRequest(
                    episode_id=self._number,
                    messages=state.messages,
                    tools=ask.shown_tools,
                    previous=previous,
                    rng=rng,
                    is_over=end,
                )
                samplings.append(Sampling(key=key, state=state, request=request, end=end))
            self._num_calls += ask.num_choices
            return samplings

    def note(
        self,
        ask: Ask,
        samplings: Sequence[Sampling],
        generations: Sequence[Generation],
        seconds: float,
    ) -> tuple[str, list[Turn]]:
        """Note what a call brought; return the id of its reply, and its turns.

        Raises:
            ApiError: If the state did not fit, or the session has ended.
        """
        with self._lock:
            self._check_open()
            self._record.generate_seconds += seconds
            if any(generation.finish_reason == "overflow" for generation in generations):
                raise ApiError(
                    400,
                    "The messages do not fit into the model's context. Send fewer, or shorter.",
                    param="messages",
                    code="context_length_exceeded",
                    stop_reason=StopReason.CONTEXT_OVERFLOW,
                )
            reply_id = f"{ask.reply_kind}-{self._num_replies}"
            self._num_replies += 1
            turns = []
            for sampling, generation in zip(samplings, generations, strict=True):
                self._record.usage += generation.spent
                turn = self._turn(ask, sampling, generation)
                self._conversations.note(sampling.state, turn)
                self._record.add(turn.transition, reply_id)
                self._free(sampling.key, turn)
                turns.append(turn)
            self._trouble = None
            return reply_id, turns

    def release(self, samplings: Sequence[Sampling]) -> None:
        """End a call; what is still being sampled for it is given up."""
        with self._lock:
            self._last_used = time.monotonic()
            for sampling in samplings:
                if sampling.key in self._busy_keys:
                    self._budget.end(sampling.key, 0)
                    self._busy_keys.discard(sampling.key)  # for good: a late answer may be its own
                    self._drop(sampling.key)

    def note_trouble(self, error: ApiError) -> None:
        """Note why a call failed: if no later one succeeds, the episode ended with it."""
        with self._lock:
            if error.stop_reason is not None:
                self._trouble = error

    def _check(self, ask: Ask) -> None:
        self._check_open()
        limits = self.limits
        if self.seconds_left <= 0:
            raise _over("timeout_seconds", limits.timeout_seconds, StopReason.TIMEOUT)
        if self._num_calls + ask.num_choices > limits.max_calls:
            raise _over("max_calls", limits.max_calls, StopReason.TURN_LIMIT)
        if self._budget.left < ask.num_choices:
            raise _over("max_tokens", limits.max_tokens, StopReason.TOKEN_LIMIT)
        if ask.num_choices > limits.max_concurrent_calls:
            raise refusal(
                "n", f"n can be {limits.max_concurrent_calls} at most (max_concurrent_calls)."
            )
        if len(self._busy_keys) + ask.num_choices > limits.max_concurrent_calls:
            raise ApiError(
                429,
                f"{limits.max_concurrent_calls} calls of this session may be under way at once "
                "(max_concurrent_calls). Wait for one of them.",
                code="rate_limit_exceeded",
            )

    def _check_open(self) -> None:
        if self._trajectory is not None:
            raise ApiError(403, "The session is closed: its episode is over.", code="closed")

    def _seeded(self, seed: int) -> np.random.Generator:
        return np.random.default_rng([*self._entropy, seed % 2**64])

    def _take_key(self, previous: Turn | None) -> int:
        """Return a key of the stream: one that holds the tokens of `previous`, if it is free."""
        holding = (k for k, turn in self._free_keys.items() if turn is previous)
        key = next(holding, next(iter(self._free_keys), None))
        if key is None:
            key = self._new_key()
        self._free_keys.pop(key, None)
        self._busy_keys.add(key)
        return key

    def _free(self, key: int, turn: Turn) -> None:
        self._busy_keys.discard(key)
        self._free_keys[key] = turn

    def _turn(self, ask: Ask, sampling: Sampling, generation: Generation) -> Turn:
        left = self._budget.end(sampling.key, generation.spent.completion_tokens)
        generation, cut_text = sampling.end.cut(generation, left)
        text = generation.text if cut_text is None else cut_text
        content, calls = text, list[FunctionCall]()
        action: dict[str, Any] | None = None
        if ask.tools and ask.reads_calls:
            content, calls, action = read_calls(text, ask.tools, self._format, ask.is_parallel)
        place = len(self._record.steps)
        transition = Transition(
            messages=sampling.state.messages,
            prompt_ids=generation.prompt_ids,
            completion_ids=generation.completion_ids,
            logprobs=generation.logprobs,
            action=generation.text,
            reward=0.0,
            reward_terms={},
            terminated=False,
            truncated=False,
            info={
                "action": action,
                "finish_reason": generation.finish_reason,
                **({"agent_role": ask.role} if ask.role else {}),
            },
        )
        numbered = [ApiCall(id=f"call_{place}_{i}", function=call) for i, call in enumerate(calls)]
        return Turn(
            transition=transition,
            tools=ask.shown_tools,
            # Clients cannot send lone surrogates back, so they get none.
            message=ApiMessage(role="assistant", content=clean(content), calls=tuple(numbered)),
            text=text,
            is_whole=cut_text is None and generation.finish_reason == "stop",
        )

    def _end(self, default_reason: StopReason) -> tuple[StopReason, str | None]:
        """Say why the episode ends now, and what went wrong."""
        if self._trouble is not None and self._trouble.stop_reason is not None:
            return self._trouble.stop_reason, self._trouble.message
        if not self._record.steps:
            return StopReason.ENVIRONMENT_ERROR, "The program never asked the model."
        return default_reason, None


def _over(limit: str, value: float, reason: StopReason) -> ApiError:
    text = f"The session has reached its limit: {limit} is {value:g}. The episode is over."
    return ApiError(403, text, code=limit, stop_reason=reason)
