"""The output folder of a run: lock, refusal to overwrite, and settings that a resumed run keeps."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from agent_envs.core.command_line import json_object
from agent_envs.data.files import write_json
from agent_envs.errors import CheckpointError, ConfigurationError
from agent_trainers.checkpointing.checkpoints import (
    UNFINISHED,
    WEIGHTS,
    check_writable,
    digest,
)
from agent_trainers.recipes import RUN_SETTINGS

RESULTS_FILE: Final = "results.json"
EVALUATION_FILE: Final = "evaluation_before.json"
_WEIGHT_FILES: Final = tuple(
    f"{name}*.{kind}" for name in WEIGHTS for kind in ("safetensors", "bin")
)
_FILES_OF_A_RUN: Final = (
    RESULTS_FILE, RUN_SETTINGS, EVALUATION_FILE, UNFINISHED, "README.md",
    "checkpoint-*", "trajectories", "trajectories.*", "metrics.jsonl", "learning_curve.png",
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "training_args.bin",
    "critic.safetensors", "adapter_*", *(f"{name}*.safetensors*" for name in WEIGHTS),
)  # fmt: skip
_MAY_CHANGE: Final = frozenset(
    """
    output_dir logging_steps logging_strategy logging_first_step report_to run_name
    save_steps save_strategy save_total_limit save_on_each_node disable_tqdm log_level
    log_level_replica log_on_each_node log_completions num_completions_to_print
    resume_from_checkpoint push_to_hub hub_model_id hub_strategy hub_token hub_private_repo
    hub_always_push hub_revision dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor max_tokens_per_micro_batch
    per_device_eval_batch_size eval_steps eval_strategy eval_delay step_timeout episode_timeout
    max_fault_share max_logprob_drift ddp_timeout skip_memory_metrics vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization include_num_input_tokens_seen local_rank project trackio_space_id
    sample_steps dry_run num_processes accelerate_config resume overwrite merge_adapter
    base_url api_key_env max_concurrency request_timeout batch_size
    program_concurrency program_env
    """.split()
)
"""Settings that do not change what is trained."""
_DATA_OPTIONS: Final = ("trajectories", "conversations", "tasks", "eval_tasks")
_MODEL_OPTIONS: Final = ("model", "critic_model")
_FILE_OPTIONS: Final = (*_DATA_OPTIONS, *_MODEL_OPTIONS)
_LENGTH: Final = ("max_steps", "num_train_epochs")


@contextlib.contextmanager
def open_run(
    folder: Path,
    settings: Mapping[str, Any],
    notify: Callable[[str], None],
    *,
    resume: bool,
    overwrite: bool,
    checkpoint: str | None,
) -> Iterator[Callable[[], None]]:
    """Lock the output folder of a run that starts or resumes there.

    Yields a function to call when everything has been loaded: only then are the files of an
    overwritten run deleted, and the settings saved.

    Args:
        folder: The output folder.
        settings: Return value of `settings_of`.
        notify: Prints a line.
        resume: Whether to resume from the newest checkpoint.
        overwrite: Whether to delete the run in the folder.
        checkpoint: A checkpoint to resume from.

    Raises:
        ConfigurationError: If the options contradict each other, another process uses the folder, a
            finished run would be lost, or a resumed run has other settings.
    """
    check_use(folder, resume=resume, overwrite=overwrite, checkpoint=checkpoint)
    with lock_folder(folder):
        # again: a run may have ended in between
        is_resumed = check_use(folder, resume=resume, overwrite=overwrite, checkpoint=checkpoint)
        if is_resumed:
            for change in check_same_settings(folder, settings):
                notify(f"Resuming with changed {change}.")

        def begin() -> None:
            if overwrite and not is_resumed:
                clear(folder, settings)
            write_settings(folder, settings)

        yield begin


@contextlib.contextmanager
def lock_folder(folder: Path, option: str = "--output_dir") -> Iterator[None]:
    """Hold the lock of `folder`; errors name `option`.

    Raises:
        ConfigurationError: If another process holds it, or the folder is not writable.
    """
    check_writable(folder, option)
    try:
        with FileLock(folder / ".lock").acquire(timeout=0):  # the file stays, see filelock's docs
            yield
    except Timeout:
        raise ConfigurationError(
            f"{option} {folder}: another run is writing there. Wait for it, stop it, or choose "
            "another folder."
        ) from None


def check_use(
    folder: Path, *, resume: bool, overwrite: bool, checkpoint: str | None = None
) -> bool:
    """Return whether a run resumes in `folder`; see `open_run` for arguments and errors."""
    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite: give one of the two.")
    if resume and not folder.is_dir():
        raise ConfigurationError(
            f"--resume: there is no folder {folder}, so no run to resume. Check --output_dir, or "
            "start a new run without --resume."
        )
    if checkpoint and not Path(checkpoint).is_dir():
        raise ConfigurationError(f"--resume_from_checkpoint {checkpoint}: there is no such folder.")
    if resume or (checkpoint and Path(checkpoint).resolve().parent == folder.resolve()):
        return True
    _check_ours(folder)
    found = None
    if any(folder.glob("checkpoint-*")):
        found = "a run that was stopped, with checkpoints"
    if any(True for name in (RESULTS_FILE, *_WEIGHT_FILES) for _ in folder.glob(name)):
        found = "a finished run"
    if found and not overwrite:
        raise ConfigurationError(
            f"--output_dir {folder} contains {found}. Resume it with --resume, delete it with "
            "--overwrite, or choose another folder."
        )
    return False


def clear(folder: Path, settings: Mapping[str, Any]) -> None:
    """Delete the files of a run, unless the new run's `settings` name one of them as input.

    Raises:
        ConfigurationError: If files are not ours, or an input is missing or would be deleted.
    """
    _check_ours(folder)
    lost = {path.resolve() for path in _files_of_a_run(folder)}
    for name, value in _inputs(settings).items():
        if not os.path.exists(value):  # noqa: PTH110 - no error if too long
            if name in _DATA_OPTIONS:
                raise ConfigurationError(f"--{name} {value}: there is no such file.")
            continue
        path = Path(value).resolve()
        is_here = name in _MODEL_OPTIONS and path == folder.resolve()
        if is_here or not lost.isdisjoint((path, *path.parents)):
            raise ConfigurationError(
                f"--overwrite would delete {value}, which the new run needs ({name}). Choose "
                "another --output_dir."
            )
    for path in _files_of_a_run(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def settings_of(environment: Mapping[str, Any], *options: Any) -> dict[str, Any]:
    """Return all settings that decide what is trained, with the digests of their files, as JSON.

    Args:
        environment: ``env`` and its arguments, or a program and its tasks.
        options: Dataclasses with the other settings.
    """
    fields = {
        field.name: getattr(part, field.name)
        for part in options
        for field in dataclasses.fields(part)
        if field.init and field.name not in _MAY_CHANGE
    }
    # a list of one environment has the settings of that environment
    fields = {k: v for k, v in fields.items() if k not in ("env", "eval_envs")}
    chosen = fields | dict(environment)
    data = {
        name: digest(Path(value))
        for name, value in _inputs(chosen).items()
        if os.path.isfile(value)  # noqa: PTH113 - no error if too long
    }
    return dict(json.loads(json.dumps({**chosen, "data": data}, default=str)))


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Save the settings of a run."""
    write_json(folder / RUN_SETTINGS, settings)


def check_same_settings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the changes in the length of a resumed run, which are allowed.

    Raises:
        CheckpointError: If the saved settings cannot be read.
        ConfigurationError: If other settings changed; names each.
    """
    changes = _changes(folder, settings)
    lengths = [changes.pop(name) for name in _LENGTH if name in changes]
    if changes:
        raise ConfigurationError(
            f"--resume: the run in {folder} began with other settings ("
            f"{'; '.join(changes.values())}). Use the same settings, or start another run from its "
            "checkpoint with --resume_from_checkpoint and another --output_dir."
        )
    return lengths


def check_unchanged(folder: Path, settings: Mapping[str, Any], option: str) -> None:
    """Raise `ConfigurationError` if a command was started in `folder` with other settings."""
    if changes := _changes(folder, settings):
        raise ConfigurationError(
            f"{folder} was started with other settings ({'; '.join(changes.values())}). Use the "
            f"same settings, choose another {option}, or delete that folder."
        )


def _changes(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the changed settings as ``name: old -> new``, by name."""
    path = folder / RUN_SETTINGS
    if not path.exists():  # stopped before it began
        return {}
    try:
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}). The run's settings are needed to resume it; choose "
            "another folder."
        ) from None
    return {
        name: f"{name}: {json.dumps(saved[name])} -> {json.dumps(settings[name])}"
        for name in saved
        if name in settings and saved[name] != settings[name]
    }


def _check_ours(folder: Path) -> None:
    """Raise if the folder contains files that a run would replace but no run wrote."""
    if (folder / RUN_SETTINGS).exists():
        return
    if (found := next(_files_of_a_run(folder), None)) is not None:
        raise ConfigurationError(
            f"--output_dir {folder} contains {found.name}, which no run of this command wrote and "
            "which would be replaced. Choose another folder."
        )


def _files_of_a_run(folder: Path) -> Iterator[Path]:
    for pattern in _FILES_OF_A_RUN:
        yield from folder.glob(pattern)


def _inputs(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that may be input files or folders."""
    arguments = {name: settings.get(name) for name in ("env_kwargs", "eval_env_kwargs")}
    for option in ("envs", "eval_envs"):
        for member in settings.get(option) or ():
            for kwargs in ("kwargs", "eval_kwargs"):
                arguments[f"{option} {member['name']} {kwargs}"] = member.get(kwargs)
    extensions = settings.get("extensions")
    if isinstance(extensions, str) and extensions.lstrip().startswith("{"):
        arguments |= json_object(extensions, "--extensions")
    named = {
        f"{name} of {option}": value
        for option, given in arguments.items()
        if isinstance(given, Mapping)
        for name, value in given.items()
    } | {name: settings.get(name) for name in _FILE_OPTIONS}
    return {name: value for name, value in named.items() if isinstance(value, str)}
