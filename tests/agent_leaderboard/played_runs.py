"""Small run folders, played for real: what the reports are tested on."""

from collections.abc import Callable

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_leaderboard.play.episodes import environment_seal
from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    AgentRecord,
    DataFile,
    EnvironmentRecord,
    Manifest,
    Prices,
    Protocol,
)
from agent_leaderboard.records.results import (
    LineUsage,
    ResultLine,
    TaskEntry,
    line_record,
    write_line,
)
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.records.sealing import episode_place
from agent_trainers.trajectory import StopReason

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\">\u202egnp\ud800|=1+1`"
PUBLIC, LICENSED = "multi-hop", "hotpotqa"
NUM_TASKS = {PUBLIC: 8, LICENSED: 2}


def solve(env, task, sample):
    return env.unwrapped.reference_actions()


def solve_some(env, task, sample):
    """Solve tasks 0, 1 and 2; of the others, answer wrongly after a mistake."""
    if task < 3:
        return env.unwrapped.reference_actions()
    return ["I think so.", "<answer>wrong</answer>"]


def attack(env, task, sample):
    return [HOSTILE, f"<answer>{HOSTILE}</answer>"]


AGENTS: dict[str, Callable] = {
    "oracle": solve,
    "best": solve,
    "some": solve_some,
    "hostile": attack,
}


def make_run(folder, data, *, samples_per_task=1, faults=(), with_seconds=True):
    """Play the agents of `AGENTS` in a generated and in a licensed environment.

    Args:
        folder: Where the run folder is made.
        data: Folder with ``hotpot.jsonl``.
        samples_per_task: Episodes of each task.
        faults: Triples of environment, agent and task whose episodes failed.
        with_seconds: Whether to write how long episodes took.
    """
    run = RunFolder(folder)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        protocol=Protocol(samples_per_task=samples_per_task),
        environments=[environment(PUBLIC), environment(LICENSED)],
        agents=[agent(slug) for slug in AGENTS],
        left_out=[],
    )
    run.write_manifest(manifest)
    for record, player in manifest.cells:
        kwargs = {k: v.replace("${data}", str(data)) for k, v in record.kwargs.items()}
        env = gym.make(record.id, **kwargs)
        lines = [
            play(env, record, player, task, sample, faults, environment_seal(record, data))
            for task in range(record.num_tasks)
            for sample in range(samples_per_task)
        ]
        env.close()
        write(run.results_path(record.slug, player.slug), [line_record(line) for line in lines])
        if with_seconds:
            seconds = [
                {"task": line.task, "sample": line.sample, "seconds": 0.25 + line.task / 8}
                for line in lines
            ]
            write(run.seconds_path(record.slug, player.slug), seconds)
        run.write_tasks(
            record.slug,
            [
                TaskEntry(task=line.task, task_id=line.task_id, sha256="0" * 64, labels=line.labels)
                for line in lines
                if line.sample == 0
            ],
        )
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
        tasks_path=f"tasks/{slug}.json",
        tasks_sha256="0" * 64,
        data=[] if is_public else [DataFile(name="hotpot.jsonl", sha256="0" * 64)],
        contamination="none: made on the spot" if is_public else "public since 2018",
        is_text_public=is_public,
    )


def agent(slug):
    has_model = slug == "some"
    return AgentRecord(
        slug=slug,
        name=f"Agent {HOSTILE}".replace("\ud800", "") if slug == "hostile" else slug,
        kind={"oracle": "oracle", "best": "react", "some": "react", "hostile": "react"}[slug],
        model="tiny" if has_model else None,
        weights_sha256={},
        tool_format=None,
        settings={},
        train=None,
        prices=Prices(prompt=1.0, completion=2.0) if has_model else None,
        packages={"agent-r1": "0.1.0"},
    )


def play(env, record, player, task, sample, faults, seal):
    _, info = env.reset(seed=task, options={"task": task})
    task_id = info["task_id"]
    actions, rewards, terms, errors = [], [], [], []
    stop_reason = StopReason.TURN_LIMIT
    for action in AGENTS[player.slug](env, task, sample):
        _, reward, terminated, truncated, info = env.step(action)
        actions.append(action)
        rewards.append(reward)
        terms.append(info["reward_terms"])
        errors.append(info["action"].get("error"))
        if terminated or truncated:
            stop_reason = StopReason.ANSWERED if terminated else StopReason.TURN_LIMIT
            break
    is_fault = (record.slug, player.slug, task) in faults
    tokens = 100 * len(actions) if player.model else 0
    place = episode_place(record, player, task="0" * 64, sample=sample, seed=task)
    closed, *attempts = seal.close([actions, *([["a first try"]] if player.model else [])], place)
    return ResultLine(
        environment=record.slug,
        agent=player.slug,
        task=task,
        task_id=task_id,
        task_sha256="0" * 64,
        sample=sample,
        seed=task,
        actions=closed,
        rewards=rewards,
        reward_terms=terms,
        errors=errors,
        metrics=info["metrics"],
        return_=sum(rewards),
        success=info["metrics"]["success"] > 0 and not is_fault,
        stop_reason=StopReason.TIMEOUT if is_fault else stop_reason,
        error="TimeoutError: no reply" if is_fault else None,
        attempts=attempts,
        usage=LineUsage(
            calls=len(actions) if player.model else 0,
            prompt_tokens=tokens,
            completion_tokens=tokens // 10,
            money=player.prices.cost(tokens, tokens // 10) if player.prices else None,
        ),
        labels={"type": "even" if task % 2 == 0 else "odd", "hops": 2 + task % 3},
    )


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(write_line, records)), encoding="utf-8")
