"""Command-line options as dataclasses, with YAML files and suggestions for mistyped names."""

import argparse
import contextlib
import difflib
import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import datasets
import gymnasium as gym
from tqdm import tqdm
from transformers.hf_argparser import HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from agent_envs import __version__
from agent_envs.core.command_line import silence_retries
from agent_envs.errors import (
    AgentEnvsError,
    ConfigurationError,
    DataError,
    MissingExtraError,
    UnknownNameError,
)
from agent_trainers.cli.config_files import read_settings

T = TypeVar("T")

_USER_ERRORS: Final = (
    ConfigurationError, DataError, MissingExtraError, UnknownNameError, gym.error.Error,
)  # fmt: skip
SHOWN: Final = (
    "max_length", "max_completion_length", "bf16", "use_cpu", "lora_alpha", "lora_dropout",
    "lora_target_modules", "load_in_4bit", "loss_type", "importance_sampling_level", "epsilon",
    "epsilon_high", "beta", "use_bias_correction_kl", "num_generations", "temperature", "use_vllm",
    "vllm_mode", "vllm_importance_sampling_mode", "num_train_epochs", "max_steps", "learning_rate",
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "seed",
    "output_dir", "save_steps", "report_to", "push_to_hub",
)  # fmt: skip
"""Options of TRL that ``--help`` shows."""


class CommandParser(HfArgumentParser):  # type: ignore[misc] # transformers is untyped
    """`HfArgumentParser` with YAML defaults, errors of two lines, and a help without TRL's rest."""

    def __init__(self, kinds: Sequence[type], *, program: str, description: str = "") -> None:
        """Make options of dataclasses; ``--help`` shows ours and `SHOWN` of TRL's."""
        super().__init__(
            kinds, prog=program, description=description, allow_abbrev=False,
            usage="%(prog)s [--option value ...]",
        )  # fmt: skip
        self._settings = dict(self._option_string_actions)
        if "--report_to" in self._settings:  # of a type with and without a list
            self._settings["--report_to"].nargs = "+"
        self.add_argument("--config", help="Settings in YAML; the command line has priority.")
        self.add_argument("--help_all", action="help", help="Show TRL's other options, too.")
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
        self._types = {k: str(v) for kind in kinds for k, v in typing.get_type_hints(kind).items()}
        ours = {
            name
            for kind in kinds
            for base in kind.__mro__
            if not base.__module__.startswith(("trl.", "transformers."))
            for name in vars(base).get("__annotations__", ())
        }
        self._hidden = self._types.keys() - ours - set(SHOWN)
        self._source = ""

    def use_settings(self, settings: Mapping[str, Any], source: str) -> None:
        """Make settings the defaults, converted as on the command line; errors name `source`."""
        self._source = f"{source}: "
        values: dict[str, Any] = {}
        for option, value in settings.items():
            if (action := self._settings.get(f"--{option}")) is None:
                self._refuse_unknown(f"--{option}")
            name = action.dest
            kind = self._types[name]
            is_list = isinstance(value, list) and "list" in kind
            if value is None and "None" not in kind and "Optional" not in kind:
                self.error(f"--{option} has no value. Give one, or remove the line.")
            if value is not None and not is_list:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                parsed = getattr(self.parse_known_args([f"--{name}={text}"])[0], name)
                # TRL maps some booleans, such as those of scale_rewards
                value = value if isinstance(value, bool) and name in self._hidden else parsed
            values[name] = value
        self._source = ""
        self.set_defaults(**values)

    def given(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options on a command line; those not on it are None."""
        helps = ("-h", "--help", "--help_all")
        kept = [argument for argument in arguments if argument not in helps]
        unset = argparse.Namespace(**{action.dest: None for action in self._actions})
        values: argparse.Namespace = self.parse_known_args(kept, unset)[0]
        return values

    def setting(self, argument: str) -> str:
        """Return the name of the setting of an option such as ``--learning-rate=1``."""
        option = argument.split("=")[0]
        action = self._option_string_actions.get(option)
        return option if action is None else action.dest

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the values by name; ends the process if an option is wrong or unknown."""
        for action in self._actions:
            if action.dest in self._hidden and "--help_all" not in arguments:
                action.help = argparse.SUPPRESS
        values: argparse.Namespace
        values, unknown = self.parse_known_args(list(arguments))
        if unknown:
            self._refuse_unknown(unknown[0])
        return values

    def build(self, values: argparse.Namespace) -> tuple[Any, ...]:
        """Return one object per dataclass; the first error of their checks ends the process."""
        try:
            return tuple(self.parse_dict(vars(values), allow_extra_keys=True))
        except (ValueError, ImportError, OSError) as error:  # TRL's and transformers' own checks
            self.error(" ".join(str(error).split()))

    def _refuse_unknown(self, option: str) -> NoReturn:
        from agent_trainers.trainers.config import StepPPOConfig  # imports TRL: seconds

        name = option.split("=")[0]
        is_of_critic = name[2:] in StepPPOConfig.__annotations__
        if is_of_critic and "--algorithm" in self._option_string_actions:
            self.error(f"{name} is for algorithms with a critic, such as --algorithm step_ppo.")
        close = difflib.get_close_matches(name, self._option_string_actions, n=1)
        self.error(f"unknown option {name}." + (f" Did you mean {close[0]}?" if close else ""))

    def error(self, message: str) -> NoReturn:
        """Print the error without argparse's usage, and exit with code 2."""
        sys.stderr.write(f"{self.prog}: {self._source}{message}\n")
        sys.stderr.write(f"All options: {self.prog} --help\n")
        sys.exit(2)


def notifier(program: str) -> Callable[[str], None]:
    """Return a function that prints a status line to stderr, above any progress bar.

    Of several processes the main one prints.
    """

    def notify(text: str) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        with contextlib.suppress(OSError):  # the terminal may have been closed
            tqdm.write(f"{program}: {text}", file=sys.stderr)
            sys.stderr.flush()

    return notify


def parse(arguments: Sequence[str], kind: type[T], *, program: str, description: str) -> T:
    """Parse a command line and its ``--config`` file into one object."""
    parser = CommandParser((kind,), program=program, description=description)
    if (config := parser.given(arguments).config) is not None:
        parser.use_settings(read_settings(Path(config)), config)
    parsed: T = parser.build(parser.read(arguments))[0]
    return parsed


def run_command(
    program: str, run: Callable[[list[str]], int | None], arguments: Sequence[str] | None = None
) -> None:
    """Call `run` with a command line (None: this process's), with errors as one line.

    The exit code is what `run` returns, 2 for a wrong command line or input, 1 for a failure while
    running, 130 after Ctrl-C.
    """
    silence_retries()
    if not sys.stderr.isatty():  # bars would be one line of thousands of carriage returns
        datasets.disable_progress_bars()
        disable_progress_bar()
    try:
        if (exit_code := run(list(sys.argv[1:] if arguments is None else arguments))) is not None:
            sys.exit(exit_code)
    except (AgentEnvsError, gym.error.Error) as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2 if isinstance(error, _USER_ERRORS) else 1)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"\n{program}: Stopped. {interrupt}\n")
        sys.exit(getattr(interrupt, "exit_code", 130))
