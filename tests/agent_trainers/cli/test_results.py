import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from datasets import Dataset

from agent_trainers import TINY_POLICY, StepGRPOConfig, StepGRPOTrainer
from agent_trainers.batching.collate import collate
from agent_trainers.batching.rows import make_rows
from agent_trainers.cli import results
from agent_trainers.cli.environments import recorded_member
from agent_trainers.cli.evaluate import PolicyArguments, open_environment
from agent_trainers.cli.results import RunFiles, evaluate
from agent_trainers.experimental.hack_watch import HackWatch
from agent_trainers.monitoring.episode_statistics import EvaluatedEnvironments, summarise
from agent_trainers.monitoring.trajectory_samples import BatchRecord
from agent_trainers.tasks.env_members import EnvMember
from agent_trainers.trajectory import StopReason, load_trajectories
from tests.agent_trainers.made import trajectory, transition
from tests.agent_trainers.short_run import SETTINGS


class Words:
    """A tokenizer of one word."""

    def decode(self, ids):
        return f"<w{ids[0]}>"


def episode(stop_reason=StopReason.ANSWERED, error=None, success=0.0):
    is_over = stop_reason is StopReason.ANSWERED
    step = transition(terminated=is_over, info={"action": {"kind": "tool_call"}})
    metrics = {"success": success}
    return trajectory(step, metrics=metrics, stop_reason=stop_reason, error=error)


@pytest.fixture
def collector(tmp_path):
    def make(played, every=0):
        rows = [row for i, t in enumerate(played) if t.is_scorable for row in make_rows(t, i)]
        tensors = collate(rows, 0) | {"advantages": torch.full((len(rows), 1), 0.5)}
        trainer = SimpleNamespace(
            trajectories={"eval": played},
            state=SimpleNamespace(global_step=3, log_history=[]),
            extensions=[HackWatch()],
            last_batch=BatchRecord(trajectories=played, rows=rows, tensors=tensors),
            current_logprobs=lambda: np.full((len(rows), 1), np.log(2.0)),
            accelerator=SimpleNamespace(is_main_process=True),
            callback_handler=SimpleNamespace(callbacks=[]),
            args=SimpleNamespace(output_dir=str(tmp_path)),
            processing_class=Words(),
        )
        return RunFiles(trainer, "A run", every=every)

    return make


def play(collected, *steps, last=30):
    for step in steps:
        collected.on_step_end(None, SimpleNamespace(global_step=step, max_steps=last), None)


def test_a_sample_that_failed_after_its_first_step_is_shown_without_advantages(collector, tmp_path):
    failed = episode(StopReason.ENVIRONMENT_ERROR, "RuntimeError: the site is down")
    collected = collector([failed, episode()])
    play(collected, 1)
    assert [sample.steps is None for sample in collected.samples] == [True, False]
    assert collected.samples[1].steps[0].advantages == [0.5]
    page = (tmp_path / "trajectories.html").read_text(encoding="utf-8")
    assert "the site is down" in page
    assert collected.samples[1].steps[0].ratios == pytest.approx([2.0])
    saved = load_trajectories(tmp_path / "trajectories" / "step_000001.jsonl.gz")
    assert [each.error for each in saved] == ["RuntimeError: the site is down", None]


def test_samples_are_of_some_steps_and_the_page_has_the_first_and_the_newest(collector, tmp_path):
    collected = collector([episode(success=s) for s in (0, 0, 0, 1, 1, 0)], every=10)
    play(collected, *range(1, 36), last=35)
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == [f"step_{step:06}.jsonl.gz" for step in (1, 10, 20, 30, 35)]
    collected.collect_evaluated("evaluation, after training")
    labels = list(dict.fromkeys(sample.label for sample in collected.samples))
    assert labels == ["training, step 1", "training, step 30", "training, step 35",
                      "evaluation, after training"]  # fmt: skip
    first = [s.trajectory.success for s in collected.samples if s.label == "training, step 1"]
    assert first[:4] == [False, True, False, True]  # in turn, not all of one kind


def test_the_intervals_are_over_tasks_of_all_environments_also_with_equal_ids():
    played = [
        trajectory(transition(reward=2 * success), env=env, task_id=f"row-{i}", task=i,
                   metrics={"success": success})
        for env, success in (("a", 1.0), ("b", 0.0)) for i in range(10)
    ]  # fmt: skip
    evaluated = EvaluatedEnvironments(["a", "b"], (), 1)
    trainer = SimpleNamespace(
        eval_dataset=[0],
        evaluate=lambda: evaluated.add([summarise(each) for each in played], ()),
        evaluated=evaluated,
        callback_handler=SimpleNamespace(callbacks=[]),
    )
    figures = evaluate(trainer)[""]
    assert (figures["num_episodes"], figures["success"]) == (20, 0.5)
    low, high = figures["return_interval"]
    assert low < 0.8 < 1.2 < high  # not ten tasks whose two returns have the mean 1


def test_results_are_written_last(collector, tmp_path, monkeypatch):
    files = collector([episode()])
    own = {"evaluated": SimpleNamespace(names=()), "training_seconds": 1.0,
           "seconds_before_resume": 0.0}  # fmt: skip
    vars(files._trainer).update(own)
    model = SimpleNamespace(num_parameters=lambda: 1)
    accelerator = SimpleNamespace(num_processes=1, unwrap_model=lambda _: model)
    vars(files._trainer).update(accelerator=accelerator, model=model)

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(results, "plot_learning_curve", fail)
    files._before = {}
    with pytest.raises(OSError, match="no space"):
        files._write_results({}, {})
    assert not (tmp_path / "results.json").exists()


def test_names_are_no_markup(capsys):
    figures = {f"{name}_{when}": 0.5 for name in ("success", "return")
               for when in ("before", "after")}  # fmt: skip
    figures |= {f"{name}_interval": None for name in figures}
    facts = {"algorithm": "grpo", "env": "acc[/x]", "steps": 1, "seconds": 1, "total_seconds": 1,
             "num_eval_episodes": 1, "evaluated_on": "tasks[easy]"}  # fmt: skip
    results.print_results({**facts, **figures}, Path("runs/[lr=1e-3]"))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("acc[/x]", "tasks[easy]", "runs/[lr=1e-3]"))


def test_every_environment_of_a_python_program_is_in_its_settings(collector, tmp_path):
    members = [EnvMember(id=f"{name}-v0", name=name, kwargs={"hops": 1}) for name in "ab"]
    files = collector([episode()])
    own = {"source": SimpleNamespace(members=members), "trajectories": {"train": [episode()]},
           "model": SimpleNamespace(config=SimpleNamespace(name_or_path="m"))}  # fmt: skip
    vars(files._trainer).update(own)
    vars(files._trainer.args).update(
        max_completion_length=8, learning_rate=0.1, seed=0, advantage_estimator="grpo"
    )
    assert files._describe()["envs"] == [member.as_json() for member in members]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert recorded_member(settings, "b", "settings.json") == members[1]
    members[0] = EnvMember(id=lambda: None, name="a")
    assert files._describe()["envs"] is None


def test_a_python_program_gets_the_files_of_the_launcher_from_one_callback(tmp_path):
    settings = SETTINGS | {"output_dir": str(tmp_path), "advantage_estimator": "grpo_step"}
    trainer = StepGRPOTrainer(
        model=str(TINY_POLICY),
        env=lambda: gym.make("AgentR1/SyntheticMultiHop-v0", hops=1),
        args=StepGRPOConfig(**settings),
        eval_dataset=Dataset.from_dict({"task": [0, 1, 2, 3]}),
    )
    trainer.add_callback(RunFiles(trainer))
    trainer.train()
    names = {"results.json", "learning_curve.png", "trajectories.html", "model.safetensors"}
    assert names <= {path.name for path in tmp_path.iterdir()}
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["env_kwargs"], written["steps"]) == ({"hops": 1}, 1)
    for name in ("success_before", "success_after"):
        low, high = written[f"{name}_interval"]
        assert 0 <= low <= written[name] <= high <= 1
    environment, _ = open_environment(PolicyArguments(model=str(tmp_path)))
    assert environment.env_kwargs == {"hops": 1}
    # and the files are those of one run
    assert {t.env_id for t in load_trajectories(tmp_path)} == {written["env"]}
