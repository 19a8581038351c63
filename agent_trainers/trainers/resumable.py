"""`ResumableTrainer`: ``trl.GRPOTrainer`` whose checkpoints hold all that a run goes on from.

transformers saves the model, optimiser, schedule, random states and log; TRL adds nothing. Missing
are the generation buffer and the place in it, the metrics and the loss since the last log line, a
reference model that moves, and the order of tasks in later epochs. With them, a run that was
killed ends bit by bit where it would have ended. Episodes need no state of their own: their seeds
are made of the run's seed and the place in the run.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from safetensors.torch import load_file, save_file
from trl import GRPOTrainer

from agent_envs.data.files import write_text
from agent_envs.errors import CheckpointError, ConfigurationError
from agent_trainers.checkpointing import checkpoints

REFERENCE_FILE: Final = "reference.safetensors"

_log = logging.getLogger(__name__)


class KeepsState(Protocol):
    """Something that a run goes on from."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its state in plain types, the same in every process."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


class ResumableTrainer(GRPOTrainer):  # type: ignore[misc]
    """Writes checkpoints whole or not at all, and goes on from them as if nothing had happened."""

    keeping_state: Mapping[str, KeepsState] = {}
    """What else checkpoints hold, by name."""

    model_card: str | None = None
    """What ``README.md`` beside the model is to say; TRL's words where it is not given."""
    _run: str | None = None
    _staging: Path | None = None
    _push_from: str | None = None
    _goes_on_from: str | None = None
    _seconds_before = 0.0
    _started = 0.0

    def begin_run(self, checkpoint: str | Path | None = None, *, is_kept: bool = True) -> None:
        """Note in the output folder whether a new run begins there or an old one goes on.

        `train` does it if nobody did.

        Args:
            checkpoint: What the run goes on from; None if it is new.
            is_kept: Whether the run leaves anything to go on from.
        """
        folder = Path(self.args.output_dir)
        goes_on = checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve()
        if self.args.should_save and is_kept:
            self._run = checkpoints.begin_run(
                folder, checkpoints.run_of(Path(checkpoint)) if checkpoint and goes_on else None
            )
        else:
            self._run = "elsewhere"  # only the process that saves needs to know

    def last_checkpoint(self) -> str | None:
        """Return the newest checkpoint in the output folder that is whole; None without any.

        Raises:
            CheckpointError: If there are some, but all of them are damaged.
        """
        found: list[Any] = [None]
        if self.accelerator.is_main_process:  # checksums take time: one process works them out
            found = [checkpoints.find_checkpoint(Path(self.args.output_dir))]
        broadcast_object_list(found)
        search: checkpoints.Search = found[0]
        if search.checkpoint is None and search.passed_over:
            raise CheckpointError(
                f"No checkpoint in {self.args.output_dir} can be used: "
                f"{'; '.join(search.passed_over)}. Begin anew without --resume."
            )
        if self.accelerator.is_main_process:
            for damaged in search.passed_over:
                _log.warning("Passed over %s.", damaged)
        return None if search.checkpoint is None else str(search.checkpoint)

    @property
    def training_seconds(self) -> float:
        """Seconds spent in `train`, those before the run was cut off included."""
        return self._seconds_before + (time.perf_counter() - self._started if self._started else 0)

    # What is overridden

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train; from the last checkpoint that is whole if `resume_from_checkpoint` is True.

        Raises:
            CheckpointError: If the checkpoint is missing or damaged, or one cannot be written.
        """
        if resume_from_checkpoint is True:
            self._goes_on_from = self.last_checkpoint()
            if self._goes_on_from is None:
                raise CheckpointError(f"There is no checkpoint in {self.args.output_dir}.")
        else:
            self._goes_on_from = resume_from_checkpoint or None
            if self._goes_on_from is not None:
                checkpoints.check_checkpoint(Path(self._goes_on_from))
        if self._run is None:
            self.begin_run(self._goes_on_from)
        self._started = time.perf_counter()
        try:
            return super().train(self._goes_on_from, **options)
        finally:
            self._seconds_before, self._started = self.training_seconds, 0.0

    def _run_epoch(self, **options: Any) -> None:
        """Find the epoch's place in the order of tasks; train nothing in a run that is over.

        Relies on: called with these options by name, for each epoch that is left. TRL's sampler
        draws each epoch's order from a generator that begins anew in each process, and the loop
        looks at ``max_steps`` only after a step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        epoch = options["epoch"]
        if options["resume_from_checkpoint"] is not None and epoch == options["epochs_trained"]:
            _pass_epochs(options["train_dataloader"], epoch)
        super()._run_epoch(**options)

    def _finalize_training(self, *arguments: Any) -> Any:
        """Restore a run that was over before its first new step. Relies on: it logs the loss."""
        if self._goes_on_from is not None:
            self._load_rng_state(self._goes_on_from)
            self.model.train()  # whose metrics are logged depends on it
        return super()._finalize_training(*arguments)

    def _get_output_dir(self, trial: Any) -> str:
        """Send a checkpoint that is being written to where nobody takes it for complete.

        Relies on: a checkpoint's folder, and where old ones are deleted, is made of this.
        """
        return str(super()._get_output_dir(trial) if self._staging is None else self._staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint, check that it is there, and only then delete an old one.

        Relies on: called on every process; ``save_total_limit`` and ``push_to_hub`` act inside.

        Raises:
            CheckpointError: If it cannot be written; the last one stays.
        """
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        with self._stage(folder, f"The checkpoint of step {self.state.global_step}") as staging:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            best = self.state.best_model_checkpoint
            if best is not None and Path(best) == staging / name:
                self.state.best_model_checkpoint = str(folder / name)
            if self.args.should_save:
                self._complete_checkpoint(staging / name, folder / name)
        self.accelerator.wait_for_everyone()
        if self._push_from is not None:
            super()._push_from_checkpoint(str(folder / name))
            self._push_from = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint when it is in its place. Relies on: called while it is written."""
        self._push_from = checkpoint_folder

    def _save_rng_state(self, output_dir: str) -> None:
        """Save what else this process needs to go on. Relies on: called on every process."""
        super()._save_rng_state(output_dir)
        torch.save(self._own_state(), self._state_file(output_dir))
        if self.args.sync_ref_model and self.args.should_save:
            reference = self.accelerator.unwrap_model(self.ref_model).state_dict()
            weights = {name: tensor.clone().contiguous() for name, tensor in reference.items()}
            save_file(weights, Path(output_dir) / REFERENCE_FILE)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load it again. Relies on: called on every process before the first step that is new."""
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        self._goes_on_from = None
        path = self._state_file(checkpoint)
        if not path.exists():
            path = self._state_file(checkpoint, process=0)
        if path.exists():  # otherwise another trainer wrote the checkpoint
            self._restore(torch.load(path, map_location="cpu"), path)
        if self.args.sync_ref_model and (reference := Path(checkpoint) / REFERENCE_FILE).exists():
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(load_file(reference))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Do not warn of weights that are missing because another holds them, as tied ones are.

        Relies on: told what loading a model's weights came to.
        """
        model = self.accelerator.unwrap_model(self.model)
        tied = getattr(model, "all_tied_weights_keys", None) or ()
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Write our card. Relies on: called with each checkpoint and before each upload."""
        if self.model_card is None:
            super().create_model_card(*arguments, **options)
        elif self.args.should_save:
            write_text(Path(self.args.output_dir) / "README.md", self.model_card)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a reader finds each file whole, and weights only when all is there.

        Raises:
            CheckpointError: If it cannot be written.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir or self.args.output_dir)
        with self._stage(folder, "The model") as staging:
            super().save_model(str(staging / "model"), _internal_call=True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save and (staging / "model").is_dir():
                checkpoints.publish_files(staging / "model", folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Count the time before the run was cut off in the summary. Relies on: it has the names."""
        if self._seconds_before and (seconds := logs.get("train_runtime")):
            logs["train_runtime"] = round(self.training_seconds, 4)
            for name in ("train_samples_per_second", "train_steps_per_second"):
                logs[name] = round(logs[name] * seconds / self.training_seconds, 3)
        super().log(logs, start_time)

    # How it is done

    @contextlib.contextmanager
    def _stage(self, folder: Path, what: str) -> Iterator[Path]:
        """Lend a folder to write into; put a failure to write into words and clear up after it."""
        staging = folder / checkpoints.UNFINISHED
        self._staging = staging
        try:
            yield staging
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
        except Exception as error:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
            if checkpoints.is_storage_failure(error):
                raise checkpoints.storage_error(error, what, folder) from error
            raise
        finally:
            self._staging = None

    def _complete_checkpoint(self, finished: Path, target: Path) -> None:
        if self.state.best_model_checkpoint == str(target):
            self.state.save_to_json(str(finished / "trainer_state.json"))
        checkpoints.describe_checkpoint(
            finished,
            run=self._run,
            step=self.state.global_step,
            num_processes=self.accelerator.num_processes,
        )
        checkpoints.publish_folder(finished, target)
        checkpoints.drop_old_checkpoints(
            target.parent,
            limit=self.args.save_total_limit,
            run=self._run or "",
            step=self.state.global_step,
            keep=[self.state.best_model_checkpoint],
        )

    def _state_file(self, folder: str, process: int | None = None) -> Path:
        process = self.accelerator.process_index if process is None else process
        return Path(folder) / f"run_state_{process}.pt"

    def _layout(self) -> dict[str, int]:
        """Return what the place in the generation buffer depends on."""
        return {
            "num_processes": self.accelerator.num_processes,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "steps_per_generation": self.args.steps_per_generation,
            "num_iterations": self.num_iterations,
        }

    def _own_state(self) -> dict[str, Any]:
        """Return what is saved, in plain types, which load without running foreign code."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        is_used_up = self._step % generate_every == 0
        return {
            "layout": self._layout(),
            "step": self._step,
            "buffer": None if is_used_up else _plain(self._buffered_inputs),
            "metrics": _plain(self._metrics),
            "logs": _plain(self._logs),
            "loss": self._tr_loss.detach().cpu(),
            "total_loss": float(self._total_loss_scalar),
            "last_logged": self._globalstep_last_logged,
            "initial_step": self._initial_global_step,
            "seconds": self.training_seconds,
            "kept": {name: part.state_dict() for name, part in self.keeping_state.items()},
        }

    def _restore(self, state: Mapping[str, Any], path: Path) -> None:
        if state["layout"] == self._layout():
            self._step = state["step"]
            self._buffered_inputs = send_to_device(state["buffer"], self.accelerator.device)
        elif state["buffer"] is None:  # the next step generates: any layout will do
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            self._buffered_inputs = None
        else:
            changed = [
                f"{name}={now} instead of {state['layout'][name]}"
                for name, now in self._layout().items()
                if state["layout"].get(name) != now
            ]
            raise ConfigurationError(
                f"{path}: the checkpoint lies in the midst of a generation batch, which cannot be "
                f"shared out anew ({', '.join(changed)}). Resume with the settings it was written "
                "with."
            )
        _refill(self._metrics, state["metrics"])
        _refill(self._logs, state["logs"])
        self._tr_loss: torch.Tensor = state["loss"].to(self._tr_loss.device)
        self._total_loss_scalar = state["total_loss"]
        self._globalstep_last_logged = state["last_logged"]
        self._initial_global_step = state["initial_step"]
        self._seconds_before = state["seconds"]
        for name, kept in state.get("kept", {}).items():
            if name in self.keeping_state:
                self.keeping_state[name].load_state_dict(kept)


def _pass_epochs(dataloader: Any, num_epochs: int) -> None:
    """Draw the orders of earlier epochs, so that the next is the one it would have been."""
    sampler: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # Accelerate's share of one process
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", None)
    if getattr(sampler, "shuffle", False):
        for _ in range(num_epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _plain(value: Any) -> Any:
    """Return containers as dicts, lists and tuples, and numbers of libraries as Python's own."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, torch.Tensor):
        return value.item()
    return value


def _refill(target: Any, values: Any) -> None:
    """Fill containers that exist, and keep their kind: queues with a limit, for instance."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _refill(target[key], value)
        elif isinstance(target[key], MutableSequence):
            target[key].clear()
            target[key].extend(value)
        else:
            target[key] = value
