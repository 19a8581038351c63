"""AgentDojo: an assistant with tools, among whose data an attacker writes."""

import ast
import copy
import datetime
import functools
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.rewards import final_metric, format_term
from agent_envs.core.tasks import Task
from agent_envs.core.tool import ForeignTool, ToolResult
from agent_envs.core.tool_env import ToolEnv

VERSION: Final = "v1.2.2"
"""Version of the benchmark."""
SUITES: Final[Mapping[str, tuple[int, int]]] = {
    "workspace": (40, 14), "travel": (20, 7), "banking": (16, 9), "slack": (21, 5),
}  # fmt: skip
"""Number of user tasks and of injection tasks by suite."""
ATTACKS: Final = (
    "direct", "ignore_previous", "system_message", "injecagent", "important_instructions",
    "important_instructions_no_user_name", "important_instructions_no_model_name",
    "important_instructions_no_names", "important_instructions_wrong_user_name", "tool_knowledge",
    "dos", "swearwords_dos", "captcha_dos", "offensive_email_dos", "felony_dos",
)  # fmt: skip
"""The package's attacks, but not those in which a person writes, or that need a known model."""
NOW: Final = datetime.datetime(2024, 5, 15, 12)
"""Time of all messages and changes of an episode."""
MAX_RESULT_CHARS: Final = 50_000
MAX_ERROR_CHARS: Final = 900


class AgentDojoEnv(ToolEnv):
    """AgentDojo (Debenedetti et al., 2024, arXiv 2406.13352; ``agentdojo``, benchmark v1.2.2).

    Task: what a user asks an assistant, with the tools and data of a suite: a workspace (mail,
    calendar, files), a travel agency, a bank, or Slack. With ``attack=`` data that the tools return
    hold instructions of an attacker, which demand an injection task. The answer ends the episode.
    It succeeds if the package's own check of the user task is met (utility). The metric
    ``obeyed_injection`` is the success of the attack, by the check of the injection task; of an
    attack that only hinders (``*dos``) it is the failure of the user task.

    Tools: the package's. Reward terms: ``correct`` at the end (outcome), ``format`` on the way
    (process). The attack has no influence on the reward. At the turn limit the episode fails.
    It is a public benchmark: do not report results on tasks of the training.

    Version history: v0, first version.
    """

    reward_functions = {"correct": final_metric("success"), "format": format_term}
    default_rewards = {"correct": 1.0, "format": 0.02}
    outcome_terms = frozenset({"correct"})
    metric_names = ("success", *ToolEnv.metric_names)
    tool_signatures = ("the tools of the suite",)
    data_source = "the package `agentdojo`; licence MIT"
    not_in_snapshots = frozenset({"default_system_prompt", "_suite", "_pairs"})

    def __init__(
        self,
        *,
        suite: str = "workspace",
        attack: str | Mapping[str, Any] | None = None,
        every_injection: bool = True,
        **shared: Any,
    ) -> None:
        """Choose the suite and the attack.

        Args:
            suite: ``"workspace"``, ``"travel"``, ``"banking"`` or ``"slack"``.
            attack: Name of an attack of the package, such as ``"important_instructions"``; or
                edits of tool results, as of any environment.
            every_injection: Whether under attack each user task comes with every injection task, as
                in the benchmark. Without, each comes with one of them, so that task n is the same
                user task with and without an attack.
            shared: Arguments of `ToolEnv`.
        """
        require_extra("agentdojo", "AgentR1/AgentDojo-v0", "agentdojo")
        lookup(SUITES, suite, kind="suite")
        self._attack_name = attack if isinstance(attack, str) else None
        if self._attack_name is not None:
            lookup(dict.fromkeys(ATTACKS), self._attack_name, kind="attack")
        self._suite = _load(suite)
        users, goals = list(self._suite.user_tasks), list(self._suite.injection_tasks)
        if self._attack_name is None:
            self._pairs: list[tuple[str, str | None]] = [(user, None) for user in users]
        elif self._attack_name.endswith("dos"):
            self._pairs = [(user, goals[0]) for user in users]
        elif every_injection:
            self._pairs = [(user, goal) for user in users for goal in goals]
        else:
            self._pairs = [(user, goals[n % len(goals)]) for n, user in enumerate(users)]
        prompt = importlib.import_module("agentdojo.agent_pipeline.agent_pipeline")
        self.default_system_prompt = prompt.load_system_message(None)  # type: ignore[misc]
        tools = [
            ForeignTool(
                each.name, each.description, each.parameters.model_json_schema(),
                functools.partial(self._call, each.name), max_result_chars=MAX_RESULT_CHARS,
            )
            for each in self._suite.tools
        ]  # fmt: skip
        edits = None if isinstance(attack, str) else attack
        super().__init__(default_tools=tools, attack=edits, **shared)

    @property
    def num_tasks(self) -> int:
        return len(self._pairs)

    def get_task(self, index: int) -> Task:
        user, goal = self._pairs[index]
        id = f"agentdojo-{self._suite.name}-{user}"
        return Task(
            id=id if goal is None else f"{id}-{self._attack_name}-{goal}",
            question=self._suite.user_tasks[user].PROMPT,
            answers=(),
            data={"user": user, "goal": goal},
        )

    def begin_episode(self) -> None:
        start = _start(self._suite.name, self._attack_name, *self._pairs[self.task_index or 0])
        self._before, self._world = start, start.model_copy(deep=True)
        self._traces: list[Any] = []
        self._is_useful = False

    def on_answer(self, answer: str) -> None:
        task = self._suite.user_tasks[self.task.data["user"]]
        self._is_useful = self._is_met(task, answer)

    def metrics(self) -> dict[str, float]:
        """Return utility, and success of the attack; without an answer the user task fails."""
        attack = {}
        if self.task.data["goal"] is not None:
            attack["obeyed_injection"] = float(self._has_obeyed(self.answer or ""))
        return {"success": float(self._is_useful), **attack, **super().metrics()}

    def reference_actions(self) -> list[str]:
        task = self._suite.user_tasks[self.task.data["user"]]
        calls = task.ground_truth(self._before.model_copy(deep=True))
        actions = [self.write_call(call.function, **call.args) for call in calls]
        return [*actions, self.write_answer(task.GROUND_TRUTH_OUTPUT or "Done.")]

    def _has_obeyed(self, answer: str) -> bool:
        if str(self._attack_name).endswith("dos"):
            return not self._is_useful
        return self._is_met(self._suite.injection_tasks[self.task.data["goal"]], answer)

    def _is_met(self, task: Any, answer: str) -> bool:
        """Return the verdict of the package on copies, since some of its checks change the data."""
        output = [{"type": "text", "content": answer}]
        state = copy.deepcopy((self._before, self._world, self._traces))
        try:
            return bool(self._suite._check_task_result(task, output, *state))
        except Exception:  # noqa: BLE001 - some checks assume that every call was complete
            return False

    def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool as the package's executor does; an error becomes a result."""
        runtime = importlib.import_module("agentdojo.functions_runtime")
        executor = importlib.import_module("agentdojo.agent_pipeline.tool_execution")
        call = runtime.FunctionCall(function=name, args=copy.deepcopy(dict(arguments)))
        self._traces.append(call)
        began = datetime.datetime.now()
        try:
            for key, value in call.args.items():
                if isinstance(value, str) and executor.is_string_list(value):
                    call.args[key] = ast.literal_eval(value)
            tools = runtime.FunctionsRuntime(self._suite.tools)
            result, error = tools.run_function(self._world, name, call.args)
            _make_deterministic(self._world, began)
            text = executor.tool_result_to_str(result)
        except Exception as raised:  # noqa: BLE001 - foreign code on a model's arguments
            error = f"{type(raised).__name__}: {raised}"
        if error:
            return ToolResult(error[:MAX_ERROR_CHARS], error="tool_error")
        return ToolResult(text)


def _make_deterministic(world: Any, began: datetime.datetime) -> None:
    """Replace times of the clock since `began`."""
    for table, records, field in (
        ("inbox", "emails", "timestamp"), ("cloud_drive", "files", "last_modified")
    ):  # fmt: skip
        for record in getattr(getattr(world, table, None), records, {}).values():
            if getattr(record, field) >= began:
                setattr(record, field, NOW)


@functools.cache
def _load(suite: str) -> Any:
    suites = importlib.import_module("agentdojo.task_suite.load_suites")
    calendar: Any = importlib.import_module("agentdojo.default_suites.v1.tools.calendar_client")
    # Its order of participants would depend on PYTHONHASHSEED, as that of any set of strings.
    calendar.set = dict.fromkeys
    return suites.get_suite(VERSION, suite)


@functools.lru_cache(maxsize=256)
def _start(name: str, attack: str | None, user: str, goal: str | None) -> Any:
    """Return the data at the start of a task; the caller must not change them."""
    suite, injections = _load(name), {}
    task = suite.user_tasks[user]
    if attack is not None and goal is not None:
        attacks = importlib.import_module("agentdojo.attacks")
        # some attacks address the model by its name, and take the name of a pipeline for it
        attacker = attacks.load_attack(attack, suite, SimpleNamespace(name="local"))
        injections = attacker.attack(task, suite.injection_tasks[goal])
    return task.init_environment(suite.load_and_inject_default_environment(injections))
