"""Runs of ``agent-r1-train`` from the command line to the files in the output folder."""

import json
import shutil
import sys

import gymnasium as gym
import pytest
import torch
from safetensors.torch import load_file

from agent_envs import ConfigurationError, DataError
from agent_envs.errors import AgentEnvsError, RolloutError
from agent_trainers import StepGRPOTrainer
from agent_trainers.cli import evaluate, train
from agent_trainers.cli.launch import launch_command
from agent_trainers.monitoring.metrics_log import read_metrics
from agent_trainers.recipes import ACCELERATE_CONFIGS
from agent_trainers.trajectory import load_trajectories
from tests.agent_trainers.real_models import save_model

FOUR_STEPS = ["--max_steps", "4", "--save_steps", "2"]


def results_of(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, run_train):
    """The folder of a finished run of four steps, which no test changes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_train(folder, *FOUR_STEPS)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of it to change."""
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_has_the_results_and_metrics_of_the_whole_run(
    whole, copy, capsys, run_train, monkeypatch, step
):
    # as if killed after step 3, or after the last step
    (copy / "results.json").unlink()
    if step == 2:
        shutil.rmtree(copy / "checkpoint-4")
    restore = StepGRPOTrainer._restore
    monkeypatch.setattr(  # the steps before took long
        StepGRPOTrainer,
        "_restore",
        lambda trainer, state, path: restore(trainer, {**state, "seconds": 1000.0}, path),
    )
    train.run(["--resume", "--output_dir", str(copy)])  # the folder has all else
    assert f"Resuming from {copy / f'checkpoint-{step}'}." in capsys.readouterr().err
    for name in ("success_before", "success_after", "return_after", "steps"):
        assert results_of(whole)[name] == results_of(copy)[name]
    one, other = ([(r["step"], r.get("reward")) for r in read_metrics(f)] for f in (whole, copy))
    assert one == other  # no line twice
    if step == 2:
        assert 1000 < results_of(copy)["seconds"] < results_of(copy)["total_seconds"]


def test_a_run_leaves_results_curve_page_trajectories_and_a_checkpoint(whole, tmp_path, capsys):
    results = results_of(whole)
    assert (results["num_eval_episodes"], results["steps"]) == (4, 4)
    assert {"agent-r1", "torch"} <= set(results["versions"])
    assert (whole / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "Step 1" in (whole / "trajectories.html").read_text(encoding="utf-8")
    assert load_trajectories(whole / "trajectories.jsonl.gz")
    assert load_trajectories(whole / "trajectories" / "step_000001.jsonl.gz")
    logged = read_metrics(whole)
    assert [record["step"] for record in logged] == [0, 1, 2, 3, 4, 4, 4]  # with both evaluations
    assert {"time/rollout_seconds", "time/train_seconds", "tools/calls"} <= set(logged[1])

    output, episodes = tmp_path / "eval.json", tmp_path / "episodes.parquet"
    evaluate.run(["--model", str(whole), "--num_tasks", "3", "--samples_per_task", "2",
                  "--output", str(output), "--trajectories", str(episodes)])  # fmt: skip
    measured = json.loads(output.read_text(encoding="utf-8"))
    assert measured["num_tasks"] == 3
    assert set(measured["pass_at_k"]) == {"1", "2"}
    assert measured["env_kwargs"] == {**results["env_kwargs"], "split": "test"}
    assert len(load_trajectories(episodes)) == 6
    shown = capsys.readouterr().out
    assert "6 episodes, 0 errors" in shown


def test_a_finished_run_is_not_replaced_until_overwrite_is_given(copy, tmp_path, run_train, capsys):
    with pytest.raises(ConfigurationError, match="is finished, so there is nothing to resume"):
        run_train(copy, *FOUR_STEPS, "--resume")
    with pytest.raises(ConfigurationError, match=r"--max_steps 2: the run in .* began with 4"):
        run_train(copy, "--max_steps", "2", "--save_steps", "2", "--resume")
    brief = ["--num_eval_tasks", "0", "--seed", "1", "--max_steps", "1"]
    before = (copy / "model.safetensors").read_bytes()
    with pytest.raises(ConfigurationError, match="contains a finished run"):
        run_train(copy, *brief)
    with pytest.raises(ConfigurationError, match=r"began with other settings \(seed: 42 -> 1"):
        run_train(copy, *FOUR_STEPS, "--seed", "1", "--resume")
    for wrong in (["--env", "no_such_module:MyEnv-v0"], ["--model", str(tmp_path / "elsewhere")]):
        with pytest.raises(AgentEnvsError):
            run_train(copy, *brief, *wrong, "--overwrite")
    assert (copy / "model.safetensors").read_bytes() == before
    run_train(copy, *brief, "--overwrite")
    assert (copy / "model.safetensors").read_bytes() != before
    shown = " ".join(capsys.readouterr().out.split())
    assert ": 1 optimiser step in " in shown
    assert "without evaluation." in shown
    assert "before" not in shown


def test_adapters_are_trained_and_resumed_bitwise(tmp_path, run_train):
    lora = ["--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj", "--beta", "0.05",
            "--num_eval_tasks", "0", "--save_steps", "1"]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_train(whole, *lora)
    run_train(cut, *lora, "--resume_from_checkpoint", str(whole / "checkpoint-1"))
    one, other = (load_file(f / "adapter_model.safetensors") for f in (whole, cut))
    assert all("lora" in name for name in one)
    assert any(weight.abs().max() > 0 for name, weight in one.items() if "lora_B" in name)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (cut / "model.safetensors").exists()


class AlwaysFails(gym.Env):
    """An environment whose steps raise."""

    def reset(self, *, seed=None, options=None):
        return "Go.", {"messages": [{"role": "user", "content": "search"}]}

    def step(self, action):
        raise RuntimeError("the database is down")


def test_a_run_in_which_everything_fails_ends_with_the_error(tmp_path, run_train):
    gym.register("Own/AlwaysFails-v0", AlwaysFails, disable_env_checker=True)
    with pytest.raises(RolloutError, match=r"(?s)4 of 4 episodes failed.*the database is down"):
        run_train(tmp_path, "--env", "Own/AlwaysFails-v0")
    assert not (tmp_path / "model.safetensors").exists()


def test_tasks_that_cannot_be_trained_on_are_refused(tmp_path, hotpot_file, run_train):
    for data, message in ((hotpot_file, "first states are unknown.*tiny_policy"), ("none", "none")):
        task = ["--env", "AgentR1/HotpotQA-v0", "--env_kwargs", json.dumps({"data": str(data)})]
        with pytest.raises((ConfigurationError, DataError), match=message):
            run_train(tmp_path / "run", *task)
    assert not (tmp_path / "run" / "results.json").exists()


def test_a_template_without_tools_gets_a_format_in_words(tmp_path, capsys):
    folder = save_model(tmp_path / "model", "qwen2_5")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    output = tmp_path / "eval.json"
    evaluate.run(["--model", folder, "--num_tasks", "1", "--max_completion_length", "4",
                  "--output", str(output)])  # fmt: skip
    assert "tool_format='tags'" in capsys.readouterr().err
    assert json.loads(output.read_text())["env_kwargs"]["tool_format"] == "tags"


OWN_ENVIRONMENT = """
import gymnasium as gym
from agent_envs.core.spaces import UnicodeText

class Own(gym.Env):
    num_tasks = 5
    observation_space = action_space = UnicodeText()

    def __init__(self, target="blue"):
        self.target = target

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        text = "search"  # a word of the embedded policy
        return text, {"messages": [{"role": "user", "content": text}], "task_id": "0"}

    def step(self, action):
        is_right = self.target in action
        messages = [{"role": "user", "content": "Thank you"}]
        info = {"messages": messages, "metrics": {"success": is_right}, "task_id": "0",
                "reward_terms": {"right": float(is_right)}, "action": {}}
        return "Thank you", float(is_right), True, False, info

gym.register("Mine/Own-v0", Own)
"""


def test_an_environment_in_the_working_directory_is_trained_in(tmp_path, monkeypatch, run_train):
    (tmp_path / "my_module.py").write_text(OWN_ENVIRONMENT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    own = ["--env", "my_module:Mine/Own-v0", "--env_kwargs"]
    run_train(tmp_path / "run", *own, '{"target": "red"}', "--max_steps", "1",
              "--per_device_train_batch_size", "20")  # fmt: skip
    results = results_of(tmp_path / "run")
    assert (results["env"], results["eval_env_kwargs"]) == ("my_module:Mine/Own-v0", {})
    with pytest.raises(ConfigurationError, match=r"--env_kwargs: .*unexpected keyword.*split"):
        run_train(tmp_path / "run2", *own, '{"split": "test"}')
    played = load_trajectories(tmp_path / "run" / "trajectories" / "step_000001.jsonl.gz")
    assert len({t.group_id for t in played}) == 5  # fewer tasks than groups are repeated
    assert len({t.task for t in played}) == 4  # one of the five is held out


def test_several_processes_are_started_by_torchrun_or_accelerate(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for has_accelerator, num_processes, config, expected in (
        (False, 2, None, ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]),
        (True, 8, "fsdp2", ["accelerate.commands.launch", "--config_file",
                            str(ACCELERATE_CONFIGS["fsdp2"]), "--num_processes", "8"]),
        (False, 1, None, None),
        (False, 0, None, "--num_processes must be at least 1, not 0"),
        (False, None, "fsdp2", "FSDP needs an accelerator"),
        (False, None, "dpp", "Did you mean 'ddp'"),
    ):  # fmt: skip
        found = lambda has=has_accelerator: has  # noqa: E731
        monkeypatch.setattr("torch.accelerator.is_available", found)
        if isinstance(expected, str):
            with pytest.raises(AgentEnvsError, match=expected):
                launch_command(num_processes, config, "module", ["--x"])
            continue
        command = launch_command(num_processes, config, "module", ["--x"])
        assert (command and command[1:]) == (
            expected and ["-m", *expected, "--module", "module", "--x"]
        )
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch_command(2, None, "module", []) is None  # these are the processes
