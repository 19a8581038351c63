"""``agent-r1-eval judge``: judge recorded episodes, again or for the first time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.core.rewards import choose_terms
from agent_envs.errors import ConfigurationError, DataError, ServerError
from agent_envs.judges import Judge
from agent_trainers.cli.arguments import notifier, parse
from agent_trainers.monitoring.episode_statistics import judge_metrics
from agent_trainers.trajectory import (
    StopReason,
    Trajectory,
    check_kind,
    load_trajectories,
    save_trajectories,
)

PROGRAM: Final = "agent-r1-eval judge"
notify = notifier(PROGRAM)


@dataclass
class JudgeArguments:
    """Options of ``agent-r1-eval judge``."""

    trajectories: str = HfArg(help="File of episodes, or a run folder.")
    rewards: str = HfArg(
        help="Judges by import path with their weights as JSON: '{\"my_judge:reasoning\": 0.3}'."
    )
    output: str = HfArg(
        default="judged.jsonl.gz", help="File to write: .jsonl, .jsonl.gz, .parquet."
    )


def run(arguments: Sequence[str]) -> None:
    """Write the episodes with judged rewards, and print agreement and cost."""
    options = parse(
        arguments, JudgeArguments, program=PROGRAM, description="Judge recorded episodes."
    )
    check_kind(options.output)
    judges: dict[str, Any] = choose_terms(json_object(options.rewards, "--rewards"), {})
    for name, (judge, _) in judges.items():
        if not isinstance(judge, Judge):
            raise ConfigurationError(f"--rewards: {name!r} is no Judge but {judge!r}.")
    before = load_trajectories(options.trajectories)
    after = [rescore(trajectory, judges) for trajectory in before]
    save_trajectories(options.output, after)
    scored = [(old, new) for old, new in zip(before, after, strict=True) if new.is_scorable]
    num_equal = sum(old.rewards == new.rewards for old, new in scored)
    notify(f"{len(scored)} of {len(after)} episodes scored, {num_equal} as before")
    steps = [t.info.get("judgements", {}) for _, new in scored for t in new.transitions]
    for name, value in judge_metrics(steps).items():
        notify(f"{name}: {value:.4g}")
    for endpoint in dict.fromkeys(e for judge, _ in judges.values() for e in judge.endpoints):
        notify(f"{endpoint.model}: {dict(endpoint.usage)}, cost {endpoint.cost(endpoint.usage):g}")


def rescore(trajectory: Trajectory, judges: Mapping[str, tuple[Judge, float]]) -> Trajectory:
    """Return a trajectory with the terms of judges, by name with their weights.

    Scores equal those given during the rollout if the judge is the same, from its cache. A failed
    judgement makes the trajectory unscorable.

    Raises:
        DataError: If the recorded states lack texts that were judged, as a context dropped them.
    """
    if not trajectory.is_scorable:
        return trajectory
    observations, actions = episode_texts(trajectory)
    steps, is_over = [], trajectory.stop_reason in (StopReason.ANSWERED, StopReason.TURN_LIMIT)
    for t, step in enumerate(trajectory.transitions):
        terms, info = dict(step.reward_terms), dict(step.info)
        known = {name: each["record"] for name, each in info.get("judgements", {}).items()}
        is_last = is_over and t == len(actions) - 1
        for name, (judge, weight) in judges.items():
            try:
                texts = observations[: t + 1], actions[: t + 1]
                value, judgement = judge.term(*texts, is_last=is_last)
            except ServerError as error:
                reason = StopReason.ENVIRONMENT_ERROR
                return replace(trajectory, stop_reason=reason, error=str(error))
            terms[name] = weight * value
            if judgement is not None:
                if known.get(judge.name, judgement.record) != judgement.record:
                    raise DataError(
                        f"Task {trajectory.task_id!r}, step {t + 1}: the recorded states are not "
                        "what was judged. Record episodes with context='full' to judge them again."
                    )
                info["judgements"] = {**info.get("judgements", {}), judge.name: asdict(judgement)}
        reward = float(sum(terms.values()))
        steps.append(replace(step, reward=reward, reward_terms=terms, info=info))
    return replace(trajectory, transitions=steps)


def episode_texts(trajectory: Trajectory) -> tuple[list[str], list[str]]:
    """Return the observation before each action, as the messages after the last one, and it."""
    observations = []
    for step in trajectory.transitions:
        texts: list[str] = []
        for message in step.messages:
            if message["role"] == "assistant":
                texts.clear()
            elif message["role"] != "system":
                texts.append(message["content"])
        observations.append("\n\n".join(texts))
    return observations, [step.action for step in trajectory.transitions]
