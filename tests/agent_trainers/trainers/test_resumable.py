"""An interrupted run that is resumed ends bitwise where the uninterrupted run ends."""

import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from agent_envs import ConfigurationError
from agent_envs.errors import CheckpointError
from agent_trainers import TINY_POLICY
from agent_trainers.checkpointing import checkpoints
from agent_trainers.trainers import grpo
from agent_trainers.trainers.config import StepGRPOConfig, StepPPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer
from tests.agent_trainers.short_run import SETTINGS

ID = "AgentR1/SyntheticMultiHop-v0"
BUFFER = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}
CASES = {
    "a log line every 3 steps, a second epoch, a moving reference, a watch and a schedule": {
        "logging_steps": 3, "beta": 0.1, "sync_ref_model": True,
        "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5,
        "train_dataset": Dataset.from_dict({"task": list(range(5))}),
        "reward_schedules": '{"new_gold_passage": {"kind": "adaptive", "target": 0.01}}',
        "extensions": "agent_trainers.experimental.hack_watch:HackWatch",
    },
    "two passes over accumulated batches with a teacher that knows skills": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2,
        "extensions": '{"agent_trainers.experimental.skills:SkillDistillation": {"weight": 0.5}}',
    },
    "branches that are trained": {
        "advantage_estimator": "agent_trainers.experimental.branching:tree",
        "extensions": '{"agent_trainers.experimental.branching:Branching": {"budget": 1}}',
        **BUFFER,
    },
    "a critic in a mixture": {
        "kind": StepPPOTrainer, "critic_warmup_steps": 2, **BUFFER,
        "env": [{"id": ID, "name": "two", "weight": 3},
                {"id": ID, "name": "few", "kwargs": {"hops": 1}, "tasks": [4, 5, 6]}],
    },
    "levels and groups that are played anew": {
        "max_extra_groups": 2,
        "curriculum": '{"kind": "levels", "groups": 2, "target": 0.1}', **BUFFER,
        "env": [{"id": ID, "name": "two"}, {"id": ID, "name": "one", "kwargs": {"hops": 1}}],
    },
}  # fmt: skip


SAVING = SETTINGS | {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}


def make_trainer(
    folder, kind=StepGRPOTrainer, env=ID, train_dataset=None, eval_dataset=None, **changes
):
    config = StepPPOConfig if kind is StepPPOTrainer else StepGRPOConfig
    args = config(output_dir=str(folder), **(SAVING | changes))
    return kind(
        str(TINY_POLICY), env, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with a buffer, whose folder no test changes."""
    trainer = make_trainer(tmp_path_factory.mktemp("whole") / "run", **BUFFER)
    trainer.train()
    return trainer


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of its folder to change."""
    return shutil.copytree(whole.args.output_dir, tmp_path / "copy")


def weights(trainer):
    critic = getattr(trainer, "critic", torch.nn.Module())
    return [*trainer.model.state_dict().values(), *critic.state_dict().values()]


def history(trainer):
    """The log without times."""
    times = ("time", "seconds", "per_second")
    return [
        {name: value for name, value in entry.items() if not any(t in name for t in times)}
        for entry in trainer.state.log_history
    ]


def assert_same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    for entry, expected in zip(history(other), history(one), strict=True):
        assert entry == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_bitwise_like_the_whole_run(tmp_path, case):
    settings = CASES[case] | {"save_steps": 3}  # in the middle of buffer, window and second epoch
    whole = make_trainer(tmp_path / "run", **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same(whole, resumed)
    played = [[t.task_id for t in each.trajectories["train"]] for each in (whole, resumed)]
    assert played[0] == played[1]


def test_a_power_cut_while_saving_loses_that_checkpoint_alone(whole, tmp_path, monkeypatch):
    class PowerCut(BaseException):
        pass

    folder = tmp_path / "run"
    cut = make_trainer(folder, save_total_limit=1, **BUFFER)
    publish = checkpoints.publish_folder

    def die(finished, target):
        if target.name == "checkpoint-3":
            assert (finished / "optimizer.pt").exists()
            raise PowerCut
        publish(finished, target)

    monkeypatch.setattr(checkpoints, "publish_folder", die)
    with pytest.raises(PowerCut):
        cut.train()
    monkeypatch.undo()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    (folder / checkpoints.UNFINISHED / "checkpoint-3").mkdir(parents=True)  # not tidied up
    resumed = make_trainer(folder, save_total_limit=1, **BUFFER)
    resumed.train(resume_from_checkpoint=True)
    assert_same(whole, resumed)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-5"]
    assert not (folder / checkpoints.UNFINISHED).exists()


def test_damaged_checkpoints_are_skipped_with_a_warning(whole, copy, tmp_path, caplog):
    bad = copy / "checkpoint-5" / "optimizer.pt"
    bad.write_bytes(bad.read_bytes()[:1000])
    resumed = make_trainer(copy, **BUFFER)
    resumed.train(resume_from_checkpoint=True)
    assert_same(whole, resumed)
    assert "checkpoint-5: optimizer.pt is damaged" in caplog.text
    assert checkpoints.find_damage(bad.parent) is None  # written again
    for state in copy.glob("checkpoint-*/trainer_state.json"):
        state.write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint-1: trainer_state.json is damaged"):
        make_trainer(copy, **BUFFER).train(resume_from_checkpoint=True)
    new = make_trainer(tmp_path / "new")
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        new.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"trainer_state.json is damaged.*--resume"):
        new.train(resume_from_checkpoint=str(bad.parent))


def test_a_full_disk_is_a_clear_error_and_what_was_saved_stays(tmp_path):
    trainer = make_trainer(tmp_path / "run", save_total_limit=1, max_steps=2)
    trainer.save_model()
    saved = (tmp_path / "run" / "model.safetensors").read_bytes()

    class FillDisk(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer.add_callback(FillDisk())
    try:
        with pytest.raises(CheckpointError, match=r"step 2 could not be written"):
            trainer.train()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(CheckpointError, match="The model could not be written"):
            trainer.save_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == saved
    assert checkpoints.find_checkpoint(tmp_path / "run")[0] is not None
    assert not (tmp_path / "run" / checkpoints.UNFINISHED).exists()  # room is given back


def test_another_batch_layout_resumes_at_the_end_of_a_buffer_only(copy):
    other = make_trainer(copy.parent / "other", per_device_train_batch_size=8)
    with pytest.raises(ConfigurationError, match="'per_device_train_batch_size': 4"):
        other.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    other = make_trainer(copy.parent / "other", per_device_train_batch_size=8)
    other.train(resume_from_checkpoint=str(copy / "checkpoint-4"))
    assert other.state.global_step == 5


def test_a_checkpoint_of_the_model_alone_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, save_only_model=True, save_steps=1, max_steps=1)
    trainer.train()
    other = make_trainer(tmp_path, save_only_model=True, max_steps=2)
    with pytest.raises(CheckpointError, match="save_only_model cannot be resumed"):
        other.train(resume_from_checkpoint=True)


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_dataset=Dataset.from_dict({"task": [0]}), eval_strategy="steps",
        eval_steps=1, metric_for_best_model="eval_runtime", greater_is_better=False, max_steps=2,
        save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    best = tmp_path / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.state.best_model_checkpoint == str(best)
    assert (best / "optimizer.pt").exists()


def test_a_moving_reference_of_a_sharded_model_is_refused(tmp_path, monkeypatch):
    sharded = lambda trainer: SimpleNamespace(is_sharded=True)  # noqa: E731
    monkeypatch.setattr(grpo, "TrainerGenerator", sharded)
    with pytest.raises(ConfigurationError, match="sync_ref_model is not supported with FSDP"):
        make_trainer(tmp_path, beta=0.1, sync_ref_model=True)
