"""`AtomicCheckpoints`, and `ResumableTrainer`: ``trl.GRPOTrainer`` that resumes bitwise.

transformers saves the model, optimiser, schedule, random states and log. Added here are the
generation buffer and the position in it, metrics and loss since the last log line, a moving
reference model, and the order of tasks in later epochs. Episodes have no state: their seeds follow
from the run's seed and the step.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from safetensors.torch import load_file, save_file
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer

from agent_envs.errors import CheckpointError, ConfigurationError
from agent_trainers.checkpointing import checkpoints

REFERENCE_FILE: Final = "reference.safetensors"

_log = logging.getLogger(__name__)


class AtomicCheckpoints(Trainer):  # type: ignore[misc]
    """Writes checkpoints completely or not at all."""

    _staging: Path | None = None
    _resume_path: str | None = None

    def last_checkpoint(self) -> str | None:
        """Return the newest undamaged checkpoint in the output folder, if any; collective."""
        found: list[Any] = [None]
        if self.accelerator.is_main_process:  # checksums take time
            found = [checkpoints.find_checkpoint(Path(self.args.output_dir))]
        broadcast_object_list(found)
        checkpoint, damaged = found[0]
        if checkpoint is None and damaged:
            raise CheckpointError(
                f"No checkpoint in {self.args.output_dir} can be used: {'; '.join(damaged)}. Start "
                "a new run without --resume."
            )
        for reason in damaged if self.accelerator.is_main_process else ():
            _log.warning("Skipped %s.", reason)
        return None if checkpoint is None else str(checkpoint)

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train; with `resume_from_checkpoint` True, from the newest undamaged checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_checkpoint()
            if resume_from_checkpoint is None:
                raise CheckpointError(f"There is no checkpoint in {self.args.output_dir}.")
        elif resume_from_checkpoint and (
            damage := checkpoints.find_damage(Path(resume_from_checkpoint))
        ):
            raise CheckpointError(
                f"Checkpoint {resume_from_checkpoint} cannot be used: {damage}. Resume from an "
                "older one, or use --resume, which takes the newest undamaged one."
            )
        self._resume_path = resume_from_checkpoint or None
        return super().train(self._resume_path, **options)

    def _get_output_dir(self, trial: Any) -> str:
        """Redirect a checkpoint being written. Relies on: saving and rotation use this folder."""
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint, put it in its place, and only then delete an old one.

        Relies on: called on every process; rotation and upload act inside.
        """
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        with self._stage(folder, f"The checkpoint of step {self.state.global_step}") as staging:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.publish_folder(staging / name, folder / name)
                best = self._best_checkpoint(folder)
                # by time: a damaged one of a later step goes first
                rotate_checkpoints(str(folder), self.args.save_total_limit, best, use_mtime=True)
        self.accelerator.wait_for_everyone()
        self.state.best_model_checkpoint = self._best_checkpoint(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder / name))

    def _best_checkpoint(self, folder: Path) -> str | None:
        path = folder / f"checkpoint-{self.state.best_global_step}"
        return str(path) if path.is_dir() else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Postpone the upload until the checkpoint is in place. Relies on: called in saving."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that a reader finds complete files only, the weights last."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir or self.args.output_dir)
        with self._stage(folder, "The model") as staging:
            super().save_model(str(staging / "model"), _internal_call=True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.publish_files(staging / "model", folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @contextlib.contextmanager
    def _stage(self, folder: Path, what: str) -> Iterator[Path]:
        staging = folder / checkpoints.UNFINISHED
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)  # of a killed run
        self.accelerator.wait_for_everyone()
        self._staging = staging
        try:
            yield staging
        except Exception as error:  # libraries raise many kinds where a disk is full
            raise CheckpointError(
                f"{what} could not be written to {folder} ({error}). What was saved before is "
                "untouched. Free space or change permissions there, then resume the run."
            ) from error
        finally:
            self._staging = None
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)


class ResumableTrainer(AtomicCheckpoints, GRPOTrainer):  # type: ignore[misc]
    """Writes atomic checkpoints, and resumes bitwise from them."""

    keeping_state: Mapping[str, Any] = {}
    """Objects whose `state_dict`, in plain types and the same in every process, is kept, too."""
    _seconds_before = 0.0
    seconds_before_resume = 0.0
    """Seconds of training of the checkpoint that the run resumed from."""
    started = 0.0
    _batch_made_at = 0
    """Optimiser steps before the current generation batch was made."""

    @property
    def training_seconds(self) -> float:
        """Seconds spent in `train`, including those before the run was resumed."""
        return self._seconds_before + (time.perf_counter() - self.started if self.started else 0)

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as `AtomicCheckpoints.train`, and measure the time."""
        self.started = time.perf_counter()
        try:
            return super().train(resume_from_checkpoint, **options)
        finally:
            self._seconds_before, self.started = self.training_seconds, 0.0

    def _run_epoch(self, **options: Any) -> None:
        """Restore the order of tasks of a resumed epoch; skip a run that is over.

        Relies on: called with these names for each remaining epoch; TRL's sampler draws the order
        of each epoch from one generator; ``max_steps`` is checked only after a step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        epoch = options["epoch"]
        if options["resume_from_checkpoint"] is not None and epoch == options["epochs_trained"]:
            _skip_epochs(options["train_dataloader"], epoch)
        super()._run_epoch(**options)

    def _finalize_training(self, *arguments: Any) -> Any:
        """Restore a run that was over before a new step. Relies on: the loss is logged here."""
        if self._resume_path is not None:
            self._load_rng_state(self._resume_path)
            self.model.train()  # decides which metrics are logged
        return super()._finalize_training(*arguments)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the state of this process. Relies on: called on every process."""
        super()._save_rng_state(output_dir)
        torch.save(self._run_state(), self._state_file(output_dir))
        if self.args.sync_ref_model and self.args.should_save:
            reference = self.accelerator.unwrap_model(self.ref_model).state_dict()
            weights = {name: tensor.clone().contiguous() for name, tensor in reference.items()}
            save_file(weights, Path(output_dir) / REFERENCE_FILE)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore it. Relies on: called on every process before the first new step."""
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        self._resume_path = None
        path = self._state_file(checkpoint)
        if not path.exists():  # saved by fewer processes
            path = path.with_name("run_state_0.pt")
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing: a checkpoint that was saved with save_only_model cannot be "
                "resumed. Start a new run with its model."
            )
        try:
            self._restore(torch.load(path, map_location="cpu"), path)
        except KeyError as error:
            raise CheckpointError(f"{path} is of another version: it lacks {error}.") from error
        if self.args.sync_ref_model and (reference := Path(checkpoint) / REFERENCE_FILE).exists():
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(load_file(reference))

    def _state_file(self, folder: str) -> Path:
        return Path(folder) / f"run_state_{self.accelerator.process_index}.pt"

    def _layout(self) -> dict[str, int]:
        """Return the settings that the position in the generation buffer depends on."""
        names = (
            "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
            "num_iterations",
        )  # fmt: skip
        num_processes = self.accelerator.num_processes
        return {"num_processes": num_processes} | {n: getattr(self.args, n) for n in names}

    def _run_state(self) -> dict[str, Any]:
        """Return the saved state in plain types, which load without executing code."""
        is_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            "layout": self._layout(),
            "step": self._step,
            "batch_made_at": self._batch_made_at,
            "buffer": None if is_used_up else _plain(self._buffered_inputs),
            "metrics": _plain(self._metrics),
            "loss": self._tr_loss.detach().cpu(),
            "total_loss": float(self._total_loss_scalar),
            "last_logged": self._globalstep_last_logged,
            "initial_step": self._initial_global_step,
            "seconds": self.training_seconds,
            "kept": {name: part.state_dict() for name, part in self.keeping_state.items()},
        }

    def _restore(self, state: Mapping[str, Any], path: Path) -> None:
        self._batch_made_at = state["batch_made_at"]
        if state["layout"] == self._layout():
            self._step = state["step"]
            self._buffered_inputs = send_to_device(state["buffer"], self.accelerator.device)
        elif state["buffer"] is None:  # the next step generates, so any layout will do
            micro_steps = self.state.global_step * self.args.gradient_accumulation_steps
            every = self.args.generate_every
            self._step = -(-micro_steps // every) * every
            self._buffered_inputs = None
        else:
            raise ConfigurationError(
                f"{path}: the checkpoint is in the middle of a generation batch, which cannot be "
                f"divided differently: it was saved with {state['layout']}. Resume with those."
            )
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].clear()
            self._metrics[mode].update(metrics)
        self._tr_loss: torch.Tensor = state["loss"].to(self._tr_loss.device)
        self._total_loss_scalar = state["total_loss"]
        self._globalstep_last_logged = state["last_logged"]
        self._initial_global_step = state["initial_step"]
        self._seconds_before = self.seconds_before_resume = state["seconds"]
        for name, kept in state["kept"].items():
            if name in self.keeping_state:
                self.keeping_state[name].load_state_dict(kept)


def _skip_epochs(dataloader: Any, num_epochs: int) -> None:
    """Draw the orders of earlier epochs, so that the generator is where it was."""
    sampler: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # Accelerate's shard of one process
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", None)
    if getattr(sampler, "shuffle", False):
        for _ in range(num_epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _plain(value: Any) -> Any:
    """Return containers as dicts, lists and tuples, and numbers of libraries as Python's own."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, torch.Tensor):
        return value.item()
    return value
