"""Summaries that the policy learns to write: ``python -m benchmarks.summaries``.

Pages are read one by one, four times the budget of the context, and the question can be answered
after the last page only. The embedded policy is warm-started on demonstrations whose summaries keep
the wanted fact in some of the cases.
"""

import itertools
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np
from transformers.hf_argparser import HfArg

from agent_envs import Task, ToolEnv
from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import correct_term
from agent_envs.errors import ConfigurationError
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers import TINY_POLICY
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.policies.policy import GenerationRequest, ScriptedPolicy
from agent_trainers.recipes import MODEL_RECIPE
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import evaluate_policy, plan_samples
from agent_trainers.tiny_policy.make import write_recipe
from benchmarks.grid import Result, running_cells
from benchmarks.learning_run import LearningRun, check_distinct, fine_tune, prepare
from benchmarks.papers_table import mean_text, run_facts, write_page

PROGRAM: Final = "python -m benchmarks.summaries"
ENV: Final = "benchmarks.summaries:Benchmarks/Pages-v0"
THINGS: Final = """
    anchor bridge canyon desert engine forest garden harbor island lantern mirror orchard river
    station tower window
""".split()
WANTED: Final = "prize"
VALUES: Final = "arland borania cestia dalmor elvany fordia gallen hestria iberon jutia".split()
NUM_PAGES: Final = 8
FACTS_PER_PAGE: Final = 3
NUM_FACTS: Final = NUM_PAGES * FACTS_PER_PAGE
NUM_LAST_PAGES: Final = 2
"""The wanted fact is on none of the last pages, which a window still shows."""
READ, END, REFUSAL, REQUEST = "search", "last .", "one ?", "which ?"
"""A turn that reads on, the texts after the last page and of a refused answer, and the request for
a summary: words of the embedded policy."""
BUDGET: Final = 43
"""Estimated tokens; all pages are four times as many. A summary is due after every second page."""
POLICY: Final = {"name": "policy", "budget_tokens": BUDGET, "request": REQUEST}
TRAINED: Final = "trained summaries"
ARMS: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    TRAINED: (POLICY, "true"),
    "frozen summaries": (POLICY, "false"),
    "full": ({"name": "full"}, "true"),
    "window": ({"name": "window", "turns": 2}, "true"),
    "budget": ({"name": "budget", "tokens": 40}, "true"),  # states as long as with summaries
}
"""Context, and ``--train_summaries``."""
P_KEEPS: Final = 0.6
"""Share of demonstrated summaries with the wanted fact, if it is in view."""
NUM_DEMONSTRATIONS: Final = 500
"""Demonstrations in each of the contexts `POLICY` and full, from task `FIRST_DEMONSTRATION` on."""
FIRST_DEMONSTRATION: Final = 1_000_000
MAX_NEW_TOKENS: Final = 12
NUM_EPISODES: Final = 32
NUM_TASKS: Final = 100
MARGIN: Final = 0.2
"""Difference that the trained summaries should have in every seed."""


class PagesEnv(ToolEnv):
    """Read pages of things with their values in order; once all were read, tell that of the prize.

    Any message of the agent shows the next page; an answer before the last page is refused.
    """

    reward_functions: ClassVar = {"correct": correct_term}
    default_rewards: ClassVar = {"correct": 1.0}
    outcome_terms = frozenset({"correct"})
    computes_only = True

    def __init__(self, *, split: str = "train", **shared: Any) -> None:
        """Choose the split, ``"train"`` or ``"test"``; the policy knows no system prompt."""
        self._split = ("train", "test").index(split)
        super().__init__(**{"system_prompt": "", **shared})

    def get_task(self, index: int) -> Task:
        """Draw the pages."""
        rng = np.random.default_rng([self._split, index])
        facts = [[str(rng.choice(THINGS)), str(rng.choice(VALUES))] for _ in range(NUM_FACTS)]
        wanted = facts[rng.integers(NUM_FACTS - NUM_LAST_PAGES * FACTS_PER_PAGE)]
        wanted[0] = WANTED
        pages = [
            " ".join(word for fact in facts[first : first + FACTS_PER_PAGE] for word in fact)
            for first in range(0, NUM_FACTS, FACTS_PER_PAGE)
        ]
        return Task(
            id=f"pages-{self._split}-{index}",
            question=f"what is the {WANTED} ?", answers=(wanted[1],),
            data={"pages": pages},
        )  # fmt: skip

    def begin_episode(self) -> None:
        """Go back to the first page."""
        self._num_read, self.is_correct, self._has_fact = 0, False, False

    def on_message(self, message: str) -> str:
        """Return the next page."""
        self._num_read += 1
        return str([*self.task.data["pages"], END][min(self._num_read - 1, NUM_PAGES)])

    def on_answer(self, answer: str) -> str | None:
        """Judge an answer after the last page."""
        if self._num_read <= NUM_PAGES:
            return REFUSAL
        fact = f"{WANTED} {self.task.answers[0]}"
        self._has_fact = any(fact in message["content"] for message in self.state["messages"])
        self.is_correct = answer == self.task.answers[0]
        return None

    def metrics(self) -> dict[str, float]:
        """Return the metrics; ``has_fact`` is whether the last state shows the fact."""
        own = {"success": float(self.is_correct), "has_fact": float(self._has_fact)}
        return {**own, **super().metrics()}


gym.register("Benchmarks/Pages-v0", "benchmarks.summaries:PagesEnv", max_episode_steps=18)


@dataclass
class SummariesArguments:
    """Options of the command."""

    seeds: list[int] = HfArg(default_factory=lambda: list(range(1, 9)), help="Seeds of each arm.")
    arms: list[str] = HfArg(default_factory=lambda: list(ARMS), help="Contexts to compare.")
    budget: int = HfArg(default=6_000, help="Environment steps of training per run.")
    learning_rate: float = HfArg(default=5e-4, help="It decays to 0 over the budget.")
    jobs: int = HfArg(default=2, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/summaries", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the page.")

    def __post_init__(self) -> None:
        """Check seeds and arms."""
        check_distinct("seeds", self.seeds)
        for arm in self.arms:
            lookup(ARMS, arm, kind="arm")
        if TRAINED not in self.arms:
            raise ConfigurationError(f"--arms: all are compared with {TRAINED!r}. Add it.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, SummariesArguments, program=PROGRAM, description=(__doc__ or "").split("\n")[0]
    )
    cells = {
        f"{arm}-{seed}": {"arm": arm, "run": asdict(learning_run(arm, seed, options))}
        for arm in options.arms
        for seed in options.seeds
    }
    with running_cells(options.work, options.jobs, run_cell) as run:
        start = run({"start": {}})["start"]
        found = run(cells)
    results = {arm: [found[f"{arm}-{seed}"] for seed in options.seeds] for arm in options.arms}
    facts = run_facts(PROGRAM, arguments, options, [start, *found.values()])
    text = _markdown(start["arms"], results, facts)
    write_page(options.output, "summaries", {"start": start, "arms": results, **facts}, text)


def learning_run(arm: str, seed: int, options: SummariesArguments) -> LearningRun:
    """Return the run of an arm."""
    context, train_summaries = lookup(ARMS, arm, kind="arm")
    return LearningRun(
        method="grpo", seed=seed, budget=options.budget, num_tasks=NUM_TASKS, columns=(), env=ENV,
        env_kwargs={"context": context}, learning_rate=options.learning_rate,
        start=str(Path(options.work).resolve() / "start" / "policy"), num_episodes=NUM_EPISODES,
        options=("--train_summaries", train_summaries),
    )  # fmt: skip


def run_cell(spec: Mapping[str, Any], folder: Path) -> Result:
    """Make and evaluate the start policy, or train an arm."""
    if "run" not in spec:
        model = _make_start(folder)
        return {"arms": {arm: evaluate(model, arm, seed=0) for arm in ARMS}}
    run = LearningRun(**spec["run"])
    trainer, budget = prepare(run, folder)
    trainer.train()
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    return {**evaluate(trainer.model, spec["arm"], run.seed), "curve": budget.curve}


def _make_start(folder: Path) -> Any:
    tasks = range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + NUM_DEMONSTRATIONS)
    episodes = [
        trajectory
        for arm in (TRAINED, "full")
        for trajectory in Rollout(
            partial(gym.make, ENV, context=ARMS[arm][0]), ScriptedPolicy(demonstrate)
        ).collect(plan_samples(tasks, 1, seed=0))
    ]
    policy = fine_tune(TINY_POLICY, episodes, folder / "policy", epochs=2)
    write_recipe(policy / MODEL_RECIPE, MAX_NEW_TOKENS)
    return load_model(str(policy))


def demonstrate(request: GenerationRequest) -> str:
    """Return the turn of a demonstration: read to the end, keep a fact if asked, then answer."""
    last = request.messages[-1]["content"]
    words = " ".join(message["content"] for message in request.messages).split()
    known = [f"{a} {b}" for a, b in itertools.pairwise(words) if b in VALUES]
    right = [fact for fact in known if fact.startswith(WANTED)]
    if last.endswith(REQUEST):
        keeps = right and request.rng.random() < P_KEEPS
        return str(right[0] if keeps else request.rng.choice(known))
    if last != END:
        return READ
    value = right[0].split()[1] if right else request.rng.choice(VALUES)
    return f"<answer> {value} </answer>"


def evaluate(model: Any, arm: str, seed: int) -> Result:
    """Return success, states with the fact and the longest state on held-out tasks."""
    policy = transformers_policy(
        model.eval(), load_tokenizer(str(TINY_POLICY)), max_new_tokens=MAX_NEW_TOKENS,
        max_batch_size=NUM_TASKS,
    )  # fmt: skip
    make_env = partial(gym.make, ENV, split="test", context=ARMS[arm][0])
    done = evaluate_policy(make_env, policy, range(NUM_TASKS), seed=seed)
    longest = [max(len(step.prompt_ids) for step in t.transitions) for t in done.trajectories]
    figures = {name: done.metrics[name] for name in ("success", "has_fact")}
    return {**figures, "state_tokens": statistics.fmean(longest)}


def _markdown(
    start: Mapping[str, Result], results: Mapping[str, Sequence[Result]], facts: Mapping[str, Any]
) -> str:
    scores = {arm: [run["success"] for run in runs] for arm, runs in results.items()}
    ahead = {arm: np.subtract(scores[TRAINED], scores[arm]) for arm in results}
    wins = {arm: f"{(ahead[arm] >= MARGIN).sum()} of {len(ahead[arm])}" for arm in results}
    lines = [
        [
            arm, f"{100 * start[arm]['success']:.1f}", mean_text(scores[arm]),
            mean_text([run["has_fact"] for run in runs]),
            f"{statistics.fmean(run['state_tokens'] for run in runs):.0f}",
            mean_text(ahead[arm].tolist(), "+"), wins[arm],
        ]
        for arm, runs in results.items()
    ]  # fmt: skip
    heads = [
        "context", "before, %", "success, %", "fact in the last state, %", "longest state, tokens",
        "trained summaries ahead, points", f"by {100 * MARGIN:.0f} points",
    ]  # fmt: skip
    return "\n\n".join([
        "# Summaries that the policy learns to write",
        f"`{facts['command']}`, {facts['date']}: {facts['num_runs']} cells, {facts['hours']:.1f} "
        "CPU hours. " + ", ".join(f"{n} {v}" for n, v in facts["versions"].items()) + ".",
        f"**Trained summaries are at least {100 * MARGIN:.0f} points ahead of frozen ones in "
        f"{wins['frozen summaries']} seeds.** See `README.md` for worlds and arms.",
        f"Success on {NUM_TASKS} held-out tasks, sampled at temperature 1; *before* is the start "
        "policy of all runs. Means with 95 % intervals by Student's t, differences paired by seed.",
        markdown_table(heads, lines) + "\n",
    ])  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
