"""Claims, demonstrations and vocabulary of the experiment with a solver and a critic."""

import gymnasium as gym
import pytest

from agent_trainers import TINY_POLICY
from agent_trainers.policies.models import load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference
from benchmarks import roles
from benchmarks.roles import ARMS, ONE_ROLE, TWO_ROLES, env_kwargs, extend, write_claims


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    write_claims(folder)
    return folder


def make(arm, data):
    return gym.make(ARMS[arm][0], **env_kwargs(arm, data, "train"))


@pytest.fixture(scope="module")
def demonstrations(data):
    renderer = ChatRenderer(load_tokenizer(str(TINY_POLICY)))
    return list(play_reference(lambda: make(TWO_ROLES, data), renderer, range(100)))


def test_both_roles_err_in_demonstrations_at_the_stated_rates(demonstrations):
    first = [episode.metrics["first_joint_em"] for episode in demonstrations]
    rejected = [episode.metrics["num_rejections"] for episode in demonstrations]
    right_reviews = sum(a != b for a, b in zip(first, rejected, strict=True))
    # 100 draws: within three standard deviations of .49 (.7 times .7) and .75
    assert 34 <= sum(first) <= 64
    assert 62 <= right_reviews <= 88
    assert sum(first) < sum(episode.metrics["success"] for episode in demonstrations) < 80
    assert all(episode.transitions[-1].terminated for episode in demonstrations)
    assert {episode.metrics["num_invalid_actions"] for episode in demonstrations} == {0.0}


def test_the_last_two_turns_of_skilled_demonstrations_are_right_and_both_verdicts_occur(data):
    arguments = {**env_kwargs(TWO_ROLES, data, "train"), "chances": roles.SKILLED}
    renderer = ChatRenderer(load_tokenizer(str(TINY_POLICY)))
    skilled = list(play_reference(lambda: gym.make(roles.REVIEW, **arguments), renderer, range(40)))
    assert {episode.metrics["success"] for episode in skilled} == {1.0}
    assert {step.reward_terms["review"] for e in skilled for step in e.transitions} == {0.0}
    assert 8 <= sum(episode.metrics["first_joint_em"] for episode in skilled) <= 32


def test_no_name_of_a_split_has_two_facts_and_splits_differ(data):
    rows = {split: list(roles.rows(seeds)) for split, seeds in roles.WORLDS.items()}
    for split in rows.values():
        names = [title for row in split for title, _ in row["context"]]
        assert len(names) == len(set(names))
    assert make(ONE_ROLE, data).unwrapped.num_tasks > 1.9 * len(rows["train"])
    facts = [{str(row["evidences"]) for row in split} for split in rows.values()]
    assert len(facts[0] & facts[1]) == 0


@pytest.mark.parametrize(("arm", "names"), [(TWO_ROLES, {"solver"}), (ONE_ROLE, {None})])
def test_only_the_arm_with_a_baseline_each_names_roles(data, arm, names):
    shared = "two roles, one baseline"
    for one, expected in ((arm, names), (shared, {None})):
        env = make(one, data)
        env.reset(options={"task": 0})
        *_, info = env.step(env.unwrapped.reference_actions()[0])
        assert {info.get("agent_role")} == expected
        assert ("reward_owners" in info) == (expected == {"solver"})


def test_the_extended_tokenizer_reads_and_writes_every_turn(data, demonstrations):
    model, tokenizer = extend(demonstrations)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    env = make(TWO_ROLES, data)
    for step in (step for episode in demonstrations for step in episode.transitions):
        ids = tokenizer(step.action).input_ids
        assert tokenizer.unk_token_id not in ids
        assert len(ids) < roles.MAX_NEW_TOKENS
        written, read = (env.unwrapped._format.parse(text, env.unwrapped.tools)
                         for text in (step.action, tokenizer.decode(ids)))  # fmt: skip
        assert (read.kind, read.name) == (written.kind, written.name)


def test_the_embeddings_of_new_words_are_the_same_in_every_run(demonstrations):
    first, second = (extend(demonstrations)[0].get_input_embeddings().weight for _ in range(2))
    assert first.equal(second)
