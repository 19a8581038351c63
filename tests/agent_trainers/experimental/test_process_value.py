"""Process values: from branches to a critic that says what it means, and back into a run."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import agent_envs  # noqa: F401 - registers the environments
from agent_envs import ConfigurationError
from agent_envs.errors import DataError
from agent_envs.wrappers.potential_shaping import PotentialShaping
from agent_trainers.experimental.values import process_value
from agent_trainers.experimental.values.process_value import ProcessValue, Reading
from agent_trainers.experimental.values.training import (
    Example,
    ExampleRow,
    ExampleSets,
    FitSettings,
    calibrate,
    fit,
    label_noise,
    make_sets,
    measure,
    outcome,
)
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.trainers.config import StepPPOConfig
from agent_trainers.trainers.ppo import CriticModel, StepPPOTrainer, save_critic
from agent_trainers.trajectory import StopReason, Trajectory, Transition

ID = "AgentR1/SyntheticMultiHop-v0"
OUTCOMES = [[1.0, 0.0], [1.0, 1.0]]
"""Of two states."""


def transition(prompt, completion, reward=0.0):
    return Transition(
        messages=[{"role": "user", "content": "q"}], prompt_ids=prompt, completion_ids=completion,
        logprobs=np.zeros(len(completion), np.float32), action="a", reward=reward,
        reward_terms={}, terminated=False, truncated=False, info={},
    )  # fmt: skip


def trajectory(task, *transitions, success=0.0, start=0, stop_reason=StopReason.ANSWERED):
    return Trajectory(
        task_id=task, group_id=task, transitions=list(transitions), metrics={"success": success},
        timings={}, stop_reason=stop_reason, start=start,
    )  # fmt: skip


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


def test_the_outcome_of_a_step_is_success_or_the_discounted_return_from_there_on():
    played = trajectory("t", *(transition([1], [2], r) for r in (1.0, 2.0, 4.0)), success=1.0)
    assert outcome(played, 1, "success", 0.5) == 1.0
    assert outcome(played, 1, "return", 0.5) == 2.0 + 0.5 * 4.0


def test_a_state_is_worth_the_mean_outcome_of_what_branched_off_it():
    first, good, bad = transition([1], [2]), transition([1, 2, 5], [3]), transition([1, 2, 5], [4])
    played = [
        part
        for task in "abcde"
        for part in (
            trajectory(task, first, good, success=1.0),
            trajectory(task, first, good, success=1.0, start=1),
            trajectory(task, first, bad, start=1),
            trajectory(task, first, bad, start=1),
            trajectory(task, first, bad, stop_reason=StopReason.POLICY_ERROR, start=1),  # no say
        )
    ]
    sets = make_sets(played, "success", 1.0, np.random.default_rng(0))
    assert [sum(len(e.outcomes) for row in rows for e in row.examples) // 8 for rows in sets] == [
        3, 1, 1
    ]  # fmt: skip
    labels = {e.ids: (e.label, len(e.outcomes)) for row in sets.test for e in row.examples}
    assert labels == {
        (1,): (1.0, 1),  # the steps before a branch are the recorded episode's
        (1, 2): (1.0, 1),
        (1, 2, 5): (0.5, 4),
        (1, 2, 5, 3): (1.0, 2),
        (1, 2, 5, 4): (0.0, 2),
    }
    # what begins another sequence is read with it
    assert [row.ids for row in sets.test] == [(1, 2, 5, 4), (1, 2, 5, 3)]


def test_too_few_tasks_and_episodes_without_tokens_are_refused():
    two = [trajectory(task, transition([1], [2])) for task in "ab"]
    with pytest.raises(DataError, match="2 tasks"):
        make_sets(two, "success", 1.0, np.random.default_rng(0))
    served = [trajectory(task, transition([], [])) for task in "abcdef"]
    with pytest.raises(DataError, match="no tokens"):
        make_sets(served, "success", 1.0, np.random.default_rng(0))


def test_a_value_does_not_depend_on_what_is_read_beside_it(critic, tokenizer, monkeypatch):
    value = ProcessValue(critic, ChatRenderer(tokenizer))
    sequences = [[5, 6], [5, 6, 7, 8, 9], [9] * 30, [5, 6]]
    together = value.values(sequences)
    monkeypatch.setattr(process_value, "MAX_TOKENS", 1)
    alone = [value.values([sequence])[0] for sequence in sequences]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(set(np.round(together, 4))) == 3


def rows(labels, count=2):
    """Return rows of a state and an action each; what the action is decides its label."""
    return [
        ExampleRow((5, token), [Example((5, token), True, [label] * count),
                                Example((5,), False, [0.0, 1.0])])
        for token, label in labels.items()
    ]  # fmt: skip


@pytest.mark.parametrize("head_only", [False, True])
def test_a_critic_learns_what_actions_come_to(critic, head_only):
    sets = ExampleSets(*[rows({20: 0.0, 21: 1.0, 22: 0.2})] * 3)
    body = [p.clone() for p in critic.body.parameters()]
    settings = FitSettings(epochs=15, learning_rate=1e-2, head_only=head_only)
    losses = list(fit(critic, sets, settings, np.random.default_rng(0)))
    # half of all outcomes are of the state, whose variance of 0.25 nothing explains, but its label
    # is the mean: so everything can be learned
    assert min(measured for _, measured in losses) < 0.3 * losses[0][0]
    same = all(torch.equal(a, b) for a, b in zip(body, critic.body.parameters(), strict=True))
    assert same == head_only


def test_a_critic_that_knows_nothing_begins_at_the_mean_outcome(tiny_policy):
    rows = [ExampleRow((i,), [Example((i,), False, found)]) for i, found in enumerate(OUTCOMES)]
    fresh = CriticModel(tiny_policy)
    settings = FitSettings(epochs=1, learning_rate=1e-12)
    list(fit(fresh, ExampleSets(rows, rows, rows), settings, np.random.default_rng(0)))
    with torch.no_grad():
        assert fresh.head.linear.bias.item() == pytest.approx(0.75)  # three of four


def test_the_noise_of_labels_is_that_of_means_of_few():
    # the outcomes of a state vary by (0.5 + 0) / (1 + 1); a mean of two by half of that
    examples = [Example((i,), False, found) for i, found in enumerate(OUTCOMES)]
    assert label_noise(examples) == pytest.approx(0.125)
    assert np.isnan(label_noise([Example((1,), False, [1.0])]))


def test_the_weights_of_the_best_epoch_are_kept(critic):
    # what is measured on is the opposite of what is trained on: every epoch makes it worse
    sets = ExampleSets(rows({20: 0.0, 21: 9.0}), rows({20: 9.0, 21: 0.0}), [])
    settings = FitSettings(epochs=6, learning_rate=1e-2)
    losses = [measured for _, measured in fit(critic, sets, settings, np.random.default_rng(0))]
    again = ExampleSets(sets.train, sets.calibration, [])
    (_, kept), *_ = fit(critic, again, FitSettings(epochs=1, learning_rate=0.0),
                            np.random.default_rng(0))  # fmt: skip
    assert kept == pytest.approx(min(losses), rel=1e-4)


def test_calibrated_values_are_right_on_average(critic):
    examples = rows({20: 3.0, 21: 5.0, 22: 4.0, 23: 1.0})
    calibrate(critic, examples)
    line = calibrate(critic, examples)  # a second time there is nothing to set right
    assert line == pytest.approx((1.0, 0.0), abs=1e-3)
    measured = measure(critic, examples)
    assert set(measured) == {"states", "actions"}


def test_a_saved_value_is_the_same_when_it_is_loaded(folder, critic, tokenizer):
    readings = [
        Reading([{"role": "user", "content": "who directed it ?"}], None),
        Reading([{"role": "user", "content": "who directed it ?"}], None, "<answer>a</answer>"),
    ]
    expected, counts = ProcessValue(critic, ChatRenderer(tokenizer)).read(readings)
    assert ProcessValue.load(folder).read(readings) == (pytest.approx(expected, abs=1e-6), counts)
    assert expected[0] != expected[1]
    assert counts[1] > counts[0] > 0


def test_a_folder_without_a_critic_says_how_to_get_one(tiny_policy):
    with pytest.raises(ConfigurationError, match=r"experimental\.values"):
        ProcessValue.load(tiny_policy)


def test_a_critic_of_another_model_is_refused(folder):
    config = (folder / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
    (folder / "config.json").write_text(config)
    with pytest.raises(ConfigurationError, match="could not be loaded"):
        CriticModel(str(folder))


@pytest.fixture
def make_trainer(tiny_policy, tokenizer, make_config):
    def make(**changes):
        config = make_config(**changes, _kind=StepPPOConfig)
        return StepPPOTrainer(tiny_policy, ID, config, processing_class=tokenizer)

    return make


def test_ppo_begins_with_a_process_value(make_trainer, played, folder):
    trainer = make_trainer(critic_model=str(folder))
    batch = trainer.builder.build(trainer.model, played[:1], {}).record
    value = trainer.values(batch.tensors)[0, 0].item()
    first = ProcessValue.load(folder).values([played[0].transitions[0].prompt_ids])
    assert value == pytest.approx(first[0], abs=1e-5)
    assert abs(value) > 1e-3  # a critic that knows nothing says 0


@pytest.mark.parametrize("kind", ["head", "own"])
def test_the_critic_of_a_run_is_a_process_value(make_trainer, tiny_policy, played, kind):
    trainer = make_trainer(critic_model=tiny_policy if kind == "own" else None)
    for parameter in trainer.critic.parameters():
        parameter.data.add_(0.01)
    trainer.save_model()
    batch = trainer.builder.build(trainer.model, played[:1], {}).record
    expected = trainer.values(batch.tensors)[0, 0].item()
    value = ProcessValue.load(trainer.args.output_dir)
    state = played[0].transitions[0].prompt_ids
    assert value.values([state]) == pytest.approx([expected], abs=1e-5)
    assert expected != 0.0


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
    assert sum(terms) == pytest.approx(-first, abs=1e-5)
    assert len({round(term, 5) for term in terms}) == len(terms)


def test_as_a_reward_term_it_is_what_the_action_adds_before_anybody_knows_what_it_does(folder):
    value = ProcessValue.load(folder)
    env = gym.make(ID, rewards={"exact_match": 1.0, "gain": (value.advantage, 0.5)})
    _, info = env.reset(seed=0)
    state = Reading(info["messages"], info["tools"])
    action = env.unwrapped.reference_actions()[0]
    (before, after), _ = value.read([state, state._replace(action=action)])
    *_, info = env.step(action)
    assert info["reward_terms"]["gain"] == pytest.approx(0.5 * (after - before), abs=1e-6)
