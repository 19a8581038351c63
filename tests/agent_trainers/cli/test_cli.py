import json
import subprocess
import sys

import gymnasium as gym
import pytest
import torch
import yaml
from safetensors.torch import load_file

from agent_envs import ConfigurationError, DataError, UnknownNameError
from agent_envs.core.tool_env import ENDLESS
from agent_envs.data.records import read_records
from agent_envs.errors import AgentEnvsError, RolloutError
from agent_trainers import TINY_POLICY
from agent_trainers.algorithms.advantages import needs_values
from agent_trainers.cli import evaluate, policies, sft, train
from agent_trainers.cli.environments import count_tasks, environment_maker, hold_out
from agent_trainers.cli.launch import launch_command, unknown_to_accelerate
from agent_trainers.cli.models import ModelArguments
from agent_trainers.monitoring.metrics_log import read_metrics
from agent_trainers.policies.models import load_model
from agent_trainers.recipes import ACCELERATE_CONFIGS, RECIPES
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.ppo_config import StepPPOConfig
from agent_trainers.trainers.presets import PRESETS
from agent_trainers.trajectory import load_trajectories
from tests.agent_trainers.real_models import save_model

SHORT = ["--max_steps", "2", "--num_eval_tasks", "4", "--per_device_train_batch_size", "8",
         "--num_generations", "4", "--per_device_eval_batch_size", "4"]  # fmt: skip


def run_train(output, *arguments):
    train.run([*SHORT, "--output_dir", str(output), *arguments])


def test_a_run_leaves_results_curve_page_trajectories_and_a_checkpoint(tmp_path, capsys):
    run_train(tmp_path / "run")
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert 0 <= results["success_before"] <= 1
    assert 0 <= results["success_after"] <= 1
    assert results["num_eval_episodes"] == 4
    assert results["steps"] == 2
    assert results["seconds"] > 0
    assert set(results["versions"]) >= {"agent-r1", "torch", "trl", "transformers"}
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "Step 1" in (folder / "trajectories.html").read_text(encoding="utf-8")
    assert load_trajectories(folder / "trajectories.jsonl.gz")
    samples = read_records(folder / "trajectories" / "step_000001.parquet")
    assert {row["optimiser_step"] for row in samples} == {1}
    assert all(row["ratios"] and row["added"] for row in samples)
    logged = read_metrics(folder)
    assert [record["step"] for record in logged] == [0, 1, 2, 2, 2]  # with both evaluations
    assert {"time/rollout_seconds", "time/train_seconds", "tools/calls"} <= set(logged[1])
    card = (folder / "README.md").read_text(encoding="utf-8")
    for part in ("| base model | embedded policy |",
                 "| environment | AgentR1/SyntheticMultiHop-v0 |",
                 '"split": "test"} |', "| algorithm | grpo_step |",
                 "| optimiser steps | 2 |", f"| trl | {results['versions']['trl']} |",
                 f"| success before training | {results['success_before']:.1%} |",
                 f"| success after training | {results['success_after']:.1%} |",
                 f"agent-r1-eval --model {folder} --env AgentR1/SyntheticMultiHop-v0"):  # fmt: skip
        assert part in card
    assert "None" not in card
    shown = capsys.readouterr().out
    assert "success" in shown
    assert "results.json" in shown.replace("\n", "")

    output, episodes = tmp_path / "eval.json", tmp_path / "episodes.parquet"
    evaluate.run(["--model", str(folder), "--num_tasks", "3", "--samples_per_task", "2",
                  "--output", str(output), "--trajectories", str(episodes)])  # fmt: skip
    measured = json.loads(output.read_text(encoding="utf-8"))
    assert measured["num_tasks"] == 3
    assert set(measured["pass_at_k"]) == {"1", "2"}
    assert measured["env_kwargs"] == {"split": "test"}
    assert len(load_trajectories(episodes)) == 6
    assert "pass@2" in capsys.readouterr().out


def test_an_upload_has_the_card_of_the_run(tmp_path, monkeypatch):
    uploaded = []

    def upload(trainer, **_):
        trainer.create_model_card(model_name="TRL's")
        uploaded.append((tmp_path / "README.md").read_text(encoding="utf-8"))

    monkeypatch.setattr(StepGRPOTrainer, "push_to_hub", upload)
    monkeypatch.setattr(StepGRPOTrainer, "init_hf_repo", lambda trainer: None)
    run_train(tmp_path, "--push_to_hub", "--hub_model_id", "me/mine", "--save_strategy", "no")
    assert len(uploaded) == 1
    assert "agent-r1-eval --model me/mine --env AgentR1/SyntheticMultiHop-v0" in uploaded[0]
    assert "success after training" in uploaded[0]


def test_a_run_that_was_cut_off_resumes_from_its_last_checkpoint(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_train(whole, "--max_steps", "4", "--save_steps", "2")
    run_train(cut, "--max_steps", "4", "--save_steps", "2", "--num_eval_tasks", "4")
    # as if killed after the third step: the checkpoint of the second is the newest
    for name in ("checkpoint-4", "results.json"):
        subprocess.run(["rm", "-r", str(cut / name)], check=True)
    run_train(cut, "--max_steps", "4", "--save_steps", "2", "--resume")
    one, other = (json.loads((f / "results.json").read_text()) for f in (whole, cut))
    for name in ("success_before", "success_after", "return_after", "steps"):
        assert one[name] == other[name]
    logged, resumed = (
        [(r["step"], r.get("reward")) for r in read_metrics(f)] for f in (whole, cut)
    )
    assert logged == resumed  # nothing is there twice


def test_adapters_are_trained_resumed_bit_by_bit_and_merged(tmp_path):
    lora = ["--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj", "--beta", "0.05",
            "--num_eval_tasks", "0", "--max_steps", "4", "--save_steps", "2"]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_train(whole, *lora, "--merge_adapter", "true")
    run_train(cut, *lora)
    for name in ("checkpoint-4", "results.json", "adapter_model.safetensors"):
        subprocess.run(["rm", "-r", str(cut / name)], check=True)
    run_train(cut, *lora, "--resume")
    one, other = (load_file(f / "adapter_model.safetensors") for f in (whole, cut))
    assert all("lora" in name for name in one)
    assert any(weight.abs().max() > 0 for name, weight in one.items() if "lora_B" in name)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (whole / "model.safetensors").exists()
    merged = load_file(whole / "merged" / "model.safetensors")
    base = load_file(TINY_POLICY / "model.safetensors")
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert changed
    assert all("q_proj" in name or "v_proj" in name for name in changed)
    for folder in (whole, whole / "merged"):
        evaluate.run(["--model", str(folder), "--num_tasks", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora_alpha", "8"], "--lora_alpha does nothing without --lora_r"),
        (["--merge_adapter", "true"], "--merge_adapter does nothing"),
        (["--lora_r", "2", "--load_in_4bit", "true"], "bitsandbytes"),
    ],
)
def test_options_of_adapters_that_would_do_nothing_are_refused(
    tmp_path, arguments, message, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises((ConfigurationError, SystemExit)) as caught:
        run_train(tmp_path, *arguments)
    assert message in f"{caught.value} {capsys.readouterr().err}"


def test_a_given_checkpoint_is_gone_on_from(tmp_path):
    run_train(tmp_path / "first", "--max_steps", "2", "--save_steps", "1")
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    run_train(tmp_path / "second", "--max_steps", "2", "--resume_from_checkpoint", checkpoint)
    one, other = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "second")
    )
    assert one["return_after"] == other["return_after"]


def test_resuming_where_no_run_was_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--resume: there is no folder .*new"):
        run_train(tmp_path / "new", "--resume")


def test_resuming_a_run_that_was_stopped_before_its_first_checkpoint_begins_it(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    run_train(tmp_path / "run", "--resume")
    assert "There is no checkpoint of this run" in capsys.readouterr().err
    assert (tmp_path / "run" / "results.json").exists()


def test_resuming_a_run_that_is_over_gives_its_results_again(tmp_path, capsys):
    run_train(tmp_path / "run")
    first = json.loads((tmp_path / "run" / "results.json").read_text())
    (tmp_path / "run" / "results.json").unlink()
    run_train(tmp_path / "run", "--resume")
    again = json.loads((tmp_path / "run" / "results.json").read_text())
    assert f"Going on from {tmp_path / 'run' / 'checkpoint-2'}." in capsys.readouterr().err
    for name in ("success_before", "success_after", "return_after", "steps"):
        assert again[name] == first[name]


def test_a_finished_run_is_kept_until_it_is_told_to_go(tmp_path):
    run_train(tmp_path, "--num_eval_tasks", "0")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigurationError, match="holds a finished run"):
        run_train(tmp_path, "--num_eval_tasks", "0", "--seed", "1")
    with pytest.raises(ConfigurationError, match=r"began with other settings \(seed: 42 -> 1\)"):
        run_train(tmp_path, "--num_eval_tasks", "0", "--seed", "1", "--resume")
    for wrong in (["--env", "no_such_module:MyEnv-v0"], ["--model", str(tmp_path / "elsewhere")]):
        with pytest.raises(AgentEnvsError):
            run_train(tmp_path, "--num_eval_tasks", "0", *wrong, "--overwrite")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    run_train(tmp_path, "--num_eval_tasks", "0", "--seed", "1", "--overwrite")
    assert (tmp_path / "model.safetensors").read_bytes() != before


class AlwaysFails(gym.Env):
    """An environment whose steps raise."""

    def reset(self, *, seed=None, options=None):
        return "Go.", {"messages": [{"role": "user", "content": "search"}]}

    def step(self, action):
        raise RuntimeError("the database is down")


def test_a_run_in_which_everything_fails_says_so_and_trains_nothing(tmp_path):
    gym.register("Own/AlwaysFails-v0", AlwaysFails, disable_env_checker=True)
    with pytest.raises(RolloutError, match=r"(?s)4 of 4 episodes failed.*the database is down"):
        run_train(tmp_path, "--env", "Own/AlwaysFails-v0")
    assert not (tmp_path / "model.safetensors").exists()


def test_an_environment_whose_words_the_model_does_not_know_is_refused(tmp_path, hotpot_file):
    kwargs = json.dumps({"data": str(hotpot_file)})
    with pytest.raises(ConfigurationError, match=r"of its first states are unknown.*tiny_policy"):
        run_train(tmp_path, "--env", "AgentR1/HotpotQA-v0", "--env_kwargs", kwargs)


def test_tasks_of_evaluation_are_held_out_where_no_others_are_named(tmp_path):
    assert min(hold_out(None, 5, seed=0).eval) == ENDLESS - 5
    rows = [{"question": f"{i} + 1", "answer": f"#### {i + 1}"} for i in range(20)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make = environment_maker("AgentR1/GSM8K-v0", {"data": str(data)})
    split = hold_out(count_tasks(make), 200, seed=0)
    assert split.words == "4 of 20 tasks, held out of training"
    assert sorted([*split.train, *split.eval]) == list(range(20))
    assert len(split.eval) == 4
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert hold_out(count_tasks(make), 200, seed=0).words.startswith("training tasks")


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


def test_a_language_model_keeps_credit_per_step_and_is_told_what_applies(tmp_path):
    options, config = train.parse_arguments(["--model", "some/model"])
    assert options.algorithm == "grpo_step"
    assert config.advantage_estimator == "grpo_step"
    assert config.learning_rate == 1e-6
    assert "64 episodes a batch in groups of 8" in train.what_applies(options, config)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_language_model_runs_in_bf16_on_a_processor_that_multiplies_in_it(
    has_instructions, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = {"avx512_bf16": has_instructions}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    options, config = train.parse_arguments(["--model", "some/model"])
    assert config.bf16 is has_instructions
    words = train.what_applies(options, config)
    assert ("on the CPU in bf16" if has_instructions else "on the CPU in float32") in words
    assert train.parse_arguments(["--config", "smollm2"])[1].bf16 is has_instructions
    assert train.parse_arguments(["--model", "some/model", "--bf16", "false"])[1].bf16 is False
    assert train.parse_arguments([])[1].bf16 is False  # the embedded policy stays exact
    warm_start = sft.make_parser(["--model", "some/model"]).parse(["--model", "some/model"])[1]
    assert warm_start.bf16 is has_instructions
    loaded = []
    monkeypatch.setattr(
        policies, "load_model", lambda *a: loaded.append(load_model(*a)) or loaded[-1]
    )
    for model in (str(TINY_POLICY), None):
        with policies.open_policy(policies.PolicyArguments(model=model)):
            pass
    precise = torch.float32
    assert [m.dtype for m in loaded] == [torch.bfloat16 if has_instructions else precise, precise]


def test_an_output_folder_that_cannot_be_written_to_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--output_dir .*cannot be written to"):
        run_train(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("module", "option", "right"),
    [
        (train, "--learning_rat", "--learning_rate"),
        (train, "--num_generation", "--num_generations"),
        (train, "--advantage_estimater=grpo", "--advantage_estimator"),
        (evaluate, "--num_task", "--num_tasks"),
    ],
)
def test_a_mistyped_option_gets_the_nearest_right_name(module, option, right, capsys):
    with pytest.raises(SystemExit) as exit_status:
        module.run([option, "1"])
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert f"Did you mean {right}?" in error
    assert error.count("\n") <= 3


def test_a_mistyped_setting_in_a_file_gets_the_nearest_right_name(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text("learning_rte: 1.0\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        train.parse_arguments(["--config", str(path)])
    error = capsys.readouterr().err
    assert "Did you mean --learning_rate?" in error
    assert str(path) in error


def test_a_value_in_a_file_is_checked_and_converted_as_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text("num_generations: 4.5\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        train.parse_arguments(["--config", str(path)])
    error = capsys.readouterr().err
    assert f"{path}: argument --num_generations" in error
    assert "invalid int value: '4.5'" in error
    path.write_text("max_steps: '3'\nreport_to: [none]\nscale_rewards: false\nbf16: false\n"
                    "use_cpu: true\ntop_p: null\n")  # fmt: skip
    _, config = train.parse_arguments(["--config", str(path)])
    assert (config.max_steps, config.report_to, config.scale_rewards) == (3, [], "none")


def test_a_recipe_is_found_by_name_and_a_wrong_name_lists_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    default, _ = train.parse_arguments(["--config", "default", "--algorithm", "ppo"])
    assert default == train.parse_arguments(["--algorithm", "ppo"])[0]
    with pytest.raises(UnknownNameError, match=r"Did you mean 'hotpotqa_grpo'.*default, hotpot"):
        train.parse_arguments(["--config", "hotpotqa_gpro"])
    assert all(path.is_file() for path in [*RECIPES.values(), *ACCELERATE_CONFIGS.values()])


def test_the_arguments_of_an_environment_stay_with_it():
    options, _ = train.parse_arguments([])
    assert json.loads(options.eval_env_kwargs) == {"split": "test"}
    options, _ = train.parse_arguments(["--env", "Mine/Own-v0"])
    assert (options.env_kwargs, options.eval_env_kwargs) == (None, None)


OWN_ENVIRONMENT = """
import gymnasium as gym
from agent_envs.core.spaces import UnicodeText

class Own(gym.Env):
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


def test_an_environment_of_ones_own_is_trained_in_from_the_folder_it_lies_in(tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(OWN_ENVIRONMENT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    run_train(tmp_path / "run", "--env", "my_module:Mine/Own-v0", "--env_kwargs",
              '{"target": "red"}')  # fmt: skip
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert (results["env"], results["eval_env_kwargs"]) == ("my_module:Mine/Own-v0", {})
    for arguments, message in (
        (
            ["--env", "my_module:Mine/Own-v0", "--env_kwargs", '{"split": "test"}'],
            "--env_kwargs: .*unexpected keyword.*split",
        ),
        (["--env", "no_module:Mine/Own-v0"], "--env no_module:Mine/Own-v0: No module named"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            run_train(tmp_path / "run2", *arguments)


def test_help_shows_our_own_options_first_with_their_defaults(capsys):
    def shown(*arguments):
        with pytest.raises(SystemExit) as exit_status:
            train.main(arguments)
        assert exit_status.value.code == 0
        return capsys.readouterr().out

    text = shown("--help")
    own = {*train.TrainArguments.__annotations__, *StepGRPOConfig.__annotations__}
    own |= set(ModelArguments.__annotations__) - {"model_name_or_path"}
    assert {name for name in own if f"  --{name}" not in text} == set()
    assert "--learning_rate (default: 0.0007)" in text
    assert "--critic_model" not in text
    assert "more options, of TRL and transformers: agent-r1-train --help_all" in text
    assert text.index("  --env") < text.index("  --algorithm") < text.index("  --learning_rate")
    changed = shown("--model", "some/model", "--algorithm", "ppo", "--help")
    assert "--resume (default: false)" in changed
    assert "--critic_model" in changed
    assert "--adam_beta1" not in text
    assert "--adam_beta1 (default: 0.9)" in shown("--help_all")


def test_options_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "settings.yaml"
    settings = {"learning_rate": "1e-4", "num_generations": 4, "per_device_train_batch_size": 8,
                "env_kwargs": {"hops": 3}, "use_cpu": True, "bf16": False}  # fmt: skip
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    options, config = train.parse_arguments(["--config", str(path), "--num_generations", "2"])
    assert config.learning_rate == 1e-4
    assert config.num_generations == 2
    assert json.loads(options.env_kwargs) == {"hops": 3}


def test_an_algorithm_sets_the_estimator_unless_it_is_given():
    assert train.parse_arguments(["--algorithm", "grpo"])[1].advantage_estimator == "grpo"
    assert train.parse_arguments([])[1].advantage_estimator == "grpo_step"
    both = ["--algorithm", "grpo", "--advantage_estimator", "grpo_step"]
    assert train.parse_arguments(both)[1].advantage_estimator == "grpo_step"
    with pytest.raises(UnknownNameError, match="Did you mean 'grpo"):
        train.parse_arguments(["--algorithm", "grpoo"])


def test_a_file_can_switch_off_what_is_on_by_default(tmp_path):
    path = tmp_path / "settings.yaml"
    settings = {"merge_steps": False, "max_steps": 1, "use_cpu": True, "bf16": False}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert train.parse_arguments(["--config", str(path)])[1].merge_steps is False
    both = ["--config", str(path), "--merge_steps", "true"]
    assert train.parse_arguments(both)[1].merge_steps is True


@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_algorithm_is_a_few_settings_of_one_of_the_trainers(algorithm):
    _, config = train.parse_arguments(["--algorithm", algorithm])
    assert {name: getattr(config, name) for name in PRESETS[algorithm]} == PRESETS[algorithm]
    assert isinstance(config, StepPPOConfig) == needs_values(config.advantage_estimator)
    if isinstance(config, StepPPOConfig):
        assert not config.bootstrap_truncated  # see recipes/default_critic.yaml


def test_settings_of_the_critic_are_refused_without_one(capsys):
    with pytest.raises(SystemExit):
        train.parse_arguments(["--algorithm", "rloo", "--critic_warmup_steps", "3"])
    assert "unknown option --critic_warmup_steps" in capsys.readouterr().err


def test_a_file_can_name_the_algorithm_and_win_over_its_settings(tmp_path):
    path = tmp_path / "settings.yaml"
    settings = {"algorithm": "step_ppo", "gamma": 0.5, "use_cpu": True, "bf16": False}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    options, config = train.parse_arguments(["--config", str(path)])
    assert options.algorithm == "step_ppo"
    assert (config.gamma, config.importance_sampling_level) == (0.5, "step")
    assert config.bootstrap_truncated


def test_the_recipe_holds_the_first_papers_settings():
    arguments = ["--config", "hotpotqa_grpo", "--use_cpu", "--bf16", "false"]
    options, config = train.parse_arguments(arguments)
    assert options.model == "Qwen/Qwen2.5-3B-Instruct"
    assert (config.learning_rate, config.beta, config.num_generations) == (1e-6, 0.001, 5)
    assert config.max_completion_length == 1024
    assert json.loads(options.env_kwargs)["max_episode_steps"] == 5
    # 8 processes x batch size x accumulation = 128 questions in groups of 5
    per_step = 8 * config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert per_step == 128 * 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--env_kwargs", "{hops: 2}"], ConfigurationError, "--env_kwargs is not valid JSON"),
        (["--env_kwargs", "[1]"], ConfigurationError, "must be a JSON object"),
        (["--model", "nowhere/at-all", "--max_steps", "1", "--use_cpu", "--bf16", "false",
          "--per_device_train_batch_size", "8"], ConfigurationError, "Model nowhere/at-all"),
        (["--env", "AgentR1/HotpotQA-v0", "--env_kwargs", '{"data": "none.jsonl"}',
          "--eval_env_kwargs", "{}"], DataError, "none.jsonl"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        train.run([*arguments, "--output_dir", str(tmp_path)])


def test_an_environment_that_does_not_exist_is_one_line_on_the_terminal(tmp_path):
    command = [sys.executable, "-m", "agent_trainers.cli.train", "--env", "AgentR1/HotpotQ-v0"]
    result = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "HotpotQA" in result.stderr
    assert "Traceback" not in result.stderr


def test_options_of_accelerate_are_told_from_our_own():
    arguments = ["--num_processes", "2", "--learning_rate", "1", "--mixed_precision=bf16",
                 "--bf16", "true", "--num_machines", "3"]  # fmt: skip
    given, others = train.make_parser(arguments).check(arguments, unknown_to_accelerate)
    assert others == ["--mixed_precision=bf16", "--num_machines", "3"]
    assert (given.num_processes, given.learning_rate, given.bf16) == (2, 1.0, True)


@pytest.mark.parametrize("argument", ["--learning_rat", "stray"])
def test_what_neither_we_nor_accelerate_know_is_refused(argument, capsys):
    with pytest.raises(SystemExit):
        train.main(["--mixed_precision", "bf16", argument, "1"])
    error = capsys.readouterr().err
    assert f"unknown option {argument}" in error
    assert error.count("\n") <= 3


def launch(num_processes=None, config=None, others=()):
    return launch_command(num_processes, config, others, "module", ["--x"])


def test_several_processes_on_a_cpu_are_started_by_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert launch(2)[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                             "--module", "module", "--x"]  # fmt: skip
    assert launch(1) is None
    with pytest.raises(ConfigurationError, match="--num_processes must be at least 1, not 0"):
        launch(0)
    with pytest.raises(ConfigurationError, match="--use_fsdp needs an accelerator"):
        launch(others=["--use_fsdp"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch(2) is None  # these are the processes


def test_several_processes_on_accelerators_are_started_by_accelerate(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert launch(8, others=["--use_fsdp"])[1:] == [
        "-m", "accelerate.commands.launch", "--num_processes", "8", "--use_fsdp",
        "--module", "module", "--x",
    ]  # fmt: skip
    assert launch() is None


def test_settings_of_accelerate_come_from_a_recipe_or_a_file(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    path = str(ACCELERATE_CONFIGS["fsdp2"])
    assert launch(4, "fsdp2")[1:7] == ["-m", "accelerate.commands.launch", "--config_file", path,
                                       "--num_processes", "4"]  # fmt: skip
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n", encoding="utf-8")
    assert str(own) in launch(config=str(own))
    with pytest.raises(UnknownNameError, match="Did you mean 'ddp'"):
        launch(config="dpp")

    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert "3" in launch(config=str(own))
    with pytest.raises(ConfigurationError, match="FSDP needs an accelerator"):
        launch(config="fsdp2")


def test_two_processes_really_train_together(tmp_path):
    command = [sys.executable, "-m", "agent_trainers.cli.train", *SHORT, "--num_eval_tasks", "6",
               "--per_device_train_batch_size", "4", "--accelerate_config", "ddp",
               "--num_processes", "2"]  # fmt: skip
    result = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "two")],
        capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    run_train(tmp_path / "one", "--num_eval_tasks", "6")
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")
    )
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    # the same tasks, seeds and draws: the same success before, in and after training
    assert two["num_eval_episodes"] == 6  # both share them; none counts twice
    for name in ("success_before", "success_after", "return_after"):
        assert one[name] == pytest.approx(two[name])
    # and the same gradients: an evaluation before must not let each process train by itself
    logged = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("one", "two")]
    rows = [[json.loads(line) for line in text.splitlines()] for text in logged]
    norms = [[row["grad_norm"] for row in own if "grad_norm" in row] for own in rows]
    assert len(norms[0]) == 2
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
