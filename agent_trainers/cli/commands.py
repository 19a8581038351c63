"""The commands as they are installed: without their libraries they say how to get them."""

import functools
import importlib
import sys


def train() -> None:
    """Run ``agent-r1-train``."""
    run("agent-r1-train", "agent_trainers.cli.train")


def evaluate() -> None:
    """Run ``agent-r1-eval``."""
    run("agent-r1-eval", "agent_trainers.cli.evaluate")


def sft() -> None:
    """Run ``agent-r1-sft``."""
    run("agent-r1-sft", "agent_trainers.cli.sft")


def collect() -> None:
    """Run ``agent-r1-collect``."""
    run("agent-r1-collect", "agent_trainers.cli.collect")


def skills() -> None:
    """Run ``agent-r1-skills``."""
    run("agent-r1-skills", "agent_trainers.cli.skills")


def value() -> None:
    """Run ``agent-r1-value``."""
    run("agent-r1-value", "agent_trainers.cli.value")


def run(command: str, module: str) -> None:
    """Call a module's ``main``; exit with code 2 and one line if a library is missing.

    What is wrong with a command line is said first, where that needs nothing heavy.
    """
    try:
        first_checks = importlib.import_module("agent_trainers.cli.first_checks")
        if command in first_checks.OPTIONS:
            check = functools.partial(first_checks.check, command)
            importlib.import_module("agent_trainers.cli.arguments").run_command(
                command, check, None
            )
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if (error.name or "agent_").startswith("agent_"):
            raise
        sys.stderr.write(
            f"{command} needs {error.name}, which is not installed: pip install 'agent-r1[train]'\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:  # importing takes seconds
        sys.exit(130)
    main()
