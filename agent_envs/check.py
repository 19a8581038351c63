"""Check an environment of your own: ``python -m agent_envs.check my_module:MyEnv-v0``."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

import gymnasium as gym

from agent_envs.errors import AgentEnvsError, ConfigurationError
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
    try:
        kwargs = json.loads(options.kwargs)
        if not isinstance(kwargs, dict):
            raise ConfigurationError("--kwargs must be a JSON object.")
        found = run_checks(options.env, kwargs=kwargs, episodes=options.episodes, seed=options.seed)
        for result in found:
            num_failed += result.status == "failed"
            print(f"{_WORDS[result.status]:5}{result.name}: {result.detail}", flush=True)  # noqa: T201
    except json.JSONDecodeError as error:
        parser.error(f"--kwargs is not valid JSON ({error}).")
    except (AgentEnvsError, gym.error.Error, ImportError, TypeError) as error:
        if isinstance(error, TypeError) and "keyword argument" not in str(error):
            raise  # a mistake of the environment's, for which its author needs the traceback
        sys.exit(f"check: {error}")
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
