import re
from functools import partial

import gymnasium as gym
import pytest

from agent_envs.core.contexts import estimate_tokens
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.rollout.evaluation import evaluate_policy
from benchmarks.summaries import ARMS, BUDGET, ENV, FACTS_PER_PAGE, NUM_PAGES, demonstrate, main


def test_demonstrations_answer_what_they_see_and_summaries_lose_it_at_times():
    done = {
        arm: evaluate_policy(
            partial(gym.make, ENV, context=context), ScriptedPolicy(demonstrate), range(60)
        )
        for arm, (context, _) in ARMS.items()
    }
    assert done["full"].metrics["success"] == done["full"].metrics["has_fact"] == 1.0
    for arm in ("window", "budget"):  # a guess is right in a tenth of the cases
        assert done[arm].metrics["has_fact"] == 0.0
        assert done[arm].metrics["success"] < 0.3
    kept = done["trained summaries"].metrics
    assert 0.1 < kept["has_fact"] <= kept["success"] < 0.6
    sizes = [
        estimate_tokens(episode.transitions[-1].messages) for episode in done["full"].trajectories
    ]
    assert 3.5 * BUDGET < min(sizes) < max(sizes) < 4.5 * BUDGET
    for episode in done["trained summaries"].trajectories:
        kinds = [step.info["action"]["kind"] for step in episode.transitions]
        assert kinds == [*["message", "message", "summary"] * (NUM_PAGES // 2), "message", "answer"]


@pytest.mark.parametrize(("arms", "error"), [("budget", ".*Add it"), ("windows", "'windows'.*")])
def test_arms_without_comparison_are_refused_before_any_run(arms, error, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--arms", arms, "--work", str(tmp_path / "work")])
    assert re.search(error, capsys.readouterr().err)
    assert not (tmp_path / "work").exists()


def test_an_early_answer_is_refused_and_its_word_is_not_judged():
    env = gym.make(ENV)
    env.reset(seed=0)
    answer = f"<answer> {env.unwrapped.task.answers[0]} </answer>"
    for page in range(NUM_PAGES):
        assert env.step(answer)[2] is False
        shown = env.step("search")[0]
        assert len(shown.split()) == 2 * FACTS_PER_PAGE, page
    env.step("search")
    _, reward, terminated, _, info = env.step(answer)
    assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, 1.0)
