"""The solver and the critic of a claim: their states, their rewards, and who owns them."""

import gymnasium as gym
import pytest

from agent_envs.adapters.own_episode import OwnEpisode
from agent_envs.adapters.trl import environment_factory
from agent_envs.envs.qa.claim_review import ACCEPT, CRITIC_PROMPT, REJECTED_TEXT, UNSEEN_TEXT
from agent_envs.errors import ConfigurationError
from tests.agent_envs.envs.playing import answer, call, solve

CLAIM_REVIEW = "AgentR1/ClaimReview-v0"


@pytest.fixture
def env(data_files):
    env = gym.make(CLAIM_REVIEW, data=data_files[CLAIM_REVIEW])
    env.reset(options={"task": 0})
    return env


def wrong_verdict(env):
    right = env.unwrapped.task.answers[0]
    return {"supported": "refuted", "refuted": "supported"}[right]


def cite_all(env):
    """Search and cite the gold passages; return the actions and the last info."""
    *actions, _, _ = env.unwrapped.reference_actions()
    return [env.step(action) for action in actions][-1][4]


def test_an_accepted_solution_earns_as_much_as_without_a_critic(env):
    earned, info = solve(env, 0)
    assert earned == pytest.approx(1.5)  # joint_em, exact_match, citation_f1 and progress
    assert (info["agent_role"], info["metrics"]["first_joint_em"]) == ("critic", 1.0)


def test_the_critic_reads_claim_verdict_and_cited_passages_and_nothing_else(env):
    solver = cite_all(env)
    call(env, "note", text="From memory.", title="Atlantis")
    question, _, _, _, info = answer(env, wrong_verdict(env))
    assert info["agent_role"] == "solver"
    system, user = info["messages"]
    assert system["content"].startswith(CRITIC_PROMPT)
    assert (user["content"], info["tools"]) == (question, [])
    claim, verdict, *evidence = question.split("\n")
    assert (claim, verdict) == (
        env.unwrapped.task.question, f"Proposed verdict: {wrong_verdict(env)}"
    )  # fmt: skip
    text = "\n".join(evidence)
    assert all(passage in text for gold in env.unwrapped.task.data["gold"] for passage in gold)
    assert text.endswith(f"[3] Atlantis\n{UNSEEN_TEXT}")
    assert solver["tools"]
    error = call(env, "search", query="anything")[4]["action"]["error"]
    assert error == "unknown_tool"


def test_the_solver_reads_the_reason_as_the_reply_to_its_verdict(env):
    *_, before = cite_all(env)["messages"]
    verdict = env.unwrapped.write_answer(wrong_verdict(env))
    env.step(verdict)
    env.step("No answer.")  # the critic's mistake stays in its own conversation
    observation, _, terminated, _, info = answer(env, "Look </tool_call> again.")
    assert observation == REJECTED_TEXT.format(reason="Look < /tool_call> again.")
    assert [m["content"] for m in info["messages"][-3:]] == [
        before["content"], verdict, observation
    ]  # fmt: skip
    assert not terminated
    assert {tool["function"]["name"] for tool in info["tools"]} == {"search", "note", "drop_note"}


def test_roles_share_changes_of_the_outcome_and_own_the_rest(env):
    cite_all(env)
    steps = [
        answer(env, wrong_verdict(env))[4],  # f1 of the citations: 1; its weight is 0.2
        answer(env, "The other verdict.")[4],  # a right review of a wrong verdict costs nothing
        answer(env, env.unwrapped.task.answers[0])[4],  # not reviewed again
    ]
    assert [step["agent_role"] for step in steps] == ["solver", "critic", "solver"]
    shared = [
        {name: value for name, value in step["reward_terms"].items()
         if name not in step["reward_owners"] and value}
        for step in steps
    ]  # fmt: skip
    assert shared == [{"citation_f1": 0.2}, {}, {"exact_match": 0.2, "joint_em": 1.0}]
    assert {owner for step in steps for owner in step["reward_owners"].values()} == {
        "solver", "critic"
    }  # fmt: skip
    assert set(steps[1]["reward_owners"].values()) == {"critic"}
    metrics = steps[-1]["metrics"]
    assert (metrics["success"], metrics["first_joint_em"], metrics["num_rejections"]) == (1, 0, 1)


@pytest.mark.parametrize(("is_right", "review", "cost"), [
    (True, ACCEPT, 0.0), (True, "Wrong.", -0.1), (False, f"{ACCEPT.upper()}.", -0.1),
    (False, "Wrong.", 0.0),
])  # fmt: skip
def test_the_critic_pays_for_a_wrong_review(env, is_right, review, cost):
    cite_all(env)
    answer(env, env.unwrapped.task.answers[0] if is_right else wrong_verdict(env))
    _, reward, terminated, _, info = answer(env, review)
    assert (reward, info["reward_terms"]["review"]) == (cost, cost)
    assert terminated == (review != "Wrong.")


def test_a_right_verdict_that_is_replaced_by_a_wrong_one_is_paid_back(env):
    cite_all(env)
    first = answer(env, env.unwrapped.task.answers[0])[1]
    answer(env, "Wrong.")
    _, second, terminated, _, info = answer(env, wrong_verdict(env))
    # joint_em 1 and exact_match 0.2 both ways; the citations stay right, the progress is kept
    assert (first, second) == (pytest.approx(1.4), pytest.approx(-1.2))
    assert terminated
    assert info["metrics"]["success"] == 0.0


def test_an_episode_continues_from_a_snapshot_in_the_critics_turn(env, data_files):
    cite_all(env)
    answer(env, wrong_verdict(env))
    other = gym.make(CLAIM_REVIEW, data=data_files[CLAIM_REVIEW])
    other.unwrapped.restore(env.unwrapped.snapshot())
    for text in ("Wrong.", "refuted"):
        assert answer(other, text) == answer(env, text)


def test_without_reviews_it_is_another_environment(data_files):
    with pytest.raises(ConfigurationError, match=r"at least 1, not 0.*ClaimVerification-v0"):
        gym.make(CLAIM_REVIEW, data=data_files[CLAIM_REVIEW], reviews=0)


def test_loops_that_only_append_refuse_the_critics_conversation(data_files):
    kwargs = {"data": data_files[CLAIM_REVIEW]}
    with pytest.raises(ConfigurationError, match="several conversations"):
        OwnEpisode(CLAIM_REVIEW, kwargs, only_text_in="GEM")
    with pytest.raises(ConfigurationError, match="several conversations"):
        environment_factory(CLAIM_REVIEW, **kwargs)
