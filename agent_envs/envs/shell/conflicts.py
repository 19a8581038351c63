"""Tasks for a shell with conflicting state: the obvious command does harm.

Files are out of date, half done, in the way, or contradict each other, so the state must be read
before it is changed. Every task contains every trap of its kind. The idea of command-line tasks
with such conflicts is ClawForge's (arXiv:2605.14133); the tasks are new.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from agent_envs.envs.shell.tasks import WORDS, Files, ShellTask, make_text

_END: Final = "-- end"


def _stale_state(rng: np.random.Generator, difficulty: int) -> ShellTask:
    """An outdated table: changed, new and deleted files, and locks of living and dead processes.

    Traps: trusting the table; rebuilding all of it, over a file that is being written; deleting
    every lock, or none.
    """
    names = [str(name) for name in rng.choice(WORDS, 5 + difficulty, replace=False)]
    gone, new, living, dead, *others = names
    processes = [int(number) for number in rng.choice(9000, 4, replace=False) + 1000]
    files: Files = {"running.txt": "".join(f"{p}\n" for p in sorted(processes[:3]))}
    before, after = {}, {}
    for name in names:
        revision, numbers = int(rng.integers(2, 9)), [int(n) for n in rng.integers(1, 100, 3)]
        after[name] = f"{name},{revision},{sum(numbers)}\n"
        is_old = name in (living, dead, others[0]) or rng.random() < 0.4
        before[name] = f"{name},{revision - 1},{sum(numbers) + 7}\n" if is_old else after[name]
        if name != gone:
            lines = [f"revision {revision}", *map(str, numbers)]
            files[f"data/{name}.txt"] = "".join(f"{line}\n" for line in lines)
    files |= {
        "table.csv": "".join(before[name] for name in sorted(names) if name != new),
        f"{living}.lock": f"{processes[0]}\n",
        f"{dead}.lock": f"{processes[3]}\n",
    }
    after[living] = before[living]
    expected = {path: text for path, text in files.items() if path != f"{dead}.lock"}
    expected["table.csv"] = "".join(after[name] for name in sorted(names) if name != gone)
    return ShellTask(
        kind="stale_state",
        instruction=(
            "table.csv has a line name,revision,total for each file data/NAME.txt: its revision, "
            "and the sum of the numbers below that. The files have changed since. A file NAME.lock "
            "holds the number of the process that is writing data/NAME.txt; running.txt lists the "
            "processes that still run. Delete the locks of processes that have ended. Then bring "
            "table.csv up to date: a line for each file that is there, sorted with LC_ALL=C; but "
            "as long as a file is being written, its line stays as it is. Change nothing else."
        ),
        files=files,
        expected=expected,
        commands=(
            'for l in *.lock; do grep -qx "$(cat "$l")" running.txt || rm "$l"; done',
            'for f in data/*.txt; do n=$(basename "$f" .txt); if [ -e "$n.lock" ]; then grep '
            '"^$n," table.csv; else awk -v n="$n" \'NR == 1 {r = $2; next} {s += $1} END '
            '{print n "," r "," s + 0}\' "$f"; fi; done | LC_ALL=C sort > table.new; '
            "mv table.new table.csv",
        ),
    )


def _half_done(rng: np.random.Generator, difficulty: int) -> ShellTask:
    """An interrupted move: files untouched, half written, written but not cleared up, done.

    Traps: starting again, over what was added since; trusting the existing files.
    """
    names = [str(name) for name in rng.choice(WORDS, 3 + 2 * difficulty, replace=False)]
    files: Files = {}
    expected: Files = {}
    for i, name in enumerate(names):
        old = make_text(rng, rng.choice(WORDS, 7)) + f"{_END}\n"
        new = f"# {name}\n{old}"
        state = ("untouched", "half", "written", "done")[i if i < 4 else int(rng.integers(4))]
        if state != "done":
            files[f"old/{name}.txt"] = old
        if state == "half":
            files[f"new/{name}.md"] = "".join(new.splitlines(keepends=True)[:-2])
        elif state in ("written", "done"):
            new += f"note: {rng.choice(WORDS)} agreed\n"
            files[f"new/{name}.md"] = new
        if state == "done":
            files["index.txt"] = files.get("index.txt", "") + f"{name}\n"
        expected[f"new/{name}.md"] = new
    expected["index.txt"] = "".join(f"{name}\n" for name in sorted(names))
    return ShellTask(
        kind="half_done",
        instruction=(
            "Somebody has begun to turn each old/NAME.txt into new/NAME.md, and was interrupted. "
            "new/NAME.md is the line '# NAME', then all lines of old/NAME.txt, the last of which "
            f"is '{_END}'; only then is old/NAME.txt deleted and NAME added to index.txt. Finish "
            "it: write what is missing or was written in part, but keep what is complete, with "
            "the notes that were added below it. In the end old/ holds no file, and index.txt "
            "lists every NAME of new/ once, sorted with LC_ALL=C."
        ),
        files=files,
        expected=expected,
        commands=(
            f"for f in old/*.txt; do n=$(basename \"$f\" .txt); grep -qx -- '{_END}' "
            '"new/$n.md" 2>/dev/null || { echo "# $n"; cat "$f"; } > "new/$n.md"; rm "$f"; done',
            "ls new | sed 's/[.]md$//' | LC_ALL=C sort > index.txt",
        ),
    )


def _name_collision(rng: np.random.Generator, difficulty: int) -> ShellTask:
    """Files to move where files of the same names exist: equal ones, other ones, and each other.

    Traps: overwriting, skipping, numbering the existing files, splitting names at blanks.
    """
    same, other, twice, free, *more = (str(n) for n in rng.choice(WORDS, 6, replace=False))
    library: Files = {}
    incoming: Files = {}

    def text() -> str:
        return make_text(rng, rng.choice(WORDS, 5))

    library[f"{same}.txt"] = incoming[f"a/{same}.txt"] = text()
    library[f"{other}.txt"], library[f"{other}-2.txt"], incoming[f"a/{other}.txt"] = (
        text() for _ in range(3)
    )
    incoming[f"a/{twice}.txt"], incoming[f"b/{twice}.txt"] = text(), text()
    incoming[f"b/{free} {same}.txt"] = text()
    for i in range(2 * (difficulty - 1)):
        name, place = more[i % 2], f"{'cde'[i // 2]}/{'xy'[int(rng.integers(2))]}"
        incoming[f"{place}/{name}.txt"] = text()
        if rng.random() < 0.5:
            library[f"{name}.txt"] = text()
    files = {f"library/{name}": content for name, content in library.items()}
    for path in sorted(incoming):
        stem, number = path.rpartition("/")[2].removesuffix(".txt"), 2
        name = f"{stem}.txt"
        while library.get(name, incoming[path]) != incoming[path]:
            name, number = f"{stem}-{number}.txt", number + 1
        library[name] = incoming[path]
    return ShellTask(
        kind="name_collision",
        instruction=(
            "Move every file below incoming/ into library/ itself, in the order of their paths "
            "(sorted with LC_ALL=C), under its own name NAME.txt. If a file of that name is "
            "there with the same content, delete the incoming one instead. If its content is "
            "another, try NAME-2.txt, then NAME-3.txt and so on, by the same rule. Overwrite "
            "nothing. In the end there is no file below incoming/."
        ),
        files=files | {f"incoming/{path}": content for path, content in incoming.items()},
        expected={f"library/{name}": content for name, content in library.items()},
        commands=(
            'find incoming -type f | LC_ALL=C sort | while IFS= read -r f; do n=$(basename "$f" '
            '.txt); t="library/$n.txt"; i=2; while [ -e "$t" ] && ! cmp -s "$f" "$t"; do '
            't="library/$n-$i.txt"; i=$((i + 1)); done; if [ -e "$t" ]; then rm "$f"; else mv "$f" '
            '"$t"; fi; done',
        ),
    )


def _contradictory_sources(rng: np.random.Generator, difficulty: int) -> ShellTask:
    """Settings that differ between four places, and policies that say which place counts.

    Traps: the newest policy, which is not in force yet; the log's last line instead of its latest;
    values that were only proposed; the file that is read last.
    """
    keys = [str(key) for key in rng.choice(WORDS, 4 + difficulty, replace=False)]
    orders = [rng.permutation(["log", "host", "site"]).tolist() for _ in range(2)]
    while orders[1][0] == orders[0][0]:
        orders[1] = rng.permutation(["log", "host", "site"]).tolist()
    today = f"2031-0{int(rng.integers(4, 7))}-15"
    policies = {"2029-11-01": orders[1], f"{today[:8]}01": orders[0], "2031-09-01": orders[1]}
    values = iter(rng.choice(9000, 8 * len(keys), replace=False) + 1000)
    sources: dict[str, dict[str, int]] = {
        place: {key: int(next(values)) for key in keys} for place in ("host", "site", "log")
    }
    # The first key is in the log only, the next two are everywhere, the others here and there.
    del sources["host"][keys[0]], sources["site"][keys[0]]
    for key in keys[3:]:
        for place in ("host", "site", "log"):
            if rng.random() < 0.4:
                del sources[place][key]
    lines = []
    for key, value in sources["log"].items():
        lines.append(f"2031-02-{int(rng.integers(10, 28))} {key}={value} approved")
        lines.append(f"2030-12-{int(rng.integers(10, 28))} {key}={next(values)} approved")
    for key in keys:
        lines.append(f"2031-03-{int(rng.integers(10, 28))} {key}={next(values)} proposed")
    # Not in the order of their dates: of the first key, the one that counts comes first.
    log = [lines[0], *(str(line) for line in rng.permutation(lines[1:]))]
    defaults = {key: int(next(values)) for key in keys}
    merged = dict(defaults)
    for place in reversed(orders[0]):
        merged |= sources[place]

    def table(pairs: Mapping[str, int]) -> str:
        return "".join(f"{key}={pairs[key]}\n" for key in sorted(pairs))

    files = {
        "today.txt": f"{today}\n",
        "log.txt": "".join(f"{line}\n" for line in log),
        "host.conf": table(sources["host"]),
        "site.conf": table(sources["site"]),
        "defaults.conf": table(defaults),
    }
    for number, day in enumerate(rng.permutation(sorted(policies))):
        order = " ".join(policies[str(day)])
        files[f"policy/{number + 1}.txt"] = f"valid from {day}\norder: {order}\n"
    return ShellTask(
        kind="contradictory_sources",
        instruction=(
            "Write to settings.conf a line key=value for each key of defaults.conf, with the value "
            "that holds, sorted with LC_ALL=C. The other sources, host.conf, site.conf and "
            "log.txt, contradict each other. The policy in force says in which order they count: "
            "of the files in policy/, the one that has become valid last, as of the day in "
            "today.txt. A key has the value of the first source in that order which has the key, "
            "and that of defaults.conf if none has. In log.txt (date, key=value, state) only "
            "approved lines count, of these the one with the latest date. Change no other file."
        ),
        files=files,
        expected=files | {"settings.conf": table(merged)},
        commands=(
            "p=$(awk -v t=\"$(cat today.txt)\" '/^valid from/ && $3 <= t {print $3, FILENAME}' "
            "policy/*.txt | LC_ALL=C sort | tail -n 1 | cut -d ' ' -f 2); for s in $(sed -n "
            "'s/^order: //p' \"$p\") defaults; do if [ $s = log ]; then LC_ALL=C sort -r log.txt "
            "| awk '$3 == \"approved\" {print $2}'; else cat $s.conf; fi; done "
            "| awk -F= '!seen[$1]++' | LC_ALL=C sort > settings.conf",
        ),
    )


CONFLICT_KINDS: Final[Mapping[str, Callable[[np.random.Generator, int], ShellTask]]] = {
    "stale_state": _stale_state, "half_done": _half_done, "name_collision": _name_collision,
    "contradictory_sources": _contradictory_sources,
}  # fmt: skip
