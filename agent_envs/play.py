"""Play an environment by hand: ``python -m agent_envs.play AgentR1/SyntheticMultiHop-v0``."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Final

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.command_line import errors_of_one_line, json_object
from agent_envs.core.tool_env import ToolEnv

_HELP: Final = """\
  TOOL text                 call a tool with one argument: search Red Harbor
  TOOL name=value ...       call a tool: note text="directed it" title="Red Harbor"
  answer text               answer
  raw text                  act with this very text, as a model would
  hint                      what solves the task, step by step
  help, quit
"""


def main(arguments: Sequence[str] | None = None, ask: Callable[[str], str] = input) -> None:
    """Run the command; `ask` shows a prompt and returns a line, or raises EOFError at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.play", description="Play an environment in the terminal.",
        epilog=f"Then type:\n{_HELP}", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("env", help="Gymnasium id")
    parser.add_argument("--env_kwargs", default="{}", help='arguments of the environment as JSON: '
                        '\'{"data": "rows.jsonl"}\'')  # fmt: skip
    parser.add_argument("--task", type=int, help="index of the task; if not given, drawn")
    parser.add_argument("--seed", type=int, help="seed of the draw")
    options = parser.parse_args(arguments)
    with errors_of_one_line("play"):
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        play(gym.make(options.env, render_mode="human", **kwargs), options.task, options.seed, ask)


def play(
    env: gym.Env[str, str], task: int | None, seed: int | None, ask: Callable[[str], str]
) -> None:
    """Play one episode."""
    base = env.unwrapped
    assert isinstance(base, ToolEnv)  # noqa: S101 - all of ours are
    env.reset(seed=seed, options=None if task is None else {"task": task})
    print(f"tools: {', '.join(base.tools)}   (help lists what you can type)")  # noqa: T201
    total, is_over = 0.0, False
    while not is_over:
        try:
            line = ask("> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("quit", "exit"):
            break
        if line in ("", "help"):
            print(_HELP)  # noqa: T201
        elif line == "hint":
            print("\n".join(base.reference_actions()))  # noqa: T201
        else:
            _, reward, terminated, truncated, _ = env.step(as_action(base, line))
            total, is_over = total + float(reward), terminated or truncated
    print(f"return {total:g}")  # noqa: T201
    env.close()


def as_action(env: ToolEnv, line: str) -> str:
    """Return what a model would write to do what a person typed."""
    word, _, rest = line.partition(" ")
    if word == "raw":
        return rest
    if word == "answer":
        return env.write_answer(rest)
    if word not in env.tools:
        return line
    return env.write_call(word, **_arguments(env.tools[word].schema["function"], rest))


def _arguments(function: dict[str, Any], text: str) -> dict[str, Any]:
    """Read ``name=value`` pairs, or the value of the first parameter."""
    parameters = list(function["parameters"]["properties"])
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote: take it as it stands
        words = []
    pairs = [word.partition("=") for word in words]
    if pairs and all(mark and name in parameters for name, mark, _ in pairs):
        return {name: _value(value) for name, _, value in pairs}
    return {parameters[0]: text} if parameters else {}


def _value(text: str) -> Any:
    """Read a number as a number, everything else as text."""
    try:
        return int(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
