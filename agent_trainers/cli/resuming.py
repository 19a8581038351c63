"""What ``agent-r1-train`` does and says where a run begins, goes on, or is stopped."""

import os
import sys
from pathlib import Path
from typing import Any

from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.checkpointing.interruption import STOP_FILE


def say(text: str) -> None:
    """Tell the user something in a line of its own, beside the progress bar."""
    sys.stderr.write(f"\nagent-r1-train: {text}\n")
    sys.stderr.flush()


def check_output_folder(output_dir: str, *, must_exist: bool) -> None:
    """Refuse an output folder that will not do, before any work.

    Raises:
        ConfigurationError: If there is nothing to go on from, or nothing can be written.
    """
    if must_exist and not Path(output_dir).is_dir():
        raise ConfigurationError(
            f"--resume: there is no folder {output_dir}, so no run to go on with. Check "
            "--output_dir, or leave --resume out to begin anew."
        )
    check_writable(Path(output_dir))


def begin_run(trainer: Any, *, resume: bool) -> str | None:
    """Return the checkpoint to go on from, or None to begin anew, and say which it is."""
    given: str | None = trainer.args.resume_from_checkpoint
    checkpoint = trainer.last_checkpoint() if resume else given
    trainer.begin_run(checkpoint)
    if trainer.accelerator.is_main_process:
        if checkpoint is not None:
            say(f"Going on from {checkpoint}.")
        elif resume:
            say(f"There is no checkpoint of this run in {trainer.args.output_dir} yet: beginning.")
    return checkpoint


def stopped_early(trainer: Any, signal_number: int) -> int:
    """Say how to go on with a run that was asked to stop; return the exit code."""
    if trainer.accelerator.is_main_process:
        step, folder = trainer.state.global_step, Path(trainer.args.output_dir)
        say(
            f"Stopped after step {step} of {trainer.state.max_steps}, which is saved in "
            f"{folder / f'checkpoint-{step}'}. The same command with --resume goes on from there."
        )
    # To torchrun any other code is a failure, with a report; the supervisor knows the right one.
    return 0 if STOP_FILE in os.environ else 128 + signal_number
