import dataclasses
import json

import pytest

from agent_envs.errors import CheckpointError, ConfigurationError
from agent_trainers.cli.output_folder import open_run, settings_of


def make_run(folder, *names):
    for name in ("settings.json", *names):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("{}")
    return folder


def begin(folder, settings=None, **options):
    """Open the folder, as a run does that has loaded everything; return what it prints."""
    printed = []
    with open_run(folder, settings or {}, printed.append, **options) as start:
        start()
    return printed


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
        tmp_path / "run", *names, "checkpoint-2/x", "metrics.jsonl", "critic.safetensors",
        "trajectories/step_000001.parquet", "notes.txt", "data/mine.jsonl",
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=rf"contains {found}.*--resume.*--overwrite"):
        begin(folder)
    begin(folder, {"model": "some/name", "tasks": None}, overwrite=True)
    left = sorted(path.name for path in folder.iterdir())
    assert left == [".lock", "data", "notes.txt", "settings.json"]
    begin(folder)  # stopped before its first checkpoint


@pytest.mark.parametrize(
    "settings",
    [
        {"model": ""},
        {"critic_model": "checkpoint-2"},
        {"trajectories": "trajectories/1.parquet"},
        {"env_kwargs": {"data": "trajectories.jsonl"}},
        {"envs": [{"kwargs": {"data": "trajectories.jsonl"}}]},
    ],
)
def test_overwriting_never_deletes_the_inputs_of_the_new_run(tmp_path, settings):
    names = ["model.safetensors", "checkpoint-2/x", "trajectories/1.parquet", "trajectories.jsonl"]
    folder = make_run(tmp_path / "run", *names)

    def placed(value):
        if isinstance(value, dict):
            return {name: placed(item) for name, item in value.items()}
        return [*map(placed, value)] if isinstance(value, list) else str(folder / value)

    settings = placed(settings)
    for given in (settings, {"extensions": json.dumps({"mine:Extension": settings})}):
        with pytest.raises(ConfigurationError, match=rf"would delete .*{next(iter(settings))}"):
            begin(folder, given, overwrite=True)
    assert all((folder / name).exists() for name in ("settings.json", *names))


@pytest.mark.parametrize("name", ["README.md", "config.json", "model-00001-of-00002.safetensors"])
def test_files_that_no_run_wrote_are_never_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigurationError, match=rf"contains {name}, which no run"):
            begin(tmp_path, overwrite=overwrite)
    assert (tmp_path / name).read_text() == "mine"


def test_a_second_run_at_the_same_time_is_refused(tmp_path):
    with (
        open_run(tmp_path, {}, print),
        pytest.raises(ConfigurationError, match="another run is writing there"),
    ):
        begin(tmp_path)
    begin(tmp_path)  # once the first is over


@dataclasses.dataclass
class Settings:
    learning_rate: float = 1e-3
    max_steps: int = 60
    output_dir: str = "runs/default"
    save_steps: int = 20


def settings(env_kwargs=None, **changes):
    environment = {"env": "AgentR1/X-v0", "env_kwargs": env_kwargs or {}, "eval_env_kwargs": {}}
    return settings_of(environment, Settings(**changes))


def test_a_resumed_run_keeps_all_settings_but_its_output_and_length(tmp_path):
    data = tmp_path / "tasks.jsonl"
    data.write_text("one\n")
    kwargs = {"data": str(data), "system_prompt": "x" * 5000}  # too long for a path
    begin(tmp_path, settings(kwargs), resume=True)
    changed = settings(kwargs, output_dir="elsewhere", save_steps=1, max_steps=120)
    assert begin(tmp_path, changed, resume=True) == ["Resuming with changed max_steps: 60 -> 120."]
    for changed, difference in (
        (settings(kwargs), "--max_steps 60: the run in .* began with 120"),
        (settings(kwargs, max_steps=120, learning_rate=1e-4), r"rate: 0\.001 -> 0\.0001"),
        (settings(max_steps=120), r"env_kwargs: \{.*\} -> \{\}"),
    ):
        with pytest.raises(ConfigurationError, match=difference):
            begin(tmp_path, changed, resume=True)
    data.write_text("another\n")
    with pytest.raises(ConfigurationError, match=r"data: \{\"env_kwargs\.data\": "):
        begin(tmp_path, settings(kwargs, max_steps=120), resume=True)


def test_damaged_settings_of_a_run_are_named(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "settings.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"settings\.json cannot be read"):
        begin(folder, resume=True)
