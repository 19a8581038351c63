"""Procedural tasks for a shell: a folder, an instruction, and the required final state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

Files = dict[str, str]
"""Path -> content."""
WORDS: Final = """
    amber birch cedar delta ember fjord grove harbor iris jade kelp lotus maple nectar olive
    pearl quartz river slate tulip umber violet willow zephyr
""".split()
_FOLDERS: Final = "archive config data docs logs notes reports scripts".split()
_KEYS: Final = (
    "cache color depth host level limit mode name owner port region retries theme".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellTask:
    """A task for a shell; records of the leaderboard hash its fields."""

    kind: str
    instruction: str
    files: Files
    """The folder at the beginning."""
    expected: Files
    """The files required at the end."""
    commands: Sequence[str]
    """Commands that solve it."""

    @property
    def absent(self) -> frozenset[str]:
        """Files that must be gone at the end."""
        return frozenset(self.files) - frozenset(self.expected)

    def checks(self, contents: Mapping[str, str | None]) -> list[bool]:
        """Return which checks hold; all of them in the required state.

        One check for all files that must not change, one for each file that must be gone, one for
        each file that must change, and one for each line of that file.

        Args:
            contents: Path -> content of all entries; None where it is no plain text file.
        """
        changed = {p: text for p, text in self.expected.items() if self.files.get(p) != text}
        kept = [p for p in self.expected if p not in changed]
        held = [all(contents.get(path) == self.expected[path] for path in kept)]
        held += [path not in contents for path in sorted(self.absent)]
        for path, text in changed.items():
            lines = (contents.get(path) or "").splitlines()
            held.append(contents.get(path) == text)
            held += [line in lines for line in text.splitlines()]
        return held


def make_text(rng: np.random.Generator, words: Iterable[str]) -> str:
    """Return words in random order, three a line."""
    words = [str(word) for word in rng.permutation(list(words))]
    lines = [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]
    return "".join(f"{line}\n" for line in lines)


def _find(rng: np.random.Generator, difficulty: int) -> ShellTask:
    word = str(rng.choice(WORDS))
    others = [other for other in WORDS if other != word]
    paths = _paths(rng, 4 * difficulty + 2, difficulty)
    count = int(rng.integers(1, len(paths)))
    wanted = {str(path) for path in rng.choice(list(paths), count, replace=False)}
    files = {
        path: make_text(rng, [*rng.choice(others, 8), *([word] if path in wanted else [])])
        for path in paths
    }
    return ShellTask(
        kind="find",
        instruction=(
            f"Write to answer.txt the path of every file that contains the word {word!r}, relative "
            "to the current folder and without a leading './', one a line, sorted with LC_ALL=C."
        ),
        files=files,
        expected=files | {"answer.txt": "".join(f"{path}\n" for path in sorted(wanted))},
        commands=(f"grep -rlw {word} * | LC_ALL=C sort > answer.txt",),
    )


def _extract(rng: np.random.Generator, difficulty: int) -> ShellTask:
    status = str(rng.choice(["paid", "open", "late"]))
    files, total = {}, 0
    for name in rng.choice(WORDS, difficulty + 1, replace=False):
        rows = []
        for number in range(3 + 3 * difficulty):
            own, amount = str(rng.choice(["paid", "open", "late"])), int(rng.integers(1, 500))
            rows.append(f"{number + 1},{rng.choice(WORDS)},{own},{amount}")
            total += amount if own == status else 0
        files[f"data/{name}.csv"] = "id,customer,status,amount\n" + "".join(f"{r}\n" for r in rows)
    return ShellTask(
        kind="extract",
        instruction=(
            "The files in data/ are tables with the columns id, customer, status and amount. Write "
            f"to answer.txt the sum of the amounts of all rows with the status {status!r}, over "
            "all files: one number."
        ),
        files=files,
        expected=files | {"answer.txt": f"{total}\n"},
        commands=(
            f"cat data/*.csv | awk -F, '$3 == \"{status}\" {{s += $4}} END {{print s + 0}}'"
            " > answer.txt",
        ),
    )


def _rename(rng: np.random.Generator, difficulty: int) -> ShellTask:
    folder, prefix = str(rng.choice(_FOLDERS)), str(rng.choice(WORDS))
    names = rng.choice(WORDS, 2 + 2 * difficulty, replace=False)
    files = {
        f"{folder}/{name}.{'txt' if i % 2 == 0 else 'log'}": make_text(rng, rng.choice(WORDS, 4))
        for i, name in enumerate(names)
    }
    expected = {}
    for path, content in files.items():
        name = path.removeprefix(f"{folder}/")
        new = f"{prefix}-{name.removesuffix('.txt')}.md" if name.endswith(".txt") else name
        expected[f"{folder}/{new}"] = content
    return ShellTask(
        kind="rename",
        instruction=(
            f"Rename every .txt file in {folder}/: put '{prefix}-' in front and change the ending "
            f"to .md, so that a.txt becomes {prefix}-a.md. Leave the other files alone."
        ),
        files=files,
        expected=expected,
        commands=(f'cd {folder} && for f in *.txt; do mv "$f" "{prefix}-${{f%.txt}}.md"; done',),
    )


def _edit(rng: np.random.Generator, difficulty: int) -> ShellTask:
    key = str(rng.choice(_KEYS))
    old, new = (int(value) for value in rng.choice(9000, 2, replace=False) + 1000)
    files, expected = {}, {}
    for i, name in enumerate(rng.choice(WORDS, 2 + 2 * difficulty, replace=False)):
        path = f"{'config' if i == 0 or rng.random() < 0.6 else 'docs'}/{name}.ini"
        lines = [f"{k}={int(rng.integers(1000))}" for k in rng.choice(_KEYS, 4) if k != key]
        lines.insert(int(rng.integers(len(lines) + 1)), f"{key}={old}")
        lines.append(f"last_{key}={old}")
        files[path] = "".join(f"{line}\n" for line in lines)
        is_meant = path.startswith("config/")
        expected[path] = "".join(
            f"{key}={new}\n" if is_meant and line == f"{key}={old}" else f"{line}\n"
            for line in lines
        )
    return ShellTask(
        kind="edit",
        instruction=(
            f"In every .ini file in config/, change the line {key}={old} to {key}={new}. Change no "
            "other line and no file elsewhere."
        ),
        files=files,
        expected=expected,
        commands=(
            f'for f in config/*.ini; do [ -e "$f" ] && sed \'s/^{key}={old}$/{key}={new}/\' "$f"'
            ' > "$f.new" && mv "$f.new" "$f"; done',
        ),
    )


def _merge(rng: np.random.Generator, difficulty: int) -> ShellTask:
    keys = rng.choice(_KEYS, 4 + 2 * difficulty, replace=False)
    sides: list[dict[str, int]] = [{}, {}]
    for key in keys:
        owners = int(rng.integers(1, 4))  # one side, the other, or both
        for bit, side in enumerate(sides):
            if owners & (1 << bit):
                side[str(key)] = int(rng.integers(1000))
    merged = sides[0] | sides[1]
    ours, theirs = (
        "".join(f"{key}={value}\n" for key, value in sorted(side.items())) for side in sides
    )
    files = {"ours.conf": ours, "theirs.conf": theirs}
    return ShellTask(
        kind="merge",
        instruction=(
            "ours.conf and theirs.conf hold lines key=value. Merge them into merged.conf: every "
            "key once, the value of theirs.conf where both have the key, sorted by key with "
            "LC_ALL=C. Then delete ours.conf and theirs.conf."
        ),
        files=files,
        expected={"merged.conf": "".join(f"{k}={v}\n" for k, v in sorted(merged.items()))},
        commands=(
            "awk -F= '{v[$1] = $2} END {for (k in v) print k \"=\" v[k]}' ours.conf theirs.conf"
            " | LC_ALL=C sort -t= -k1,1 > merged.conf",
            "rm ours.conf theirs.conf",
        ),
    )


def _undo(rng: np.random.Generator, difficulty: int) -> ShellTask:
    paths = _paths(rng, 2 + 2 * difficulty, difficulty)
    original = {path: make_text(rng, rng.choice(WORDS, 4)) for path in paths}
    files, moves = dict(original), []
    for step in range(1 + 2 * difficulty):
        source = sorted(files)[int(rng.integers(len(files)))]
        target = f"{rng.choice(_FOLDERS)}/{rng.choice(WORDS)}-{step}.txt"
        files[target] = files.pop(source)
        moves.append((source, target))
    log = "".join(f"{source} {target}\n" for source, target in moves)
    return ShellTask(
        kind="undo",
        instruction=(
            "Somebody moved files. moves.txt lists the moves in the order they were made, a line "
            "'from to' for each; a file may have been moved several times. Undo them all, then "
            "delete moves.txt."
        ),
        files=files | {"moves.txt": log},
        expected=original,
        commands=(
            "awk '{l[NR] = $0} END {for (i = NR; i > 0; i--) print l[i]}' moves.txt"
            ' | while read from to; do mkdir -p "$(dirname "$from")"; mv "$to" "$from"; done',
            "rm moves.txt",
        ),
    )


KINDS: Final[Mapping[str, Callable[[np.random.Generator, int], ShellTask]]] = {
    "find": _find, "extract": _extract, "rename": _rename, "edit": _edit, "merge": _merge,
    "undo": _undo,
}  # fmt: skip
"""The default kinds."""


def _paths(rng: np.random.Generator, count: int, depth: int) -> list[str]:
    """Return distinct paths of text files."""
    paths: dict[str, None] = {}
    while len(paths) < count:
        folders = rng.choice(_FOLDERS, int(rng.integers(1, depth + 1)), replace=False)
        paths["/".join([*folders, f"{rng.choice(WORDS)}.txt"])] = None
    return list(paths)
