"""Command lines, settings files and recipes of the commands; their errors are one line."""

import contextlib
import copy
import dataclasses
import json
import re
import shlex
import shutil
import sys
import typing

import pytest
import torch

from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError
from agent_trainers import TINY_POLICY
from agent_trainers.cli import evaluate, sft, train
from agent_trainers.cli.environments import DEFAULT_ENV, hold_out, read_source
from agent_trainers.cli.model_options import ModelArguments
from agent_trainers.cli.output_folder import read_arguments
from agent_trainers.cli.train import TrainArguments, make_parser, parse_arguments
from agent_trainers.policies import local
from agent_trainers.policies.models import load_model
from agent_trainers.recipes import ACCELERATE_CONFIGS, RECIPES
from agent_trainers.trainers.config import PRESETS, StepGRPOConfig, StepPPOConfig, check_ranges

TOOLS = "AgentR1/SyntheticTable-v0"


WRONG = {
    train: [
        (["--learning_rat", "1"], "unknown option --learning_rat. Did you mean --learning_rate?"),
        (["--algorithm", "rloo", "--critic_warmup_steps", "3"], "is for algorithms with a critic"),
        (["--algorithm", "grpoo"], "Did you mean 'grpo"),
        (["--config", "none.yaml"], "Unknown file or name of --config 'none.yaml'"),
        (["--config", "hotpotqa_gpro"], "Did you mean 'hotpotqa_grpo'", "default, hotpot"),
        (["--config", "broken.yaml"],
         "--config broken.yaml: is not valid YAML", "line 2, column 2"),
        (["--config", "typo.yaml"], "typo.yaml: unknown option --learning_rat. Did you mean"),
        (["--config", "number.yaml"],
         "number.yaml: argument --num_generations", "invalid int value: '4.5'"),
        (["--env", "AgentR1/HotpotQ-v0"], "Did you mean: `HotpotQA`?"),
        (["--env", "raises:X-v0"], "RuntimeError: no licence (", "raises.py, line 1)"),
        (["--env", TOOLS, "--env", "{"], "env, entry 2 is not valid JSON"),
        (["--env", TOOLS, "--env", json.dumps({"id": TOOLS, "wight": 2})], "Did you mean 'weight'"),
        (["--eval_env", json.dumps({"id": TOOLS, "weight": 2})], "weight does nothing"),
        (["--eval_env", TOOLS, "--num_eval_tasks", "0"],
         "--eval_envs does nothing with --num_eval_tasks 0"),
        (["--env_kwargs", '{"hops": 1, "hops": 2}'], "an object repeats a key"),
        (["--env_kwargs", "{hops: 2}"], "--env_kwargs is not valid JSON"),
        (["--eval_env_kwargs", "[1]"], "--eval_env_kwargs must be a JSON object"),
        (["--model", "./nowhere"], "Model ./nowhere: there is no such folder"),
        (["--output_dir", "finished"], "contains a finished run", "--resume", "--overwrite"),
        (["--output_dir", "project/README.md/run"], "--output_dir", "cannot be written to"),
        (["--resume", "--output_dir", "new"], "--resume: there is no folder new"),
        (["--resume", "--overwrite"], "--resume and --overwrite: give one of the two"),
        (["--resume_from_checkpoint", "none"], "none: there is no such folder"),
        (["--tasks", "t.jsonl"], "--tasks does nothing without --program"),
        (["--program", "a:run"], "--program needs --tasks"),
        (["--program", "a:run", "--env", TOOLS], "--env is for environments"),
        (["--config", "twice.yaml"], "twice.yaml: is not valid YAML: 'max_steps' is given twice"),
        (["--config", "alias.yaml"], "alias.yaml: 'env' sets 'env' again"),
        (["--config", "dashes.yaml"], "'learning_rate' sets 'learning_rate' again"),
        (["--config", "nested.yaml"], "nested.yaml: cannot name another file"),
        (["--config", "no_value.yaml"], "no_value.yaml: --learning_rate has no value"),
        (["--config", "no.yaml"], "--env False: Environment `False` doesn't exist"),
        (["--config", "date.yaml"], "--config date.yaml: is not valid YAML", "type date"),
        (["--program", "exits:run", "--tasks", "t.jsonl"], "cannot be imported: SystemExit: 3"),
        (["--program", "raises:run", "--tasks", "t.jsonl"], "imported: RuntimeError: no licence"),
        (["--program", "json:loads", "--tasks", "t.jsonl", "--program_max_calls", "0"],
         "program_max_calls must be at least 1"),
        (["--config", "deep.yaml"], "--config deep.yaml: is not valid YAML", "recursion"),
        (["--config", "empty_list.yaml"], "env must list at least one environment"),
        *(
            ([f"--{name}", value], f"{name} must be {words}, not {float(value):g}")
            for words, wrong in {
                "at least 0": {"epsilon": "nan", "beta": "-1", "epsilon_high": "-1", "top_k": "-7",
                               "max_grad_norm": "-1", "weight_decay": "-1", "learning_rate": "inf"},
                "at least 1": {"num_generations": "0", "num_iterations": "0",
                               "steps_per_generation": "0", "max_prompt_length": "0"},
                "-1, or at least 1": {"max_steps": "0"},
                "in [0, 1]": {"min_p": "2", "gamma": "nan"},
                "in (0, 1]": {"top_p": "3"},
                "in [0, 1)": {"adam_beta1": "2"},
                "more than 1": {"delta": "0.5"},
                "positive": {"save_steps": "-3", "eval_steps": "0", "repetition_penalty": "0"},
            }.items()
            for name, value in wrong.items()
        ),
        (["--program", "number:x", "--tasks", "t.jsonl"], "'number:x' is no function or class: 3"),
        (["--env_kwargs", '{"context": "number:x"}'], "context 'number:x' is no function"),
        (["--model", "damaged"], "header too small"),
        (["--lora_alpha", "8"], "--lora_alpha does nothing without --lora_r"),
        (["--env", "SyntheticTable"], "All ids: python -m agent_envs list"),
        (["--env_kwargs", '{"context": {"turns": 2}}'], "has no name. Write it as 'window'"),
        (["--reward_schedules", '{"f1": "linear"}'], "should be a JSON object, not 'linear'"),
        (["--report_to", "swanlab"], "--report_to swanlab: install its package first"),
    ],
    sft: [
        (["--learning_rat", "1"], "unknown option --learning_rat. Did you mean"),
        (["--config", "none.yaml"], "--config none.yaml: is not valid YAML: [Errno 2]"),
        (["--env", "Nowhere-v0"], "--env Nowhere-v0: Environment `Nowhere` doesn't exist"),
        (["--num_tasks", "0"], "num_tasks must be at least 1, not 0"),
        (["--output_dir", "finished"], "contains a finished run"),
    ],
    evaluate: [
        (["--num_task", "1"], "unknown option --num_task. Did you mean --num_tasks?"),
        (["--env_kwargs", "{"], "--env_kwargs is not valid JSON"),
        (["--env_kwargs", '{"hop": 1}'], "unexpected keyword argument 'hop'", "'hops'?"),
        (["--env", "Nowhere-v0"], "--env Nowhere-v0"),
        (["--output", "."], "--output .: is a folder"),
        (["--trajectories", "x.txt"], "x.txt: unknown kind of file"),
        (["--base_url", "localhost", "--model", "m"], "--base_url must begin with http://"),
        (["--base_url", "http://", "--model", "m"], "the name of a host, not 'http://'"),
        (["--model", "no_end"], "Model no_end: generation_config.json is not valid JSON"),
        (["--base_url", "http://localhost"], "--base_url needs --model"),
        (["--base_url", "http://localhost", "--model", "m", "--top_k", "5"], "--top_k"),
        (["--base_url", "http://localhost", "--model", "m", "--max_concurrency", "0"],
         "max_concurrency must be at least 1, not 0"),
        (["--tool_format", "openai"], "--tool_format openai needs a served model"),
        (["collect", "--keep", "0"], "keep must be at least 1, not 0"),
        (["collect", "--output", "x.txt"], "x.txt: unknown kind of file"),
    ],
}  # fmt: skip


@pytest.fixture
def wrong_inputs(tmp_path, monkeypatch):
    """Work in a folder with files that the commands refuse."""
    files = {
        "exits.py": "raise SystemExit(3)", "twice.yaml": "max_steps: 3\nmax_steps: 4",
        "no_value.yaml": "learning_rate:", "nested.yaml": "config: other.yaml",
        "alias.yaml": f"envs: [{TOOLS}]\nenv: {TOOLS}",
        "dashes.yaml": "learning-rate: 0.5\nlearning_rate: 0.1",
        "no.yaml": "env: no", "date.yaml": "env_kwargs: {split: 2026-01-01}",
        "deep.yaml": "a: " + 500 * "[" + 500 * "]", "empty_list.yaml": "envs: []",
        "number.py": "x = 3", "t.jsonl": '{"q": 1}',
        "broken.yaml": "a: [1\nb: }", "typo.yaml": "learning_rat: 1",
        "number.yaml": "num_generations: 4.5", "raises.py": "raise RuntimeError('no licence')",
        "finished/settings.json": "{}", "finished/results.json": "{}", "project/README.md": "{}",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copytree(TINY_POLICY, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"cut")
    shutil.copytree(TINY_POLICY, tmp_path / "no_end")
    (tmp_path / "no_end" / "generation_config.json").write_text("[")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("wrong_inputs")
@pytest.mark.parametrize(
    ("command", "case"), [(command, case) for command, cases in WRONG.items() for case in cases]
)
def test_a_wrong_command_line_is_one_line_with_exit_code_2(command, case, capsys):
    arguments, *messages = case
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    error = "".join(
        line for line in capsys.readouterr().err.splitlines(keepends=True) if ": recipe" not in line
    )
    assert [message for message in messages if message not in error] == []
    assert end.value.code == 2
    assert error.count("\n") <= 2


@pytest.mark.parametrize("kind", [StepPPOConfig, sft.WarmStartConfig])
def test_every_number_has_a_range(kind):
    types = typing.get_type_hints(kind)
    numbers = {
        field.name
        for field in dataclasses.fields(kind)
        if {int, float} & {types[field.name], *typing.get_args(types[field.name])}
    }
    free = re.compile(  # of losses and features that are refused, or set by a launcher
        "local_rank|(sapo|vespo|entropy)_.*|pad_to_multiple_of|router_aux_loss_coef"
        "|num_completions_to_print|dataset_num_proc|top_entropy_quantile"
        "|off_policy_mask_threshold|max_tool_calling_iterations"
        "|vllm_importance_sampling_cap"
    )
    unchecked = set()
    for name in sorted(numbers):
        settings = copy.copy(kind("run"))
        setattr(settings, name, float("nan"))
        with contextlib.suppress(ConfigurationError):
            check_ranges(settings)
            unchecked.add(name)
    assert {name for name in unchecked if not free.fullmatch(name)} == set()


def test_help_shows_our_own_options_with_the_defaults_that_hold(capsys):
    def shown(*arguments):
        with pytest.raises(SystemExit, match="0"):
            train.main(arguments)
        return capsys.readouterr().out

    text = shown("--help")
    kinds = (TrainArguments, StepGRPOConfig, ModelArguments)
    ours = {name for kind in kinds for name in kind.__annotations__}
    options = {f.name for kind in kinds for f in dataclasses.fields(kind) if f.init} & ours
    assert {name for name in options if f"  --{name}" not in text} == set()
    assert "(default: 0.001)" in text
    assert "--critic_model" not in text
    assert "--adam_beta1" not in text
    changed = shown("--model", "some/model", "--algorithm", "ppo", "--help")
    assert "--critic_model" in changed
    assert "(default: 1e-06)" in changed
    assert "--adam_beta1" in shown("--help_all")


def test_the_command_line_wins_over_the_file_and_the_file_over_the_recipe(config_file):
    settings = {"learning_rate": "1e-4", "num_generations": 4, "per_device_train_batch_size": 8,
                "env_kwargs": {"hops": 3}, "loss_mask": False, "report_to": ["none"],
                "scale_rewards": False, "min_p": None}  # fmt: skip
    arguments = [*config_file(**settings), "--num_generations", "2"]
    options, config = parse_arguments(arguments)
    assert (config.learning_rate, config.num_generations, config.loss_mask) == (1e-4, 2, False)
    assert (config.report_to, config.scale_rewards) == ([], "none")
    assert json.loads(options.env_kwargs) == {"hops": 3}
    assert (config.max_completion_length, config.max_steps) == (24, 200)  # of the recipe
    assert make_parser(arguments).get_default("recipe").startswith("default, ")
    assert parse_arguments([])[1].learning_rate == 1e-3
    # a file lies on the recipe of its model, and wins over the preset of its algorithm
    assert parse_arguments(config_file(model="some/model"))[1].learning_rate == 1e-6
    _, config = parse_arguments(config_file(algorithm="step_ppo", gamma=0.5))
    assert (config.gamma, config.importance_sampling_level) == (0.5, "step")


def test_the_recipe_of_the_first_paper_has_its_settings():
    arguments = ["--config", "hotpotqa_grpo", "--use_cpu", "--bf16", "false"]
    options, config = parse_arguments(arguments)
    assert make_parser(arguments).get_default("recipe") == "hotpotqa_grpo"
    assert (config.learning_rate, config.beta, config.num_generations) == (1e-6, 0.001, 5)
    assert config.max_completion_length == 1024
    assert json.loads(options.env_kwargs)["max_episode_steps"] == 5
    # 8 processes x batch size x accumulation = 128 questions in groups of 5
    per_step = 8 * config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert per_step == 128 * 5
    assert all(path.is_file() for path in [*RECIPES.values(), *ACCELERATE_CONFIGS.values()])


@pytest.mark.parametrize("algorithm", PRESETS)
def test_an_algorithm_is_a_few_settings_of_one_of_the_trainers(algorithm):
    _, config = parse_arguments(["--algorithm", algorithm])
    assert {name: getattr(config, name) for name in PRESETS[algorithm]} == PRESETS[algorithm]
    # see recipes/default_critic.yaml
    assert not getattr(config, "bootstrap_truncated", False)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_language_model_runs_in_bf16_on_a_processor_with_instructions_for_it(
    has_instructions, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = {"avx512_bf16": has_instructions}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert parse_arguments(["--config", "smollm2"])[1].bf16 is has_instructions
    assert parse_arguments(["--model", "some/model", "--bf16", "false"])[1].bf16 is False
    assert parse_arguments([])[1].bf16 is False  # the embedded policy stays exact
    parser = sft.make_parser(["--model", "some/model"])
    assert parser.build(parser.read(["--model", "some/model"]))[1].bf16 is has_instructions
    loaded = []
    load = lambda *given: loaded.append(load_model(*given)) or loaded[-1]  # noqa: E731
    monkeypatch.setattr(local, "load_model", load)
    for model in (str(TINY_POLICY), None):
        with evaluate.open_policy(evaluate.PolicyArguments(model=model)):
            pass
    types = [torch.bfloat16 if has_instructions else torch.float32, torch.float32]
    assert [model.dtype for model in loaded] == types


def sources(*arguments):
    source = read_source(parse_arguments(arguments)[0])
    members = [(m.id, m.name, m.weight, dict(m.kwargs)) for m in source.trained]
    return members, [member.name for member in source.variants]


def test_the_arguments_of_an_environment_go_with_it(config_file):
    for arguments, expected in (
        ([], {"split": "test"}), (["--env", DEFAULT_ENV], {"split": "test"}),
        (["--env", "Mine/Own-v0"], None),
    ):  # fmt: skip
        options, _ = parse_arguments(arguments)
        assert json.loads(options.eval_env_kwargs or "null") == expected
    file = config_file(envs=[DEFAULT_ENV, TOOLS], eval_envs=[DEFAULT_ENV], num_eval_tasks=7)
    options, _ = parse_arguments([*file, "--env", TOOLS])
    assert (options.env, options.eval_envs, options.num_eval_tasks) == ([TOOLS], None, 7)
    file = config_file(program="a:run", tasks="t.jsonl", max_steps=3)
    assert read_source(parse_arguments(file)[0]).settings["program"] == "a:run"
    options, config = parse_arguments([*file, "--env", DEFAULT_ENV])  # replaces the program
    assert (read_source(options).settings["env"], config.max_steps) == (DEFAULT_ENV, 3)


def test_own_data_replace_the_split_that_a_recipe_evaluates_on():
    options, _ = train.parse_arguments(
        ["--config", "hotpotqa_grpo", "--use_vllm", "false", "--env_kwargs", '{"data": "a.jsonl"}']
    )
    assert options.eval_env_kwargs is None


def test_several_environments_are_read_from_a_file_and_from_the_command_line(config_file):
    envs = [{"id": DEFAULT_ENV, "weight": 2, "kwargs": {"hops": [1, 2, 3]}}, {"id": TOOLS}]
    file = config_file(envs=envs, eval_envs=[{"id": DEFAULT_ENV, "name": "test"}])
    assert sources(*file) == (
        [(DEFAULT_ENV, "SyntheticMultiHop-v0", 2, {"hops": [1, 2, 3]}),
         (TOOLS, "SyntheticTable-v0", 1, {})],
        ["test"],
    )  # fmt: skip
    weighted = json.dumps({"id": TOOLS, "weight": 3})
    shared = {"max_episode_steps": 5}
    for arguments in (["--env", DEFAULT_ENV, f"--env={weighted}"],
                      ["--envs", DEFAULT_ENV, weighted]):  # fmt: skip
        assert sources(*arguments, "--env_kwargs", json.dumps(shared)) == (
            [(DEFAULT_ENV, "SyntheticMultiHop-v0", 1, shared),
             (TOOLS, "SyntheticTable-v0", 3, shared)],
            [],
        )  # fmt: skip


def test_evaluation_tasks_are_held_out_where_no_others_are_named():
    assert min(hold_out(None, 5, seed=0).eval) == ENDLESS - 5
    split = hold_out(20, 200, seed=0)
    assert split.words == "4 of 20 tasks, held out of training"
    assert sorted([*split.train, *split.eval]) == list(range(20))
    assert len(split.eval) == 4
    assert hold_out(4, 200, seed=0).words.startswith("training tasks")


def test_options_with_dashes_in_a_file_go_with_their_environment(tmp_path):
    (tmp_path / "x.yaml").write_text(f"env: {TOOLS}\nenv-kwargs: {{split: test}}\n")
    config = ["--config", str(tmp_path / "x.yaml")]
    other = "AgentR1/SyntheticLongHorizon-v0"
    assert parse_arguments([*config, "--env", other])[0].env_kwargs is None


@pytest.mark.parametrize("began", ["--envs", "--env"])
def test_a_resumed_run_replaces_an_option_also_under_its_other_names(tmp_path, began):
    folder = ["--output-dir", str(tmp_path)]
    command = shlex.join([*folder, began, TOOLS, DEFAULT_ENV])
    (tmp_path / "settings.json").write_text(json.dumps({"command": command}))
    given = [*folder, "--resume", "--env", TOOLS, DEFAULT_ENV]
    _, _, values = read_arguments(make_parser, given)
    assert values.env == [TOOLS, DEFAULT_ENV]
