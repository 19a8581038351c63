"""Check an environment of your own: ``python -m agent_envs.check my_module:MyEnv-v0``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from agent_envs.core.command_line import errors_of_one_line, json_object
from agent_envs.testing import run_checks

_WORDS: Final = {"ok": "ok", "failed": "FAIL", "skipped": "skip"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: a line per check, exit code 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.check",
        description="Check that an environment keeps the contract.",
    )
    parser.add_argument("env", help="Gymnasium id with its module: my_module:MyEnv-v0")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--episodes", type=int, default=3, help="tasks to solve (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    options = parser.parse_args(arguments)
    num_failed = 0
    with errors_of_one_line("check"):
        kwargs = json_object(options.kwargs, "--kwargs")
        found = run_checks(options.env, kwargs=kwargs, episodes=options.episodes, seed=options.seed)
        for result in found:
            num_failed += result.status == "failed"
            print(f"{_WORDS[result.status]:5}{result.name}: {result.detail}", flush=True)  # noqa: T201
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
