import pytest
import yaml

from agent_trainers.cli import train

SHORT = ["--max_steps", "2", "--num_eval_tasks", "4", "--per_device_train_batch_size", "8",
         "--steps_per_generation", "1",
         "--num_generations", "4", "--per_device_eval_batch_size", "4"]  # fmt: skip


@pytest.fixture(scope="session")
def run_train():
    """Train for two steps into a folder."""
    return lambda folder, *arguments: train.run([*SHORT, "--output_dir", str(folder), *arguments])


@pytest.fixture
def config_file(tmp_path):
    """Write a settings file and return the option that names it."""

    def write(**settings):
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return ["--config", str(path)]

    return write
