"""Episodes of programs: their rewards, and those that fail."""

import atexit
import sys
import time

import httpx
import numpy as np
import pytest

from agent_trainers.monitoring.episode_statistics import EPISODE_FAULTS
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.programs import EnvironmentTools, Outcome, ProgramTasks
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason

CLIENT = httpx.Client(limits=httpx.Limits(max_connections=None), timeout=60)
atexit.register(CLIENT.close)


def ask(session, *messages, **options):
    """Return the model's message, as any HTTP client gets it."""
    reply = CLIENT.post(
        f"{session.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {session.key}"},
        json={"model": "policy", "messages": list(messages), **options},
    )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


def chat(session, *messages, **options):
    return ask(session, *messages, **options)["content"]


def user(text):
    return {"role": "user", "content": text}


ECHO = ScriptedPolicy(lambda request: request.messages[-1]["content"].upper())


def specs(count, group_size=2, seed=0):
    return [
        EpisodeSpec(
            task=i // group_size,
            seed=i // group_size,
            group_id=str(i // group_size),
            rng=np.random.default_rng([seed, i]),
        )
        for i in range(count)
    ]


def collect(
    program, tasks, count=None, policy=ECHO, group_size=1, seed=0, settings=None, **options
):
    source = ProgramTasks(program, tasks, **options)
    rollout = source.make_rollout(policy, **(settings or {}))
    return rollout.collect(specs(count or len(tasks), group_size, seed))


def test_calls_become_transitions_and_the_return_value_the_reward():
    def run(session, task):
        first = chat(session, user(task["text"]))
        second = chat(
            session, user(task["text"]), {"role": "assistant", "content": first}, user("b")
        )
        return Outcome(reward=2.0, metrics={"seen": float(first + second == "AB")})

    (trajectory,) = collect(run, [{"text": "a"}])
    assert [t.action for t in trajectory.transitions] == ["A", "B"]
    assert trajectory.rewards == [0.0, 2.0]
    assert trajectory.metrics == {"success": 1.0, "seen": 1.0}
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.transitions[-1].terminated


def test_a_reward_function_scores_answers():
    def run(session, task):
        return chat(session, user(task["question"]))

    tasks = [{"question": "paris", "answer": "Paris"}, {"question": "rome", "answer": "Paris"}]
    assert [p.return_ for p in collect(run, tasks, reward="exact_match")] == [1.0, 0.0]
    scored = collect(run, tasks, reward=lambda task, answer: Outcome(reward=len(answer)))
    assert [p.return_ for p in scored] == [5.0, 4.0]


FAULT = StopReason.ENVIRONMENT_ERROR
FAILURES = {
    "is silent": (FAULT, "never called the model"),
    "raises": (FAULT, "ValueError: too hot"),
    "exits": (FAULT, "SystemExit: 3"),
    "returns nonsense": (FAULT, "'well done'"),
    "hangs": (StopReason.TIMEOUT, "did not call the model for 2 seconds"),
    "never stops": (StopReason.TURN_LIMIT, "max_calls=4"),
}


def test_a_failing_program_ends_only_its_own_episode():
    def run(session, task):
        kind = task["kind"]
        if kind == "is silent":
            return 1.0
        chat(session, user("hello"))
        if kind == "raises":
            raise ValueError("too hot")
        if kind == "exits":
            sys.exit(3)
        if kind == "hangs":
            time.sleep(30)
        while kind == "never stops":
            chat(session, user("more"))
        return "well done" if kind == "returns nonsense" else 1.0

    tasks = [{"kind": kind} for kind in ("returns", *FAILURES, "returns")]
    before, *episodes, after = collect(run, tasks, max_calls=4, settings={"step_timeout": 2.0})
    assert (before.return_, after.return_) == (1.0, 1.0)
    for failed, (stop_reason, error) in zip(episodes, FAILURES.values(), strict=True):
        assert failed.stop_reason is stop_reason
        assert error in failed.error
        is_fault = stop_reason is not StopReason.TURN_LIMIT  # which the model caused
        assert (failed.stop_reason in EPISODE_FAULTS) == is_fault
        assert (failed.is_scorable, failed.is_truncated) == (not is_fault, not is_fault)
        assert failed.return_ == 0.0


def test_a_program_that_fails_at_a_cut_off_turn_is_truncated():
    def run(session, task):
        return float(chat(session, user("1.0 it is"), max_tokens=task["max_tokens"]))

    cut, whole = collect(run, [{"max_tokens": 4}, {"max_tokens": 99}])  # tokens are bytes
    assert cut.stop_reason is StopReason.ANSWERED
    assert (cut.transitions[0].action, cut.return_) == ("1.0 ", 1.0)
    assert whole.stop_reason is StopReason.ENVIRONMENT_ERROR
    (cut,) = collect(run, [{"max_tokens": 7}])
    assert cut.stop_reason is StopReason.TOKEN_LIMIT
    assert "could not convert string to float" in cut.error
    assert (cut.is_scorable, cut.is_truncated, cut.return_) == (True, True, 0.0)
    (step,) = cut.transitions
    assert (step.terminated, step.truncated) == (False, True)


@pytest.mark.parametrize(
    ("num_calls", "stop_reason"), [(5, StopReason.TURN_LIMIT), (2, StopReason.ANSWERED)]
)
def test_an_episode_is_truncated_if_its_environment_is(num_calls, stop_reason):
    def run(session, task):
        chat(session, user("hello"))
        world = EnvironmentTools("AgentR1/SyntheticMultiHop-v0", task=0)
        for _ in range(num_calls):
            world.call("search", query="x")
        return world.outcome(None)

    (trajectory,) = collect(run, [{}])
    assert trajectory.stop_reason is stop_reason
    assert (
        trajectory.is_truncated
        == trajectory.transitions[-1].truncated
        == bool(trajectory.final_prompt_ids)
    )


def test_an_episode_ends_at_its_timeout():
    def run(session, task):
        while True:
            chat(session, user("more"))
            time.sleep(0.02)

    (trajectory,) = collect(run, [{}], max_calls=10_000, settings={"episode_timeout": 0.5})
    assert trajectory.stop_reason is StopReason.TIMEOUT


def test_errors_of_the_policy_are_raised():
    def act(request):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        collect(lambda session, task: chat(session, user("x")), [{}], policy=ScriptedPolicy(act))


def test_seeds_and_order_are_those_of_the_specs():
    def run(session, task):
        time.sleep((session.seed % 7) / 200)
        chat(session, user(str(task["n"])))
        return Outcome(reward=0.0, metrics={"seed": session.seed % 2**32})

    tasks = [{"n": i} for i in range(8)]
    one, two = collect(run, tasks), collect(run, tasks, max_concurrency=2)
    assert [p.transitions[0].action for p in one] == [str(i) for i in range(8)]
    assert [p.metrics for p in one] == [p.metrics for p in two]
    other = collect(run, tasks, seed=1)
    assert [p.metrics for p in one] != [p.metrics for p in other]


def test_roles_share_a_session_and_are_named_in_their_transitions():
    seen = []

    def run(session, task):
        plan = chat(session.role("planner"), user("plan"))
        chat(session.role("executor"), user(plan))
        chat(session, user("sum up"))
        wrong = type(session)(base_url=session.base_url, key=f"{session.key}.a/b", seed=0)
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            chat(wrong, user("x"))
        for other in seen:  # a key opens its own session alone
            stolen = type(session)(base_url=other.base_url, key=session.key, seed=0)
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                chat(stolen, user("mine"))
        seen.append(session)
        return 1.0

    trajectory, other = collect(run, [{}] * 2, frozen_roles=["executor"], max_concurrency=1)
    assert len(other.transitions) == 3
    assert [t.role for t in trajectory.transitions] == ["planner", "executor", ""]
    assert [t.is_frozen for t in trajectory.transitions] == [False, True, False]


def test_rewards_by_role_are_at_each_roles_last_step_and_need_a_role_that_called():
    def run(session, task):
        for role in task["calls"]:
            chat(session.role(role), user("x"))
        return Outcome(reward=task["rewards"])

    tasks = [
        {"calls": ["solver", "critic", "solver"],
         "rewards": {"solver": 1.0, "critic": -0.5, "judge": 3.0}},
        {"calls": ["solver"], "rewards": {"slover": 1.0, "critic": 0.0}},
    ]  # fmt: skip
    with pytest.warns(RuntimeWarning, match=r"roles \['judge'\] .*'critic', 'solver'"):
        paid, failed = collect(run, tasks)
    assert paid.rewards == [0.0, -0.5, 1.0]
    assert paid.metrics["reward/judge"] == 3.0  # it never called, but is measured
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "roles ['critic', 'slover'] are rewarded" in failed.error
    assert "['solver'] did" in failed.error


def test_processes_behave_like_threads(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(
        "import json, os, urllib.request\n"
        "task = json.loads(input())\n"
        "if task['n'] == 1: os._exit(7)\n"
        "body = {'model': 'policy', 'messages': [{'role': 'user', 'content': str(task['n'])}]}\n"
        "request = urllib.request.Request(\n"
        "    os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode(),\n"
        "    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'],\n"
        "     'Content-Type': 'application/json'})\n"
        "reply = json.load(urllib.request.urlopen(request))\n"
        "print(json.dumps(reply['choices'][0]['message']['content']))\n"
    )
    monkeypatch.chdir(tmp_path)
    trajectories = collect(
        f"{sys.executable} agent.py",
        [{"n": n, "answer": n} for n in range(3)],
        runner="process",
        reward="exact_match",
    )
    assert [p.return_ for p in trajectories] == [1.0, 0.0, 1.0]
    assert trajectories[1].error.startswith("the program exited with 7")
    assert trajectories[1].stop_reason is StopReason.ENVIRONMENT_ERROR


def test_a_program_gets_its_own_copy_of_the_task():
    def run(session, task):
        chat(session, user("x"))
        task["seen"].append(1)
        task["answer"] = "forged"
        return f"{len(task['seen'])}"

    tasks = [{"seen": [], "answer": "1"}]
    for _ in range(2):
        assert [p.return_ for p in collect(run, tasks * 2, reward="exact_match")] == [1.0] * 2
