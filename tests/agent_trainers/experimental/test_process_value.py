"""Process values: from branches to a critic, and from a value to a run and a search."""

import dataclasses
import functools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import agent_envs  # noqa: F401 - registers the environments
from agent_envs import ConfigurationError, UnknownNameError
from agent_envs.errors import DataError
from agent_envs.wrappers.potential_shaping import PotentialShaping
from agent_trainers.experimental import search, values
from agent_trainers.experimental.values import (
    Example,
    ProcessValue,
    fit,
    make_examples,
    make_sets,
    reliability,
)
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.trainers.batch_builder import build_batch
from agent_trainers.trainers.ppo import CriticModel, StepPPOTrainer, save_critic
from agent_trainers.trajectory import StopReason, save_trajectories
from tests.agent_trainers.gradients import TOLERANCE
from tests.agent_trainers.made import trajectory, transition

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def critic(tiny_policy):
    """A critic with an opinion."""
    torch.manual_seed(0)
    critic = CriticModel(tiny_policy)
    torch.nn.init.normal_(critic.head.linear.weight, std=0.1)
    torch.nn.init.constant_(critic.head.linear.bias, 0.3)
    return critic.eval()


@pytest.fixture
def folder(critic, tokenizer, tmp_path):
    """The critic as ``python -m agent_trainers.experimental.values`` leaves it."""
    critic.body.config.save_pretrained(tmp_path / "value")
    tokenizer.save_pretrained(tmp_path / "value")
    save_critic(critic, tmp_path / "value")
    return tmp_path / "value"


def test_steps_are_labelled_with_success_or_the_discounted_return_from_there_on():
    first, second = transition([1], [2], reward=1.0), transition([1, 2, 5], [3], reward=2.0)
    rewritten = transition([7], [4, 4], reward=4.0)
    played = trajectory(first, second, rewritten, metrics={"success": 1.0})
    # steps that extend each other share an example
    assert make_examples(played, "success", 0.5) == [
        Example([1, 2, 5, 3], [0, 1, 2, 3], [1.0] * 4), Example([7, 4, 4], [0, 2], [1.0] * 2),
    ]  # fmt: skip
    assert [e.outcomes for e in make_examples(played, "return", 0.5)] == [
        [3.0, 3.0, 4.0, 4.0], [4.0, 4.0],  # 1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4
    ]  # fmt: skip
    with pytest.raises(DataError, match="no token ids"):
        make_examples(trajectory(transition([], [2])), "success", 1.0)
    # the steps before a branch are the recorded episode's
    branch = trajectory(first, second, start=1, metrics={"success": 0.0})
    assert make_examples(branch, "success", 1.0) == [Example([1, 2, 5, 3], [2, 3], [0.0] * 2)]


def test_sets_have_tasks_of_their_own_and_scorable_episodes_only():
    step, won = transition([1], [2]), {"metrics": {"success": 1.0}}
    played = [trajectory(step, task_id=task, **won) for task in "abcde"] * 2
    played += [trajectory(step, task_id="a", stop_reason=StopReason.POLICY_ERROR, **won)]
    sets = make_sets(played, "success", 1.0, np.random.default_rng(0))
    assert [len(examples) for examples in sets] == [6, 2, 2]
    with pytest.raises(DataError, match="2 tasks"):
        make_sets(played[:2], "success", 1.0, np.random.default_rng(0))


def test_episodes_that_cannot_measure_a_value_are_refused(tmp_path):
    step, file = transition([1], [2]), str(tmp_path / "episodes.jsonl")
    save_trajectories(file, [trajectory(step, task_id=task) for task in "abc"])
    with pytest.raises(DataError, match="at least 100 tasks with --keep_failures"):
        values.run([file, "--output_dir", str(tmp_path / "value")])
    assert not (tmp_path / "value").exists()


def test_a_value_does_not_depend_on_what_is_read_beside_it(critic, tokenizer, monkeypatch):
    value = ProcessValue(critic, ChatRenderer(tokenizer))
    sequences = [[5, 6], [5, 6, 7, 8, 9], [9] * 30, [5, 6]]
    together = value.values(sequences)
    monkeypatch.setattr(values, "MAX_TOKENS", 1)
    alone = [value.values([sequence])[0] for sequence in sequences]
    assert together == pytest.approx(alone, abs=TOLERANCE)
    assert len(set(np.round(together, 4))) == 3


def examples(labels):
    """Return examples of a state and an action each; what the action is decides its label."""
    return [
        Example([5, token], [0, 1], [state, label])
        for token, label in labels.items()
        for state in (0.0, 1.0)
    ]


def fitted(critic, train, choice, epochs, learning_rate=1e-2):
    rng = np.random.default_rng(0)
    return list(fit(critic, train, choice, epochs=epochs, learning_rate=learning_rate, rng=rng))


def test_a_critic_learns_what_actions_come_to(critic):
    learned = examples({20: 0.0, 21: 1.0, 22: 0.2})
    errors = fitted(critic, learned, learned, 40)
    # half of all labels are the state's, whose variance of 0.25 nothing explains
    assert min(errors) == pytest.approx(0.125, abs=0.02)


def test_a_critic_that_knows_nothing_begins_at_the_mean_outcome(tiny_policy):
    found = [Example([i], [0], [outcome]) for i, outcome in enumerate([1.0, 0.0, 1.0, 1.0])]
    fresh = CriticModel(tiny_policy)
    fitted(fresh, found, found, 1, 1e-12)
    with torch.no_grad():
        assert fresh.head.linear.bias.item() == pytest.approx(0.75)  # three of four


def test_the_weights_of_the_best_epoch_are_kept(critic):
    # what is measured on is the opposite of what is trained on: every epoch makes it worse
    sets = examples({20: 0.0, 21: 9.0}), examples({20: 9.0, 21: 0.0})
    errors = fitted(critic, *sets, 6)
    (kept,) = fitted(critic, *sets, 1, 0.0)
    assert kept == pytest.approx(min(errors), rel=1e-4)


def test_the_calibration_error_is_the_distance_of_bins_from_what_came_true():
    # ten bins of equal size: what is given 0.2 comes true in 0.5 of the cases, 0.8 in 0.9
    found = reliability([0.2] * 5 + [0.8] * 5, [0.5] * 5 + [0.9] * 5)
    assert found["calibration_error"] == pytest.approx((0.3 + 0.1) / 2)
    assert found["mean_squared_error"] == pytest.approx((0.09 + 0.01) / 2)
    assert found["mean_squared_error_of_mean"] == pytest.approx(0.04)
    assert found["correlation"] == pytest.approx(1.0)
    assert np.isnan(reliability([0.5, 0.5], [0.0, 1.0])["correlation"])
    # errors of both signs within a bin cancel
    chances = np.random.default_rng(0).random(20_000)
    came_true = np.random.default_rng(1).random(20_000) < chances
    found = reliability(chances, came_true)
    assert found["calibration_error"] < 0.02
    assert found["mean_squared_error"] == pytest.approx(1 / 6, abs=0.01)  # E[p * (1 - p)]


def test_a_saved_value_is_the_same_when_it_is_loaded(folder, critic, tokenizer, tiny_policy):
    sequences = [[5, 6], [5, 6, 7]]
    expected = ProcessValue(critic, ChatRenderer(tokenizer)).values(sequences)
    assert ProcessValue.load(folder).values(sequences) == pytest.approx(expected, abs=TOLERANCE)
    with pytest.raises(ConfigurationError, match=r"experimental\.values"):
        ProcessValue.load(tiny_policy)


@pytest.fixture
def make_trainer(make_trainer):
    return functools.partial(make_trainer, kind=StepPPOTrainer)


@pytest.mark.parametrize("kind", ["head", "own", "value"])
def test_the_critic_of_a_run_is_a_process_value_and_begins_with_one(
    make_trainer, tiny_policy, played, folder, kind
):
    start = {"head": None, "own": tiny_policy, "value": str(folder)}[kind]
    trainer = make_trainer(critic_model=start)
    batch = build_batch(trainer, played[:1], {})
    state = played[0].transitions[0].prompt_ids

    def assert_same(saved):
        found = trainer.values(batch.tensors)[0, 0].item()
        assert ProcessValue.load(saved).values([state]) == pytest.approx([found], abs=TOLERANCE)
        assert abs(found) > 1e-3  # a critic that knows nothing says 0

    if kind == "value":
        assert_same(folder)
    for parameter in trainer.critic.parameters():
        parameter.data.add_(0.01)
    trainer.save_model()
    assert_same(trainer.args.output_dir)


def test_as_a_potential_it_adds_up_to_the_value_of_the_first_state(folder):
    value = ProcessValue.load(folder)
    env = PotentialShaping(gym.make(ID), value.potential)
    env.reset(seed=0)
    first = value.potential(env.unwrapped)
    terms = []
    for action in env.unwrapped.reference_actions():
        *_, info = env.step(action)
        terms.append(info["reward_terms"]["shaping"])
    # A solved task ends in a state that counts as 0: the additions sum to -potential(s_0).
    assert sum(terms) == pytest.approx(-first, abs=TOLERANCE)
    assert len({round(term, 5) for term in terms}) == len(terms)


def test_as_a_reward_term_it_is_what_the_action_adds_before_anybody_knows_what_it_does(
    folder, tokenizer
):
    value = ProcessValue.load(folder)
    env = gym.make(ID, rewards={"exact_match": 1.0, "gain": (value.advantage, 0.5)})
    _, info = env.reset(seed=0)
    renderer = ChatRenderer(tokenizer)
    state = renderer.prompt_ids(info["messages"], info["tools"], None)
    action = env.unwrapped.reference_actions()[0]
    before, after = value.values([state, [*state, *renderer.turn_ids(action)]])
    *_, info = env.step(action)
    assert info["reward_terms"]["gain"] == pytest.approx(0.5 * (after - before), abs=TOLERANCE)


def test_a_value_is_trained_and_searched_with(played, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_trajectories("few.jsonl", played)
    with pytest.raises(DataError, match="tasks"):
        values.run(["few.jsonl"])
    more = [
        dataclasses.replace(t, task_id=f"{t.task_id} {i}", metrics={"success": success})
        for t in played
        for i in range(3)
        for success in (0.0, 1.0)
    ]
    save_trajectories("played.jsonl", more)
    command = ["played.jsonl", "--epochs", "1", "--output_dir", "run"]
    values.run(command)
    measured = json.loads((tmp_path / "run" / "value.json").read_text(encoding="utf-8"))
    assert 0 <= measured["reliability"]["calibration_error"] <= 1
    assert measured["num_episodes"] == len(more)
    with pytest.raises(ConfigurationError, match=r"contains value\.json"):
        values.run(command)
    search.run(["played.jsonl", "--value", "run"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " success " in line]
    assert [line.split()[0] for line in lines] == ["sample", "best_of", "oracle_best_of"]


def test_training_that_diverges_is_an_error(critic):
    sets = examples({20: 0.0, 21: 1.0}), examples({20: 0.0, 21: 1.0})
    with pytest.raises(ConfigurationError, match="lower --learning_rate"):
        fitted(critic, *sets, 2, float("inf"))


@pytest.mark.parametrize(("command", "arguments", "error", "words"), [
    (search, "played.jsonl --value nowhere", ConfigurationError, "critic.safetensors"),
    (values, "x.jsonl --output_dir .", ConfigurationError, r"contains critic\.safetensors"),
    (values, "x.jsonl --gamma 2", ConfigurationError, "gamma"),
    (values, "x.jsonl --target sucess", UnknownNameError, "success"),
])  # fmt: skip
def test_wrong_options_are_refused(command, arguments, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "critic.safetensors").write_text("trained")
    with pytest.raises(error, match=words):
        command.run(arguments.split())


def test_episodes_of_a_model_with_more_tokens_are_refused(critic, tokenizer):
    value = ProcessValue(critic, ChatRenderer(tokenizer))
    with pytest.raises(DataError, match="another model acted"):
        value.values([[1, 50_000]])
