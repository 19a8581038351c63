"""Begin an environment of your own: ``python -m agent_envs.new my_env``."""

import argparse
import importlib.util
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_envs.errors import AgentEnvsError, ConfigurationError

TEMPLATE: Final = Path(__file__).parent / "template"
NEXT_STEPS: Final = """\
Check it:  python -m agent_envs.check {env}
Test it:   python -m pytest {test}
Train it:  python -m agent_trainers.make_tiny_policy --env {env} --output tiny
           agent-r1-train --env {env} --model tiny"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.new",
        description="Write a small environment, with its tests, to begin with.",
    )
    parser.add_argument("name", help="name of the module: my_env")
    parser.add_argument("--folder", type=Path, default=Path(), help="where (default: here)")
    options = parser.parse_args(arguments)
    try:
        module, test = write_template(options.name, options.folder)
    except AgentEnvsError as error:
        sys.exit(f"new: {error}")
    env = f"{options.name}:{_class_name(options.name)}-v0"
    print(f"Wrote {module} and {test}.", NEXT_STEPS.format(env=env, test=test.name), sep="\n")  # noqa: T201


def write_template(name: str, folder: Path) -> list[Path]:
    """Write a module with an environment, and its tests; return the two files.

    Args:
        name: Name of the module; that of the class is made from it.
        folder: Where to; made if it does not exist.

    Raises:
        ConfigurationError: If the name is none for a module or is taken, or a file exists.
    """
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


if __name__ == "__main__":
    main()
