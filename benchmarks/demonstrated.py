"""Policies that were shown something before they learn by reward."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trl import SFTTrainer

from agent_trainers import TINY_POLICY
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference
from agent_trainers.rollout.episode import TextEnv
from agent_trainers.trainers.supervised import WarmStartConfig, supervised_dataset
from agent_trainers.trajectory import Trajectory
from benchmarks.performance.models import load_tokenizer


def references(make_env: Callable[[], TextEnv], first_task: int, count: int) -> list[Trajectory]:
    """Return how `count` tasks are solved."""
    renderer = ChatRenderer(load_tokenizer())
    return list(play_reference(make_env, renderer, range(first_task, first_task + count)))


def show(trajectories: Sequence[Trajectory], folder: Path) -> None:
    """Train the embedded policy on `trajectories`; save it, whole, unless it is there."""
    if folder.exists():
        return
    dataset, _ = supervised_dataset(list(trajectories), None)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    config = WarmStartConfig(
        str(unfinished), per_device_train_batch_size=16, learning_rate=2e-3, num_train_epochs=1,
        warmup_steps=5, use_cpu=True, bf16=False, save_strategy="no", report_to="none",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        str(TINY_POLICY), args=config, train_dataset=dataset, processing_class=load_tokenizer()
    )
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    trainer.save_model()
    unfinished.rename(folder)
