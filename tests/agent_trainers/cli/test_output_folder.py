import dataclasses
import json

import pytest

from agent_envs import ConfigurationError
from agent_trainers import StepPPOConfig
from agent_trainers.cli import output_folder
from agent_trainers.cli.collect import CollectArguments
from agent_trainers.cli.output_folder import (
    check_same_settings,
    check_use,
    clear,
    lock_folder,
    settings_of,
    write_settings,
)
from agent_trainers.cli.train_options import TrainArguments


def make_run(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in ("settings.json", *names):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def check_unused(folder):
    return check_use(folder, resume=False, overwrite=False)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["results.json", "model.safetensors"], "a finished run"),
        (["checkpoint-20/model.safetensors"], "a run that was stopped"),
    ],
)
def test_a_run_is_not_replaced_by_another_and_overwriting_deletes_its_files_alone(
    tmp_path, names, found
):
    folder = make_run(
        tmp_path / "run", *names, "checkpoint-2/x", "metrics.jsonl", "adapter_model.safetensors",
        "trajectories/step_000001.parquet", "notes.txt", "data/mine.jsonl",
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"contains a .*--resume.*--overwrite"):
        check_unused(folder)
    clear(folder, {"model": "some/name", "tasks": None})
    assert not check_unused(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["data", "notes.txt"]
    assert not check_unused(make_run(tmp_path / "other"))  # stopped before its first checkpoint
    with pytest.raises(ConfigurationError, match=found):
        check_unused(make_run(tmp_path / "third", *names))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, r"would delete .*\(model\)"),
        ({"critic_model": "checkpoint-2"}, r"would delete .*\(critic_model\)"),
        ({"trajectories": "trajectories/1.parquet"}, r"would delete .*\(trajectories\)"),
        ({"env_kwargs": {"data": "trajectories.jsonl"}}, r"would delete .*\(data of env_kwargs\)"),
        ({"tasks": "missing.jsonl"}, r"--tasks .*: there is no such file"),
    ],
)
def test_overwriting_never_deletes_the_inputs_of_the_new_run(tmp_path, settings, message):
    names = ["model.safetensors", "checkpoint-2/x", "trajectories/1.parquet", "trajectories.jsonl"]
    folder = make_run(tmp_path / "run", *names)
    placed = {
        name: {k: str(folder / v) for k, v in value.items()}
        if isinstance(value, dict)
        else str(folder / value)
        for name, value in settings.items()
    }
    with pytest.raises(ConfigurationError, match=message):
        clear(folder, placed)
    assert all((folder / name).exists() for name in ("settings.json", *names))


@pytest.mark.parametrize("name", ["README.md", "config.json", "tokenizer.json", "metrics.jsonl",
                                  "model-00001-of-00002.safetensors"])  # fmt: skip
def test_files_that_no_run_wrote_are_never_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigurationError, match=rf"contains {name}, which no run"):
            check_use(tmp_path, resume=False, overwrite=overwrite)
    with pytest.raises(ConfigurationError, match="Choose another folder"):
        clear(tmp_path, {})
    assert (tmp_path / name).read_text() == "mine"


def test_a_second_run_at_the_same_time_is_refused(tmp_path):
    with (
        lock_folder(tmp_path / "run"),
        pytest.raises(ConfigurationError, match="another run is writing there"),
        lock_folder(tmp_path / "run"),
    ):
        pass
    with lock_folder(tmp_path / "run"):  # once the first is over
        pass


@dataclasses.dataclass
class Settings:
    model: str = "embedded policy"
    algorithm: str = "grpo_step"
    learning_rate: float = 1e-3
    seed: int = 42
    max_steps: int = 60
    output_dir: str = "runs/default"
    save_steps: int = 20


def settings(env_kwargs=None, **changes):
    environment = {"env": "AgentR1/X-v0", "env_kwargs": env_kwargs or {}, "eval_env_kwargs": {}}
    return settings_of(environment, Settings(**changes))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"learning_rate": 1e-4}, r"learning_rate: 0\.001 -> 0\.0001"),
        ({"seed": 1}, "seed: 42 -> 1"),
        ({"model": "other"}, 'model: "embedded policy" -> "other"'),
        ({"algorithm": "gigpo"}, 'algorithm: "grpo_step" -> "gigpo"'),
        ({"env_kwargs": {"hops": 3}}, r'env_kwargs: \{\} -> \{"hops": 3\}'),
    ],
)
def test_resuming_with_other_settings_names_them(tmp_path, changes, difference):
    write_settings(tmp_path, settings())
    with pytest.raises(ConfigurationError, match=difference):
        check_same_settings(tmp_path, settings(**changes))


def test_resuming_with_a_changed_file_of_tasks_is_refused(tmp_path):
    data = tmp_path / "tasks.jsonl"
    data.write_text("one\n")
    kwargs = {"data": str(data), "system_prompt": "x" * 5000}  # too long for a path
    write_settings(tmp_path, settings(env_kwargs=kwargs))
    assert check_same_settings(tmp_path, settings(env_kwargs=kwargs)) == []
    data.write_text("another\n")
    with pytest.raises(ConfigurationError, match="data of env_kwargs"):
        check_same_settings(tmp_path, settings(env_kwargs=kwargs))


def test_output_and_length_of_a_run_may_change(tmp_path):
    assert check_same_settings(tmp_path, settings()) == []  # stopped before it began
    write_settings(tmp_path, settings())
    assert check_same_settings(tmp_path, settings(output_dir="elsewhere", save_steps=1)) == []
    assert check_same_settings(tmp_path, settings(max_steps=120)) == ["max_steps: 60 -> 120"]
    kinds = (StepPPOConfig, TrainArguments, CollectArguments)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert known >= output_folder._MAY_CHANGE
    json.dumps(settings())
