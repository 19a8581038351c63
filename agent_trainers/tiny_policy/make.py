"""Tiny policies for any environment with reference actions, or any program with an oracle.

Supervised training on correct demonstrations teaches what they can, then training on careless ones
reduces the success again, so that the policy fails by habit, which reinforcement learning corrects.
A policy that cannot copy a name does not learn that from rewards.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_envs.core.tool_env import ENDLESS
from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.rows import Row, make_rows
from agent_trainers.cli.environments import count_tasks
from agent_trainers.policies import GenerationRequest, Policy, ScriptedPolicy
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.programs import ProgramTasks
from agent_trainers.recipes import MODEL_RECIPE, RECIPES
from agent_trainers.rollout.demonstrations import Demonstration, play_reference
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.evaluation import evaluate, evaluate_policy
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trajectory import Trajectory, Transition

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
VOCABULARY: Final = 2000
MAX_CONTEXT: Final = 4096
LEARNED: Final = 0.9
"""Success at which training on correct demonstrations stops."""
P_CORRECT_TURN: Final = 0.5
"""Probability of each turn of a careless demonstration to be correct."""
NUM_HELD_OUT: Final = 48
WARMUP_STEPS: Final = 40
TOKENS_PER_STEP: Final = 6000
Oracle = Callable[[dict[str, Any], Sequence[Any]], str]
"""Returns the correct model turn for a task and the messages so far."""


class EnvironmentSource:
    """The reference actions of an environment."""

    def __init__(self, options: str, make_env: Callable[[], TextEnv]) -> None:
        """Use the environment that `make_env` returns."""
        self.options, self._make_env = options, make_env
        self.num_tasks = count_tasks(make_env)

    def texts(self, tasks: Sequence[int]) -> Iterator[str]:
        """Yield observations and reference actions."""
        env = self._make_env()
        try:
            for task in tasks:
                _, info = env.reset(seed=task, options={"task": task})
                for action in getattr(env.unwrapped, "reference_actions", list)():
                    yield action
                    *_, terminated, truncated, info = env.step(action)
                    yield from (m["content"] for m in info["messages"] if m["role"] != "system")
                    if terminated or truncated:
                        break
        finally:
            env.close()

    def demonstrate(self, renderer: ChatRenderer, tasks: Sequence[int]) -> list[Trajectory]:
        """Return the trajectories of reference actions."""
        return list(play_reference(self._make_env, renderer, tasks))

    def evaluate(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the success of `policy` on tasks."""
        return evaluate_policy(self._make_env, policy, tasks).metrics.get("success", 0.0)


class ProgramSource:
    """A program in which an oracle answers instead of the model."""

    def __init__(self, options: str, tasks: ProgramTasks, oracle: Oracle) -> None:
        """Use the answers of `oracle` in the program of `tasks`."""
        self.options, self._tasks, self._oracle = options, tasks, oracle
        self.num_tasks = tasks.num_tasks
        self._turns: dict[int, list[tuple[GenerationRequest, str]]] = {}  # by solved task

    def texts(self, tasks: Sequence[int]) -> Iterator[str]:
        """Yield requests and answers of the solved tasks.

        Raises:
            ConfigurationError: If the oracle solves no task; with the first error.
        """
        self._run(tasks)
        for turns in self._turns.values():
            for request, turn in turns:
                yield from (m["content"] for m in request.messages if m["role"] != "system")
                yield turn

    def demonstrate(self, renderer: ChatRenderer, tasks: Sequence[int]) -> list[Trajectory]:
        """Return the answers of the solved tasks."""
        demonstrations = []
        for task in tasks:
            if turns := self._turns.get(task):
                demonstration = Demonstration(renderer, turns[0][0].tools)
                for request, turn in turns:
                    demonstration.add(request.messages, turn, renderer.turn_ids(turn))
                demonstrations.append(demonstration.trajectory(str(task), {"success": 1.0}))
        return demonstrations

    def evaluate(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the success of `policy` in the program."""
        return evaluate(self._tasks.make_rollout(policy), tasks).metrics.get("success", 0.0)

    def _run(self, tasks: Sequence[int]) -> None:
        turns: dict[int, list[tuple[GenerationRequest, str]]] = {task: [] for task in tasks}

        def act(request: GenerationRequest) -> str:
            task = tasks[request.episode_id]  # sessions are opened in the order of the tasks
            turn = self._oracle(dict(self._tasks.tasks[task]), request.messages)
            turns[task].append((request, turn))
            return turn

        episodes = evaluate(self._tasks.make_rollout(ScriptedPolicy(act)), tasks).trajectories
        solved = [t for t, episode in zip(tasks, episodes, strict=True) if episode.success]
        if not solved:
            error = next((e.error for e in episodes if e.error), "no error was recorded")
            raise ConfigurationError(
                f"The oracle solves none of {len(tasks)} tasks. The first error:\n{error}"
            )
        self._turns = {task: turns[task] for task in solved}


Source = EnvironmentSource | ProgramSource


def make_tiny_policy(
    source: Source,
    output: Path,
    *,
    seed: int = 0,
    num_tasks: int = 256,
    num_steps: int = 600,
    success: float = 0.4,
) -> float:
    """Make a policy, evaluate it, and save it with the recipe for its training.

    Args:
        source: Demonstrations and evaluation.
        output: Folder to write.
        seed: Seed of the weights and the order of demonstrations.
        num_tasks: Demonstrations at most.
        num_steps: Updates on correct demonstrations at most.
        success: Success on held-out tasks at most in the end.

    Returns:
        Success on held-out tasks, sampled at temperature 1.

    Raises:
        ConfigurationError: If no demonstration succeeds.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    trained, held_out = _split_tasks(source, num_tasks, rng)
    tokenizer = train_tokenizer(source.texts(trained))
    renderer = ChatRenderer(tokenizer)
    correct = source.demonstrate(renderer, trained)
    correct = [t for t in correct if t.metrics.get("success", 1) > 0]
    if not _rows(correct):
        raise ConfigurationError(
            f"None of the {len(trained)} references of {source.options} succeeds within "
            f"{MAX_CONTEXT} tokens. Check an environment's reference_actions() with "
            "python -m agent_envs check."
        )
    longest = max(len(t.completion_ids) for d in correct for t in d.transitions)
    turn_length = int(1.5 * longest)
    model = make_model(tokenizer, max_position_embeddings=MAX_CONTEXT + turn_length)

    def measure() -> float:
        policy = transformers_policy(model, tokenizer, max_new_tokens=turn_length)
        return source.evaluate(policy, held_out)

    def train(demonstrations: Sequence[Trajectory], rate: float, steps_per_evaluation: int,
              is_over: Callable[[float], bool]) -> float:  # fmt: skip
        batches = _batches(_rows(demonstrations), rng)
        return _train(
            model, batches, tokenizer.pad_token_id, measure, num_steps=num_steps,
            steps_per_evaluation=steps_per_evaluation, learning_rate=rate, is_over=is_over,
        )  # fmt: skip

    reached = train(correct, 3e-3, 40, lambda solved: solved >= LEARNED)
    if reached > success:
        reached = train(careless(correct, rng), 1e-3, 5, lambda solved: solved <= success)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    write_recipe(output / MODEL_RECIPE, turn_length)
    _write_card(output, source.options, model, reached, len(held_out))
    return reached


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with the words of `texts`."""
    tokenizer = Tokenizer(models.BPE())
    # The first word of a turn is the same token as in running text, so that it can be copied.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return fast_tokenizer(tokenizer, model_max_length=MAX_CONTEXT)


def fast_tokenizer(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens and templates of tiny policies."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **options,
    )
    embedded = AutoTokenizer.from_pretrained(TINY_POLICY)
    fast.chat_template = embedded.chat_template
    fast.response_template = embedded.response_template  # parses calls for TRL's own loop
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast, max_position_embeddings: int = 1024, **changes: Any
) -> Qwen3ForCausalLM:
    """Return a model with random weights; `changes` are of its configuration."""
    shape = {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    }  # fmt: skip
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.1,  # with 0.02, copying is never learned at this width
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(shape | changes),
    )
    return Qwen3ForCausalLM(config)


def careless(correct: Sequence[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
    """Return demonstrations in which turns are replaced by those at the same step of others."""
    by_step: dict[int, list[list[int]]] = defaultdict(list)
    for trajectory in correct:
        for number, step in enumerate(trajectory.transitions):
            by_step[number].append(step.completion_ids)

    def turn(number: int, step: Transition) -> Transition:
        if rng.random() < P_CORRECT_TURN:
            return step
        ids = by_step[number][int(rng.integers(len(by_step[number])))]
        return replace(step, completion_ids=ids, logprobs=np.zeros(len(ids), np.float32))

    return [
        replace(trajectory, transitions=[turn(i, t) for i, t in enumerate(trajectory.transitions)])
        for trajectory in correct
    ]


def write_recipe(path: Path, max_completion_length: int) -> None:
    """Write the settings with which `agent-r1-train` trains the policy: the default run's."""
    settings = yaml.safe_load(RECIPES["default"].read_text(encoding="utf-8"))
    replaced = ("env", "env_kwargs", "eval_env_kwargs", "num_eval_tasks", "output_dir")
    kept = {name: value for name, value in settings.items() if name not in replaced}
    kept |= {
        "max_completion_length": max_completion_length,
        "per_device_eval_batch_size": 64,
        "num_eval_tasks": 100,
        "output_dir": "runs/own_environment",
    }
    write_text(path, yaml.safe_dump(kept, sort_keys=False))


def _split_tasks(
    source: Source, count: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return tasks for demonstrations and held-out tasks for evaluation."""
    if source.num_tasks is None:
        drawn = rng.integers(ENDLESS, size=count + NUM_HELD_OUT).tolist()
        return drawn[:count], drawn[count:]
    order = rng.permutation(source.num_tasks).tolist()
    num_held_out = min(NUM_HELD_OUT, source.num_tasks // 5)
    if num_held_out == 0:
        return order, order
    return order[num_held_out:][:count], order[:num_held_out]


def _train(
    model: Qwen3ForCausalLM,
    batches: Iterator[list[Row]],
    pad_token_id: int,
    measure: Callable[[], float],
    *,
    num_steps: int,
    steps_per_evaluation: int,
    learning_rate: float,
    is_over: Callable[[float], bool],
) -> float:
    """Train until `is_over` is true of an evaluation; return the last success."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    solved = 0.0
    with tqdm(range(1, num_steps + 1), desc="supervised training", unit="step") as progress:
        for step in progress:
            model.train()
            loss = _loss(model, next(batches), pad_token_id)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            if step % steps_per_evaluation and step < num_steps:
                continue
            model.eval()
            solved = measure()
            progress.set_postfix(loss=f"{loss.item():.3f}", success=f"{solved:.0%}")
            if is_over(solved):
                break
    model.eval()
    return solved


def _rows(demonstrations: Sequence[Trajectory]) -> list[Row]:
    rows = [row for number, each in enumerate(demonstrations) for row in make_rows(each, number)]
    return [row for row in rows if len(row.prompt_ids) + len(row.completion_ids) <= MAX_CONTEXT]


def _batches(rows: Sequence[Row], rng: np.random.Generator) -> Iterator[list[Row]]:
    """Yield batches of about `TOKENS_PER_STEP` tokens, infinitely."""
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
    """Return the cross-entropy of the labelled tokens, a tenth of all, without other logits."""
    tokens = [torch.tensor([*row.prompt_ids, *row.completion_ids]) for row in rows]
    labels = [torch.tensor(row.labels()) for row in rows]
    hidden = model.model(input_ids=pad_sequence(tokens, True, pad_token_id)).last_hidden_state
    target = pad_sequence(labels, True, -100)[:, 1:]
    is_label = target != -100  # (B, T - 1)
    logits = model.lm_head(hidden[:, :-1][is_label])
    return torch.nn.functional.cross_entropy(logits, target[is_label])


def _write_card(output: Path, options: str, model: Any, reached: float, num_held_out: int) -> None:
    write_text(
        output / "README.md",
        f"""# A tiny policy for {options}

A Qwen3-type model of {model.num_parameters():,} parameters, made by
`python -m agent_trainers.tiny_policy {options}`: supervised training on reference actions, then on
careless ones. Success before reinforcement learning, sampled at temperature 1: {reached:.0%} of
{num_held_out} held-out tasks.

Train it with `agent-r1-train {options} --model {output}`, which takes its settings from
`{MODEL_RECIPE}` here.
""",
    )
