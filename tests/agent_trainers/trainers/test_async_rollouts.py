"""Rollouts ahead of the optimiser: staleness, order, masking and resumption."""

import time

import gymnasium as gym
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

from agent_trainers import TINY_POLICY
from agent_trainers.algorithms.losses import sampling_ratio
from agent_trainers.trainers.config import PRESETS, config_class, has_critic
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer
from tests.agent_trainers.short_run import SETTINGS
from tests.agent_trainers.trainers.test_resumable import assert_same

ID = "AgentR1/SyntheticMultiHop-v0"
ASYNC = SETTINGS | {"rollout": "async", "max_staleness": 2, "max_steps": 4}


class SlowTools(gym.Wrapper):
    """Every third group has tools that take longer than a rollout without them."""

    def reset(self, *, seed=None, options=None):
        self._seconds = 0.4 * (seed % 3 == 0)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(self._seconds)
        return super().step(action)


class Trained(TrainerCallback):
    """Records the episodes of each optimiser step; may end the run in the middle of a step."""

    def __init__(self, trainer, dies_at=None):
        self.trainer, self.dies_at, self.steps = trainer, dies_at, {}
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, **_):
        self.steps[state.global_step] = self.trainer.trajectories["train"]
        if state.global_step == self.dies_at:
            raise KeyboardInterrupt

    def episodes(self):
        return {
            step: [(t.group_id, t.env, t.task, t.seed) for t in trained]
            for step, trained in self.steps.items()
        }


def make_trainer(folder, env=ID, **changes):
    settings = ASYNC | changes
    is_ppo = "critic_warmup_steps" in settings
    args = config_class("ppo" if is_ppo else "grpo")(output_dir=str(folder), **settings)
    return (StepPPOTrainer if is_ppo else StepGRPOTrainer)(str(TINY_POLICY), env, args=args)


def slow_env():
    return SlowTools(gym.make(ID))


def run(folder, env=ID, **changes):
    trainer = make_trainer(folder, env, **changes)
    trained = Trained(trainer)
    trainer.train()
    return trainer, trained


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sync"), max_staleness=None, rollout="sync")


def test_without_staleness_a_run_is_bitwise_the_synchronous_one(synchronous, tmp_path):
    trainer, _ = run(tmp_path, max_staleness=0)
    assert_same(trainer, synchronous[0])


def test_started_episodes_are_trained_in_order_although_tools_delay_some(synchronous, tmp_path):
    trainer, trained = run(tmp_path, slow_env)
    assert trained.episodes() == synchronous[1].episodes()
    assert all(t.is_scorable for steps in trained.steps.values() for t in steps)
    num_versions = []
    for step, trajectories in trained.steps.items():
        for trajectory in trajectories:
            versions = [transition.info["policy_version"] for transition in trajectory.transitions]
            assert versions == sorted(versions)
            assert step - 2 <= versions[0] <= versions[-1] <= step
            num_versions.append(len({*versions}))
    assert max(num_versions) > 1  # an unfinished episode continued with newer weights
    batch = trainer.last_batch.tensors
    assert batch["staleness"].max() > 0
    actions = batch["action_mask"].bool()  # ratios are those to the weights that sampled
    sampled = batch["sampling_per_token_logps"][actions]
    assert torch.equal(batch["old_per_token_logps"][actions], sampled)
    logs = trainer.state.log_history[:-1]
    assert max(log["sampling/staleness_max"] for log in logs) in (1, 2)
    assert all(log["sampling/staleness"] <= log["sampling/staleness_max"] for log in logs)
    # Only tokens of the current weights count as drift; other weights differ by more than this.
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-4


def test_rollouts_keep_their_weights_until_new_ones_are_published(tmp_path):
    trainer, ids = make_trainer(tmp_path), torch.tensor([[2, 19, 20, 3]])
    rollouts = trainer.generator._copy
    with torch.no_grad():
        before = rollouts(input_ids=ids).logits
        for weight in trainer.model.parameters():
            weight.mul_(1.1)
        assert torch.equal(rollouts(input_ids=ids).logits, before)
        trainer.generator.publish()
        assert torch.equal(rollouts(input_ids=ids).logits, trainer.model(input_ids=ids).logits)


RESUMED = {
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "a buffer": {
        "per_device_train_batch_size": 4, "steps_per_generation": 2, "critic_warmup_steps": 1,
    },
    "drawn tasks": {
        "env": [{"id": ID, "name": "two"}, {"id": ID, "name": "one", "kwargs": {"hops": 1}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", RESUMED)
def test_a_killed_run_neither_loses_episodes_nor_trains_them_twice(tmp_path, case):
    saving = RESUMED[case] | {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    _, whole = run(tmp_path / "whole", **saving)
    killed = make_trainer(tmp_path / "run", **saving)
    before = Trained(killed, dies_at=3)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = make_trainer(tmp_path / "run", **saving)
    after = Trained(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert sorted(after.steps) == [2, 3, 4]
    kept = {step: episodes for step, episodes in before.episodes().items() if step < 2}
    assert kept | after.episodes() == whole.episodes()


@pytest.mark.parametrize("algorithm", ["gspo", "turn_ppo", "tree"])
def test_presets_train_asynchronously(tmp_path, algorithm):
    args = config_class(algorithm)(
        output_dir=str(tmp_path), **(ASYNC | {"max_steps": 2}), **PRESETS[algorithm]
    )
    kind = StepPPOTrainer if has_critic(algorithm) else StepGRPOTrainer
    trainer = kind(str(TINY_POLICY), ID, args=args)
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_an_error_of_the_policy_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    trainer.generator._copy.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()


def test_abandoned_rollouts_leave_the_state_of_the_next_trainer_alone(tmp_path):
    trainer = make_trainer(tmp_path, bf16=True)
    AcceleratorState._reset_state(reset_partial_state=True)  # as the arguments of the next one do
    with trainer.generator._copy_context():
        assert torch.is_autocast_enabled("cpu")
    assert AcceleratorState._shared_state == {}


def test_far_trajectories_are_masked_as_a_whole(tmp_path):
    # rows 0 and 2 are trajectory 1: .2 + .3 + .9 = 1.4, exp(1.4) = 4.06; row 1 has exp(.4) = 1.49
    log_ratio = torch.tensor([[0.2, 0.3], [0.4, 0.0], [0.9, 0.0]])
    trajectories = torch.tensor([1, 2, 1])
    options = {"low": None, "high": 3.0}
    ratio = sampling_ratio(log_ratio, trajectories, "sequence_mask", **options)
    assert ratio[1].tolist() == pytest.approx([1.4918, 1.4918], rel=1e-4)
    assert ratio[[0, 2]].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    ratio = sampling_ratio(log_ratio, trajectories, "sequence_truncate", **options)
    assert ratio[0].tolist() == [3.0, 3.0]
    # A bound between the ratios of stale trajectories and 1 masks all that changed.
    bounds = {"vllm_importance_sampling_clip_max": 1.0001, "vllm_importance_sampling_clip_min": 0.9}
    trainer, _ = run(tmp_path, vllm_importance_sampling_mode="sequence_mask", **bounds)
    assert max(log["sampling/masked_trajectories"] for log in trainer.state.log_history[:-1]) > 0
