"""Several environments on a command line and in a settings file."""

import json

import pytest
import yaml

from agent_envs import ConfigurationError
from agent_envs.errors import UnknownNameError
from agent_trainers.cli import first_checks, output_folder, train
from agent_trainers.cli.env_lists import environments_of, gather_lists
from agent_trainers.cli.train_options import environment_settings

HOP = "AgentR1/SyntheticMultiHop-v0"
TOOLS = "AgentR1/SyntheticTable-v0"
BASE = {"use_cpu": True, "bf16": False}


def parsed(*arguments):
    return train.parse_arguments(list(arguments))


@pytest.fixture
def config_file(tmp_path):
    def write(**settings):
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(BASE | settings), encoding="utf-8")
        return ["--config", str(path)]

    return write


def test_environments_of_a_file_are_read_by_weight(config_file):
    envs = [{"id": HOP, "weight": 2, "kwargs": {"hops": [1, 2, 3]}}, {"id": TOOLS}]
    options, config = parsed(*config_file(envs=envs, eval_envs=[{"id": HOP, "name": "test"}]))
    trained, variants = environments_of(options)
    assert [(m.id, m.name, m.weight, dict(m.kwargs)) for m in trained] == [
        (HOP, "SyntheticMultiHop-v0", 2, {"hops": [1, 2, 3]}), (TOOLS, "SyntheticTable-v0", 1, {})
    ]  # fmt: skip
    assert [member.name for member in variants] == ["test"]
    assert (config.eval_strategy, config.eval_steps) == ("steps", 0.17)


def test_env_given_several_times_is_the_list():
    weighted = json.dumps({"id": TOOLS, "weight": 3})
    for arguments in (["--env", HOP, "--env", weighted], [f"--env={HOP}", f"--env={weighted}"]):
        options, config = parsed(*arguments, "--env_kwargs", '{"max_episode_steps": 5}')
        trained, variants = environments_of(options)
        assert [(m.id, m.weight, dict(m.kwargs)) for m in trained] == [
            (HOP, 1, {"max_episode_steps": 5}), (TOOLS, 3, {"max_episode_steps": 5})
        ]  # fmt: skip
        assert (variants, config.eval_strategy) == ([], "no")
    options, _ = parsed("--eval_env", TOOLS, "--eval-env", json.dumps({"id": HOP, "name": "x"}))
    assert [member.name for member in environments_of(options).variants] == [
        "SyntheticTable-v0", "x"
    ]  # fmt: skip


def test_environments_on_the_command_line_take_the_place_of_those_of_a_file(config_file):
    file = config_file(envs=[HOP, TOOLS], eval_envs=[HOP], num_eval_tasks=7)
    options, _ = parsed(*file, "--env", HOP)
    assert (options.env, options.envs, options.eval_envs, options.num_eval_tasks) == (
        HOP, None, None, 7,
    )  # fmt: skip
    options, _ = parsed(*config_file(env=TOOLS, env_kwargs={"a": 1}), "--env", HOP, "--env", TOOLS)
    assert [dict(member.kwargs) for member in environments_of(options).trained] == [{}, {}]
    kept, _ = parsed(*config_file(envs=[HOP, TOOLS]), "--eval_env", HOP)
    assert [member.name for member in environments_of(kept).trained] == [
        "SyntheticMultiHop-v0", "SyntheticTable-v0"
    ]  # fmt: skip


def test_a_list_of_one_has_the_settings_of_that_one(config_file, tmp_path):
    one = {"id": HOP, "weight": 4, "kwargs": {"hops": 3}, "eval_kwargs": {"split": "test"}}
    listed = parsed(*config_file(envs=[one]))
    alone = parsed(*config_file(env=HOP, env_kwargs={"hops": 3}, eval_env_kwargs={"split": "test"}))
    listed, alone = (
        output_folder.settings_of(environment_settings(options), config)
        for options, config in (listed, alone)
    )
    assert listed == alone
    assert "envs" not in alone


def test_settings_of_several_hold_the_digest_of_their_files(config_file, tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    members = [{"id": HOP, "kwargs": {"data": str(tmp_path / "x.jsonl")}}, TOOLS]
    options, config = parsed(*config_file(envs=members))
    settings = output_folder.settings_of(environment_settings(options), options, config)
    assert settings["env"] is None
    assert [member["name"] for member in settings["envs"]] == [
        "SyntheticMultiHop-v0", "SyntheticTable-v0"
    ]  # fmt: skip
    assert [*settings["data"]] == ["data of envs SyntheticMultiHop-v0 kwargs"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--env", HOP, "--env", "{"], "envs, entry 2 is not valid JSON"),
    (["--env", HOP, "--env", "AgentR1/Synthetic-v0"], "--env AgentR1/Synthetic-v0: .*Did you mean"),
    (["--env", HOP, "--envs", TOOLS, "--env", TOOLS], "--env and --envs: give one of the two"),
    (["--eval_env", json.dumps({"id": HOP, "weight": 2})], "weight does nothing"),
    (["--env", HOP, "--env", json.dumps({"id": HOP, "wight": 2})], "Did you mean 'weight'"),
])  # fmt: skip
def test_what_is_wrong_with_a_list_is_said_before_anything_is_loaded(arguments, message):
    with pytest.raises((ConfigurationError, UnknownNameError), match=message):
        first_checks.check("agent-r1-train", arguments)


def test_a_file_that_contradicts_itself_is_refused(config_file, capsys):
    with pytest.raises(ConfigurationError, match="env and envs: give one of the two"):
        parsed(*config_file(env=HOP, envs=[HOP, TOOLS]))
    with pytest.raises(SystemExit):
        parsed(*config_file(eval_envs=[HOP], num_eval_tasks=0))
    assert "--eval_envs does nothing with --num_eval_tasks 0" in capsys.readouterr().err


def test_gathering_twice_changes_nothing():
    once = gather_lists(["--env", HOP, "--max_steps", "3", "--env", TOOLS])
    assert once == ["--max_steps", "3", "--envs", HOP, TOOLS]
    assert gather_lists(once) == once
    assert gather_lists(["--env", HOP]) == ["--env", HOP]
