"""Self-distillation from skills: ``python -m benchmarks.skill_distillation``.

Compares runs on the synthetic worlds with a share of the loss from a teacher that is shown the
actions of another episode of the group (`SkillDistillation`) with runs without. A skill in its
prompt only confuses the embedded policy, so all runs start from one finetuned on demonstrations
with the skill in the prompt, mixed with its own episodes.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from transformers import AutoModelForCausalLM

from agent_envs.data.files import write_json
from agent_envs.formats.turn_reading import without_thoughts
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers import TINY_POLICY
from agent_trainers.cli.arguments import run_command
from agent_trainers.experimental.skills.skills import NOTE
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.demonstrations import play_reference
from agent_trainers.rollout.evaluation import evaluate_policy, plan_samples
from agent_trainers.trajectory import Trajectory
from benchmarks.grid import Grid, Result
from benchmarks.learning_run import MAX_NEW_TOKENS, MULTI_HOP, LearningRun, finetune, run
from benchmarks.papers_report import mean_text
from benchmarks.performance.models import load_tokenizer

COLUMN: Final = "clean facts"
NUM_DEMONSTRATIONS: Final = 300
NUM_OWN_EPISODES: Final = 1000
FIRST_TASK: Final = 10_000_000
"""First task of both; no run draws tasks near it."""


def _distillation(**settings: Any) -> tuple[str, str]:
    """Return the option that adds self-distillation to a run."""
    name = "agent_trainers.experimental.skills:SkillDistillation"
    return "--extensions", json.dumps({name: settings})


SIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "0": (),
    "0.1": _distillation(weight=0.1),
    "0.5": _distillation(weight=0.5),
    "0.5, reference teacher": (
        *_distillation(weight=0.5, teacher="reference"), "--beta", "0.001",
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command("python -m benchmarks.skill_distillation", _run, arguments)


def _run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--budget", type=int, default=1_500, help="environment steps of a run")
    parser.add_argument("--num_tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--work", type=Path, default=Path("runs/skill_distillation"))
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    options = parser.parse_args(arguments)
    reader = options.work / "reader"
    with Grid(options.work) as grid:
        if not reader.exists():
            make_reader(reader)

        def compute(key: str, spec: dict[str, Any]) -> Result:
            with contextlib.redirect_stdout(sys.stderr):  # transformers prints every step
                return run(LearningRun(**spec), options.work / key)

        cells = {
            _key(side, seed): LearningRun(
                method="grpo_step", seed=seed, budget=options.budget,
                num_tasks=options.num_tasks, columns=(COLUMN,),
                options=("--config", "default", "--model", str(reader), *SIDES[side]),
            )
            for side in SIDES for seed in options.seeds
        }  # fmt: skip
        specs = {k: json.loads(json.dumps(dataclasses.asdict(c))) for k, c in cells.items()}
        results = grid.run(specs, compute)
    success = {
        side: [results[_key(side, seed)]["scores"][COLUMN] for seed in options.seeds]
        for side in SIDES
    }
    starts = {
        name: measure_start(path, options.num_tasks)
        for name, path in {"embedded policy": TINY_POLICY, "finetuned": reader}.items()
    }
    sys.stdout.write(report(starts, success))
    if options.output is not None:
        figures = {name: getattr(options, name) for name in ("seeds", "budget", "num_tasks")}
        write_json(options.output, figures | {"starts": starts, "success": success})


def report(
    starts: Mapping[str, Mapping[str, float]], success: Mapping[str, Sequence[float]]
) -> str:
    """Return the success of the initial policies, and after training by seed, as tables."""
    before = [[n, *(f"{100 * s[kind]:.1f} %" for kind in ("alone", "shown"))]
              for n, s in starts.items()]  # fmt: skip
    after = []
    for side, values in success.items():
        paired = [a - b for a, b in zip(values, success["0"], strict=True)]
        each = " ".join(f"{100 * value:.1f}" for value in values)
        after.append([side, each, mean_text(values), "" if side == "0" else mean_text(paired, "+")])
    header = ["skill_weight", "success after training, each seed", "mean", "against 0, same seeds"]
    start = markdown_table(["before training", "success", "with a skill in the prompt"], before)
    return f"\n{start}\n\n{markdown_table(header, after)}\n"


def make_reader(folder: Path) -> None:
    """Save the embedded policy finetuned to use a skill in its prompt."""
    tokenizer = load_tokenizer()
    renderer = ChatRenderer(tokenizer)
    make_env = functools.partial(gym.make, MULTI_HOP)
    tasks = range(FIRST_TASK, FIRST_TASK + NUM_DEMONSTRATIONS + NUM_OWN_EPISODES)
    demonstrations = play_reference(make_env, renderer, tasks[:NUM_DEMONSTRATIONS])
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY).eval()
    policy = transformers_policy(model, tokenizer, max_new_tokens=MAX_NEW_TOKENS)
    own = Rollout(make_env, policy).collect(plan_samples(tasks[NUM_DEMONSTRATIONS:], 1, seed=0))
    finetune([*(with_skill(t, renderer) for t in demonstrations), *own], folder)


def with_skill(trajectory: Trajectory, renderer: ChatRenderer) -> Trajectory:
    """Return a demonstration whose first state contains its own actions as a skill."""
    skill = "\n".join(without_thoughts(t.action).strip() for t in trajectory.transitions)
    note = renderer.note_ids(NOTE.format(skill=skill))
    place = renderer.end_of_state(trajectory.transitions[0].prompt_ids)
    return dataclasses.replace(
        trajectory,
        transitions=[
            dataclasses.replace(t, prompt_ids=[*t.prompt_ids[:place], *note, *t.prompt_ids[place:]])
            for t in trajectory.transitions
        ],
    )


class ShowSkill(gym.Wrapper[str, str, str, str]):
    """Add the reference actions as a skill to the question."""

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        """Reset, and record the reference actions."""
        observation, info = self.env.reset(**options)
        actions = self.env.unwrapped.reference_actions()  # type: ignore[attr-defined]
        self._note = NOTE.format(skill="\n".join(actions))
        return observation, self._with_note(info)

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Step."""
        *outcome, info = self.env.step(action)
        return *outcome, self._with_note(info)  # type: ignore[return-value]

    def _with_note(self, info: dict[str, Any]) -> dict[str, Any]:
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


def _key(side: str, seed: int) -> str:
    return f"{side.replace(', ', '-').replace(' ', '-')}-{seed}"


if __name__ == "__main__":
    main(sys.argv[1:])
