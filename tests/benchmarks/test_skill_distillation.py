import functools

import gymnasium as gym

from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference
from agent_trainers.rollout.episode import template_tools
from benchmarks.learning_run import MULTI_HOP
from benchmarks.performance.models import load_tokenizer
from benchmarks.skill_distillation import ShowSkill, report, with_skill


def test_the_prompt_of_a_demonstration_is_that_in_which_its_use_is_measured():
    renderer = ChatRenderer(load_tokenizer())
    (told,) = play_reference(functools.partial(gym.make, MULTI_HOP), renderer, [3])
    env = ShowSkill(gym.make(MULTI_HOP))
    _, info = env.reset(seed=3, options={"task": 3})
    for transition in with_skill(told, renderer).transitions:
        # both written afresh: how a turn is spelled is the same in the embedded policy's words
        state = renderer.prompt_ids(info["messages"], template_tools(info), None)
        assert state == transition.prompt_ids
        *_, info = env.step(transition.action)


def test_the_table_sets_each_share_beside_none_with_the_same_seeds():
    success = {"0": [0.5, 0.6, 0.7], "0.5": [0.6, 0.7, 0.9]}
    text = report({"as it is": {"alone": 0.1, "shown": 0.25}}, success)
    assert "| as it is | 10.0 % | 25.0 % |" in text
    # mean 0.6, deviation 0.1: 4.303 * 10 / sqrt(3) = 24.8; differences 0.1, 0.1, 0.2: 14.3
    assert "| 0 | 50.0 60.0 70.0 | 60.0 ± 24.8 |  |" in text
    assert "| 0.5 | 60.0 70.0 90.0 | 73.3 ± 37.9 | +13.3 ± 14.3 |" in text
