"""The files that an environment's tasks come from: in the data folder, or in a package.

Their bytes make the key that seals what agents wrote about the tasks.
"""

import importlib.util
from pathlib import Path
from typing import Final

from agent_leaderboard.play.config import DATA_PLACEHOLDER, EnvironmentConfig, texts_in
from agent_leaderboard.records.manifest import EnvironmentRecord

IN_PACKAGES: Final = {
    "AgentR1/BFCL-v0": ("bfcl_eval", "data/possible_answer/BFCL_v4_*.json"),
    "AgentR1/ScienceWorld-v0": ("scienceworld", "scienceworld.jar"),
}
"""Environments whose tasks a package brings: its name, and the files that the answers are in."""
_MARK: Final = "package:"

Environment = EnvironmentConfig | EnvironmentRecord


def reads_data(environment: Environment) -> bool:
    """Return whether tasks come from files, so that what is written about them is sealed."""
    return environment.id in IN_PACKAGES or bool(_named(environment))


def missing_data(environment: Environment, data: Path | None) -> str:
    """Return the first file or folder of the data folder that is not there; empty if all are."""
    missing = (n for n in _named(environment) if data is None or not (data / n).exists())
    return next(missing, "")


def data_files(environment: Environment, data: Path | None) -> list[str]:
    """Return the name of each file, those below folders too; none of a package that is not there.

    They are sorted: in which order a board's settings name its files changes no seal.
    """
    found = set()
    for name in _named(environment):
        path = data_path(name, data)
        for file in path.rglob("*") if path.is_dir() else [path]:
            if not file.is_dir():
                found.add(file.relative_to(data or "").as_posix())
    if environment.id in IN_PACKAGES:
        package, pattern = IN_PACKAGES[environment.id]
        root = _package_folder(package)
        files = root.glob(pattern) if root else ()
        found |= {f"{_MARK}{package}/{file.relative_to(root or '').as_posix()}" for file in files}
    return sorted(found)


def data_path(name: str, data: Path | None) -> Path:
    """Return where a file that `data_files` names is."""
    for package, _ in IN_PACKAGES.values():
        if name.startswith(start := f"{_MARK}{package}/"):
            return (_package_folder(package) or Path()) / name.removeprefix(start)
    return (data or Path()) / name


def _named(environment: Environment) -> list[str]:
    """Return what the arguments name in the data folder."""
    texts = texts_in(environment.kwargs)
    names = {t.removeprefix(f"{DATA_PLACEHOLDER}/") for t in texts if DATA_PLACEHOLDER in t}
    return sorted(names)


def _package_folder(package: str) -> Path | None:
    """Return where a package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
