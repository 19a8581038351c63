"""A solver with a critic against a solver alone: ``python -m benchmarks.roles``.

Claims about procedural worlds, in the form of 2WikiMultihopQA, are verified by the embedded policy,
which is warm-started on demonstrations with mistakes of both roles. All arms train on as many
sampled tokens, with the exact rewards of the environments.
"""

import json
import re
import shutil
import statistics
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers.hf_argparser import HfArg

from agent_envs.envs.qa.claim_review import ACCEPT, ClaimReviewEnv
from agent_envs.envs.qa.claims import REFUTED, SUPPORTED
from agent_envs.envs.synthetic.world import make_world
from agent_envs.scoring.statistics import paired_test
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers import TINY_POLICY
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.recipes import MODEL_RECIPE
from agent_trainers.rollout.demonstrations import play_reference
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.tiny_policy.make import write_recipe
from agent_trainers.trajectory import Trajectory
from benchmarks.grid import Result, running_cells
from benchmarks.learning_run import LearningRun, check_seeds, fine_tune, num_tokens, prepare
from benchmarks.papers_table import mean_text, run_facts, write_page

PROGRAM: Final = "python -m benchmarks.roles"
REVIEW: Final = "benchmarks.roles:Benchmarks/ClaimReview-v0"
ONE_ROLE, TWO_ROLES = "one role", "two roles, a baseline each"
ARMS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    ONE_ROLE: ("AgentR1/ClaimVerification-v0", {}),
    TWO_ROLES: (REVIEW, {}),
    "two roles, one baseline": (REVIEW, {"has_roles": False}),
}
"""Environment and its arguments."""
WORLDS: Final = {"train": range(20), "test": range(100, 105)}
"""Seeds of the worlds by split; 40 films each."""
NUM_SKILL_EPOCHS, NUM_EPOCHS = 40, 2
SECOND_HOPS: Final = ("birthplace", "employer", "award")
SKILLED, CARELESS = (1.0, 0.5, 1.0, 1.0), (0.7, 0.7, 0.75, 0.7)
"""Probabilities in a demonstration of the second citation, a right first verdict, a right review
and a right last verdict. The last two turns of a skilled one are always right."""
REJECTION: Final = "wrong"
NOTE: Final = '<tool_call>{"name": "note", "arguments": {"text": "evidence.", "title": "'
"""Beginning of a citation: one token, as that of a search."""
MAX_NEW_TOKENS: Final = 12
NUM_EPISODES: Final = 32
NUM_TASKS: Final = 200


class ReviewEnv(ClaimReviewEnv):
    """Claims as in `ClaimReviewEnv`; the references are demonstrations with mistakes."""

    def __init__(
        self, *, has_roles: bool = True, chances: Sequence[float] = CARELESS, **rest: Any
    ) -> None:
        """Load claims; without roles, the steps of both share one baseline and all rewards."""
        self._has_roles, self._chances = has_roles, chances
        super().__init__(**rest)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        *rest, info = super().step(action)
        if not self._has_roles:
            del info["agent_role"], info["reward_owners"]
        return *rest, info  # type: ignore[return-value]

    def reference_actions(self) -> list[str]:
        """Return a demonstration, with mistakes drawn by the task."""
        *work, cite, _, _ = super().reference_actions()
        rng = np.random.default_rng(zlib.crc32(self.task.id.encode()))
        right = self.task.answers[0]
        wrong = {SUPPORTED: REFUTED, REFUTED: SUPPORTED}[right]
        cites, first, review, second = rng.random(4) < self._chances
        accepts = bool(cites and first) == bool(review)
        verdicts = [self.write_answer(right if each else wrong) for each in (first, second)]
        actions = [*work, *([cite] if cites else []), verdicts[0]]
        if accepts:
            return [*actions, self.write_answer(ACCEPT)]
        return [
            *actions, self.write_answer(REJECTION), *([] if cites else [cite]), verdicts[1]
        ]  # fmt: skip


gym.register("Benchmarks/ClaimReview-v0", "benchmarks.roles:ReviewEnv", max_episode_steps=10)


@dataclass
class RolesArguments:
    """Options of the command."""

    seeds: list[int] = HfArg(default_factory=lambda: list(range(1, 9)), help="Seeds of each arm.")
    budget: int = HfArg(default=20_000, help="Sampled tokens of training per run.")
    learning_rate: float = HfArg(default=5e-4, help="It decays to 0 over the budget.")
    jobs: int = HfArg(default=1, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/roles", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the page.")

    def __post_init__(self) -> None:
        """Check the seeds."""
        check_seeds(self.seeds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, RolesArguments, program=PROGRAM, description=(__doc__ or "").split("\n")[0]
    )
    data = Path(options.work).resolve() / "data"
    with running_cells(options.work, options.jobs, run_cell) as run:
        start = run({"start": {"data": str(data)}})["start"]
        cells = {
            f"{arm}-{seed}": {
                "arm": arm,
                "data": str(data),
                "run": learning_run(arm, seed, options),
            }
            for seed in options.seeds
            for arm in ARMS
        }
        found = run(cells)
    results = {arm: [found[f"{arm}-{seed}"] for seed in options.seeds] for arm in ARMS}
    facts = run_facts(PROGRAM, arguments, options, [start, *found.values()])
    text = _markdown(start["arms"], results, facts)
    write_page(options.output, "roles", {"start": start, "arms": results, **facts}, text)


def learning_run(arm: str, seed: int, options: RolesArguments) -> dict[str, Any]:
    """Return the fields of the run of an arm."""
    env, _ = ARMS[arm]
    work = Path(options.work).resolve()
    return asdict(LearningRun(
        method="grpo", seed=seed, budget=options.budget, counts_tokens=True, num_tasks=NUM_TASKS,
        columns=(), env=env, env_kwargs=env_kwargs(arm, work / "data", "train"),
        learning_rate=options.learning_rate, start=str(work / "start" / "policy"),
        num_episodes=NUM_EPISODES,
    ))  # fmt: skip


def env_kwargs(arm: str, data: Path, split: str) -> dict[str, Any]:
    """Return the arguments of the environment of an arm."""
    shared = {"system_prompt": "", "top_k": 1, "max_episode_steps": 10}
    return {"data": str(data / f"{split}.jsonl"), **shared, **ARMS[arm][1]}


def run_cell(spec: Mapping[str, Any], folder: Path) -> Result:
    """Make and evaluate the start policy, or train an arm."""
    data = Path(spec["data"])
    if "run" not in spec:
        tokenizer, model = make_start(folder, data)
        return {"arms": {arm: evaluate(model, tokenizer, arm, data) for arm in ARMS}}
    run = LearningRun(**spec["run"])
    trainer, budget = prepare(run, folder)
    trainer.train()
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    figures = evaluate(trainer.model, load_tokenizer(str(run.start)), spec["arm"], data)
    return {**figures, "curve": budget.curve}


def rows(seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield rows in the form of 2WikiMultihopQA: a film, its director and a fact about them.

    They are those of several worlds, in which no name occurs twice.
    """
    seen: set[str] = set()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        facts = {(fact.relation, fact.subject): fact.object for fact in make_world(rng).facts}
        for film in [subject for name, subject in facts if name == "director"]:
            person, second = facts["director", film], str(rng.choice(SECOND_HOPS))
            if {film, person} & seen:
                continue
            seen |= {film, person}
            chain = [[film, "director", person], [person, second, facts[second, person]]]
            yield {
                "_id": f"{seed}-{film.replace(' ', '-')}", "type": "compositional",
                "question": f"what is the {second} of the director of {film} ?",
                "answer": chain[1][2], "evidences": chain,
                "context": [[a, [f"the {name} of {a} is {b} ."]] for a, name, b in chain],
                "supporting_facts": [[title, 0] for title, _, _ in chain],
            }  # fmt: skip


def write_claims(data: Path) -> None:
    """Write the rows of both splits."""
    data.mkdir(parents=True, exist_ok=True)
    for split, seeds in WORLDS.items():
        lines = [f"{json.dumps(row)}\n" for row in rows(seeds)]
        (data / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_start(folder: Path, data: Path) -> tuple[Any, Any]:
    """Write the claims, and train the embedded policy on demonstrations, which add words."""
    write_claims(data)
    renderer = ChatRenderer(load_tokenizer(str(TINY_POLICY)))
    found = []
    for chances in (SKILLED, CARELESS):
        arguments = {**env_kwargs(TWO_ROLES, data, "train"), "chances": chances}
        make_env = partial(gym.make, REVIEW, **arguments)
        tasks = range(make_env().unwrapped.num_tasks)
        found.append(list(play_reference(make_env, renderer, tasks)))
    skilled, careless = found
    model, tokenizer = extend(careless)
    model.save_pretrained(folder / "wider")
    tokenizer.save_pretrained(folder / "wider")
    decisions = [replace(t, transitions=[step]) for t in skilled for step in t.transitions[-2:]]
    fine_tune(folder / "wider", decisions, folder / "skilled", epochs=NUM_SKILL_EPOCHS)
    policy = fine_tune(folder / "skilled", careless, folder / "policy", epochs=NUM_EPOCHS)
    write_recipe(policy / MODEL_RECIPE, MAX_NEW_TOKENS)
    return load_tokenizer(str(policy)), load_model(str(policy))


def extend(demonstrations: Sequence[Trajectory]) -> tuple[Any, Any]:
    """Return the embedded policy and its tokenizer with the words of demonstrations."""
    tokenizer, model = load_tokenizer(str(TINY_POLICY)), load_model(str(TINY_POLICY))
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    pattern, vocabulary = written["pre_tokenizer"]["pattern"], written["model"]["vocab"]
    pattern["Regex"] = f"{re.escape(NOTE)}|{pattern['Regex']}"
    reader = Tokenizer.from_str(json.dumps(written))
    steps = [step for trajectory in demonstrations for step in trajectory.transitions]
    texts = [message["content"] for step in steps for message in step.messages]
    for text in (*texts, *(step.action for step in steps)):
        pieces = reader.pre_tokenizer.pre_tokenize_str(reader.normalizer.normalize_str(text))
        for word, _ in pieces:
            vocabulary.setdefault(word, len(vocabulary))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(written))
    torch.manual_seed(0)  # embeddings of new words are drawn
    model.resize_token_embeddings(len(vocabulary))
    return model, tokenizer


def evaluate(model: Any, tokenizer: Any, arm: str, data: Path) -> Result:
    """Return figures on held-out claims, sampled at temperature 1."""
    policy = transformers_policy(
        model.eval(), tokenizer, max_new_tokens=MAX_NEW_TOKENS, max_batch_size=NUM_TASKS
    )
    make_env = partial(gym.make, ARMS[arm][0], **env_kwargs(arm, data, "test"))
    done = evaluate_policy(make_env, policy, range(NUM_TASKS), seed=0)
    tokens = statistics.fmean(map(num_tokens, done.trajectories))
    names = ("success", "exact_match", "citation_em", "first_joint_em", "num_rejections")
    return {name: done.metrics.get(name, 0.0) for name in names} | {"tokens": tokens}


def _markdown(
    start: Mapping[str, Result], results: Mapping[str, Sequence[Result]], facts: Mapping[str, Any]
) -> str:
    alone = [run["success"] for run in results[ONE_ROLE]]
    lines = []
    for arm, runs in results.items():
        figures = {name: [run[name] for run in runs] for name in runs[0] if name != "curve"}
        ahead = np.subtract(figures["success"], alone).tolist()
        lines.append([
            arm, f"{100 * start[arm]['success']:.1f}", mean_text(figures["success"]),
            *(mean_text(figures[name]) for name in ("exact_match", "citation_em")),
            "" if arm == ONE_ROLE else mean_text(figures["first_joint_em"]),
            f"{statistics.fmean(figures['tokens']):.1f}",
            "" if arm == ONE_ROLE else f"{mean_text(ahead, '+')} (p = {paired_test(ahead):.3f})",
        ])  # fmt: skip
    heads = [
        "arm", "before, %", "success, %", "right verdict, %", "right citations, %",
        "success at the first verdict, %", "tokens an episode", "ahead of one role, points",
    ]  # fmt: skip
    return "\n\n".join([
        "# A solver with a critic against a solver alone",
        f"`{facts['command']}`, {facts['date']}: {facts['num_runs']} cells, {facts['hours']:.2f} "
        "CPU hours. " + ", ".join(f"{n} {v}" for n, v in facts["versions"].items()) + ".",
        f"Success on {NUM_TASKS} held-out claims, sampled at temperature 1, after training on "
        f"{facts['settings']['budget']:,} sampled tokens; *before* is the start policy of all "
        "runs. Means with 95 % intervals by Student's t, differences paired by seed, p by the "
        "exact sign-flip test. See `README.md` for claims and arms.",
        markdown_table(heads, lines) + "\n",
    ])  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
