import pytest

from agent_trainers.make_tiny_policy.embedded import mixture
from agent_trainers.policies.scripted import ScriptedPolicy
from benchmarks.held_out import HELD_OUT, report


@pytest.mark.parametrize("name", HELD_OUT)
def test_what_is_held_out_is_none_of_the_mixture_and_can_be_solved_in_its_turns(name):
    trained, changed = mixture().keywords, mixture(**HELD_OUT[name]).keywords
    for argument in {"variant", "hops", "top_k"} & HELD_OUT[name].keys():
        value = changed[argument]
        assert not set(trained[argument]) & set(value if isinstance(value, list) else [value])
    env = mixture(**HELD_OUT[name])()
    env.reset(options={"task": 0})
    for action in env.unwrapped.reference_actions():
        *_, info = env.step(action)
    assert info["metrics"]["success"] == 1.0


def test_the_report_has_a_row_for_each_and_no_ratio_to_nothing():
    rows = report([ScriptedPolicy(lambda request: "<answer> nobody </answer>")], 1).splitlines()
    assert len(rows) == 2 + 1 + len(HELD_OUT)
    assert rows[2] == "| the mixture | 0.0% |  |"
