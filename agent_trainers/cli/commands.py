"""The commands as they are installed: without their libraries they say how to get them."""

import functools
import importlib
import sys


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


train = functools.partial(run, "agent-r1-train", "agent_trainers.cli.train")
evaluate = functools.partial(run, "agent-r1-eval", "agent_trainers.cli.evaluate")
sft = functools.partial(run, "agent-r1-sft", "agent_trainers.cli.sft")
collect = functools.partial(run, "agent-r1-collect", "agent_trainers.cli.collect")
