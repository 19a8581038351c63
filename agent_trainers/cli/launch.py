"""Start several processes where the options ask for them.

``accelerate launch`` does it on accelerators. On a CPU it silently starts a single process whatever
``--num_processes`` says, so ``torchrun`` does it there. ``--accelerate_config`` names a file of
Accelerate's settings: one in ``recipes/accelerate`` (``ddp``, ``fsdp2``, ``deepspeed_zero3``), or
one of your own.
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml
from accelerate import PartialState
from accelerate.commands.launch import launch_command_parser

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError

ACCELERATE_CONFIGS: Final = {
    path.stem: path
    for path in sorted((Path(__file__).parent.parent / "recipes" / "accelerate").glob("*.yaml"))
}
_CONFIG_OPTION: Final = "--accelerate_config"
_MAY_RUN_ON_CPU: Final = ("NO", "MULTI_CPU", "MULTI_GPU")


def split_launch_options(
    arguments: Sequence[str], own_options: frozenset[str]
) -> tuple[list[str], list[str]]:
    """Tell Accelerate's options from the program's own.

    Args:
        arguments: The command line.
        own_options: Options of the program; where both have a name, it is the program's.

    Returns:
        Accelerate's options with their values, and everything else.
    """
    table: dict[str, argparse.Action] = {
        option: action
        for action in launch_command_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and option not in own_options and option != "--help"
    }
    table[_CONFIG_OPTION] = argparse.Action([_CONFIG_OPTION], "accelerate_config")
    launch: list[str] = []
    rest: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        action = table.get(argument.split("=")[0].replace("-", "_").replace("__", "--", 1))
        if action is None:
            rest.append(argument)
            continue
        launch.append(argument)
        if action.nargs != 0 and "=" not in argument and remaining:
            launch.append(remaining.pop(0))
    return launch, rest


def launch_command(options: Sequence[str], module: str, rest: Sequence[str]) -> list[str] | None:
    """Return the command that starts the processes, or None where this process will do.

    Raises:
        ConfigurationError: If the options ask for what a CPU cannot do.
    """
    if not options or "LOCAL_RANK" in os.environ:  # nothing asked for, or already started
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_CONFIG_OPTION, _CONFIG_OPTION.replace("_", "-"))
    known, others = parser.parse_known_args(list(options))
    config = None if known.accelerate_config is None else find_config(known.accelerate_config)
    import torch

    if torch.accelerator.is_available():
        settings = [] if config is None else ["--config_file", str(config)]
        start = [sys.executable, "-m", "accelerate.commands.launch", *settings, *others]
        return [*start, "--module", module, *rest]
    num_processes = _num_cpu_processes(others, config)
    if num_processes == 1:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc_per_node", str(num_processes), "--module", module, *rest]


def find_config(name_or_path: str) -> Path:
    """Return the file of Accelerate's settings that is meant.

    Raises:
        UnknownNameError: If there is none; says which there are.
    """
    path = Path(name_or_path)
    return path if path.is_file() else lookup(ACCELERATE_CONFIGS, name_or_path, kind=_CONFIG_OPTION)


def _num_cpu_processes(options: Sequence[str], config: Path | None) -> int:
    """Return how many processes to start on this CPU.

    Raises:
        ConfigurationError: If the options or the file ask for what a CPU cannot do.
    """
    settings = {} if config is None else yaml.safe_load(config.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    default = int(settings.get("num_processes", 1))
    parser.add_argument("--num_processes", "--num-processes", type=int, default=default)
    known, others = parser.parse_known_args(list(options))
    if others:
        raise ConfigurationError(
            f"{others[0]} needs an accelerator; on a CPU only --num_processes is supported."
        )
    if (kind := settings.get("distributed_type", "NO")) not in _MAY_RUN_ON_CPU:
        raise ConfigurationError(
            f"{_CONFIG_OPTION} {config}: {kind} needs an accelerator. On a CPU use "
            f"{_CONFIG_OPTION} ddp, or --num_processes alone."
        )
    if known.num_processes < 1:
        raise ConfigurationError(f"--num_processes must be at least 1, not {known.num_processes}.")
    return int(known.num_processes)


def leave_process_group() -> None:
    """Wait for the other processes and stop the group's threads; call it when no trainer is left.

    DDP's reducer holds the group as well. If it is collected last, the group dies with Python's
    lock held, and waits forever for a thread of gloo's that wants the lock to free a tensor; if it
    is not collected, such a thread aborts the process while the interpreter ends. So the trainer
    goes first, and the group, which lets go of the lock when it dies by itself, after it.
    """
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
