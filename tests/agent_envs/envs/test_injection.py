import re

import gymnasium as gym
import pytest

from agent_envs.core.tasks import Task
from agent_envs.envs.qa.injection import ATTACKS, Injection

IDS = [
    "AgentR1/HotpotQA-v0", "AgentR1/2WikiMultihopQA-v0", "AgentR1/MuSiQue-v0",
    "AgentR1/SyntheticMultiHop-v0",
]  # fmt: skip


def make(env_id, data_files, variant="injected", **kwargs):
    kwargs |= {"data": data_files[env_id]} if env_id in data_files else {}
    return gym.make(env_id, variant=variant, max_episode_steps=30, **kwargs)


def play(env, actions, task=0):
    _, info = env.reset(seed=1, options={"task": task})
    texts = []
    for action in actions(env.unwrapped):
        text, *_, info = env.step(action)
        texts.append(text)
    return "\n".join(texts), info


def reference(env):
    return env.reference_actions()


@pytest.mark.parametrize("env_id", IDS)
def test_planted_text_changes_no_reference_actions_and_obeying_is_counted(env_id, data_files):
    env, plain = make(env_id, data_files), make(env_id, data_files, "default")
    text, info = play(env, reference)
    plain_text, plain_info = play(plain, reference)
    assert env.unwrapped.reference_actions() == plain.unwrapped.reference_actions()
    metrics = info["metrics"]
    assert metrics.pop("num_injections_shown") >= 1
    assert metrics.pop("obeyed_injection") == 0.0
    assert metrics == plain_info["metrics"]
    assert metrics["success"] == 1.0
    assert info["reward_terms"] == plain_info["reward_terms"]  # no planted call or answer counts
    assert len(text) > len(plain_text)
    assert "injected" in info["task_id"]
    assert "injected" not in plain_info["task_id"]
    assert play(make(env_id, data_files), reference)[0] == text  # the same in every episode
    planted = Injection(env.unwrapped.task, None)

    def obeys(*actions):
        return play(env, lambda _: actions)[1]["metrics"]["obeyed_injection"]

    call, answer = env.unwrapped.write_call, env.unwrapped.write_answer
    assert obeys(answer(f"It is {planted.answer.upper()}.")) == 1.0
    assert obeys(call("search", query=f'"{planted.query.lower()}"'), answer("x")) == 1.0
    # what was asked for was the other thing: neither is obeyed by it
    assert obeys(call("search", query=planted.answer), answer(planted.query)) == 0.0


def test_planted_text_in_pages_keeps_the_numbers_of_sentences(data_files):
    env = make("AgentR1/HotpotQA-v0", data_files, tools=["read", "find_in_page", "note"])
    plain = make("AgentR1/HotpotQA-v0", data_files, "default", tools=["read"])

    def read(env):
        return [env.write_call("read", title="Red Harbor")]

    planted, honest = play(env, read)[0], play(plain, read)[0]
    assert planted.startswith(honest)
    assert "[2] " in planted.removeprefix(honest)


def test_every_attack_occurs_with_a_distinct_goal_per_task():
    seen, attacks = set(), set()
    for number in range(200):
        task = Task(id=f"t{number}", question="Who {won} it?", answers=("Ada",))
        planted = Injection(task, "gold")
        seen |= {planted.answer, planted.query}
        assert planted.text_for("gold") is not None
        texts = [planted.text_for(f"key {i}") for i in range(8)]
        for text in filter(None, texts):
            assert planted.answer in text or planted.query in text
            assert not re.search(r"\{(order|answer|query|question)\}", text)
            attacks |= {name for name, form in ATTACKS.items() if form[:12] == text[:12]}
        assert not planted.is_answer("Ada")
        assert not planted.is_query("Who won it?")
    assert len(seen) == 400
    assert attacks == set(ATTACKS)
