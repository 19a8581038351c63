"""Forgeries of twelve kinds at random places of a run are found; a true run raises no alarm.

Checksums, digests and counts are made again, and text is sealed again, because a forger may have
the data.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.environments import environment_seal
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import DataFile, make_slug
from agent_leaderboard.records.results import (
    Run,
    episode_seed,
    read_run,
    task_list_sha256,
    write_run,
)
from agent_leaderboard.records.sealing import episode_place
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import check_run
from agent_trainers.trajectory import StopReason
from tests.agent_leaderboard.runs import edit_manifest, write_config
from tests.agent_trainers.chat_server import chat_server, says

CONFIG = """
protocol: {samples_per_task: 2, concurrency: 8, seed: 7}
environments:
  - {id: AgentR1/SyntheticTable-v0, name: table, kwargs: {split: test}, tasks: 2,
     contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: 3, kwargs: {split: test},
     contamination: none}
  - {id: AgentR1/HotpotQA-v0, kwargs: {data: "${data}/hotpot.jsonl"}, tasks: 2,
     contamination: public}
agents:
  - {name: guessing, kind: random}
  - {name: rules, kind: heuristic}
  - {name: oracle, kind: oracle}
  - {name: small, kind: checkpoint, settings: {model: embedded}}
  - {name: voting, kind: best_of_n, settings: {model: embedded, samples: 2}}
"""
MODELS = ("checkpoint", "best_of_n")


class Forger:
    """A run folder with its text opened; writes changes with digests and seals made anew."""

    def __init__(self, path, rng, data):
        self.path, self.rng = path, rng
        true = read_run(path)
        self.manifest, self.tasks = true.manifest, {k: list(own) for k, own in true.tasks.items()}
        self._seals = {e.id: environment_seal(e, data) for e in true.manifest.environments}
        self.results = {
            cell: [self._convert(one, "open") for one in own] for cell, own in true.results.items()
        }

    def choose(self, things):
        return things[int(self.rng.integers(len(things)))]

    def cell(self, *kinds):
        agents = [a.slug for a in self.manifest.agents if not kinds or a.kind in kinds]
        return self.choose([e.slug for e in self.manifest.environments]), self.choose(agents)

    def change(self, is_eligible, cell, **fields):
        places = [i for i, one in enumerate(self.results[cell]) if is_eligible(one)]
        if not places:
            return False
        place = self.choose(places)
        one = self.results[cell][place]
        changed = {name: v(one) if callable(v) else v for name, v in fields.items()}
        self.results[cell][place] = replace(one, **changed)
        return self.results[cell][place] != one

    def alter(self, record, **fields):
        new = replace(record, **fields)
        kind = "agents" if record in self.manifest.agents else "environments"
        records = [new if one is record else one for one in getattr(self.manifest, kind)]
        self.manifest = replace(self.manifest, **{kind: records})
        name, names = kind[:-1], {record.slug: new.slug}
        if kind == "environments":
            self.tasks = {names.get(slug, slug): own for slug, own in self.tasks.items()}
        self.results = {
            (names.get(e, e), a) if kind == "environments" else (e, names.get(a, a)): [
                replace(one, **{name: names.get(getattr(one, name), getattr(one, name))})
                for one in own
            ]
            for (e, a), own in self.results.items()
        }

    def write(self):
        environments = [
            replace(one, tasks_sha256=task_list_sha256(self.tasks[one.slug]),
                    num_tasks=len(self.tasks[one.slug]))
            for one in self.manifest.environments
        ]  # fmt: skip
        self.manifest = replace(self.manifest, environments=environments)
        closed = {
            cell: [self._convert(one, "close") for one in own] for cell, own in self.results.items()
        }
        write_run(self.path, Run(manifest=self.manifest, tasks=self.tasks, results=closed))

    def _convert(self, one, how):
        environment = self.manifest.environment(one.environment)
        (entry,) = [entry for entry in self.tasks[one.environment] if entry.task == one.task]
        seed = episode_seed(self.manifest.protocol, one.task, one.sample)
        place = episode_place(environment, self.manifest.agent(one.agent), task=entry.sha256,
                              sample=one.sample, seed=seed)  # fmt: skip
        seal = self._seals.get(environment.id, next(iter(self._seals.values())))
        actions, *attempts = getattr(seal, how)([one.actions, *one.attempts], place)
        return replace(one, actions=actions, attempts=attempts)


def success(forger):
    return forger.change(
        lambda one: not one.success, forger.cell(), success=True,
        metrics=lambda one: {**one.metrics, "success": 1.0},
    )  # fmt: skip


def rewards(forger):
    return forger.change(
        lambda one: bool(one.rewards), forger.cell(),
        rewards=lambda one: [one.rewards[0] + 1.0, *one.rewards[1:]],
        return_=lambda one: float(sum([one.rewards[0] + 1.0, *one.rewards[1:]])),
    )  # fmt: skip


def declared_faults(forger):
    return forger.change(
        lambda one: not one.success, forger.cell("random", "heuristic"), actions=[], rewards=[],
        reward_terms=[], errors=[], return_=0.0, metrics={}, error="OSError: gone",
        stop_reason=StopReason.POLICY_ERROR,
    )  # fmt: skip


def chosen_tasks(forger):
    slug = forger.choose(list(forger.tasks))
    entries = forger.tasks[slug]
    out = entries.pop(int(forger.rng.integers(len(entries) - 1))).task  # not the last: a prefix
    for cell in forger.results:
        if cell[0] == slug:
            forger.results[cell] = [one for one in forger.results[cell] if one.task != out]
    return True


def borrowed_actions(forger):
    environment, model = forger.cell(*MODELS)
    (oracle,) = [agent.slug for agent in forger.manifest.agents if agent.kind == "oracle"]
    forger.results[environment, model] = [
        replace(one, agent=model, calls=len(one.actions), prompt_tokens=200 * len(one.actions),
                completion_tokens=20 * len(one.actions))
        for one in forger.results[environment, oracle]
    ]  # fmt: skip
    return True


def cheaper(forger):
    name = forger.choose(["calls", "prompt_tokens", "completion_tokens"])
    return forger.change(lambda one: one.calls > 0, forger.cell(*MODELS), **{name: 0})


def taken_name(forger):
    kind = forger.choose(["agent", "display", "environment"])
    if kind == "environment":
        record = forger.choose(forger.manifest.environments)
        forger.alter(record, slug=forger.choose(["math-hard", "gsm8k"]))
        return True
    agent = forger.choose([one for one in forger.manifest.agents if one.kind in MODELS])
    name = forger.choose(["Oracle", "rules", "random", "The Oracle"])
    slug = make_slug(name) if kind == "agent" else agent.slug
    if any(other.slug == slug for other in forger.manifest.agents if other is not agent):
        return False
    forger.alter(agent, name=name, slug=slug)
    return True


def page(forger):
    path = forger.path / "leaderboard.md"
    text = path.read_text()
    at = forger.choose([i for i, c in enumerate(text) if c.isdigit()])
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    return True


def seconds(forger):
    return forger.change(lambda one: True, forger.cell(), seconds=forger.choose([-1.0, 1e300]))


def settings(forger):
    record = forger.choose([*forger.manifest.agents, *forger.manifest.environments])
    of_agents = {"weights_sha256": {"a": "0"}, "tool_format": "tags", "packages": {"x": "1"},
                 "settings": {"best": 1}}  # fmt: skip
    of_environments = {"max_turns": 99, "reward_terms": {"exact_match": 9.0}, "kwargs": {"hops": 1},
                       "data": [DataFile(name="x", sha256="0")],
                       "id": "AgentR1/SyntheticArithmetic-v0"}  # fmt: skip
    changes = of_agents if hasattr(record, "kind") else of_environments
    key = forger.choose(list(changes))
    forger.alter(record, **{key: changes[key]})
    return True


def other_seed(forger):
    protocol = forger.manifest.protocol
    forger.manifest = replace(forger.manifest, protocol=replace(protocol, seed=protocol.seed + 1))
    return True


def edited_actions(forger):
    return forger.change(
        lambda one: bool(one.actions), forger.cell("random", "heuristic", "oracle"),
        actions=lambda one: [*one.actions[:-1], one.actions[-1] + "x"],
    )  # fmt: skip


KINDS = [
    success, rewards, declared_faults, chosen_tasks, borrowed_actions, cheaper, taken_name, page,
    seconds, settings, other_seed, edited_actions,
]  # fmt: skip


@pytest.fixture(scope="module")
def true_run(tmp_path_factory, small_data):
    folder = tmp_path_factory.mktemp("true")
    made = run(load_configs([write_config(folder, CONFIG)]), folder / "run", data=small_data)
    write_reports(made, small_data)
    return made


def test_a_true_run_raises_no_alarm_and_names_what_stays_on_trust(true_run, small_data):
    found = check_run(true_run, small_data)
    assert found.problems == []
    assert found.is_whole
    names = [text.partition(":")[0] for text in found.on_trust]
    assert names == ["leaderboard.html"]  # the embedded policy runs again


def test_actions_that_the_embedded_policy_does_not_write_are_found(true_run, small_data, tmp_path):
    """Every action replays; running it again shows another."""
    folder = shutil.copytree(true_run, tmp_path / "run")
    forger = Forger(folder, np.random.default_rng(0), small_data)
    for one in (results := forger.results["hops", "small"]):
        assert not one.success
    results[:] = [
        replace(one, agent="small", calls=3, prompt_tokens=600, completion_tokens=60)
        for one in forger.results["hops", "oracle"]
    ]
    forger.write()
    (folder / "leaderboard.md").unlink()
    assert check_run(folder, small_data).problems[-1] == (
        "small: 6 of 14 episodes are others when it runs again"
    )


def test_a_recorded_server_is_a_problem_and_gets_no_key(
    true_run, small_data, tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_KEY", "secret")
    with chat_server(lambda *_: says("x")) as server:
        folder = shutil.copytree(true_run, tmp_path / "run")
        hostile = {"base_url": server.url, "api_key_env": "MY_KEY"}

        def change(manifest):
            (agent,) = [one for one in manifest["agents"] if one["name"] == "small"]
            agent["settings"] |= hostile

        edit_manifest(folder, change)
        problems = check_run(folder, small_data).problems
    assert server.bodies == []
    for name in hostile:
        assert (
            f"manifest.json, agent 'small', field 'settings': {name!r} is not recorded" in problems
        )


@pytest.mark.parametrize("forge", KINDS)
def test_forgeries_of_every_kind_are_found(true_run, small_data, tmp_path, forge):
    for seed in range(20):
        folder = tmp_path / str(seed)
        shutil.copytree(true_run, folder)
        forger = Forger(folder, np.random.default_rng(seed), small_data)
        if forge(forger):
            forger.write()
            assert check_run(folder, small_data).problems
            return
    pytest.fail("nothing was forged")
