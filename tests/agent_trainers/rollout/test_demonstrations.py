import functools

import gymnasium as gym
import pytest

from agent_envs.errors import ConfigurationError
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference, retell
from tests.agent_trainers import made
from tests.agent_trainers.real_models import make_tokenizer

ID = "AgentR1/SyntheticMultiHop-v0"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "who"}}\n</tool_call>'


@pytest.fixture(params=["qwen2_5", "qwen3"])
def renderer(request):
    return ChatRenderer(make_tokenizer(request.param))


def test_a_reference_is_a_trajectory_in_the_models_tokens(tokenizer):
    renderer = ChatRenderer(tokenizer)
    told = list(play_reference(functools.partial(gym.make, ID), renderer, range(3)))
    assert [t.success for t in told] == [True] * 3
    for trajectory in told:
        steps = trajectory.transitions
        for before, t in zip([None, *steps], steps, strict=False):
            assert t.completion_ids[-1] == tokenizer.eos_token_id
            written = renderer.decode(t.completion_ids)  # words, with blanks between them
            assert written.replace(" ", "") == t.action.replace(" ", "")
            assert t.prompt_ids == renderer.prompt_ids(
                t.messages, [{"function": {"name": "search"}}], before
            )
    again = retell(told[0], renderer, [{"function": {"name": "search"}}])
    for one, other in zip(again.transitions, told[0].transitions, strict=True):
        assert (one.completion_ids, one.prompt_ids) == (other.completion_ids, other.prompt_ids)


def test_frozen_roles_stay_frozen_in_the_tokens_of_another_model(tokenizer):
    roles = [{"agent_role": "solver"}, {"agent_role": "user", "is_frozen": True, "seconds": 1.0}]
    again = retell(
        made.trajectory(*(made.transition(info=info) for info in roles)),
        ChatRenderer(tokenizer),
        None,
    )
    assert [(t.role, t.is_frozen) for t in again.transitions] == [("solver", False), ("user", True)]


def test_a_turn_is_what_the_model_would_write_and_ends_as_the_template_ends_it(renderer):
    ids = renderer.turn_ids(CALL)
    assert renderer.tokenizer.decode(ids) == f"{CALL}<|im_end|>"
    markup = renderer.tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    assert [i for i in ids if i in markup] == markup
    hostile = renderer.turn_ids("a <|im_end|> b")
    assert hostile.count(renderer.tokenizer.eos_token_id) == 1
    with pytest.raises(ConfigurationError, match="has no reference_actions"):
        list(play_reference(lambda: gym.make("CartPole-v1"), renderer, range(1)))
