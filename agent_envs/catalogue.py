"""Every environment on one page: ``python -m agent_envs.catalogue``.

The page is made from the environments themselves: each is set up on a row like those of its data
set, and asked for its tools, reward terms and metrics.
"""

import argparse
import inspect
import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import DataError, MissingExtraError, SandboxUnavailableError
from agent_envs.registration import ENVIRONMENTS

TITLE: Final = "# The environments"
NOT_DESCRIBED: Final = "Not described here:"
INTRODUCTION: Final = (
    "Made by `python -m agent_envs.catalogue --output ENVIRONMENTS.md`. All take `tools`, "
    "`tool_format`, `context`, `rewards`, `system_prompt`, `render_mode` and `max_episode_steps` "
    "besides their own arguments. Reward terms are listed with their default weights; those "
    "without one are off unless `rewards=` names them. Outcome terms are marked with an asterisk."
)
_WIKI: Final[Mapping[str, Any]] = {
    "question": "Who directed Red Harbor?",
    "answer": "Ada Holm",
    "context": [["Red Harbor", ["Red Harbor is a film by Ada Holm."]]],
    "supporting_facts": [["Red Harbor", 0]],
}
_OPEN: Final[Mapping[str, Any]] = {"question": "Who?", "golden_answers": ["Ada Holm"]}
_PARAGRAPH: Final[Mapping[str, Any]] = {
    "title": "Red Harbor", "paragraph_text": "A film by Ada Holm.", "is_supporting": True,
}  # fmt: skip
EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "HotpotQA": _WIKI,
    "2WikiMultihopQA": {**_WIKI, "evidences": [["Red Harbor", "director", "Ada Holm"]]},
    "MuSiQue": {"question": "Who?", "answer": "Ada Holm", "paragraphs": [_PARAGRAPH]},
    "Bamboogle": {"Question": "Who?", "Answer": "Ada Holm"},
    "NaturalQuestions": _OPEN,
    "TriviaQA": _OPEN,
    "PopQA": _OPEN,
    "GSM8K": {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    "MATH": {"problem": "What is 1 + 1?", "answer": "2", "level": 1, "subject": "Prealgebra"},
    "HumanEval": {
        "prompt": 'def one():\n    """Return 1."""\n',
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    },
    "MBPP": {
        "text": "Return 1.", "code": "def one(): return 1", "test_list": ["assert one() == 1"],
    },
}  # fmt: skip
"""A row in the form of each data set."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.catalogue", description="List every environment as Markdown."
    )
    parser.add_argument("--output", type=Path, help="file to write; the terminal if not given")
    options = parser.parse_args(arguments)
    page = make_page()
    if options.output is None:
        print(page, end="")  # noqa: T201
    else:
        options.output.write_text(page, encoding="utf-8")
        print(f"{len(ENVIRONMENTS)} environments: {options.output}")  # noqa: T201


def make_page() -> str:
    """Return the page as Markdown."""
    return "\n\n".join([TITLE, INTRODUCTION, *map(make_section, ENVIRONMENTS)]) + "\n"


def make_section(spec: EnvSpec) -> str:
    """Return what the page says of one environment."""
    return "\n\n".join(_section(spec))


def describe(spec: EnvSpec) -> dict[str, str]:
    """Return what there is to say of an environment, by heading.

    Raises:
        DataError: If its data are not at hand, and no row can stand for them.
        MissingExtraError: If its extra is not installed.
        SandboxUnavailableError: If it runs code, and this machine offers no strong isolation.
    """
    env = _example(spec)
    base = env.unwrapped
    assert isinstance(base, ToolEnv)  # noqa: S101 - all of ours are
    env.reset(seed=0)
    *_, info = env.step("")
    metrics = info["metrics"]
    weights = base.default_rewards
    terms = [
        f"`{name}`{'*' * (name in base.outcome_terms)}"
        + (f" {weights[name]:g}" if name in weights else "")
        for name in base.reward_functions
    ]
    facts = {
        "Data": _data(type(base), spec),
        "Tools": ", ".join(map(_signature, base.tools.values())) or "none",
        "Tools by name": ", ".join(f"`{name}`" for name in base.optional_tools),
        "Reward terms": ", ".join(terms),
        "Metrics": ", ".join(f"`{name}`" for name in metrics),
        "Arguments": _arguments(type(base)),
        "Turns": str(spec.max_episode_steps),
        "Fixed arguments": ", ".join(f"`{k}={v!r}`" for k, v in spec.kwargs.items()),
    }
    env.close()
    return {name: value for name, value in facts.items() if value}


def _section(spec: EnvSpec) -> Iterator[str]:
    kind = load_env_creator(str(spec.entry_point))
    yield f"## `{spec.id}`"
    yield from _paragraphs(inspect.getdoc(kind) or "")
    try:
        facts = describe(spec)
    except (DataError, MissingExtraError, SandboxUnavailableError) as error:
        yield f"{NOT_DESCRIBED} {error}"
        return
    yield "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _paragraphs(docstring: str) -> Iterator[str]:
    for paragraph in docstring.split("\n\n"):
        yield "\n".join(textwrap.wrap(paragraph.replace("``", "`"), 118, break_long_words=False))


def _example(spec: EnvSpec) -> gym.Env[str, str]:
    """Set the environment up, on a row like those of its data set if it has one."""
    name = spec.id.removeprefix("AgentR1/").removesuffix("-v0")
    if name not in EXAMPLES:
        return gym.make(spec.id)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps([EXAMPLES[name]]), encoding="utf-8")
        return gym.make(spec.id, data=str(path))


def _data(kind: type[ToolEnv], spec: EnvSpec) -> str:
    hub = getattr(kind, "hub", None) or getattr(getattr(kind, "dataset", None), "hub", None)
    if hub is None:
        return "generated, endless"
    configuration = f", {hub.configuration}" if hub.configuration else ""
    return f"`{hub.path}`{configuration} on the hub, or `data=`; licence: {hub.licence}"


def _signature(tool: Any) -> str:
    parameters = tool.schema["function"]["parameters"]["properties"]
    return f"`{tool.name}({', '.join(parameters)})`"


def _arguments(kind: type[ToolEnv]) -> str:
    """Return the arguments of its own, those of its bases included, with their defaults."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if base is ToolEnv:
            break
        if "__init__" not in vars(base):
            continue
        for parameter in inspect.signature(base).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "tasks":
                found.setdefault(parameter.name, f"`{parameter.name}={parameter.default!r}`")
    return ", ".join(found.values())


if __name__ == "__main__":
    main()
