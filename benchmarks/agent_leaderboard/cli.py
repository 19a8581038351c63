"""``agent-r1-bench`` and ``python -m agent_leaderboard``: enter, run, verify, report, share."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import gymnasium as gym

from agent_envs import __version__
from agent_envs.core.command_line import CommandLineParser, check_range, positive_int
from agent_envs.core.lookup import lookup
from agent_envs.errors import AgentEnvsError
from agent_leaderboard.play.config import PRESETS, RunConfig, load_configs

DATA_VARIABLE: Final = "AGENT_R1_DATA"
CHECKOUT_DATA: Final = Path(__file__).parents[3] / "shared" / "data"
"""Data folder next to a checkout, used if the variable is not set."""
EXIT_IN_PART: Final = 3
"""Exit code of ``verify`` if nothing is wrong but not every episode could be replayed."""
_OWN_OPTIONS: Final = ("-h", "--help", "--version")
NEXT_STEPS: Final = """\
Try it:     agent-r1-bench --config {name}.yaml --output runs/try --tasks 1
Run it:     agent-r1-bench --config {name}.yaml --output runs/{name}
Verify it:  agent-r1-bench verify runs/{name}
Send it:    agent-r1-bench submit runs/{name}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].startswith("-") and arguments[0] not in _OWN_OPTIONS:
        arguments.insert(0, "run")
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except (AgentEnvsError, gym.error.Error) as error:
        sys.exit(f"agent-r1-bench: {error}")
    except OSError as error:
        sys.exit(f"agent-r1-bench: {error}. Complete files are kept; repeat the command to resume.")
    except KeyboardInterrupt:
        sys.stderr.write("\nagent-r1-bench: Stopped. Repeat the command to resume.\n")
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(
        prog="agent-r1-bench",
        description="Compare agents on environments. Options without a command are those of run.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(
        name: str, command: Callable[[argparse.Namespace], None], text: str, *paths: str,
        data: bool = False, jobs: int = 0,
    ) -> argparse.ArgumentParser:  # fmt: skip
        """Add a command that takes these paths; ``...`` marks one that may be repeated."""
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, allow_abbrev=False)
        made.set_defaults(command=command)
        for path in paths:
            nargs = "+" if path.endswith("...") else None
            made.add_argument(path.removesuffix("..."), type=Path, nargs=nargs)
        if data:
            text = f"folder of the data sets; ${DATA_VARIABLE} or ../shared/data by default"
            found = CHECKOUT_DATA if CHECKOUT_DATA.is_dir() else None
            default = os.environ.get(DATA_VARIABLE) or found
            made.add_argument("--data", type=Path, default=default, help=text)
        if jobs:
            text = "number of processes, of one core each"
            made.add_argument("--jobs", type=positive_int, default=jobs, help=text)
        return made

    new = add("new", _new, "write an agent template, and the file that enters it")
    new.add_argument("name", help="name of the module: my_agent")
    run = add("run", _run, "run agents, or resume a run", data=True, jobs=1)
    text = "check a run: replay and score every episode again"
    verify = add("verify", _verify, text, "run", data=True, jobs=2)
    text = "the run must have the measure of the published run"
    verify.add_argument("--reference", choices=["published"], help=text)
    text = "time limit; %(default)g minutes by default"
    verify.add_argument("--max_minutes", type=float, default=60.0, help=text)
    add("report", _report, "write leaderboard.md and .html", "run", data=True)
    text = "verify a run, and write the folder and the text of a pull request"
    submit = add("submit", _submit, text, "run", data=True, jobs=2)
    submit.add_argument("--output", type=Path, default=Path("submissions"), help="folder for both")
    text = "verify runs and merge them into one"
    add("merge", _merge, text, "output", "runs...", data=True, jobs=2)
    _add_run_options(run)
    return parser


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument("--config", type=Path, nargs="+", default=[], help="YAML files; they add up")
    run.add_argument("--preset", help=f"configuration by name: {', '.join(PRESETS)}")
    run.add_argument("--output", type=Path, default=Path("runs/leaderboard"), help="folder")
    run.add_argument("--environments", nargs="+", default=[], help="only these, by name")
    run.add_argument("--agents", nargs="+", default=[], help="only these, by name")
    run.add_argument("--tasks", type=positive_int, help="largest number of each environment")
    text = "run on a hidden split; its secret seed is in this file, which is written if missing"
    run.add_argument("--hidden", type=Path, metavar="FILE", help=text)
    run.add_argument("--model", help="model of all model agents")
    run.add_argument("--base_url", help="OpenAI-compatible server of the model agents")
    run.add_argument("--api_key_env", help="environment variable with the server's key")


# Commands. They import what they need: most need no torch.


def _new(options: argparse.Namespace) -> None:
    from agent_leaderboard.entries.entry import write_template

    paths = write_template(options.name, Path())
    print(f"Wrote {' and '.join(map(str, paths))}.")  # noqa: T201
    print(NEXT_STEPS.format(name=options.name))  # noqa: T201


def _run(options: argparse.Namespace) -> None:
    from agent_leaderboard.play.run import run

    sys.path.append("")  # for custom agents in the current folder
    options.run = run(_config(options), options.output, data=options.data, jobs=options.jobs)
    _report(options)


def _config(options: argparse.Namespace) -> RunConfig:
    paths = list(options.config)
    if options.preset is not None or not paths:
        paths.insert(0, lookup(PRESETS, options.preset or "published", kind="preset"))
    config = load_configs(paths).choose(
        environments=options.environments, agents=options.agents, tasks=options.tasks
    )
    if options.hidden is not None:
        config = config.hide(options.hidden)
    server = {name: getattr(options, name) for name in ("model", "base_url", "api_key_env")}
    return config.override_models({k: v for k, v in server.items() if v is not None})


def _verify(options: argparse.Namespace) -> None:
    from agent_leaderboard.verify.contained import verify

    check_range(options, "positive", "max_minutes")
    verification = verify(
        options.run,
        options.data,
        jobs=options.jobs,
        is_published=options.reference is not None,
        max_minutes=options.max_minutes,
    )
    print(verification.summary())  # noqa: T201
    if not verification.is_whole:
        sys.exit(1 if verification.problems else EXIT_IN_PART)


def _report(options: argparse.Namespace) -> None:
    from agent_leaderboard.verify.contained import report

    print(report(options.run, options.data))  # noqa: T201


def _submit(options: argparse.Namespace) -> None:
    from agent_leaderboard.entries.entry import SUBMISSIONS, submit

    folder = submit(options.run, options.output, options.data, jobs=options.jobs)
    print(  # noqa: T201
        f"Wrote {folder} and {folder.with_suffix('.md')}.\nCopy the folder to {SUBMISSIONS}/ in a "
        "fork of the repository, commit it, and open a pull request with the text."
    )


def _merge(options: argparse.Namespace) -> None:
    from agent_leaderboard.entries.entry import merge
    from agent_leaderboard.verify.contained import verify

    options.run = merge(options.output, options.runs, options.data, verify, jobs=options.jobs)
    _report(options)
