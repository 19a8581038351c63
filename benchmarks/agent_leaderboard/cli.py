"""``python -m agent_leaderboard`` and ``agent-r1-bench``: enter, run, verify, report, share.

``run`` is what is meant where the first argument is an option.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_text
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_leaderboard.play.config import EMBEDDED, PRESETS, AgentConfig, RunConfig, load_configs
from agent_trainers.programs.runners import RUNNERS

DATA_VARIABLE: Final = "AGENT_R1_DATA"
DATA_BESIDE: Final = Path(__file__).parents[3] / "shared" / "data"
"""Where a checkout has its data beside it, as the tests look for them."""
IN_PART: Final = 3
"""How ``verify`` ends where nothing is wrong, but not every episode could be played again."""
CHECKPOINT_PLACEHOLDER: Final = "${checkpoint}"
STOPPED_TEXT: Final = "Stopped. Give the same command again: it goes on where it was."
NEXT_STEPS: Final = """\
Check it:   agent-r1-bench check {name}.yaml
Run it:     agent-r1-bench --config {name}.yaml --output runs/{name}
Verify it:  agent-r1-bench verify runs/{name}
Send it:    agent-r1-bench submit runs/{name}"""
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
    except OSError as error:  # a full disk, a file where a folder is to be
        sys.exit(f"agent-r1-bench: {error}. What is written whole is kept: the command goes on.")
    except KeyboardInterrupt:
        sys.stderr.write(f"\nagent-r1-bench: {STOPPED_TEXT}\n")
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent-r1-bench",
        description="Compare agents on environments. Without a command's name, options are those "
        "of run.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    new = _add(commands, "new", _new, "write an agent to begin with, and the file that enters it")
    new.add_argument("name", help="name of the module: my_agent")
    text = "play five tasks by an agent, and verify them"
    check_entry = _add(commands, "check", _check, text, "config", data=True)
    check_entry.add_argument("--environments", nargs="+", default=[], help="only these, by name")
    _add_run(commands)
    check = "check a run, or a bundle: replay every episode, score it again"
    verify = _add(commands, "verify", _verify, check, "run", data=True, jobs=2)
    text = "the run must measure as this file says; 'published' is the one that comes with it"
    verify.add_argument("--reference", help=text)
    text = "end after so many minutes; %(default)g if not given"
    verify.add_argument("--max_minutes", type=float, default=60.0, help=text)
    text = "write down what a run measures, for verify --reference"
    _add(commands, "reference", _reference, text, "run", "file")
    text = "write leaderboard.md, .csv and .html"
    report = _add(commands, "report", _report, text, "run", data=True)
    report.add_argument(
        "--text",
        action="store_true",
        help="also write a page with the text of licensed data sets, for your own eyes",
    )
    compare = _add(commands, "compare", _compare, "compare two agents on the same tasks", "run")
    compare.add_argument("agent_a")
    compare.add_argument("agent_b")
    text = "compare runs of the same board over time, the oldest first"
    _add(commands, "history", _history, text, "runs...")
    text = "verify a run, and write the folder and the text of a pull request"
    submit = _add(commands, "submit", _submit, text, "run", data=True, jobs=2)
    submit.add_argument("--output", type=Path, default=Path("submissions"), help="folder for both")
    text = "pack a run that is complete into one file"
    _add(commands, "export", _export, text, "run", "bundle")
    text = "verify bundles and join them into one run"
    _add(commands, "merge", _merge, text, "output", "bundles...", data=True, jobs=2)
    text = "write logs that inspect view shows"
    _add(commands, "to-inspect", _to_inspect, text, "run", "folder", data=True)
    _add(commands, "from-inspect", _from_inspect, "read logs of inspect_ai", "logs...", "output")
    return parser


def _add(
    commands: Any,
    name: str,
    command: Callable[[argparse.Namespace], None],
    text: str,
    *paths: str,
    data: bool = False,
    jobs: int = 0,
) -> argparse.ArgumentParser:
    """Add a command that takes these paths; ``...`` says that one may be several."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(command=command)
    for path in paths:
        several = "+" if path.endswith("...") else None
        parser.add_argument(path.removesuffix("..."), type=Path, nargs=several)
    if data:
        parser.add_argument(
            "--data",
            type=Path,
            default=os.environ.get(DATA_VARIABLE)
            or (DATA_BESIDE if DATA_BESIDE.is_dir() else None),
            help=f"folder of the data sets' files; ${DATA_VARIABLE} if not given, or "
            "../shared/data beside a checkout",
        )
    if jobs:
        text = "processes at once, of one core each"
        parser.add_argument("--jobs", type=_positive, default=jobs, help=text)
    return parser


def _add_run(commands: Any) -> None:
    text = "run agents over environments; a stopped run goes on"
    run = _add(commands, "run", _run, text, data=True, jobs=1)
    run.add_argument("--config", type=Path, nargs="+", default=[], help="YAML files; they add up")
    run.add_argument("--preset", help=f"settings by name: {', '.join(PRESETS)}")
    run.add_argument("--output", type=Path, help="the run's folder; runs/leaderboard if not given")
    run.add_argument("--environments", nargs="+", default=[], help="only these, by name")
    run.add_argument("--agents", nargs="+", default=[], help="only these, by name")
    run.add_argument("--tasks", type=_positive, help="at most so many of each environment")
    run.add_argument("--model", help="model of every agent on a model, unless the run trains it")
    run.add_argument("--checkpoint", help="what ${checkpoint} stands for: a trained model's folder")
    run.add_argument("--program", help="play this program, my_module:run or a command, alone")
    text = f"how it runs: {', '.join(RUNNERS)}"
    run.add_argument("--program_runner", choices=RUNNERS, default="thread", help=text)
    run.add_argument("--base_url", help="an OpenAI-compatible server for agents on a model")
    run.add_argument("--api_key_env", help="environment variable with the server's key")
    for name, kind in _PROTOCOL_OPTIONS.items():
        run.add_argument(f"--{name}", type=kind, help="instead of what the settings say")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


# Commands. What they call is imported where it is used: most need neither torch nor a browser page.


def _new(options: argparse.Namespace) -> None:
    from agent_leaderboard.entries.new import write_template

    paths = write_template(options.name, Path())
    print(f"Wrote {' and '.join(map(str, paths))}.")  # noqa: T201
    print(NEXT_STEPS.format(name=options.name))  # noqa: T201


def _check(options: argparse.Namespace) -> None:
    from agent_leaderboard.entries.check import check_entry
    from agent_leaderboard.report.terminal import make_console

    sys.path.append("")
    config = load_configs([options.config]).choose(environments=options.environments)
    if not check_entry(config, options.data, make_console()):
        sys.exit(1)


def _submit(options: argparse.Namespace) -> None:
    from agent_leaderboard.entries.submit import PLACE, submit

    made = submit(options.run, options.output, options.data, jobs=options.jobs)
    print(f"Wrote {made.folder} and {made.text}.")  # noqa: T201
    print(  # noqa: T201
        f"Copy the folder to {PLACE}/ in a fork of the repository, commit it, and open a pull "
        f"request with the text."
    )


def _history(options: argparse.Namespace) -> None:
    from agent_leaderboard.report.history import print_history

    print_history(options.runs)


def _run(options: argparse.Namespace) -> None:
    from agent_leaderboard.play.run import run

    sys.path.append("")  # an agent of one's own may lie here
    output = options.output or Path("runs/leaderboard")
    run(_config(options), output, data=options.data, jobs=options.jobs)
    _write_and_print(output, options.data)


def _write_and_print(run: Path, data: Path | None, *, text: bool = False) -> None:
    from agent_leaderboard.report.tables import write_reports
    from agent_leaderboard.report.terminal import print_table

    write_reports(run, data, text=text)
    print_table(run)


def _config(options: argparse.Namespace) -> RunConfig:
    paths = list(options.config)
    if options.preset is not None or not paths:
        paths.insert(0, lookup(PRESETS, options.preset or "published", kind="preset"))
    protocol = {name: getattr(options, name) for name in _PROTOCOL_OPTIONS}
    config = load_configs(paths, **{k: v for k, v in protocol.items() if v is not None})
    if options.program is not None:
        settings = {"program": options.program, "runner": options.program_runner, "model": EMBEDDED}
        program = AgentConfig(name=options.program, kind="program", settings=settings)
        config = replace(config, agents=(program,))
    config = config.choose(
        environments=options.environments, agents=options.agents, tasks=options.tasks
    )
    names = ("model", "base_url", "api_key_env")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return _with_checkpoint(config.override_models(given), options.checkpoint)


def _with_checkpoint(config: RunConfig, checkpoint: str | None) -> RunConfig:
    agents = list(config.agents)
    for i, agent in enumerate(agents):
        if agent.settings.get("model") != CHECKPOINT_PLACEHOLDER:
            continue
        if checkpoint is None:
            raise ConfigurationError(
                "An agent wants a trained model: pass --checkpoint with its folder, or leave the "
                "agent out with --agents."
            )
        agents[i] = replace(agent, settings={**agent.settings, "model": checkpoint})
    return replace(config, agents=tuple(agents))


def _verify(options: argparse.Namespace) -> None:
    from agent_leaderboard.records.reference import PUBLISHED
    from agent_leaderboard.verify.contained import verify

    name = options.reference
    verification = verify(
        options.run,
        options.data,
        jobs=options.jobs,
        reference=PUBLISHED if name == "published" else name and Path(name),
        max_minutes=options.max_minutes,
    )
    print(verification.summary())  # noqa: T201
    if not verification.is_whole:
        sys.exit(1 if verification.problems else IN_PART)


def _reference(options: argparse.Namespace) -> None:
    from agent_leaderboard.records.reference import reference_text
    from agent_leaderboard.records.run_folder import RunFolder

    write_text(options.file, reference_text(RunFolder(options.run).read_manifest()))


def _report(options: argparse.Namespace) -> None:
    _write_and_print(options.run, options.data, text=options.text)


def _compare(options: argparse.Namespace) -> None:
    from agent_leaderboard.report.terminal import print_comparison

    print_comparison(options.run, options.agent_a, options.agent_b)


def _export(options: argparse.Namespace) -> None:
    from agent_leaderboard.verify.bundle import export_bundle

    export_bundle(options.run, options.bundle)
    size = options.bundle.stat().st_size
    print(f"{options.bundle}: {size:,} bytes")  # noqa: T201


def _merge(options: argparse.Namespace) -> None:
    from agent_leaderboard.verify.merge import merge_bundles

    merge_bundles(options.output, options.bundles, options.data, jobs=options.jobs)
    _write_and_print(options.output, options.data)


def _to_inspect(options: argparse.Namespace) -> None:
    from agent_leaderboard.inspect_logs import convert

    convert.export(options.run, options.folder, options.data)


def _from_inspect(options: argparse.Namespace) -> None:
    from agent_leaderboard.inspect_logs import convert

    convert.import_logs(options.logs, options.output)
