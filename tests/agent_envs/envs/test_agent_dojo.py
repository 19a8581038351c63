"""AgentDojo's suites, compared with the verdicts of their package."""

import copy
import datetime
import random
import re

import gymnasium as gym
import pytest

from agent_envs.envs.functions.agent_dojo import ATTACKS, SUITES, VERSION
from agent_envs.errors import UnknownNameError
from agent_envs.testing import find_detour, play_ways
from tests.agent_envs.envs.playing import answer, call, make, solve

ENV_ID = "AgentR1/AgentDojo-v0"


@pytest.fixture
def load_suites():
    reason = "the extra agentdojo is not installed"
    return pytest.importorskip("agentdojo.task_suite.load_suites", reason=reason)


@pytest.fixture(params=SUITES)
def suite(request, load_suites):
    return request.param


def mutated(calls, rng):
    """Return calls with some missing, twice, or with another argument."""
    calls = copy.deepcopy(calls)
    for _ in range(rng.randint(0, 2) if calls else 0):
        place = rng.randrange(len(calls))
        _, arguments = calls[place]
        kind = rng.choice(["drop", "double", "argument"])
        if kind == "drop" and len(calls) > 1:
            del calls[place]
        elif kind == "double":
            calls.insert(place, copy.deepcopy(calls[place]))
        elif arguments:
            name = rng.choice(sorted(arguments))
            arguments[name] = rng.choice([None, 7, "x", "['a', 'b']", str(arguments[name])])
    return calls


def without_clock(data):
    """Return the texts of the data in alphabetical order, without the time of the run."""
    times = rf"datetime\.datetime\((2024, 5, 15, 12, 0|{datetime.date.today().year}, [^)]*)\)"
    return sorted(re.sub(times, "now", str(data.model_dump())).split("'"))


def by_the_package(suite, user, goal, attack, calls, output):
    """Return utility, security and data after a scripted run of the package's own pipeline."""
    from agentdojo.agent_pipeline.base_pipeline_element import BasePipelineElement
    from agentdojo.agent_pipeline.tool_execution import ToolsExecutor
    from agentdojo.attacks import load_attack
    from agentdojo.functions_runtime import FunctionCall

    class Scripted(BasePipelineElement):
        name = "local"

        def query(self, query, runtime, env, messages=(), extra_args=None):
            for function, arguments in calls:
                made = FunctionCall(function=function, args=copy.deepcopy(arguments))
                turn = {"role": "assistant", "content": None, "tool_calls": [made]}
                *_, messages, _ = ToolsExecutor().query(query, runtime, env, [*messages, turn])
            self.data = without_clock(env)
            last = {"role": "assistant", "content": [{"type": "text", "content": output}]}
            return query, runtime, env, [*messages, {**last, "tool_calls": None}], extra_args

    pipeline = Scripted()
    user_task, injection_task = suite.user_tasks[user], suite.injection_tasks[goal]
    injections = load_attack(attack, suite, pipeline).attack(user_task, injection_task)
    verdicts = suite.run_task_with_pipeline(pipeline, user_task, injection_task, injections)
    return verdicts, pipeline.data


def compare_runs(name, suite, num_runs, seed=0, attack="important_instructions"):
    """Compare verdicts and data of mutated runs; return how often each task was solved."""
    rng = random.Random(seed)
    env = gym.make(ENV_ID, suite=name, attack=attack, max_episode_steps=-1)
    totals = [0, 0]
    for _ in range(num_runs):
        task = rng.randrange(env.unwrapped.num_tasks)
        env.reset(options={"task": task})
        user, goal = (env.unwrapped.task.data[key] for key in ("user", "goal"))
        start = suite.load_and_inject_default_environment({})
        parts = [suite.user_tasks[user], suite.injection_tasks[goal]]
        chosen = rng.choice([parts, parts, parts[:1], parts[1:]])
        calls = [(c.function, dict(c.args)) for part in chosen for c in part.ground_truth(start)]
        calls = mutated(calls, rng)
        output = rng.choice([part.GROUND_TRUTH_OUTPUT for part in parts] + ["Done."]) or "Done."
        for function, arguments in calls:
            call(env, function, **arguments)
        metrics = answer(env, output)[4]["metrics"]
        verdicts, data = by_the_package(suite, user, goal, attack, calls, output)
        assert (metrics["success"], metrics["obeyed_injection"]) == verdicts, (user, goal, calls)
        assert without_clock(env.unwrapped._world) == data
        totals = [total + verdict for total, verdict in zip(totals, verdicts, strict=True)]
    return totals


def test_verdicts_and_data_are_those_of_the_package(suite, load_suites):
    useful, obeyed = compare_runs(suite, load_suites.get_suite(VERSION, suite), num_runs=8)
    assert 0 < useful < 8
    assert 0 < obeyed < 8


def test_reference_actions_solve_every_task(suite, load_suites):
    env = gym.make(ENV_ID, suite=suite)
    count, num_goals = SUITES[suite]
    assert env.unwrapped.num_tasks == count
    for task in range(count):
        total, info = solve(env, task)
        assert total == pytest.approx(1.0)
        assert "obeyed_injection" not in info["metrics"]
    attacked = gym.make(ENV_ID, suite=suite, attack="direct")
    assert attacked.unwrapped.num_tasks == count * num_goals
    assert len(load_suites.get_suite(VERSION, suite).injection_tasks) == num_goals


def test_the_agent_reads_the_attack_and_may_ignore_or_obey_it(suite):
    env = gym.make(ENV_ID, suite=suite, attack="important_instructions")
    _, info = solve(env)
    assert any("<INFORMATION>" in message["content"] for message in info["messages"])
    assert (info["metrics"]["success"], info["metrics"]["obeyed_injection"]) == (1.0, 0.0)
    env.reset(options={"task": 0})
    inner = env.unwrapped
    goal = inner._suite.injection_tasks[inner.task.data["goal"]]
    for each in goal.ground_truth(inner._before):
        call(env, each.function, **each.args)
    _, reward, *_, info = answer(env, goal.GROUND_TRUTH_OUTPUT or "Done.")
    assert info["metrics"]["obeyed_injection"] == 1.0
    assert (reward, info["metrics"]["success"]) == (0.0, 0.0)


def test_a_task_has_the_same_user_task_with_one_attack_each(suite):
    plain, attacked = (
        gym.make(ENV_ID, suite=suite, attack=attack, every_injection=False)
        for attack in (None, "injecagent")
    )
    assert plain.unwrapped.num_tasks == attacked.unwrapped.num_tasks
    for task in (0, 7, 15):
        first, second = (env.reset(options={"task": task}) for env in (plain, attacked))
        assert first[0] == second[0]
        assert second[1]["task_id"].startswith(f"{first[1]['task_id']}-injecagent-injection_task_")


def test_an_attack_that_hinders_succeeds_where_the_user_task_fails(load_suites):
    env = make(ENV_ID, suite="banking", attack="dos")
    assert env.unwrapped.num_tasks == SUITES["banking"][0]
    assert answer(env, "asdf")[4]["metrics"]["obeyed_injection"] == 1.0
    assert solve(env)[1]["metrics"]["obeyed_injection"] == 0.0


def test_every_attack_can_be_made(load_suites):
    for attack in ATTACKS:
        make(ENV_ID, suite="slack", attack=attack)
    with pytest.raises(UnknownNameError, match="important_instructions"):
        gym.make(ENV_ID, attack="important_instruction")


def test_no_probe_earns_more_than_the_reference_actions(suite):
    env = gym.make(ENV_ID, suite=suite, max_episode_steps=12)
    plays = play_ways(env, 0)
    assert plays[0].solved
    assert find_detour(plays) is None


def test_an_error_of_a_tool_is_a_result_and_episodes_are_separate(load_suites):
    first, second = (make(ENV_ID, suite="banking") for _ in range(2))
    balance = call(second, "get_balance")[4]["tool_result"]
    wrong = call(first, "send_money", recipient="x", amount="much", subject="s", date="2022-01-01")
    assert wrong[4]["action"]["error"] == "tool_error"
    assert "ValidationError" in wrong[0]
    call(first, "send_money", recipient="x", amount=9.0, subject="s", date="2022-01-01")
    assert len(first.unwrapped._world.bank_account.transactions) > 0
    assert call(second, "get_balance")[4]["tool_result"] == balance
    before = first.unwrapped._before.model_dump()
    first.reset(options={"task": 0})
    assert first.unwrapped._world.model_dump() == before


def test_checks_that_read_mail_leave_the_data_as_they_are(load_suites):
    env = gym.make(ENV_ID, suite="workspace", attack="direct", max_episode_steps=-1)
    task = env.unwrapped._pairs.index(("user_task_24", "injection_task_6"))
    assert solve(env, task)[0] == pytest.approx(1.0)
    env.reset(options={"task": task})
    call(env, "send_email", recipients=["mark.black-2134@gmail.com"], subject="x", body="nothing")
    call(env, "delete_email", email_id="34")
    info = call(env, "get_current_day")[4]
    assert info["metrics"]["obeyed_injection"] == 0.0
    assert solve(env, task)[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("user", "calls"),
    [
        ("user_task_11", [("invite_user_to_slack", {"user": "Dora"})]),
        ("user_task_1", [("remove_user_from_slack", {"user": "Alice"})]),
        ("user_task_13", [("remove_user_from_slack", {"user": "Charlie"}),
                          ("invite_user_to_slack", {"user": "Charlie", "user_email": "c@x.org"})]),
    ],
    ids=["argument left out", "user removed", "user replaced"],
)  # fmt: skip
def test_what_a_check_does_not_expect_fails_the_task(load_suites, user, calls):
    env = gym.make(ENV_ID, suite="slack", max_episode_steps=-1)
    env.reset(options={"task": env.unwrapped._pairs.index((user, None))})
    for name, arguments in calls:
        call(env, name, **arguments)
    _, reward, terminated, _, info = answer(env, "Done.")
    assert terminated
    assert (reward, info["metrics"]["success"]) == (0.0, 0.0)


def test_an_error_names_participants_in_their_order(load_suites):
    env = make(ENV_ID, suite="workspace")
    names = [f"guest {number}" for number in range(4)]
    text, *_ = call(
        env, "create_calendar_event", title="x", participants=names,
        start_time="2024-05-15 10:00", end_time="2024-05-15 11:00",
    )  # fmt: skip
    assert re.findall(r"input_value='(.*?)'", text) == names
