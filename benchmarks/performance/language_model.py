"""A real language model's optimiser step: beside TRL's, and beside bare generation and gradients.

SmolLM2 from its package, in a chat template that TRL can read calls by, shown 64 demonstrations
(once, three minutes), so that episodes are those of a model that acts. Both trainers play the same
environment with the same batch, from the same weights.

*Bare* is what nobody can leave out: after each step of ours, with the same weights and precision,
``generate`` on the prompts of all first turns, all second turns and so on, as many tokens as the
longest of each, and one forward and backward of each episode's tokens, in batches as large as ours,
with logits of what was sampled only.
"""

import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

from agent_trainers.cli import sft
from agent_trainers.cli.train_options import parse_arguments
from agent_trainers.policies.models import cache_folder
from agent_trainers.small_models import prepare
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trajectory import Trajectory
from benchmarks.performance.alternation import train_in_turns
from benchmarks.performance.comparison import compare, spread
from benchmarks.performance.models import utilisation
from benchmarks.performance.settings import Settings
from benchmarks.performance.step_time import ENVIRONMENT, facts_of_ours, facts_of_theirs, summary
from benchmarks.trl_peer import make_trl_trainer

TRL_TARGET: Final = 0.6
BARE_TARGET: Final = 1.15


def measure_language_model(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return seconds of our step over those of TRL's, and of its phases over the bare ones."""
    folder = settings.language_model or str(warm_model(cache_folder() / "models" / "smollm2-calls"))
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    with tempfile.TemporaryDirectory() as output:
        config = _config(settings, output)
        ours = StepGRPOTrainer(
            model=load(), env=ENVIRONMENT, args=config, processing_class=tokenizer
        )
        theirs, played = make_trl_trainer(ENVIRONMENT, {}, config, tokenizer, model=load())
        steps = train_in_turns(
            {"ours": ours, "trl": theirs},
            settings.rounds,
            before_round=lambda: theirs.model.load_state_dict(ours.model.state_dict()),
            facts={
                "ours": functools.partial(_with_bare_phases, ours, tokenizer),
                "trl": functools.partial(facts_of_theirs, theirs, played),
            },
        )
    seconds = {name: [step.seconds for step in timed] for name, timed in steps.items()}
    details = {
        "model": folder,
        "batch": config.per_device_train_batch_size,
        "per_step": {name: summary(timed) for name, timed in steps.items()},
    }
    facts = [step.facts for step in steps["ours"]]
    bare = [fact["bare_generate_seconds"] + fact["bare_gradient_seconds"] for fact in facts]
    speed = [
        step.facts["trained_tokens"] / (step.seconds - step.facts["rollout_seconds"])
        for step in steps["ours"]
    ]
    return {
        "language_model_vs_trl": compare(seconds["ours"], seconds["trl"], target=TRL_TARGET)
        | details,
        "language_model_vs_bare": compare(seconds["ours"], bare, target=BARE_TARGET)
        | {"merged": utilisation(ours.model, spread(speed)["median"])},
    }


def warm_model(folder: Path) -> Path:
    """Return the folder of a SmolLM2 that calls tools as TRL reads them; make it if need be."""
    if folder.exists():
        return folder
    base = prepare("smollm2")
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        templated = Path(beside) / "base"
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(templated)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = qwen3_instruct_2507_chat_template
        tokenizer.save_pretrained(templated)
        output = Path(beside) / "warm"
        sft.run(["--model", str(templated), "--env", ENVIRONMENT, "--output_dir", str(output)])
        output.rename(folder)
    return folder


def _config(settings: Settings, folder: str) -> StepGRPOConfig:
    """Return the settings of the recipe ``smollm2``, with turns long enough for calls as JSON."""
    options = {
        **{name: value for name, value in settings.trainer_options.items() if name != "bf16"},
        "config": "smollm2",
        "max_steps": settings.rounds + 1,
        "max_completion_length": 64,
        "per_device_train_batch_size": 8,  # TRL computes the logits of a whole batch at once
        "output_dir": folder,
        "save_strategy": "no",
        "num_eval_tasks": 0,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    _, config = parse_arguments(arguments)
    return config


def _with_bare_phases(trainer: StepGRPOTrainer, tokenizer: Any) -> dict[str, float]:
    """Return what our last step did and took, and what its phases take bare."""
    episodes = trainer.trajectories["train"]
    generate = _timed(lambda: _generate(trainer, tokenizer, episodes))
    gradient = _timed(lambda: _differentiate(trainer, tokenizer, episodes))
    return facts_of_ours(trainer) | {
        "rollout_seconds": trainer.clock.seconds()["rollout"],
        "bare_generate_seconds": generate,
        "bare_gradient_seconds": gradient,
        "trained_tokens": sum(len(_tokens(episode)) for episode in episodes),
    }


def _generate(trainer: StepGRPOTrainer, tokenizer: Any, episodes: Sequence[Trajectory]) -> None:
    """Sample as many tokens as were sampled, turn by turn."""
    model = trainer.model
    model.eval()
    with trainer.accelerator.autocast(), torch.no_grad():
        for turn in range(max(len(episode.transitions) for episode in episodes)):
            steps = [e.transitions[turn] for e in episodes if turn < len(e.transitions)]
            prompts = tokenizer.pad(
                {"input_ids": [step.prompt_ids for step in steps]}, return_tensors="pt"
            ).to(model.device)
            length = max(len(step.completion_ids) for step in steps)
            model.generate(**prompts, do_sample=True, max_new_tokens=length, min_new_tokens=length)
    model.train()


def _differentiate(
    trainer: StepGRPOTrainer, tokenizer: Any, episodes: Sequence[Trajectory]
) -> None:
    """Run each episode's tokens forward and backward, packed under the same budget as ours."""
    model: Any = trainer.model
    budget: Any = trainer.args.max_tokens_per_micro_batch
    batches: list[list[Trajectory]] = []
    for episode in sorted(episodes, key=lambda one: len(_tokens(one)), reverse=True):
        if batches and (len(batches[-1]) + 1) * len(_tokens(batches[-1][0])) <= budget:
            batches[-1].append(episode)
        else:
            batches.append([episode])
    for batch in batches:
        rows = [torch.tensor(_tokens(episode)) for episode in batch]
        tokens = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        is_real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        is_sampled = torch.zeros_like(tokens, dtype=torch.bool)
        for number, episode in enumerate(batch):
            for step in episode.transitions:
                start = len(step.prompt_ids)
                is_sampled[number, start : start + len(step.completion_ids)] = True
        tokens, is_real, is_sampled = (x.to(model.device) for x in (tokens, is_real, is_sampled))
        with trainer.accelerator.autocast():
            states = model.base_model(tokens, attention_mask=is_real).last_hidden_state
            logits = model.get_output_embeddings()(states[:, :-1][is_sampled[:, 1:]])
            loss = cross_entropy(logits.float(), tokens[is_sampled])
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def _tokens(episode: Trajectory) -> list[int]:
    """Return the whole episode: each state of a full context holds what was before it."""
    last = episode.transitions[-1]
    return [*last.prompt_ids, *last.completion_ids]


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
