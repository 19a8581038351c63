"""Write the beginnings of an agent: ``agent-r1-bench new my_agent``."""

import keyword
from pathlib import Path
from typing import Final

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError

TEMPLATE: Final = Path(__file__).parent / "template"


def write_template(name: str, folder: Path) -> list[Path]:
    """Write a module with an agent, and the file that enters it; return both.

    Args:
        name: Name of the module; that of the class, and of the agent, is made from it.
        folder: Where to.

    Raises:
        ConfigurationError: If the name is none for a module, or a file exists.
    """
    if not (name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} cannot name a module; write a name like my_agent.")
    words = {
        "MyAgent": "".join(word.capitalize() for word in name.split("_")),
        "my_agent": name,
        "my agent": name.replace("_", " ").strip(),
    }
    files = {}
    for path in sorted(TEMPLATE.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        for old, new in words.items():
            text = text.replace(old, new)
        target = folder / path.stem.replace("my_agent", name)
        if target.exists():
            raise ConfigurationError(f"{target} exists; nothing was written.")
        files[target] = text
    folder.mkdir(parents=True, exist_ok=True)
    for target, text in files.items():
        write_text(target, text)
    return list(files)
