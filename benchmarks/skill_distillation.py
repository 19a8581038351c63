"""What self-distillation from skills is worth: ``python -m benchmarks.skill_distillation``.

A policy learns the synthetic worlds with a share of the loss from a teacher that is shown what
another episode of the group did (``--skill_weight``), against the same runs without. A skill in its
prompt only confuses the embedded policy, so it is shown first how to use one, as an
instruction-tuned model knows it anyway: by demonstrations with the skill in the prompt, among its
own episodes without, which keep it as good alone as it was.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from agent_envs.data.files import write_json
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers import TINY_POLICY
from agent_trainers.experimental.skills.skills import NOTE, tell_actions
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.demonstrations import play_reference
from agent_trainers.rollout.evaluation import evaluate_policy, plan_samples
from agent_trainers.trajectory import Trajectory
from benchmarks.demonstrated import show
from benchmarks.learning_run import MAX_NEW_TOKENS, MULTI_HOP, LearningRun, run
from benchmarks.papers_report import mean_text
from benchmarks.performance.models import load_tokenizer

COLUMN: Final = "clean facts"
NUM_SHOWN: Final = 300
"""Demonstrations that show how a skill is used."""
NUM_OWN: Final = 1000
"""The policy's own episodes beside them."""
FIRST_TASK: Final = 10_000_000
"""Where the tasks of both begin; no run draws near it."""
SIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "0": ("--skill_weight", "0.0"),
    "0.1": ("--skill_weight", "0.1"),
    "0.5": ("--skill_weight", "0.5"),
    "0.5, the reference teaches": (
        "--skill_weight", "0.5", "--skill_teacher", "reference", "--beta", "0.001",
    ),
}  # fmt: skip
"""Rows of the table."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the runs that are missing, print the tables, and write them with all figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--budget", type=int, default=1_500, help="environment steps of a run")
    parser.add_argument("--num_tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--work", type=Path, default=Path("runs/skill_distillation"))
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args(arguments)
    reader = options.work / "reader"
    if not reader.exists():
        make_reader(reader)
    success: dict[str, list[float]] = {side: [] for side in SIDES}
    for side, seed in tqdm(list(itertools.product(SIDES, options.seeds)), unit="run"):
        learning_run = LearningRun(
            method="grpo_step", seed=seed, budget=options.budget, num_tasks=options.num_tasks,
            columns=(COLUMN,),
            options=("--config", "default", "--model", str(reader), *SIDES[side],
                     "--disable_tqdm", "true"),
        )  # fmt: skip
        folder = options.work / f"{side.replace(' ', '_')}-{seed}"
        success[side].append(success_of(folder, learning_run))
    starts = {
        name: measure_start(path, options.num_tasks)
        for name, path in {"embedded policy": TINY_POLICY, "shown how": reader}.items()
    }
    sys.stdout.write(report(starts, success))
    if options.output is not None:
        write_json(options.output, {
            "seeds": options.seeds, "budget": options.budget, "num_tasks": options.num_tasks,
            "starts": starts, "success": success,
        })  # fmt: skip


def success_of(folder: Path, learning_run: LearningRun) -> float:
    """Return what a run ended with; do it unless it is done already."""
    wanted = json.loads(json.dumps(asdict(learning_run)))
    result = folder / "result.json"
    if not result.exists() or json.loads(result.read_text(encoding="utf-8"))["run"] != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", wanted)
        with contextlib.redirect_stdout(sys.stderr):  # what transformers prints of each step
            run(folder)
    return float(json.loads(result.read_text(encoding="utf-8"))["scores"][COLUMN])


def report(
    starts: Mapping[str, Mapping[str, float]], success: Mapping[str, Sequence[float]]
) -> str:
    """Return the two tables: the starts, and what was learned from each teacher."""
    before = [
        [name, *(f"{100 * value:.1f} %" for value in values.values())]
        for name, values in starts.items()
    ]
    after = [
        [
            side,
            " ".join(f"{100 * value:.1f}" for value in values),
            mean_text(values),
            mean_text([a - b for a, b in zip(values, success["0"], strict=True)], "+")
            if side != "0"
            else "",
        ]
        for side, values in success.items()
    ]
    header = ["skill_weight", "success after training, each seed", "mean", "against 0, same seeds"]
    start = markdown_table(["before training", "success", "with a skill in the prompt"], before)
    return f"\n{start}\n\n{markdown_table(header, after)}\n"


# A policy that can read


def make_reader(folder: Path) -> None:
    """Show the embedded policy how a skill is used, and save what comes of it, whole."""
    tokenizer = load_tokenizer()
    renderer = ChatRenderer(tokenizer)
    make_env = functools.partial(gym.make, MULTI_HOP)
    tasks = range(FIRST_TASK, FIRST_TASK + NUM_SHOWN + NUM_OWN)
    shown = play_reference(make_env, renderer, tasks[:NUM_SHOWN])
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY).eval()
    policy = transformers_policy(model, tokenizer, max_new_tokens=MAX_NEW_TOKENS)
    own = Rollout(make_env, policy).collect(plan_samples(tasks[NUM_SHOWN:], 1, seed=0))
    show([*(with_skill(t, renderer) for t in shown), *own], folder)


def with_skill(trajectory: Trajectory, renderer: ChatRenderer) -> Trajectory:
    """Return a demonstration in whose first state it is told what it is going to do."""
    note = renderer.note_ids(NOTE.format(skill=tell_actions(trajectory)))
    place = renderer.end_of_state(trajectory.transitions[0].prompt_ids)
    return dataclasses.replace(
        trajectory,
        transitions=[
            dataclasses.replace(t, prompt_ids=[*t.prompt_ids[:place], *note, *t.prompt_ids[place:]])
            for t in trajectory.transitions
        ],
    )


class ShowSkill(gym.Wrapper[str, str, str, str]):
    """An environment that tells what solves the task; only to measure who can use it."""

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        """Begin, and note what solves the task."""
        observation, info = self.env.reset(**options)
        actions = self.env.unwrapped.reference_actions()  # type: ignore[attr-defined]
        self._note = NOTE.format(skill="\n".join(actions))
        return observation, self._shown(info)

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Act."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, self._shown(info)

    def _shown(self, info: dict[str, Any]) -> dict[str, Any]:
        messages = [dict(message) for message in info["messages"]]
        question = next(message for message in messages if message["role"] == "user")
        question["content"] += self._note
        return {**info, "messages": messages}


def measure_start(folder: Path, num_tasks: int) -> dict[str, float]:
    """Return the success of a policy alone, and with a skill in its prompt."""
    policy = transformers_policy(
        AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(),
        max_new_tokens=MAX_NEW_TOKENS, max_batch_size=num_tasks,
    )  # fmt: skip
    make_env = functools.partial(gym.make, MULTI_HOP, split="test")

    def success(make: Callable[[], gym.Env[str, str]]) -> float:
        return evaluate_policy(make, policy, range(num_tasks)).metrics["success"]

    return {"alone": success(make_env), "shown": success(lambda: ShowSkill(make_env()))}


if __name__ == "__main__":
    main()
