"""`ToolEnv`: a Gymnasium environment in which an LLM acts by writing text.

One step is one model turn. The tool returns what happened; the environment decides what that means:
the next state, the reward term by term, and whether the episode is over. A subclass provides tasks
(`get_task`), tools, reward functions and metrics, and judges answers (`on_answer`).
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import gymnasium as gym

from agent_envs.core.async_bridge import resolve
from agent_envs.core.contexts import (
    EMPTY_SUMMARY_TEXT,
    Budget,
    ContextChoice,
    Conversation,
    NewConversation,
    PolicySummary,
    TokenCounter,
    Window,
    estimate_tokens,
    full,
    make_context,
)
from agent_envs.core.lookup import lookup
from agent_envs.core.messages import Message, new_text
from agent_envs.core.result_edits import ResultEdits
from agent_envs.core.rewards import Call, Rewards, StepEvent, choose_terms, compute_terms
from agent_envs.core.snapshots import Record
from agent_envs.core.spaces import UnicodeText
from agent_envs.core.tasks import ENDLESS, Task, TaskFamily, choose_task
from agent_envs.core.tool import (
    RESERVED_NAMES,
    Tool,
    ToolResult,
    ToolSource,
    chosen_tools,
    offered_tools,
    run_calls,
)
from agent_envs.core.transcript import Transcript
from agent_envs.core.turn_limit import calling_limits
from agent_envs.errors import ActionTypeError, ConfigurationError
from agent_envs.formats.actions import without_thoughts
from agent_envs.formats.tool_formats import TOOL_FORMATS, ParsedAction, ToolFormat

__all__ = ["ENDLESS", "NewConversation", "ToolEnv"]

SEVERAL_CALLS_TEXT: Final = (
    "Calls that do not need each other's results may stand in one turn: they run side by side and "
    "are answered in order."
)
ONE_CALL_TEXT: Final = "Make one call per turn."
OVER_TEXT: Final = "This call was not carried out: the one before it ended the task."
USER_TEXT: Final = "Whatever else you write is said to the user, who replies."


class ToolEnv(TaskFamily):
    """Base class of environments with tools: a subclass must provide `get_task`.

    `info`, at `reset` and at every `step`, holds ``messages`` (the state: chat messages selected by
    the context policy), ``tools`` (function schemas in the OpenAI format), ``tool_format``,
    ``is_native_format`` (whether a chat template describes the tools) and ``task_id``; after a step
    also ``action`` (tool and arguments, the answer, a requested summary, or the mistake; of several
    calls ``calls``),
    ``tool_result`` (the result; of several calls each in ``tool_results``), ``reward_terms`` (name
    -> weighted contribution; they sum to the reward) and ``metrics``; and ``context`` if the state
    leaves something out or requests a summary.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi", "human"],
        "render_fps": 4,  # required by Gymnasium, without effect
    }
    not_in_snapshots: ClassVar[frozenset[str]] = frozenset(
        {
            "optional_tools", "_tools", "_tool_schemas", "_format", "_context", "_terms",
            "_system_prompt", "_count_tokens", "_limit_is_known", "_has_user", "_parallel_calls",
            "_more_tools", "_given_prompt", "_sessions", "_offered",
        }
    )  # fmt: skip

    def __init__(
        self,
        *,
        default_tools: Sequence[Tool] = (),
        optional_tools: Mapping[str, Sequence[Tool]] | None = None,
        tools: Sequence[Tool | ToolSource | str] | None = None,
        tool_format: str | ToolFormat = "hermes",
        context: ContextChoice = "full",
        rewards: Rewards | None = None,
        system_prompt: str | None = None,
        render_mode: str | None = None,
        parallel_calls: bool = True,
        attack: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the environment.

        Args:
            default_tools: The tools of the family; a subclass passes them.
            optional_tools: Tools of the family that are off unless `tools` names them; a name may
                be that of several.
            tools: More tools: names of optional ones; `Tool` objects, which are added or replace
                the one with the same name; and sources such as an MCP server. Each may be an import
                path, ``"my_module:my_tool"``.
            tool_format: Syntax of actions: a key of `TOOL_FORMATS`, or a `ToolFormat`.
            context: Which part of the history the model sees; see `make_context`.
            rewards: Weight of each reward term, or a pair of function and weight, instead of the
                defaults: ``{"exact_match": 1.0, "short": (my_function, 0.1)}``.
            system_prompt: Replaces the default prompt, which also describes how to answer and, in
                formats that no chat template describes, the tools; ``""`` for none.
            render_mode: ``"ansi"``: `render` returns the episode so far as coloured text;
                ``"human"``: each step is printed.
            parallel_calls: Whether a turn may hold several calls, at most 16, which run
                concurrently; else a second call is a mistake.
            attack: Edits of tool results before the model reads them, ``{"attacker": "swap",
                "budget": 2}``; see `agent_envs.core.result_edits`.
        """
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self.optional_tools = dict(optional_tools or {})
        more = chosen_tools(tools, self.optional_tools)
        self._more_tools = [tool for tool in more if isinstance(tool, Tool)]
        self._sessions = [each.open() for each in more if not isinstance(each, Tool)]
        self._format = (
            tool_format
            if isinstance(tool_format, ToolFormat)
            else lookup(TOOL_FORMATS, tool_format, kind="tool format")
        )
        self._has_user = type(self).on_message is not ToolEnv.on_message
        if self._has_user:
            self._format = self._format.for_dialogue()
        self._parallel_calls = parallel_calls
        self._context = make_context(context)
        chosen = self.default_rewards if rewards is None else rewards
        self._terms = choose_terms(chosen, self.reward_functions)
        self._given_prompt = system_prompt
        for name in attack or ():
            lookup({"attacker": None, "budget": None}, name, kind="key of attack")
        self._attack = None if attack is None else ResultEdits(**attack)
        self.offer_tools(default_tools)
        self._count_tokens: TokenCounter = estimate_tokens
        self._limit_is_known = False
        self._task: Task | None = None
        self.task_index: int | None = None
        """The index of the current task; None before the first reset."""
        self._is_over = True
        self.render_mode = render_mode
        self._conversation, self._transcript = Conversation(), Transcript()

    # Gymnasium's interface

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode: that of ``options["task"]``, or of a task drawn by `seed`.

        Returns the first observation (the question), and `info`.
        """
        super().reset(seed=seed)
        self._find_turn_limit("reset")
        random_state = self.np_random.bit_generator.state
        self._conversation.seed = int(self.np_random.integers(2**32))
        # undone: the tasks and draws of an episode are the same in every context
        self.np_random.bit_generator.state = random_state
        self.task_index = choose_task(options or {}, self)
        self._task = self.get_task(self.task_index)
        self._is_over = False
        self._begin_sessions()
        self.noted: defaultdict[str, float] = defaultdict(float)
        """Values of this step for the terms that `noted_terms` makes."""
        self.num_turns = self.num_tool_calls = self.num_invalid_actions = 0
        self.answer: str | None = None
        self.begin_episode()
        if self._attack is not None:
            self._attack.begin(self._task)
        self.begin_step()
        self._conversation.begin(self._system_prompt, self._task.question)
        if render_mode := self.render_mode:
            self._transcript.begin(render_mode, self._task.question)
        self._episode_record = Record(
            random_state, (options or {}).get("task"), self.max_turns, [self._task.question]
        )
        return self._task.question, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn, the whole text that the model wrote.

        Returns the reply of the environment, the reward, whether the task is over, ``False`` (the
        turn limit is Gymnasium's own), and `info`.
        """
        self._open_turn(action)
        self.num_turns += 1
        self.noted = defaultdict(float)
        self.begin_step()
        parsed = self._understand(action)
        calls = self._carry_out(parsed.each_call)
        reply = self._reply(parsed, calls)
        self._is_over = reply is None or self.is_finished()
        is_last = self._is_over or (self.max_turns or math.inf) <= self.num_turns
        result = next((call.result for call in calls if call.result is not None), None)
        event = StepEvent(action=parsed, result=result, is_last=is_last, calls=calls, text=action)
        terms = compute_terms(self, event, self._terms)
        reward = float(sum(terms.values()))
        edits = {} if self._attack is None else {"num_edits": float(self._attack.num_edits)}
        metrics = {**self.metrics(), **edits}
        if is_summary := parsed.kind == "summary":
            self._conversation.add_summary(parsed.text or "")
        observation = "" if is_summary else self._continue(action, reply)
        info = {
            **self._info(), **_describe(parsed, calls), "reward_terms": terms, "metrics": metrics,
            **event.info,
        }  # fmt: skip
        if not self._is_over and (is_summary or self._conversation.is_summary_requested):
            observation = new_text(info["messages"])
        if render_mode := self.render_mode:
            self._transcript.add_step(render_mode, action, observation, info, is_last=is_last)
        if self._episode_record is not None:
            self._episode_record.actions.append(action)
            self._episode_record.observations.append(observation)
            self._episode_record.rewards.append(reward)
        return observation, reward, self._is_over, False, info

    def _open_turn(self, action: object) -> None:
        check_turn(action, is_over=self._is_over)
        if not self._limit_is_known:
            self._find_turn_limit("step")

    def _find_turn_limit(self, method: str) -> None:
        """Find the turn limit; in a restored episode, also set its count."""
        limits = calling_limits(self, method)
        self.max_turns = min((limit._max_episode_steps for limit in limits), default=None)
        self._limit_is_known = True
        for limit in limits if method == "step" else ():
            setattr(limit, "_elapsed_steps", self.num_turns)  # noqa: B010 - typed as None only

    def render(self) -> str | None:
        """Return the episode so far as coloured text, in the mode ``"ansi"``."""
        return self._transcript.text if self.render_mode == "ansi" else None

    # Helpers for subclasses and policies

    @property
    def task(self) -> Task:
        """The current task."""
        if self._task is None:
            raise gym.error.ResetNeeded("There is no task yet; call reset() first.")
        return self._task

    @property
    def state(self) -> dict[str, Any]:
        """The entries of `info` for the current state; in a reward term, that before the step."""
        return self._info()

    @property
    def episode_texts(self) -> tuple[list[str], list[str]]:
        """Observations and actions so far; in a reward term, those before the step."""
        record = self._episode_record
        return ([], []) if record is None else (record.observations, record.actions)

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by name."""
        return self._tools

    @property
    def is_immediate(self) -> bool:
        """Whether a step only computes, so that it needs no thread."""
        kind = type(self)
        # foreign code may wait for anything: subclasses, reward terms, contexts
        return (
            self.computes_only
            and ("computes_only" in vars(kind) or kind.__module__.startswith("agent_envs."))
            and all(self.reward_functions.get(n) is f for n, (f, _) in self._terms.items())
            and all(tool.timeout is None for tool in self._tools.values())
            and (
                self._context is full or isinstance(self._context, Window | Budget | PolicySummary)
            )
        )

    @property
    def tool_format(self) -> str:
        """The name of the syntax of actions."""
        return self._format.name

    @property
    def action_format(self) -> ToolFormat:
        """The syntax of actions."""
        return self._format

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of each active reward term."""
        return {name: weight for name, (_, weight) in self._terms.items()}

    def write_call(self, name: str, /, **arguments: Any) -> str:
        """Write a tool call in this environment's tool format."""
        return self._format.write_call(name, arguments)

    def write_answer(self, answer: str) -> str:
        """Write an answer in this environment's tool format."""
        return self._format.write_answer(answer)

    def offer_tools(self, tools: Sequence[Tool]) -> None:
        """Replace the offered tools, except those of ``tools=``, in `begin_episode` or later."""
        self._offered = tuple(tools)
        own = {tool.name: tool for tool in (*tools, *self._more_tools)}
        self._tools = offered_tools(own, self._sessions)
        if self._format.name == "tags" and (taken := RESERVED_NAMES & self._tools.keys()):
            raise ConfigurationError(
                f"tool_format='tags' has another meaning for the tag of the tool {min(taken)!r}. "
                "Rename the tool, @tool(name=...), or choose another format."
            )
        self._tool_schemas = json.dumps([tool.schema for tool in self._tools.values()])
        given = self._given_prompt
        self._system_prompt = self._full_prompt() if given is None else given

    def close(self) -> None:
        """Close the sessions with tool servers."""
        for session in self._sessions:
            session.close()
        super().close()

    def set_token_counter(self, count_tokens: Callable[[Sequence[Message]], int]) -> None:
        """Let the context policy count with a tokenizer instead of an estimate."""
        self._count_tokens = count_tokens

    # Insides

    def _full_prompt(self) -> str:
        instructions = [self._format.instructions(list(self._tools.values()))]
        if self._has_user:
            instructions.append(USER_TEXT)
        if self._tools:
            instructions.append(SEVERAL_CALLS_TEXT if self._parallel_calls else ONE_CALL_TEXT)
        return f"{self.default_system_prompt}\n{' '.join(instructions)}".strip()

    def _begin_sessions(self) -> None:
        for session in self._sessions:
            session.begin_episode()
        if self._sessions:  # a server may have changed its tools
            self.offer_tools(self._offered)

    def _understand(self, action: str) -> ParsedAction:
        if self._conversation.is_summary_requested:
            if summary := without_thoughts(action).strip():
                return ParsedAction(kind="summary", text=summary)
            error = "empty_summary"
            return ParsedAction(kind="invalid", error=error, message=EMPTY_SUMMARY_TEXT)
        parsed = self._format.parse(action, self._tools)
        if parsed.calls and not self._parallel_calls:
            parsed = self._format.only_one(len(parsed.calls), self._tools)
        text = without_thoughts(action).strip() if self._has_user else ""
        if parsed.error == "no_action" and text:
            return ParsedAction(kind="message", text=text)
        return parsed

    def _carry_out(self, calls: Sequence[ParsedAction]) -> list[Call]:
        """Run the calls of a turn; return each with its result, mistakes without one."""
        valid = [call for call in calls if call.kind == "tool_call"]
        results = run_calls([(self._tools[c.name or ""], c.arguments or {}) for c in valid])
        on_result: Callable[..., Any] = self.on_result  # may be async
        done: list[Call] = []
        has_run = False  # a game may be over from the start
        for call in calls:
            if call.kind == "invalid":
                done.append(Call(call, None))
                continue
            if has_run and self.is_finished():
                done.append(Call(call, ToolResult(OVER_TEXT, error="not_carried_out")))
                continue
            noted, self.noted = self.noted, defaultdict(float)  # each call starts empty
            result, has_run = next(results), True
            self.num_tool_calls += 1
            resolve(on_result(call, result))
            for name, value in self.noted.items():
                noted[name] += value
            self.noted = noted
            done.append(Call(call, result if self._attack is None else self._attack.edit(result)))
        return done

    def _reply(
        self, parsed: ParsedAction, calls: Sequence[Call]
    ) -> Sequence[Message] | NewConversation | None:
        """Return the reply to an action after its calls; None ends the episode."""
        self.num_invalid_actions += not parsed.is_faultless
        if parsed.kind == "answer":
            self.answer = parsed.answer or ""
            return self._checked("on_answer", self.on_answer(self.answer))
        if parsed.kind == "message":
            return self._checked("on_message", self.on_message(parsed.text or ""))
        if parsed.kind == "summary":
            return []
        if calls:
            return self._results(calls)
        return [Message(role="user", content=parsed.message or "")]

    def _results(self, calls: Sequence[Call]) -> list[Message]:
        """Return the results of calls as messages, in order.

        Templates require that users and models alternate, so user messages are joined to one.
        """
        replies: list[Message] = []
        for number, (action, result) in enumerate(calls, start=1):
            content = (action.message or "") if result is None else result.content
            message = self._format.result_message(action.name or f"call {number}", content)
            if replies and message["role"] != "tool" and replies[-1]["role"] == message["role"]:
                both = f"{replies[-1]['content']}\n\n{message['content']}"
                replies[-1] = {**replies[-1], "content": both}
            else:
                replies.append(message)
        return replies

    def _checked(self, hook: str, reply: Any) -> Sequence[Message] | NewConversation | None:
        reply = resolve(reply)
        if reply is None or isinstance(reply, NewConversation):
            return reply
        if not isinstance(reply, str):
            said = f"{type(self).__name__}.{hook} returned {reply!r}"
            raise TypeError(f"{said}; it must return None, a text or a NewConversation.")
        return [Message(role="user", content=reply)]

    def _continue(self, action: str, reply: Sequence[Message] | NewConversation | None) -> str:
        """Add a turn to the conversation; return the observation."""
        if isinstance(reply, NewConversation):
            self._conversation.begin(self._system_prompt, reply.question)
            return reply.question
        self._conversation.add_turn(action, reply or ())
        return "\n\n".join(message["content"] for message in reply or ())

    def _info(self) -> dict[str, Any]:
        """Return the entries of `info` that describe the state; the caller may change them."""
        view = self._conversation.view(self._context, self._count_tokens, self.pinned_text())
        names = ["num_dropped", "num_shortened", "reason"] if view.reason else []
        names += ["is_summary_requested"] if view.is_summary_requested else []
        context = {name: getattr(view, name) for name in names}
        return {
            "messages": [message.copy() for message in view.messages],
            **({"context": context} if context else {}),
            "tools": json.loads(self._tool_schemas),
            "tool_format": self._format.name,
            "is_native_format": self._format.is_native,
            "task_id": self.task.id,
        }

    def _has_state_elsewhere(self) -> bool:
        return any(tool.has_state_outside(self) for tool in self._tools.values())

    def _resume(self, *, is_replayed: bool) -> None:
        self._limit_is_known = False
        if is_replayed:
            return
        self._begin_sessions()
        if self._task is not None:
            self.on_restore()


def check_turn(action: object, *, is_over: bool) -> None:
    """Check that `action` can be the next turn of an episode."""
    if not isinstance(action, str):
        raise ActionTypeError(
            f"An action is the text of one model turn (str), not {type(action).__name__}."
        )
    if is_over:
        raise gym.error.ResetNeeded("The episode is over; call reset() before step().")


def _describe(parsed: ParsedAction, calls: Sequence[Call]) -> dict[str, Any]:
    """Return the keys of `info` for an action and its results; see `ToolEnv`."""
    action = parsed.as_info()
    each = action.get("calls", [action])
    results = [call.result for call in calls]
    for info, result in zip(each, results, strict=False):  # without calls there is no result
        if result is None:
            continue
        if result.error is not None:
            info |= {"error": result.error, "message": result.content}
        if result.exception is not None:
            info["exception"] = result.exception
        if result.num_cut_chars:
            info["num_cut_chars"] = result.num_cut_chars
    contents = [result.content for result in results if result is not None]
    described: dict[str, Any] = {
        "action": action,
        "tool_result": "\n\n".join(contents) if contents else None,
    }
    if len(calls) > 1:
        first_fault: dict[str, Any] = next((info for info in each if "error" in info), {})
        action |= {key: first_fault[key] for key in ("error", "message") if first_fault}
        described["tool_results"] = [result and result.content for result in results]
    return described
