import json

import pytest

from agent_envs import ConfigurationError
from agent_envs.errors import UnknownNameError
from agent_trainers.tasks.env_members import name_members, read_members

HOP = "AgentR1/SyntheticMultiHop-v0"
TOOLS = "AgentR1/SyntheticTable-v0"


def names(trained, variants=()):
    members = name_members(
        read_members(trained, "envs"), read_members(variants, "eval_envs") if variants else []
    )
    return tuple([member.name for member in named] for named in members)


def test_an_entry_is_an_id_json_or_a_mapping():
    entries = [HOP, json.dumps({"id": TOOLS, "weight": 2}), {"id": HOP, "kwargs": {"hops": 3}}]
    plain, weighted, given = read_members(entries, "envs")
    assert (plain.id, plain.weight, plain.kwargs) == (HOP, 1.0, {})
    assert (weighted.id, weighted.weight) == (TOOLS, 2)
    assert given.kwargs == {"hops": 3}


@pytest.mark.parametrize(("entry", "message"), [
    ({"weight": 2}, "entry 2: id: Field required"),
    ({"id": HOP, "weight": 0}, "entry 2: weight: .*greater than 0, not 0"),
    ({"id": HOP, "weight": float("nan")}, "weight: "),
    ({"id": HOP, "weight": True}, "weight: .*number"),
    ({"id": HOP, "kwargs": [1]}, "kwargs: .*a JSON object"),
    ({"id": HOP, "name": "a/b"}, "name: .*pattern"),
    ({"id": HOP, "tasks": [True]}, r"tasks\.0: .*integer"),
    ({"id": HOP, "tasks": [4, 2, 4]}, "listed more than once"),
    ({"id": HOP, "wieght": 2}, "Did you mean 'weight'"),
    ('{"id": ', "entry 2 is not valid JSON"),
    (3, r"entry 2: id\b"),
])  # fmt: skip
def test_a_wrong_entry_is_named(entry, message):
    with pytest.raises((ConfigurationError, UnknownNameError), match=message):
        read_members([HOP, entry], "envs")


def test_an_empty_list_and_the_weight_of_what_is_only_measured_are_refused():
    with pytest.raises(ConfigurationError, match="envs must list at least one"):
        read_members([], "envs")
    with pytest.raises(ConfigurationError, match="eval_envs, entry 1: weight does nothing"):
        read_members([{"id": HOP, "weight": 2}], "eval_envs", is_weighted=False)


def test_a_name_is_the_id_without_its_namespace_and_unique():
    assert names([HOP, TOOLS]) == (["SyntheticMultiHop-v0", "SyntheticTable-v0"], [])
    variants = [{"id": HOP, "name": "three", "kwargs": {"hops": 3}}, TOOLS]
    assert names([HOP], variants) == (["SyntheticMultiHop-v0"], ["three", "SyntheticTable-v0"])
    for same in (([HOP, HOP],), ([{"id": HOP, "name": "a"}], [{"id": TOOLS, "name": "a"}])):
        with pytest.raises(ConfigurationError, match="have the name"):
            names(*same)
