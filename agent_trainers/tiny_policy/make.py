"""Make a tiny policy for an environment: ``python -m agent_trainers.tiny_policy``.

Supervised training on correct demonstrations teaches what they can, then training on careless ones
reduces the success again, so that the policy fails by habit, which reinforcement learning corrects.
A policy that cannot copy a name does not learn that from rewards.
"""

import functools
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from agent_envs import __version__
from agent_envs.core.command_line import CommandLineParser, check_range, json_object
from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.rows import make_rows
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.cli.arguments import run_command
from agent_trainers.cli.environments import Environment, first_tasks, hold_out, inspect_environment
from agent_trainers.policies import Policy
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.policy import Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.recipes import MODEL_RECIPE, RECIPES
from agent_trainers.rollout.demonstrations import play_reference, retell
from agent_trainers.rollout.environments import template_tools
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trajectory import Trajectory, Transition

PROGRAM: Final = "python -m agent_trainers.tiny_policy"
PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
VOCABULARY: Final = 2000
MAX_CONTEXT: Final = 4096
LEARNED: Final = 0.9
"""Success at which training on correct demonstrations stops, by default."""
P_CORRECT_TURN: Final = 0.5
"""Probability of each turn of a careless demonstration to be kept, by default."""
NUM_HELD_OUT: Final = 48
TOKENS_PER_STEP: Final = 6000


def run(arguments: Sequence[str]) -> None:
    """Make a policy that knows an environment's words and some of its answers, and save it."""
    parser = CommandLineParser(prog=PROGRAM, description=run.__doc__)
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--env", required=True, help="Gymnasium id, such as my_module:MyEnv-v0")
    add("--env_kwargs", help="the environment's keyword arguments as JSON")
    add("--output", type=Path, default=Path("runs/tiny_policy"), help="folder to write")
    add("--seed", type=int, default=0, help="seed of weights and demonstrations")
    add("--num_tasks", type=int, default=256, help="demonstrated tasks at most")
    add("--num_steps", type=int, default=600, help="updates of supervised training at most")
    add("--learned", type=float, default=LEARNED,
        help="success at which training on correct demonstrations stops")  # fmt: skip
    add("--success", type=float, default=0.4,
        help="success at most before reinforcement learning")  # fmt: skip
    add("--p_correct_turn", type=float, default=P_CORRECT_TURN,
        help="share of turns that careless demonstrations keep; the others are drawn from those "
        "of other tasks at the same step")  # fmt: skip
    options = parser.parse_args(arguments)
    check_range(options, "at least 1", "num_tasks", "num_steps")
    check_range(options, "in [0, 1]", "learned", "success", "p_correct_turn")
    output = options.output
    if output.is_dir() and any(output.iterdir()) and not (output / MODEL_RECIPE).is_file():
        raise ConfigurationError(
            f"--output {output}: exists and is not a tiny policy. Choose another folder."
        )
    check_writable(output, "--output")
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    source = EnvironmentSource(inspect_environment(options.env, env_kwargs))
    reached = make_tiny_policy(
        source, output, seed=options.seed, num_tasks=options.num_tasks,
        num_steps=options.num_steps, learned=options.learned, success=options.success,
        p_correct_turn=options.p_correct_turn,
    )  # fmt: skip
    sys.stdout.write(f"{output}: solves {reached:.0%} of held-out tasks.\n")
    kwargs = f" --env_kwargs {shlex.quote(options.env_kwargs)}" if options.env_kwargs else ""
    sys.stdout.write(
        f"Train it with: agent-r1-train --env {options.env}{kwargs} --model {output}\n"
    )


class EnvironmentSource:
    """Demonstrations by the reference actions of an environment, and evaluation."""

    num_tasks: int | None
    """Number of tasks; None if endless."""
    tools: Schemas
    """Schemas of the tools that the model sees."""

    def __init__(self, environment: Environment) -> None:
        self._make_env, self.num_tasks = environment.make_env, environment.num_tasks
        self.tools = template_tools(environment.states[0])

    def demonstrate(self, tasks: Sequence[int]) -> list[Trajectory]:
        """Return the successful episodes of reference actions."""
        renderer = ChatRenderer(AutoTokenizer.from_pretrained(TINY_POLICY))
        episodes = play_reference(self._make_env, renderer, tasks)
        return [t for t in episodes if t.metrics.get("success", 1.0) > 0]

    def evaluate(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the success of `policy` on tasks."""
        return evaluate_policy(self._make_env, policy, tasks).metrics.get("success", 0.0)


def make_tiny_policy(
    source: EnvironmentSource,
    output: Path,
    *,
    seed: int = 0,
    num_tasks: int = 256,
    num_steps: int = 600,
    learned: float = LEARNED,
    success: float = 0.4,
    p_correct_turn: float = P_CORRECT_TURN,
) -> float:
    """Make a policy, evaluate it, and save it with the recipe for its training.

    Args:
        source: Demonstrations and evaluation.
        output: Folder to write.
        seed: Seed of the weights and the order of demonstrations.
        num_tasks: Demonstrations at most.
        num_steps: Updates on correct demonstrations at most.
        learned: Success on held-out tasks at which training on correct demonstrations stops.
        success: Success on held-out tasks at most in the end.
        p_correct_turn: Probability of each turn of a careless demonstration to be kept.

    Returns:
        Success on held-out tasks, sampled at temperature 1.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    split = hold_out(source.num_tasks, NUM_HELD_OUT, seed)
    shown = split.train or first_tasks(source.num_tasks, num_tasks)
    played = source.demonstrate(rng.permutation(shown)[:num_tasks].tolist())
    tokenizer = train_tokenizer(_texts(played))
    renderer = ChatRenderer(tokenizer)
    correct = [retell(trajectory, renderer, source.tools) for trajectory in played]
    correct = [t for t in correct if len(t.transitions[-1].prompt_ids) <= MAX_CONTEXT]
    if not correct:
        raise ConfigurationError(
            f"None of {len(shown)} references succeeds within {MAX_CONTEXT} tokens. Check an "
            "environment's reference_actions() with python -m agent_envs check."
        )
    longest = max(len(t.completion_ids) for d in correct for t in d.transitions)
    turn_length = int(1.5 * longest)
    model = make_model(tokenizer, max_position_embeddings=MAX_CONTEXT + turn_length)

    def train(demonstrations: Sequence[Trajectory], rate: float, steps_per_evaluation: int,
              is_over: Callable[[float], bool]) -> float:  # fmt: skip
        rows = [row for trajectory in demonstrations for row in make_rows(trajectory)]
        num_tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
        arguments = TrainingArguments(
            output, max_steps=num_steps, learning_rate=rate, warmup_steps=40, adam_beta2=0.98,
            weight_decay=0.01, lr_scheduler_type="constant_with_warmup", seed=seed, use_cpu=True,
            per_device_train_batch_size=max(1, TOKENS_PER_STEP * len(rows) // num_tokens),
            save_strategy="no", logging_strategy="no", report_to="none",
        )  # fmt: skip

        class EndWhenLearned(TrainerCallback):  # type: ignore[misc] # transformers is untyped
            solved = 0.0

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                is_last = state.global_step == state.max_steps
                if is_last or state.global_step % steps_per_evaluation == 0:
                    policy = transformers_policy(
                        model.eval(), tokenizer, max_new_tokens=turn_length
                    )
                    self.solved = source.evaluate(policy, split.eval)
                    control.should_training_stop |= is_over(self.solved)

        trainer = Trainer(
            model,
            arguments,
            train_dataset=[
                {"input_ids": [*row.prompt_ids, *row.completion_ids], "labels": row.labels()}
                for row in rows
            ],
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            callbacks=[end := EndWhenLearned()],
        )
        trainer.train()
        return end.solved

    reached = train(correct, 3e-3, 40, lambda solved: solved >= learned)
    if reached > success:
        reached = train(
            careless(correct, rng, p_correct_turn), 1e-3, 5, lambda solved: solved <= success
        )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    write_recipe(output / MODEL_RECIPE, turn_length)
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


def careless(
    correct: Sequence[Trajectory], rng: np.random.Generator, p_correct_turn: float
) -> list[Trajectory]:
    """Return demonstrations in which turns are replaced by those at the same step of others."""
    by_step: dict[int, list[list[int]]] = defaultdict(list)
    for trajectory in correct:
        for number, step in enumerate(trajectory.transitions):
            by_step[number].append(step.completion_ids)

    def turn(number: int, step: Transition) -> Transition:
        if rng.random() < p_correct_turn:
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
    for name in ("env", "env_kwargs", "eval_env_kwargs"):
        settings.pop(name, None)
    settings |= {
        "max_completion_length": max_completion_length,
        "per_device_eval_batch_size": 64,
        "num_eval_tasks": 100,
        "output_dir": "runs/own_environment",
    }
    write_text(path, yaml.safe_dump(settings, sort_keys=False))


def _texts(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    for step in (step for trajectory in trajectories for step in trajectory.transitions):
        yield from (m["content"] for m in step.messages if m["role"] != "system")
        yield step.action


main = functools.partial(run_command, PROGRAM, run)
"""Run the command with arguments, by default those of this process."""
