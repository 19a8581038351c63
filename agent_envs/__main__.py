"""The command ``python -m agent_envs {list,play,check,new,serve}``."""

import argparse
import importlib.util
import keyword
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium as gym

from agent_envs import __version__
from agent_envs.catalogue import make_page
from agent_envs.core.command_line import (
    CommandLineParser,
    check_range,
    errors_of_one_line,
    json_object,
)
from agent_envs.core.lookup import require_extra
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.remote.protocol import TOKEN_VARIABLE

TEMPLATE: Final = Path(__file__).parent / "template"
NEXT_STEPS: Final = """\
Check it:  python -m agent_envs check {env}
Test it:   python -m pytest {test}
Train it:  python -m agent_trainers.tiny_policy --env {env} --output tiny
           agent-r1-train --env {env} --model tiny"""
PLAY_HELP: Final = """\
  TOOL text                 call a tool with one argument: search Red Harbor
  TOOL name=value ...       call a tool: note text="directed it" title="Red Harbor"
  answer text               answer
  raw text                  act with exactly this text, as a model would
  hint                      actions that solve the task, step by step
  help, quit
"""
_STATUS: Final = {"ok": "ok", "failed": "FAIL", "skipped": "skip"}
_ENV_HELP: Final = "Gymnasium id, with its module if it is not built in: my_module:MyEnv-v0"


def main(arguments: Sequence[str] | None = None, ask: Callable[[str], str] = input) -> None:
    """Run the command; `ask` shows a prompt and returns a line, for ``play``."""
    options = _parser().parse_args(arguments)
    with errors_of_one_line(options.command):
        if options.command == "play":
            play(options, ask)
        else:
            _COMMANDS[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(prog="python -m agent_envs", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, env: bool = True, **options: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, **options)
        if env:
            command.add_argument("env", help=_ENV_HELP)
            command.add_argument(
                "--env_kwargs", default="{}",
                help='arguments of the environment as JSON: \'{"data": "rows.jsonl"}\'',
            )  # fmt: skip
        return command

    add("list", "List every environment as Markdown.", env=False)

    playing = add(
        "play", "Play an environment in the terminal.", epilog=f"Then type:\n{PLAY_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    playing.add_argument("--task", type=int, help="index of the task (default: drawn)")
    playing.add_argument("--seed", type=int, help="seed of the draw")

    checking = add("check", "Check that an environment keeps the contract.")
    checking.add_argument("--episodes", type=int, default=3, help="tasks to solve (default: 3)")
    checking.add_argument("--seed", type=int, default=0, help="seed (default: 0)")

    new = add("new", "Write a small environment with tests, to start from.", env=False)
    new.add_argument("name", help="name of the module: my_env")
    new.add_argument("--folder", type=Path, default=Path(), help="folder (default: this one)")

    serving = add(
        "serve", "Serve an environment over OpenEnv's protocol, for AgentR1/Remote-v0 and "
        "OpenEnv's clients.", usage="%(prog)s [options] env",
    )  # fmt: skip
    serving.add_argument("--host", default="127.0.0.1", help="address (default: this machine only)")
    serving.add_argument("--port", type=int, default=8000, help="port; 0 for a free one")
    serving.add_argument("--max_sessions", type=int, default=256, help="concurrent episodes")
    serving.add_argument("--idle_timeout", type=float, default=600.0, help="seconds without a step")
    serving.add_argument("--token", default=os.environ.get(TOKEN_VARIABLE),
                         help=f"secret of the clients; better set as {TOKEN_VARIABLE}, which other "
                         "users of the machine cannot see")  # fmt: skip
    serving.add_argument("--reference", action="store_true", help="also serve reference actions")
    return parser


def list_environments(options: argparse.Namespace) -> None:
    """Print the page of all environments."""
    print(make_page(), end="")  # noqa: T201


def check(options: argparse.Namespace) -> None:
    """Print a line per check; exit with 1 if one failed."""
    from agent_envs.testing import run_checks

    check_range(options, "at least 1", "episodes")
    check_range(options, "at least 0", "seed")
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    num_failed = 0
    for result in run_checks(
        options.env, kwargs=kwargs, episodes=options.episodes, seed=options.seed
    ):
        num_failed += result.status == "failed"
        print(f"{_STATUS[result.status]:5}{result.name}: {result.detail}", flush=True)  # noqa: T201
    sys.exit(1 if num_failed else 0)


def new(options: argparse.Namespace) -> None:
    """Write the template, and print the next steps."""
    module, test = write_template(options.name, options.folder)
    env = f"{options.name}:{_class_name(options.name)}-v0"
    print(f"Wrote {module} and {test}.", NEXT_STEPS.format(env=env, test=test.name), sep="\n")  # noqa: T201


def write_template(name: str, folder: Path) -> list[Path]:
    """Write the module `name` with an environment, and its tests; return the two files."""
    if not (name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} cannot name a module; write a name like my_env.")
    files = {}
    for path in sorted(TEMPLATE.glob("*.txt")):
        text = path.read_text(encoding="utf-8").replace("MyEnv", _class_name(name))
        target = folder / path.stem.replace("my_env", name)
        files[target] = text.replace("my_env", name)
        if target.exists():
            raise ConfigurationError(f"{target} exists; nothing was written.")
    if importlib.util.find_spec(name):
        raise ConfigurationError(f"There is a module {name} already; choose another name.")
    folder.mkdir(parents=True, exist_ok=True)
    for target, text in files.items():
        target.write_text(text, encoding="utf-8")
    return list(files)


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def serve(options: argparse.Namespace) -> None:
    """Serve until stopped."""
    require_extra("serve", "Serving environments", "starlette", "uvicorn", "websockets")
    from agent_envs.remote.server import EnvironmentServer, listen

    check_range(options, "at least 1", "max_sessions")
    check_range(options, "positive", "idle_timeout")
    check_range(options, "in [0, 65535]", "port")
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    if not options.token and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigurationError(
            f"--host {options.host} admits other machines. Set {TOKEN_VARIABLE} to a secret, here "
            "and where the clients run."
        )
    server = EnvironmentServer(
        lambda: gym.make(options.env, **kwargs),
        max_sessions=options.max_sessions,
        idle_seconds=options.idle_timeout,
        token=options.token or None,
        with_reference=options.reference,
    )
    try:
        listener, socket, url = listen(server, options.host, options.port)
    except OSError as error:
        raise ConfigurationError(f"{error.strerror}. Choose another --host or --port.") from None
    what = server.description["environment"]
    print(f"Serving {what} at {url} ({options.max_sessions} sessions)", flush=True)  # noqa: T201
    listener.run(sockets=[socket])


def play(options: argparse.Namespace, ask: Callable[[str], str]) -> None:
    """Run one episode with the actions of a person."""
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    env = gym.make(options.env, render_mode="human", **kwargs)
    base = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(f"{options.env} is not an environment with tools (a ToolEnv).")
    env.reset(seed=options.seed, options=None if options.task is None else {"task": options.task})
    print(f"tools: {', '.join(base.tools)}   (help lists the commands)")  # noqa: T201
    total, is_over = 0.0, False
    while not is_over:
        try:
            line = ask("> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("quit", "exit"):
            break
        if line in ("", "help"):
            print(PLAY_HELP)  # noqa: T201
        elif line == "hint":
            try:
                print("\n".join(base.reference_actions()))  # noqa: T201
            except NotImplementedError as error:
                print(error)  # noqa: T201
        else:
            _, reward, terminated, truncated, _ = env.step(_as_action(base, line))
            total, is_over = total + float(reward), terminated or truncated
    print(f"return {total:g}")  # noqa: T201
    env.close()


def _as_action(env: ToolEnv, line: str) -> str:
    """Return the action of a model for a line of a person."""
    word, _, rest = line.partition(" ")
    if word == "answer":
        return env.write_answer(rest)
    if word not in env.tools:
        return rest if word == "raw" else line
    return env.write_call(word, **_read_arguments(env.tools[word].schema["function"], rest))


def _read_arguments(function: dict[str, Any], text: str) -> dict[str, Any]:
    """Read ``name=value`` pairs, or the value of the first parameter."""
    parameters = list(function["parameters"]["properties"])
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        words = []
    pairs = [word.partition("=") for word in words]
    if pairs and all(mark and name in parameters for name, mark, _ in pairs):
        return {name: int(v) if v.removeprefix("-").isdecimal() else v for name, _, v in pairs}
    return {parameters[0]: text} if parameters else {}


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace], None]]] = {
    "list": list_environments, "check": check, "new": new, "serve": serve,
}  # fmt: skip


if __name__ == "__main__":
    main()
