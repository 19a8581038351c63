"""Entry points of the installed commands; a missing library is an error of one line."""

import functools
import importlib
import sys

from agent_envs import __version__
from agent_envs.core.lookup import install_hint


def run(command: str, module: str) -> None:
    """Call a module's ``main``; exit with code 2 and one line if a library is missing."""
    if sys.argv[1:] == ["--version"]:  # without the libraries that the command needs
        sys.stdout.write(f"{command} {__version__}\n")
        return
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if (error.name or "agent_").startswith("agent_"):
            raise
        sys.stderr.write(f"{command} needs {error.name}. {install_hint('train')}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # importing takes seconds
        sys.exit(130)
    main()


train = functools.partial(run, "agent-r1-train", "agent_trainers.cli.train")
evaluate = functools.partial(run, "agent-r1-eval", "agent_trainers.cli.evaluate")
sft = functools.partial(run, "agent-r1-sft", "agent_trainers.cli.sft")
