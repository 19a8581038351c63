"""``python -m agent_leaderboard`` and ``agent-r1-bench``: run, verify, report, compare, share.

``run`` is what is meant where the first argument is an option.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym

from agent_envs.core.lookup import lookup
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_leaderboard.play.config import PRESETS, RunConfig, load_configs

DATA_VARIABLE: Final = "AGENT_R1_DATA"
DATA_BESIDE: Final = Path(__file__).parents[3] / "shared" / "data"
"""Where a checkout has its data beside it, as the tests look for them."""
CHECKPOINT_PLACEHOLDER: Final = "${checkpoint}"
_PROTOCOL_OPTIONS: Final = {
    "samples_per_task": int, "temperature": float, "seed": int, "concurrency": int,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        arguments.insert(0, "run")
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except (AgentEnvsError, gym.error.Error) as error:
        sys.exit(f"agent-r1-bench: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent-r1-bench",
        description="Compare agents on environments. Without a command's name, options are those "
        "of run.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_run(commands)
    verify = _add(commands, "verify", _verify, "check a run: replay every episode, score it again")
    verify.add_argument("run", type=Path)
    _add_data(verify)
    verify.add_argument("--jobs", type=_positive, default=2, help="processes that replay")
    report = _add(commands, "report", _report, "write leaderboard.md, .csv and .html")
    report.add_argument("run", type=Path)
    _add_data(report)
    report.add_argument(
        "--text",
        action="store_true",
        help="also write a page with the text of licensed data sets, for your own eyes",
    )
    compare = _add(commands, "compare", _compare, "compare two agents on the same tasks")
    compare.add_argument("run", type=Path)
    compare.add_argument("agent_a")
    compare.add_argument("agent_b")
    export = _add(commands, "export", _export, "pack a run that is complete into one file")
    export.add_argument("run", type=Path)
    export.add_argument("bundle", type=Path)
    merge = _add(commands, "merge", _merge, "verify bundles and join them into one run")
    merge.add_argument("output", type=Path)
    merge.add_argument("bundles", type=Path, nargs="+")
    _add_data(merge)
    merge.add_argument("--jobs", type=_positive, default=2, help="processes that replay")
    to_inspect = _add(commands, "to-inspect", _to_inspect, "write logs that inspect view shows")
    to_inspect.add_argument("run", type=Path)
    to_inspect.add_argument("folder", type=Path)
    _add_data(to_inspect)
    from_inspect = _add(commands, "from-inspect", _from_inspect, "read logs of inspect_ai")
    from_inspect.add_argument("logs", type=Path, nargs="+")
    from_inspect.add_argument("output", type=Path)
    return parser


def _add(
    commands: Any, name: str, command: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(command=command)
    return parser


def _add_run(commands: Any) -> None:
    run = _add(commands, "run", _run, "run agents over environments; a stopped run goes on")
    run.add_argument("--config", type=Path, nargs="+", default=[], help="YAML files; they add up")
    run.add_argument("--preset", help=f"settings by name: {', '.join(PRESETS)}")
    run.add_argument("--output", type=Path, help="the run's folder; runs/leaderboard if not given")
    _add_data(run)
    run.add_argument("--jobs", type=_positive, default=1, help="processes that play")
    run.add_argument("--environments", nargs="+", default=[], help="only these, by name")
    run.add_argument("--agents", nargs="+", default=[], help="only these, by name")
    run.add_argument("--tasks", type=_positive, help="at most so many of each environment")
    run.add_argument("--model", help="model of every agent on a model, unless the run trains it")
    run.add_argument("--checkpoint", help="what ${checkpoint} stands for: a trained model's folder")
    run.add_argument("--base_url", help="an OpenAI-compatible server for agents on a model")
    run.add_argument("--api_key_env", help="environment variable with the server's key")
    for name, kind in _PROTOCOL_OPTIONS.items():
        run.add_argument(f"--{name}", type=kind, help="instead of what the settings say")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get(DATA_VARIABLE) or (DATA_BESIDE if DATA_BESIDE.is_dir() else None),
        help=f"folder of the data sets' files; ${DATA_VARIABLE} if not given, or ../shared/data "
        "beside a checkout",
    )


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


# Commands. What they call is imported where it is used: most need neither torch nor a browser page.


def _run(options: argparse.Namespace) -> None:
    from agent_leaderboard.play.run import run
    from agent_leaderboard.report.report import print_table, write_reports

    config = _config(options)
    output = options.output or Path("runs/leaderboard")
    run(config, output, data=options.data, jobs=options.jobs)
    write_reports(output, options.data)
    print_table(output)


def _config(options: argparse.Namespace) -> RunConfig:
    paths = list(options.config)
    if options.preset is not None or not paths:
        paths.insert(0, lookup(PRESETS, options.preset or "published", kind="preset"))
    protocol = {name: getattr(options, name) for name in _PROTOCOL_OPTIONS}
    config = load_configs(paths, **{k: v for k, v in protocol.items() if v is not None})
    config = config.choose(
        environments=options.environments, agents=options.agents, tasks=options.tasks
    )
    names = ("model", "base_url", "api_key_env")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return _with_checkpoint(config.override_models(given), options.checkpoint)


def _with_checkpoint(config: RunConfig, checkpoint: str | None) -> RunConfig:
    def settings(given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("model") != CHECKPOINT_PLACEHOLDER:
            return dict(given)
        if checkpoint is None:
            raise ConfigurationError(
                "An agent wants a trained model: pass --checkpoint with its folder, or leave the "
                "agent out with --agents."
            )
        return {**given, "model": checkpoint}

    agents = tuple(replace(agent, settings=settings(agent.settings)) for agent in config.agents)
    return replace(config, agents=agents)


def _verify(options: argparse.Namespace) -> None:
    from agent_leaderboard.verify.verify import verify

    verification = verify(options.run, options.data, jobs=options.jobs)
    print(verification.summary())  # noqa: T201
    if verification.problems:
        sys.exit(1)


def _report(options: argparse.Namespace) -> None:
    from agent_leaderboard.report.report import print_table, write_reports

    write_reports(options.run, options.data, text=options.text)
    print_table(options.run)


def _compare(options: argparse.Namespace) -> None:
    from agent_leaderboard.report.report import print_comparison

    print_comparison(options.run, options.agent_a, options.agent_b)


def _export(options: argparse.Namespace) -> None:
    from agent_leaderboard.verify.bundle import export_bundle

    export_bundle(options.run, options.bundle)
    size = options.bundle.stat().st_size
    print(f"{options.bundle}: {size:,} bytes")  # noqa: T201


def _merge(options: argparse.Namespace) -> None:
    from agent_leaderboard.report.report import print_table, write_reports
    from agent_leaderboard.verify.bundle import merge_bundles

    merge_bundles(options.output, options.bundles, options.data, jobs=options.jobs)
    write_reports(options.output, options.data)
    print_table(options.output)


def _to_inspect(options: argparse.Namespace) -> None:
    from agent_leaderboard.inspect_logs import inspect_log

    inspect_log.export(options.run, options.folder, options.data)


def _from_inspect(options: argparse.Namespace) -> None:
    from agent_leaderboard.inspect_logs import inspect_log

    inspect_log.import_logs(options.logs, options.output)
