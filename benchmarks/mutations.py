"""Mutation tests of the modules that carry guarantees: what their nearest tests do not notice.

``python -m benchmarks.mutations agent_envs/core/rewards.py --sample 40``

cosmic-ray changes one operator, number or condition at a time in a copy of the checkout, and runs
the tests of the module. Install it anywhere: ``pip install cosmic-ray``, and name the command by
``--cosmic_ray`` if it is not on the path. Survivors without an entry in `EXPLAINED` end the run
with exit code 1.
"""

import argparse
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent_envs.core.command_line import CommandLineParser, positive_int

ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = 120.0
"""Time limit of the tests of a mutant."""
COPIED: Final = ("agent_envs", "agent_trainers", "benchmarks", "examples", "tests")
_ORDER: Final = "operator_name, operator_args, occurrence"
"""Order of the mutants of a module; their ids are random."""
_BOARD: Final = "benchmarks/agent_leaderboard"
MODULES: Final[Mapping[str, str]] = {
    "agent_envs/core/replay.py": "agent_envs/core/test_replay.py",
    "agent_envs/core/rewards.py": (
        "agent_envs/core/test_rewards.py agent_envs/core/test_tool_env.py"
    ),
    "agent_envs/scoring/answers.py": (
        "agent_envs/scoring/test_answers.py agent_envs/scoring/test_two_wiki.py"
    ),
    "agent_envs/scoring/statistics.py": "agent_envs/scoring/test_statistics.py",
    "agent_trainers/algorithms/gae.py": "agent_trainers/algorithms/test_advantages.py",
    "agent_trainers/algorithms/group_estimators.py": "agent_trainers/algorithms",
    "agent_trainers/gateway/session.py": "agent_trainers/gateway/test_requests.py",
    "agent_trainers/policies/sampling.py": (
        "agent_trainers/policies/test_policy.py agent_trainers/policies/test_slots.py"
    ),
    f"{_BOARD}/records/sealing.py": "agent_leaderboard/test_sealing.py",
    f"{_BOARD}/verify/claims.py": (
        "agent_leaderboard/test_verify.py agent_leaderboard/test_forgeries.py"
    ),
}
"""Tests of each module, below `tests`."""
EXPLAINED: Final[Mapping[str, str]] = {
    "*, solved: bool": "equivalent: the star only makes the argument a keyword",
    "if number > 0:": "equivalent: a number of actions is never negative",
    "{found[-300:]}": "only how much of a long value an error shows",
    "float(num_right == len(cited)": "equivalent for >=: no more facts are right than are cited",
    "file.read(1 << 20)": "only how much is read at once",
    "_NONCE: Final = 16": "a longer nonce is the same one with more of the ciphertext",
    "@functools.lru_cache": "only speed",
    "disable_compile=True": "only speed",
    "pad_token_id: int = 0": "any token will do where the mask is 0",
    "tokens.clamp_(max=scores.size(-1)": "equivalent: dimension 1 of two is the last one",
    "torch.full_like(scores, -torch.inf)": "any finite score of the one token that can be drawn",
    "@dataclass(frozen=True": "nothing changes a record, so whether it is frozen shows nowhere",
}
"""Why mutants of a line survive, by a part of the line."""


def main() -> None:
    """Mutate the chosen modules, print what survives, and exit with 1 if it is unexplained."""
    parser = CommandLineParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("modules", nargs="*", choices=[*MODULES, []], metavar="module")
    parser.add_argument("--sample", type=positive_int, help="mutants per module; all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--cosmic_ray", default="cosmic-ray", help="the command")
    options = parser.parse_args()
    unexplained = 0
    for module in options.modules or MODULES:
        with tempfile.TemporaryDirectory() as scratch:
            results = list(_mutate(module, Path(scratch), options))
        survivors = [place for place, outcome in results if outcome == "survived"]
        print(f"{module}: {len(results) - len(survivors)} of {len(results)} mutants found")  # noqa: T201
        for place in survivors:
            reason = next((why for part, why in EXPLAINED.items() if part in place), "")
            unexplained += not reason
            print(f"  {place}  {reason or 'NOT EXPLAINED'}")  # noqa: T201
    sys.exit(min(unexplained, 1))


def _mutate(module: str, scratch: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield place and outcome of each mutant of a module, in a copy of the checkout."""
    for name in COPIED:
        shutil.copytree(ROOT / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", scratch)
    tests = " ".join(f"tests/{name}" for name in MODULES[module].split())
    config, session = scratch / "mutations.toml", scratch / "session.sqlite"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {SECONDS}\nexcluded-modules = []\n'
        f'test-command = "{sys.executable} -m pytest -x -q -p no:cacheprovider {tests}"\n'
        '[cosmic-ray.distributor]\nname = "local"\n',
        encoding="utf-8",
    )

    def call(*words: str) -> str:
        command = [options.cosmic_ray, *words]
        done = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)  # noqa: S603
        return done.stdout

    call("init", config.name, session.name)
    if options.sample is not None:
        with sqlite3.connect(session) as database:
            rows = database.execute(f"SELECT job_id FROM mutation_specs ORDER BY {_ORDER}")  # noqa: S608
            ids = [row[0] for row in rows]
            random.Random(options.seed).shuffle(ids)  # noqa: S311 - no secret
            for table in ("work_items", "mutation_specs"):
                database.executemany(
                    f"DELETE FROM {table} WHERE job_id = ?",  # noqa: S608
                    [(id,) for id in ids[options.sample :]],
                )
    call("exec", config.name, session.name)
    lines = (ROOT / module).read_text(encoding="utf-8").splitlines()
    for entry in call("dump", session.name).splitlines():
        item, result = json.loads(entry)
        for mutation in item["mutations"]:
            yield _place(mutation, lines), (result or {}).get("test_outcome", "none")


def _place(mutation: Mapping[str, Any], lines: list[str]) -> str:
    number = mutation["start_pos"][0]
    operator = mutation["operator_name"].rpartition("/")[2]
    return f"line {number}, {operator}: {lines[number - 1].strip()}"


if __name__ == "__main__":
    main()
