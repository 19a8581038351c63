"""Small runs: a real one of a few seconds, and one with made-up agents for reports."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import pyarrow as pa
import pyarrow.parquet as pq

import agent_envs  # noqa: F401 - registers the environments
from agent_leaderboard.play.environments import environment_seal
from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    ORIGIN,
    AgentRecord,
    DataFile,
    EnvironmentRecord,
    Manifest,
    Prices,
    Protocol,
)
from agent_leaderboard.records.results import (
    NESTED,
    SCHEMA,
    EpisodeResult,
    Run,
    TaskEntry,
    episode_seed,
    make_checksums,
    read_run,
    write_run,
)
from agent_leaderboard.records.sealing import episode_place
from agent_trainers.trajectory import StopReason

CONFIG = """
protocol: {samples_per_task: 2, concurrency: 3, seed: 5}
environments:
  - {id: AgentR1/SyntheticTable-v0, name: table, kwargs: {split: test}, tasks: 3,
     contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: multi-hop, kwargs: {split: test}, tasks: 2,
     contamination: none}
  - {id: AgentR1/HotpotQA-v0, kwargs: {data: "${data}/hotpot.jsonl"}, contamination: made up}
agents:
  - {name: random, kind: random}
  - {name: rules, kind: heuristic}
  - {name: oracle, kind: oracle}
"""
HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\">\u202egnp\ud800|=1+1`"
PUBLIC, LICENSED = "multi-hop", "hotpotqa"
NUM_TASKS = {PUBLIC: 8, LICENSED: 2}


def write_config(folder, text=CONFIG, name="config.yaml"):
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return path


def make_data_folder(folder, hotpot_file):
    data = Path(folder) / "data"
    data.mkdir()
    shutil.copyfile(hotpot_file, data / "hotpot.jsonl")
    return data


def content_of(folder):
    """Return everything in a run but durations and origin, whose day changes at midnight."""
    run = read_run(folder)
    agents = [replace(agent, **dict.fromkeys(ORIGIN)) for agent in run.manifest.agents]
    results = {cell: [values(one) for one in own] for cell, own in run.results.items()}
    return replace(run.manifest, agents=agents), run.tasks, results


def values(result):
    names = [name for name in EpisodeResult.__dataclass_fields__ if name != "seconds"]
    return {name: getattr(result, name) for name in names}


# Changing a run as a forger does


def write_checksums(folder):
    (folder / "checksums.json").write_text(json.dumps(make_checksums(folder)))


def read_rows(folder, environment=None, agent=None):
    """Return all rows with nested values decoded, and those of one cell."""
    rows = pq.read_table(folder / "results.parquet").to_pylist()
    for row in rows:
        row |= {name: json.loads(row[name]) for name in NESTED}
    return rows, [r for r in rows if (r["environment"], r["agent"]) == (environment, agent)]


def write_rows(folder, rows, *, hide=True):
    """Write rows without any check; with `hide`, make the checksums again."""
    encoded = [row | {n: json.dumps(row[n], sort_keys=True) for n in NESTED} for row in rows]
    table = pa.Table.from_pylist(encoded, schema=SCHEMA)
    pq.write_table(table, folder / "results.parquet", compression="zstd", use_dictionary=False,
                   store_schema=False, write_statistics=False)  # fmt: skip
    if hide:
        write_checksums(folder)


def edit_manifest(folder, change, *, hide=True):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    if hide:
        write_checksums(folder)


def replace_text(path, old, new, *, hide=True):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    if hide:
        write_checksums(path.parent)


# A run of made-up agents


def solve(env, task):
    return env.unwrapped.reference_actions()


def solve_some(env, task):
    """Solve tasks 0, 1 and 2; answer the others wrongly after an error."""
    return solve(env, task) if task < 3 else ["I think so.", "<answer>wrong</answer>"]


def attack(env, task):
    return [HOSTILE, f"<answer>{HOSTILE}</answer>"]


AGENTS: dict[str, Callable] = {
    "oracle": solve, "best": solve, "some": solve_some, "hostile": attack,
}  # fmt: skip


def make_run(folder, data, *, samples_per_task=1, faults=(), with_seconds=True):
    """Step the agents of `AGENTS` through a generated and a licensed environment.

    `faults` are triples of environment, agent and task whose episodes failed.
    """
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        protocol=Protocol(samples_per_task=samples_per_task),
        environments=[environment(PUBLIC), environment(LICENSED)],
        agents=[agent(slug) for slug in AGENTS],
        left_out=[],
    )
    tasks, results = {}, {}
    for record, player in manifest.cells:
        kwargs = {k: v.replace("${data}", str(data)) for k, v in record.kwargs.items()}
        env = gym.make(record.id, **kwargs)
        entries, own = {}, []
        for task in range(record.num_tasks):
            for sample in range(samples_per_task):
                is_fault = (record.slug, player.slug, task) in faults
                entries[task], one = step_through(
                    env, manifest, record, player, task, sample, is_fault, data
                )
                own.append(one if with_seconds else EpisodeResult(**values(one), seconds=None))
        env.close()
        tasks[record.slug], results[record.slug, player.slug] = list(entries.values()), own
    folder.mkdir(parents=True)
    write_run(folder, Run(manifest=manifest, tasks=tasks, results=results))
    return folder


def environment(slug):
    is_public = slug == PUBLIC
    return EnvironmentRecord(
        slug=slug,
        id="AgentR1/SyntheticMultiHop-v0" if is_public else "AgentR1/HotpotQA-v0",
        kwargs={} if is_public else {"data": "${data}/hotpot.jsonl"},
        max_turns=4 if is_public else 5,
        reward_terms={"exact_match": 1.0, "new_gold_passage": 0.2},
        outcome_terms=["exact_match"],
        num_tasks=NUM_TASKS[slug],
        tasks_sha256="0" * 64,
        data=[] if is_public else [DataFile(name="hotpot.jsonl", sha256="0" * 64)],
        contamination="none: generated" if is_public else "public since 2018",
        is_text_public=is_public,
    )


def agent(slug):
    has_model = slug == "some"
    return AgentRecord(
        slug=slug,
        name=f"Agent {HOSTILE}".replace("\ud800", "") if slug == "hostile" else slug,
        kind="oracle" if slug == "oracle" else "react",
        model="tiny" if has_model else None,
        prices=Prices(prompt=1.0, completion=2.0) if has_model else None,
        packages={"agent-r1": "0.1.0"},
    )


def step_through(env, manifest, record, player, task, sample, is_fault, data):
    """Run one episode; return its task and its result."""
    _, info = env.reset(seed=task, options={"task": task})
    labels = {"type": "even" if task % 2 == 0 else "odd", "hops": 2 + task % 3}
    entry = TaskEntry(task=task, task_id=info["task_id"], sha256="0" * 64, labels=labels)
    actions, rewards, terms, errors = [], [], [], []
    for action in AGENTS[player.slug](env, task):
        _, reward, terminated, truncated, info = env.step(action)
        actions.append(action)
        rewards.append(reward)
        terms.append(info["reward_terms"])
        errors.append(info["action"].get("error"))
        if terminated or truncated:
            break
    seed = episode_seed(manifest.protocol, task, sample)
    place = episode_place(record, player, task=entry.sha256, sample=sample, seed=seed)
    attempts = [["a first try"]] if player.model else []
    closed, *others = environment_seal(record, data).close([actions, *attempts], place)
    tokens = 100 * len(actions) if player.model else 0
    result = EpisodeResult(
        environment=record.slug, agent=player.slug, task=task, sample=sample,
        success=info["metrics"]["success"] > 0 and not is_fault,
        return_=float(sum(rewards)),
        stop_reason=StopReason.TIMEOUT if is_fault else StopReason.ANSWERED,
        error="TimeoutError: no reply" if is_fault else None,
        calls=len(actions) if player.model else 0,
        prompt_tokens=tokens, completion_tokens=tokens // 10,
        money=player.prices.cost(tokens, tokens // 10) if player.prices else None,
        seconds=0.25 + task / 8, actions=closed, rewards=list(map(float, rewards)),
        reward_terms=[{k: float(v) for k, v in own.items()} for own in terms], errors=errors,
        metrics={k: float(v) for k, v in info["metrics"].items()}, attempts=others,
    )  # fmt: skip
    return entry, result
