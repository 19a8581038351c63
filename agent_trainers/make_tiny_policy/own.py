"""A tiny policy for any environment that has reference actions, and for any program with an oracle.

Its words are those of the texts and references, and pieces of words where it meets others. Its
weights come from two rounds of supervised training, as those of the embedded policy: on references,
until it can do what they show, then on careless ones, until it rarely does. What is left fails by
habit, which reward mends; a policy that cannot copy a name yet does not learn that from rewards. So
an author sees in minutes whether a thing can be learned at all.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.rows import Row, make_rows
from agent_trainers.make_tiny_policy.embedded import (
    CHAT_TEMPLATE,
    END,
    PAD,
    RESPONSE_TEMPLATE,
    START,
    make_model,
)
from agent_trainers.make_tiny_policy.lessons import Lessons, split_tasks
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.recipes import MODEL_RECIPE, RECIPES
from agent_trainers.trajectory import Trajectory, Transition

VOCABULARY: Final = 2000
MAX_CONTEXT: Final = 4096
LEARNED: Final = 0.9
"""Share of held-out tasks that are solved when references have taught what they can."""
CARE: Final = 0.5
"""Chance of each turn of a careless reference to be the right one."""
WARMUP_STEPS: Final = 40
TOKENS_PER_STEP: Final = 6000
ROOM: Final = 1.5
"""How much longer than the longest reference a turn may be."""


class Round(NamedTuple):
    """One round of supervised training."""

    num_steps: int
    """Updates, at most."""
    steps_per_look: int
    """Updates from one measurement to the next."""
    learning_rate: float
    is_over: Callable[[float], bool]
    """Says of the share of tasks that are solved whether it ends."""


def make(
    lessons: Lessons,
    output: Path,
    *,
    seed: int = 0,
    num_tasks: int = 256,
    num_steps: int = 600,
    success: float = 0.4,
) -> float:
    """Make a policy, measure it, and save it with the recipe that trains it.

    Args:
        lessons: What it learns from.
        output: The folder.
        seed: Of the weights and the order of demonstrations.
        num_tasks: References that are shown, at most.
        num_steps: Updates of supervised training on references, at most.
        success: Share of held-out tasks that may be solved in the end.

    Returns:
        The share of held-out tasks that it solves, sampled at temperature 1.

    Raises:
        ConfigurationError: If no reference succeeds.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    shown, tested = split_tasks(lessons, num_tasks, rng)
    tokenizer = make_tokenizer(lessons.texts(shown))
    renderer = ChatRenderer(tokenizer)
    told = [t for t in lessons.show(renderer, shown) if t.metrics.get("success", 1) > 0]
    if not _rows(told):
        raise ConfigurationError(
            f"None of the {len(shown)} references of {lessons.options} ends in success within "
            f"{MAX_CONTEXT} tokens. Check an environment's reference_actions() with "
            "python -m agent_envs check."
        )
    turn = int(ROOM * max(len(t.completion_ids) for played in told for t in played.transitions))
    model = make_model(tokenizer, max_position_embeddings=MAX_CONTEXT + turn)

    def measure() -> float:
        policy = transformers_policy(model, tokenizer, max_new_tokens=turn)
        return lessons.measure(policy, tested)

    def learn(shown: Sequence[Trajectory], how: Round) -> float:
        return train(model, _rows(shown), tokenizer.pad_token_id, measure, rng, how)

    reached = learn(told, Round(num_steps, 40, 3e-3, lambda solved: solved >= LEARNED))
    if reached > success:
        half = careless(told, rng)
        reached = learn(half, Round(num_steps, 5, 1e-3, lambda solved: solved <= success))
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    write_recipe(output / MODEL_RECIPE, turn)
    _write_card(output, lessons.options, model, reached, len(tested))
    return reached


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are those of `texts`; any other word is made of pieces."""
    tokenizer = Tokenizer(models.BPE())
    # A word that begins a turn is the token that it is in running text, so that it can be copied.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[PAD, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        padding_side="left",
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def careless(told: Sequence[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
    """Return references in which many a turn is what is said at its place in another task."""
    said: dict[int, list[list[int]]] = defaultdict(list)  # by place
    for trajectory in told:
        for place, step in enumerate(trajectory.transitions):
            said[place].append(step.completion_ids)

    def turn(place: int, step: Transition) -> Transition:
        if rng.random() < CARE:
            return step
        ids = said[place][int(rng.integers(len(said[place])))]
        return replace(step, completion_ids=ids, logprobs=np.zeros(len(ids), np.float32))

    return [
        replace(trajectory, transitions=[turn(i, t) for i, t in enumerate(trajectory.transitions)])
        for trajectory in told
    ]


def train(
    model: Qwen3ForCausalLM,
    rows: Sequence[Row],
    pad_token_id: int,
    measure: Callable[[], float],
    rng: np.random.Generator,
    how: Round,
) -> float:
    """Train for a round; return what share of the tasks is solved at its end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    batches = _batches(rows, rng)
    solved = 0.0
    progress = tqdm(range(1, how.num_steps + 1), desc="learning from references", unit="step")
    for step in progress:
        model.train()
        loss = _loss(model, next(batches), pad_token_id)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        if step % how.steps_per_look and step < how.num_steps:
            continue
        model.eval()
        solved = measure()
        progress.set_postfix(loss=f"{loss.item():.3f}", success=f"{solved:.0%}")
        if how.is_over(solved):
            break
    progress.close()
    model.eval()
    return solved


def write_recipe(path: Path, max_completion_length: int) -> None:
    """Write the settings that `agent-r1-train` takes with the policy: those of the default run."""
    settings = yaml.safe_load(RECIPES["default"].read_text(encoding="utf-8"))
    of_its_own = ("env", "env_kwargs", "eval_env_kwargs", "num_eval_tasks", "output_dir")
    kept = {name: value for name, value in settings.items() if name not in of_its_own}
    kept |= {
        "max_completion_length": max_completion_length,
        "per_device_eval_batch_size": 64,
        "num_eval_tasks": 100,
        "output_dir": "runs/own_environment",
    }
    write_text(path, yaml.safe_dump(kept, sort_keys=False))


def _rows(told: Sequence[Trajectory]) -> list[Row]:
    rows = [row for number, trajectory in enumerate(told) for row in make_rows(trajectory, number)]
    return [row for row in rows if len(row.prompt_ids) + len(row.completion_ids) <= MAX_CONTEXT]


def _batches(rows: Sequence[Row], rng: np.random.Generator) -> Iterator[list[Row]]:
    """Yield batches of about as many tokens, epoch after epoch."""
    batch: list[Row] = []
    num_tokens = 0
    while True:
        for i in rng.permutation(len(rows)).tolist():
            batch.append(rows[i])
            num_tokens += len(rows[i].prompt_ids) + len(rows[i].completion_ids)
            if num_tokens >= TOKENS_PER_STEP:
                yield batch
                batch, num_tokens = [], 0


def _loss(model: Any, rows: Sequence[Row], pad_token_id: int) -> torch.Tensor:
    tokens = [torch.tensor([*row.prompt_ids, *row.completion_ids]) for row in rows]
    labels = [torch.tensor(row.labels()) for row in rows]
    hidden = model.model(input_ids=pad_sequence(tokens, True, pad_token_id)).last_hidden_state
    target = pad_sequence(labels, True, -100)[:, 1:]
    is_learned = target != -100  # (B, T - 1); a tenth of all: the others need no logits
    logits = model.lm_head(hidden[:, :-1][is_learned])
    return torch.nn.functional.cross_entropy(logits, target[is_learned])


def _write_card(output: Path, options: str, model: Any, reached: float, num_tested: int) -> None:
    write_text(
        output / "README.md",
        f"""# A tiny policy for {options}

A Qwen3-type model of {model.num_parameters():,} parameters, made from nothing by
`python -m agent_trainers.make_tiny_policy {options}`: its words are those of the
texts there, its weights come from supervised training on reference actions, then on careless ones.
Success before any reinforcement learning, sampled at temperature 1: {reached:.0%} of {num_tested}
tasks that it was not shown.

Train it with `agent-r1-train {options} --model {output}`, which takes its settings from
`{MODEL_RECIPE}` here.
""",
    )
