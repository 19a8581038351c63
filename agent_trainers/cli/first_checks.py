"""What is told of a wrong command line before torch and TRL are imported, which takes seconds.

``agent-r1-train`` and ``agent-r1-sft`` have TRL's settings, and to import those is to import torch:
so for ``--help`` too, since it shows their defaults. But which options there are stands in the
source of their classes, and what is checked here is checked by the functions that the commands call
again when they run. Nothing is accepted here, only refused: what passes is parsed as ever.
"""

import argparse
import ast
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import read_config, refuse, unknown_option
from agent_trainers.cli.env_lists import gather_lists, ids_in
from agent_trainers.cli.environments import check_id
from agent_trainers.cli.output_folder import check_use
from agent_trainers.policies.models import check_model
from agent_trainers.recipes import find_recipe

_MODEL: Final = {
    "ModelConfig": "trl.trainer.model_config",
    "ModelArguments": "agent_trainers.cli.models",
    "TrainingArguments": "transformers.training_args",
    "_BaseConfig": "trl.trainer.base_config",
}
OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "agent-r1-train": {
        **_MODEL,
        "GRPOConfig": "trl.trainer.grpo_config",
        "StepGRPOConfig": "agent_trainers.trainers.grpo_config",
        "StepPPOConfig": "agent_trainers.trainers.ppo_config",
        "ProgramArguments": "agent_trainers.cli.played",
        "TrainArguments": "agent_trainers.cli.train_options",
    },
    "agent-r1-sft": {
        **_MODEL,
        "SFTConfig": "trl.trainer.sft_config",
        "WarmStartConfig": "agent_trainers.trainers.supervised",
        "WarmStartArguments": "agent_trainers.cli.sft",
    },
}
"""The classes whose fields are a command's options, and where they stand."""
_LOOKED_AT: Final = (
    "config", "model", "env", "env_kwargs", "eval_env_kwargs", "program", "algorithm", "output_dir",
    "resume_from_checkpoint",
)  # fmt: skip
_LISTS: Final = ("envs", "eval_envs")
WARM_START_FOLDER: Final = "runs/sft"
"""Output folder of ``agent-r1-sft`` if no other is given."""
_SWITCHES: Final = ("resume", "overwrite", "dry_run")


def check(program: str, arguments: Sequence[str]) -> None:
    """Refuse a command line that is wrong for a reason that is cheap to see.

    Raises:
        SystemExit: If there is no such option.
        AgentEnvsError: As the command itself would.
    """
    if {"-h", "--help", "--help_all", "--help-all"} & set(arguments):
        return
    arguments = gather_lists(arguments) if program == "agent-r1-train" else arguments
    names = option_names(program)
    if names and program == "agent-r1-train":
        names |= _options_of_accelerate()
    _check_names(program, arguments, names, "")
    given = given_values(program, arguments)
    settings: dict[str, Any] = {}
    if program == "agent-r1-train":
        path: Path | None = find_recipe(given.config, given.model)
    else:
        path = None if given.config is None else Path(given.config)
        settings["output_dir"] = WARM_START_FOLDER
    settings |= {} if path is None else read_config(path)
    _check_names(program, [f"--{name}" for name in settings], names, f"{path}: ")
    values = {name: getattr(given, name) for name in (*_LOOKED_AT, *_LISTS, *_SWITCHES)}
    _check_values({**settings, **{name: v for name, v in values.items() if v is not None}})


def given_values(program: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return those values on a command line that decide what stands for the others; None if none.

    Raises:
        SystemExit: If one of them is not written as an option is.
    """
    parser = _FirstParser(program, add_help=False, allow_abbrev=False)
    for name in _LOOKED_AT:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    for name in _LISTS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="+")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?",
                            const=True, type=_is_switched_on)  # fmt: skip
    given, _ = parser.parse_known_args(list(arguments))
    return given


def option_names(program: str) -> frozenset[str]:
    """Return the names of a command's options, from the sources of the classes that declare them.

    Empty if one of them is not where it was: then only the command itself can tell.
    """
    names: set[str] = set()
    for kind, module in OPTIONS[program].items():
        tree = ast.parse(_source(module) or "")
        body = next(
            (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind), None
        )
        if body is None:
            return frozenset()
        names |= {
            line.target.id
            for line in body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
    return frozenset(names | {"config", "help_all"})


def _options_of_accelerate() -> frozenset[str]:
    """Return what ``accelerate launch`` may take; whatever in its source looks like an option."""
    found = re.findall(r'"--([\w-]+)"', _source("accelerate.commands.launch") or "")
    return frozenset(name.replace("-", "_") for name in found)


def _source(module: str) -> str | None:
    """Return the source of a module without importing it, or the packages that it lies in."""
    package, _, rest = module.partition(".")
    found = importlib.util.find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder, *rest.split(".")).with_suffix(".py")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def _check_names(program: str, options: Sequence[str], names: frozenset[str], source: str) -> None:
    for option in options if names else ():
        name = option.split("=")[0]
        if not name.startswith("--") or name == "--" or " " in name:
            continue  # a value
        plain = name.removeprefix("--").replace("-", "_")
        if plain not in names and plain.removeprefix("no_") not in names:
            refuse(program, source + unknown_option(name, sorted(names)))


def _check_values(values: Mapping[str, Any]) -> None:
    for name in ("env_kwargs", "eval_env_kwargs"):
        value = values.get(name)
        json_object(
            value if value is None or isinstance(value, str) else json.dumps(value), f"--{name}"
        )
    if (model := values.get("model")) is not None:
        check_model(str(model))
    if "env" in values:
        check_id(values["env"])
    for name in _LISTS:
        for env_id in ids_in(values.get(name), name):
            check_id(env_id)
    if values.get("output_dir") == "":
        raise ConfigurationError("--output_dir is empty: name a folder.")
    is_main = os.environ.get("RANK", "0") == "0"  # the others leave the folder to it
    if (folder := values.get("output_dir")) is not None and is_main and not values.get("dry_run"):
        check_use(
            Path(folder),
            resume=bool(values.get("resume")),
            overwrite=bool(values.get("overwrite")),
            checkpoint=values.get("resume_from_checkpoint"),
        )


class _FirstParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(self.prog, message)


def _is_switched_on(text: str) -> bool:
    return text.lower() in ("yes", "true", "t", "y", "1")
