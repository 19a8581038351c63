"""Reward models of whole trajectories: ``python -m agent_trainers.experimental.reward_model``.

``train`` fits an ensemble of classifiers with TRL's `RewardTrainer` to pairs of a successful and a
failed trajectory (Bradley-Terry), ``calibrate`` measures it on other trajectories and fits its
scale, and ``score`` adds its reward to recorded trajectories. A `RewardModel` is a judge: a reward
term, alone or among others, and a choice among attempts (`agent_trainers.experimental.search`).
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import mannwhitneyu
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.hf_argparser import HfArg
from trl import RewardConfig, RewardTrainer

from agent_envs.core.command_line import check_range, counted
from agent_envs.core.lookup import lookup
from agent_envs.core.messages import Message
from agent_envs.data.files import atomic_path, write_json
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.judges import BaseJudge, Judgement
from agent_envs.judges.judge import digest
from agent_trainers.batching.collate import pad_rows
from agent_trainers.batching.probe import is_tiny
from agent_trainers.cli.arguments import notifier, parse, run_command
from agent_trainers.cli.evaluate import check_output
from agent_trainers.experimental.diagnose import name_file
from agent_trainers.experimental.values import NUM_BINS, reliability, split_by_tokens, split_tasks
from agent_trainers.policies.local import context_length
from agent_trainers.policies.models import load_tokenizer, model_path
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.rescoring import episode_texts, rescore
from agent_trainers.trainers.config import ignore_renames
from agent_trainers.trajectory import load_trajectories, save_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.reward_model"
RESULTS_FILE: Final = "reward_model.json"
DIAGRAM_FILE: Final = "reliability.png"
CUT: Final = "[The start of the record is cut.]\n"
"""Start of a trajectory that is longer than the model's context."""
PAIRS_PER_STEP: Final = 16
notify = notifier(PROGRAM)
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Task = list[tuple[list[int], bool]]
"""Trajectories of a task in tokens, and whether each succeeded, or was chosen."""


@dataclass
class TrainArguments:
    """Options of ``train``."""

    trajectories: list[str] = HfArg(
        default_factory=list,
        help="Files of episodes with the metric 'success', of all policies that will be scored.",
    )
    pairs: str | None = HfArg(
        default=None,
        help="Instead: JSON lines with the conversations 'chosen' and 'rejected', as for TRL.",
    )
    model: str | None = HfArg(
        default=None,
        help="The model that gets a classification head: its name on the hub, or a folder; the "
        "embedded policy if not given.",
    )
    num_members: int = HfArg(default=3, help="Members of the ensemble: other heads and pairs.")
    epochs: int = HfArg(default=2, help="Pairs per trajectory.")
    learning_rate: float | None = HfArg(
        default=None, help="By default 1e-3 for tiny models, else 1e-5."
    )
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output_dir: str = HfArg(default="runs/reward_model", help="Folder for the reward model.")


@dataclass
class CalibrateArguments:
    """Options of ``calibrate``."""

    trajectories: list[str] = HfArg(default_factory=list, help="Files of episodes.")
    reward_model: str = HfArg(default="runs/reward_model", help="Folder of the reward model.")


@dataclass
class ScoreArguments(CalibrateArguments):
    """Options of ``score``."""

    output: str = HfArg(default="scored.jsonl.gz", help="File of the scored episodes.")


def run(arguments: Sequence[str]) -> None:
    """Run a subcommand."""
    name, *rest = arguments or [""]
    function, kind = lookup(COMMANDS, name, kind="subcommand")
    function(parse(name_file(rest), kind, program=f"{PROGRAM} {name}", description=kind.__doc__))


def train(options: TrainArguments) -> None:
    """Train an ensemble, and measure it on a tenth of the tasks."""
    check_range(options, "at least 1", "num_members", "epochs")
    check_range(options, "positive", "learning_rate")
    folder, rng = Path(options.output_dir), np.random.default_rng(options.seed)
    if (folder / RESULTS_FILE).exists():
        raise ConfigurationError(f"--output_dir: {folder / RESULTS_FILE} exists.")
    if bool(options.trajectories) == (options.pairs is not None):
        raise ConfigurationError("Pass either files of trajectories or --pairs.")
    model = model_path(options)
    tokenizer, config = load_tokenizer(model), AutoConfig.from_pretrained(model)
    length, renderer = context_length(config), ChatRenderer(tokenizer)
    if options.pairs is None:
        by_task = read_episodes(options.trajectories, renderer, length)
    else:
        by_task = read_pairs(options.pairs, renderer, length)
    train_set, choice, test = split_tasks(by_task, rng)
    check_outcomes(choice, "choice set")
    ignore_renames()
    on_cpu = not torch.accelerator.is_available()
    rate = options.learning_rate or (1e-3 if is_tiny(config) else 1e-5)
    for k in range(options.num_members):
        pairs = make_pairs(train_set, options.epochs, rng, across=options.pairs is None)
        settings = RewardConfig(
            str(folder / f"member_{k}"), num_train_epochs=1, learning_rate=rate, warmup_steps=0.1,
            per_device_train_batch_size=PAIRS_PER_STEP, seed=options.seed + k, max_length=None,
            bf16=not on_cpu, use_cpu=on_cpu, gradient_checkpointing=not is_tiny(config),
            dataloader_pin_memory=not on_cpu, save_strategy="no", report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
        )  # fmt: skip
        data = Dataset.from_list(pairs)
        trainer = RewardTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        trainer.save_model()
    results = dataclasses.asdict(options) | {"max_length": length, "scale": [1.0, 0.0]}
    write_json(folder / RESULTS_FILE, results)
    fitted = RewardModel(folder)
    if options.pairs is None:
        fitted.calibrate(choice)
    fitted.measure(test)


def calibrate(options: CalibrateArguments) -> None:
    """Fit the scale to most tasks of other episodes, and measure it on the rest."""
    model = RewardModel(options.reward_model)
    by_task = read_episodes(options.trajectories, model.renderer, model.results["max_length"])
    *fit, test = split_tasks(by_task, np.random.default_rng(0))
    calibrated = [task for one in fit for task in one]
    check_outcomes(calibrated, "file")
    model.calibrate(calibrated)
    model.measure(test)


def score(options: ScoreArguments) -> None:
    """Write trajectories with the model's reward as a further term."""
    check_output("--output", options.output, is_trajectories=True)
    model = RewardModel(options.reward_model)
    episodes = [t for path in options.trajectories for t in load_trajectories(path)]
    if not any(episode.is_scorable for episode in episodes):
        raise DataError(f"--trajectories {' '.join(options.trajectories)}: no scorable episode.")
    judges = {model.name: (model, 1.0)}
    save_trajectories(options.output, [rescore(episode, judges) for episode in episodes])
    found = counted(len(episodes), "episode")
    notify(f"{found} with the reward term {model.name!r}: {options.output}")


COMMANDS: Final[dict[str, tuple[Any, Any]]] = {
    "train": (train, TrainArguments),
    "score": (score, ScoreArguments),
    "calibrate": (calibrate, CalibrateArguments),
}


class RewardModel(BaseJudge):
    """Probability that a trajectory succeeds, by an ensemble; a judge of the whole episode.

    The members' scores are in the judgement: ``judges/<name>/alpha/percent`` falls as they disagree
    more, but also when all episodes of a batch score alike.
    """

    name = "reward_model"

    def __init__(self, folder: str | Path, *, caution: float = 0.0) -> None:
        """Load the folder that ``train`` wrote.

        `caution` is the number of standard deviations of the members by which the log-odds are
        lowered, a lower confidence bound (arXiv:2310.02743).
        """
        self._folder = Path(folder)
        try:
            self.results = json.loads((self._folder / RESULTS_FILE).read_text(encoding="utf-8"))
            numbers = range(self.results["num_members"])
            places = [str((self._folder / f"member_{k}").resolve(strict=True)) for k in numbers]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigurationError(
                f"{folder}: no {RESULTS_FILE} with its members found ({error!r}). Train a reward "
                f"model with {PROGRAM} train."
            ) from error
        self._caution = caution
        load = AutoModelForSequenceClassification.from_pretrained
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._members = [load(place, dtype=torch.float32).eval().to(device) for place in places]
        self.renderer = ChatRenderer(load_tokenizer(places[0]))

    def judge(self, observations: Sequence[str], actions: Sequence[str]) -> Judgement:
        """Score an episode."""
        messages = conversation(observations, actions)
        ids = token_ids(self.renderer, messages, self.results["max_length"])
        log_odds = self.log_odds([ids])[:, 0]
        return Judgement(
            value=float(expit(log_odds.mean() - self._caution * log_odds.std())),
            scores=[{"percent": round(100 * float(chance))} for chance in expit(log_odds)],
            tokens=len(ids) * len(log_odds),
            cost=0.0,
            record=digest(messages),
        )

    @torch.no_grad()
    def log_odds(self, sequences: Sequence[Sequence[int]]) -> Floats:
        """Return each member's log-odds of success of sequences of tokens, (members, N)."""
        scores = np.zeros((len(self._members), len(sequences)))
        for numbers in split_by_tokens(sequences):
            rows = [sequences[i] for i in numbers]
            for k, member in enumerate(self._members):
                ids = pad_rows(rows, member.config.get_text_config().pad_token_id)
                mask = pad_rows([1] * len(row) for row in rows)
                logits = member(ids.to(member.device), mask.to(member.device)).logits
                scores[k, numbers] = logits[:, 0].cpu().numpy()
        slope, offset = self.results["scale"]
        scaled: Floats = slope * scores + offset
        return scaled

    def calibrate(self, tasks: Sequence[Task]) -> None:
        """Fit the scale of the log-odds to outcomes (Platt, 1999)."""
        log_odds, good = self._outcomes(tasks)
        slope, offset = fit_scale(log_odds, good)
        before = self.results["scale"]
        self.results["scale"] = [slope * before[0], slope * before[1] + offset]

    def measure(self, tasks: Sequence[Task]) -> None:
        """Save scale and figures on tasks that were not fitted, with a reliability diagram."""
        log_odds, good = self._outcomes(tasks)
        chances, within = expit(log_odds), [auc(*self._outcomes([task])) for task in tasks]
        figures = {
            "auc": auc(log_odds, good),
            "auc_within_tasks": float(np.mean([x for x in within if x == x] or [np.nan])),
            **reliability(chances.tolist(), good.tolist()),
        }
        plot_reliability(self._folder / DIAGRAM_FILE, chances, good)
        self.results["held_out"] = {"num_trajectories": len(good), **figures}
        write_json(self._folder / RESULTS_FILE, self.results)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        notify(f"{len(good)} held-out trajectories: {shown}")

    def _outcomes(self, tasks: Sequence[Task]) -> tuple[Floats, Bools]:
        """Return mean log-odds and outcome of each trajectory, (N,) each."""
        sequences, good = zip(*(each for task in tasks for each in task), strict=True)
        return self.log_odds(sequences).mean(axis=0), np.array(good)


def conversation(observations: Sequence[str], actions: Sequence[str]) -> list[Message]:
    """Return an episode as messages: an observation before each action."""
    turns = zip(observations, actions, strict=True)
    pairs = [
        (Message(role="user", content=o), Message(role="assistant", content=a)) for o, a in turns
    ]
    return [message for pair in pairs for message in pair]


def token_ids(renderer: ChatRenderer, messages: Sequence[Message], max_length: int) -> list[int]:
    """Return the tokens of a conversation; of a longer one `CUT` and its last tokens."""
    *state, turn = messages
    ids = [*renderer.prompt_ids(state, None, None), *renderer.turn_ids(turn["content"])]
    note = renderer.note_ids(CUT)[: max_length - 1]
    return ids if len(ids) <= max_length else [*note, *ids[len(note) - max_length :]]


def read_episodes(
    paths: Sequence[str], renderer: ChatRenderer, max_length: int
) -> dict[str, list[Task]]:
    """Return the scorable episodes of files, by task."""
    found: dict[str, list[Task]] = {}
    num_cut = 0
    for trajectory in (t for path in paths for t in load_trajectories(path)):
        if trajectory.is_scorable and "success" in trajectory.metrics:
            ids = token_ids(renderer, conversation(*episode_texts(trajectory)), max_length)
            found.setdefault(trajectory.task_id, [[]])[0].append((ids, trajectory.success))
            num_cut += len(ids) == max_length
    if not found:
        raise DataError(f"{' '.join(paths)}: no scorable episode with the metric 'success'.")
    if num_cut:
        notify(f"{num_cut} trajectories reach {max_length} tokens: their start is cut.")
    return found


def read_pairs(path: str, renderer: ChatRenderer, max_length: int) -> dict[str, list[Task]]:
    """Return the conversations of a file of preferences, those of a row as a task."""
    found = {}
    for number, row in enumerate(read_records(path), start=1):
        try:
            both = [[*row.get("prompt", []), *row[name]] for name in ("rejected", "chosen")]
            ids = [token_ids(renderer, messages, max_length) for messages in both]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}, row {number}: not two conversations ({error!r}).") from None
        found[str(number)] = [[(ids[0], False), (ids[1], True)]]
    return found


def check_outcomes(tasks: Sequence[Task], name: str) -> None:
    """Check that tasks, those of `name`, have a success and a failure."""
    if len({good for task in tasks for _, good in task}) < 2:
        raise DataError(
            f"The {len(tasks)} tasks of the {name} have no success, or no failure, so no "
            "probability can be calibrated. Collect more episodes."
        )


def make_pairs(
    tasks: Sequence[Task], epochs: int, rng: np.random.Generator, *, across: bool
) -> list[dict[str, list[int]]]:
    """Pair each trajectory `epochs` times with one of the other outcome.

    It is of the same task, but `across` tasks half of the time, and where the task has none.
    """
    everywhere = [[ids for task in tasks for ids, good in task if good is k] for k in (False, True)]
    pairs = []
    for task in epochs * list(tasks):
        own = [[ids for ids, good in task if good is kind] for kind in (False, True)]
        for ids, good in task:
            others = own[not good]
            if across and (not others or rng.random() < 0.5):
                others = everywhere[not good]
            if others:
                both = {good: ids, not good: others[rng.integers(len(others))]}
                pairs.append({"chosen_ids": both[True], "rejected_ids": both[False]})
    if not pairs:
        raise DataError(
            f"None of {len(tasks)} training tasks has successes and failures to compare. Collect "
            "several episodes per task: agent-r1-eval --samples_per_task 4 --trajectories FILE."
        )
    return pairs


def auc(scores: Floats, good: Bools) -> float:
    """Return the chance that a success scores higher than a failure; NaN if one is missing."""
    if good.all() or not good.any():
        return np.nan
    test = mannwhitneyu(scores[good], scores[~good], method="asymptotic")
    return float(test.statistic / (good.sum() * (~good).sum()))


def fit_scale(log_odds: Floats, good: Bools) -> list[float]:
    """Return slope and offset of the log-odds with the highest likelihood (Platt, 1999)."""
    targets = np.where(good, 1 - 1 / (good.sum() + 2), 1 / ((~good).sum() + 2))

    def loss(scale: Floats) -> float:
        scaled = scale[0] * log_odds + scale[1]
        return float(np.mean(np.logaddexp(0, scaled) - targets * scaled))

    return [float(value) for value in minimize(loss, [1.0, 0.0]).x]


def plot_reliability(path: Path, chances: Floats, good: Bools) -> None:
    """Write a PNG of the share of successes over the predicted one, in bins of equal size."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(4.5, 4.5), dpi=150, layout="constrained")).add_subplot()
    bins = [one for one in np.array_split(np.argsort(chances, kind="stable"), NUM_BINS) if len(one)]
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="calibrated")
    points = [(chances[one].mean(), good[one].mean()) for one in bins]
    axes.plot(*zip(*points, strict=True), "o-", color="#2563eb", label="a tenth of trajectories")
    axes.set(xlabel="predicted success", ylabel="share of successes", aspect="equal")
    axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
