"""Forgeries of runs, of twelve kinds and planted at random places: what verification has to find.

Each takes a copy of a true run, changes what would pay, and hides it: checksums, digests and counts
are made anew. Returns False where there is nothing to forge.
"""

import json
from collections.abc import Callable

import numpy as np

from agent_leaderboard.records.manifest import make_slug
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import write_line


class Folder:
    """A run's folder in a forger's hands."""

    def __init__(self, path, rng):
        self.path, self.rng = path, rng
        self.manifest = json.loads((path / "manifest.json").read_text())

    def any_of(self, things):
        return things[int(self.rng.integers(len(things)))]

    def cells(self, *kinds):
        agents = [a for a in self.manifest["agents"] if not kinds or a["kind"] in kinds]
        return [(e, a) for e in self.manifest["environments"] for a in agents]

    def results(self, environment, agent):
        path = self.path / "results" / environment["slug"] / f"{agent['slug']}.jsonl"
        return path, [json.loads(line) for line in path.read_text().splitlines()]

    def seal(self):
        """Make every digest that a forger can make anew."""
        for environment in self.manifest["environments"]:
            path = self.path / environment["tasks_path"]
            environment["tasks_sha256"] = file_sha256(path)
            environment["num_tasks"] = len(json.loads(path.read_text()))
        (self.path / "manifest.json").write_text(json.dumps(self.manifest, indent=2) + "\n")
        names = json.loads((self.path / "checksums.json").read_text())
        digests = {name: file_sha256(self.path / name) for name in names}
        (self.path / "checksums.json").write_text(json.dumps(digests))


def write(path, records):
    path.write_text("".join(map(write_line, records)))


MODELS = ("checkpoint", "best_of_n")


def success(folder):
    """A failure becomes a success."""
    path, lines = folder.results(*folder.any_of(folder.cells()))
    failed = [line for line in lines if not line["success"]]
    if not failed:
        return False
    line = folder.any_of(failed)
    line["success"] = True
    line["metrics"]["success"] = 1.0
    write(path, lines)
    return True


def rewards(folder):
    """More is earned."""
    path, lines = folder.results(*folder.any_of(folder.cells()))
    line = folder.any_of([line for line in lines if line["rewards"]])
    step = int(folder.rng.integers(len(line["rewards"])))
    line["rewards"][step] += 1.0
    line["return"] = float(sum(line["rewards"]))
    write(path, lines)
    return True


def declared_faults(folder):
    """Failures of an agent that could be asked again become faults."""
    path, lines = folder.results(*folder.any_of(folder.cells("random", "heuristic")))
    failed = [line for line in lines if not line["success"]]
    if not failed:
        return False
    for line in failed:
        line |= {"actions": [], "rewards": [], "reward_terms": [], "errors": [], "return": 0.0}
        line |= {"stop_reason": "policy_error", "error": "OSError: away", "metrics": {}}
    write(path, lines)
    return True


def chosen_tasks(folder):
    """Tasks that went badly are left out, and the counts are adjusted."""
    environment = folder.any_of(folder.manifest["environments"])
    path = folder.path / environment["tasks_path"]
    tasks = json.loads(path.read_text())
    out = tasks.pop(int(folder.rng.integers(len(tasks) - 1)))["task"]  # a prefix is a shorter run
    path.write_text(json.dumps(tasks, indent=2) + "\n")
    for agent in folder.manifest["agents"]:
        for part in ("results", "seconds"):
            own = folder.path / part / environment["slug"] / f"{agent['slug']}.jsonl"
            lines = [json.loads(line) for line in own.read_text().splitlines()]
            write(own, [line for line in lines if line["task"] != out])
    return True


def borrowed_actions(folder):
    """The oracle's episodes stand under a model's name."""
    environment, model = folder.any_of(folder.cells(*MODELS))
    (oracle,) = [a for a in folder.manifest["agents"] if a["kind"] == "oracle"]
    _, lines = folder.results(environment, oracle)
    path, _ = folder.results(environment, model)
    write(path, [line | {"agent": model["slug"]} for line in lines])
    return True


def cheaper(folder):
    """A model's calls or tokens shrink."""
    path, lines = folder.results(*folder.any_of(folder.cells(*MODELS)))
    line = folder.any_of([line for line in lines if line["usage"]["calls"]])
    name = folder.any_of(["calls", "prompt_tokens", "completion_tokens"])
    line["usage"][name] = folder.any_of([0, 1, -line["usage"][name]]) if name != "calls" else 0
    if line["usage"]["completion_tokens"] == 1 and len(line["actions"]) < 2:
        line["usage"]["completion_tokens"] = 0
    write(path, lines)
    return True


def taken_name(folder):
    """An agent or an environment takes a name that stands for another."""
    kind = folder.any_of(["agent", "display", "environment"])
    if kind == "environment":
        environment = folder.any_of(folder.manifest["environments"])
        new = folder.any_of(["math-hard", "gsm8k", "humaneval-plus"])
        rename(folder, environment["slug"], new)
        environment["slug"], environment["tasks_path"] = new, f"tasks/{new}.json"
        return True
    agent = folder.any_of([a for a in folder.manifest["agents"] if a["kind"] in MODELS])
    agent["name"] = folder.any_of(["Oracle", "rules", "random", "The Oracle"])
    if kind == "agent":
        new = make_slug(agent["name"])
        if any(other["slug"] == new for other in folder.manifest["agents"]):
            return False
        rename(folder, agent["slug"], new)
        agent["slug"] = new
    return True


def rename(folder, old, new):
    for path in sorted(folder.path.rglob(f"{old}*"), reverse=True):
        path.rename(path.with_name(path.name.replace(old, new)))
    for path in folder.path.glob("results/*/*.jsonl"):
        path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))
    names = json.loads((folder.path / "checksums.json").read_text())
    moved = {f"/{name}".replace(f"/{old}", f"/{new}")[1:]: 0 for name in names}
    (folder.path / "checksums.json").write_text(json.dumps(moved))


def page(folder):
    """A page says otherwise than the results."""
    name = folder.any_of(["leaderboard.md", "leaderboard.csv", "leaderboard.html"])
    path = folder.path / name
    text = path.read_text()
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    at = folder.any_of(digits)
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    return True


def seconds(folder):
    """Time that cannot be."""
    files = sorted(folder.path.glob("seconds/*/*.jsonl"))
    path = folder.any_of(files)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    how = folder.any_of(["negative", "fewer", "words"])
    if how == "fewer":
        lines.pop()
    else:
        lines[0]["seconds"] = -1.0 if how == "negative" else "fast"
    write(path, lines)
    return True


def settings(folder):
    """What the agent or the environment is said to be."""
    record = folder.any_of([*folder.manifest["agents"], *folder.manifest["environments"]])
    if "kind" in record:
        key, value = folder.any_of(
            [("weights_sha256", {"a": "0"}), ("tool_format", "tags"), ("packages", {"x": "1"}),
             ("settings", {"best": 1})]
        )  # fmt: skip
    else:
        key, value = folder.any_of(
            [("max_turns", 99), ("reward_terms", {"exact_match": 9.0}), ("kwargs", {"hops": 1}),
             ("data", [{"name": "x", "sha256": "0"}]), ("id", "AgentR1/SyntheticArithmetic-v0")]
        )  # fmt: skip
    record[key] = value
    return True


def other_seed(folder):
    """A protocol, or an episode, under another seed."""
    if folder.rng.random() < 0.5:
        folder.manifest["protocol"]["seed"] += 1
        return True
    path, lines = folder.results(*folder.any_of(folder.cells()))
    folder.any_of(lines)["seed"] += 1
    write(path, lines)
    return True


def edited_actions(folder):
    """An episode with other actions, or with those of another task."""
    path, lines = folder.results(*folder.any_of(folder.cells("random", "heuristic", "oracle")))
    acting = [line for line in lines if line["actions"]]
    line, other = folder.any_of(acting), folder.any_of(acting)
    if line["actions"] == other["actions"]:
        line["actions"][-1] += "x"
    else:
        line["actions"] = other["actions"]
    write(path, lines)
    return True


KINDS: dict[str, Callable] = {
    forge.__name__: forge
    for forge in (
        success, rewards, declared_faults, chosen_tasks, borrowed_actions, cheaper, taken_name,
        page, seconds, settings, other_seed, edited_actions,
    )
}  # fmt: skip


def plant(path, kind, seed):
    """Forge a run in place; the same seed forges the same. Returns whether there was a way."""
    folder = Folder(path, np.random.default_rng(seed))
    is_forged = KINDS[kind](folder)
    if is_forged:
        folder.seal()
    return is_forged
