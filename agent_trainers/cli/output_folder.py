"""The folder of a run: whose it is, what lies there, and who writes to it now.

What a run leaves is never touched by another one unless it is told to: a folder in which a run has
ended or saved a checkpoint is refused without ``--resume`` or ``--overwrite``.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from agent_envs.data.files import write_json
from agent_envs.errors import CheckpointError, ConfigurationError
from agent_trainers.checkpointing.checkpoints import (
    RUN_FILE,
    UNFINISHED,
    WEIGHTS,
    check_writable,
    digest,
)
from agent_trainers.recipes import RUN_SETTINGS

RESULTS_FILE: Final = "results.json"
EVALUATION_FILE: Final = "evaluation_before.json"
_LOCK_FILE: Final = ".lock"
_OF_A_RUN: Final = (
    RESULTS_FILE, RUN_SETTINGS, EVALUATION_FILE, RUN_FILE, UNFINISHED, "README.md",
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
"""Settings on which what is trained does not depend."""
_ONLY_FILES: Final = ("trajectories", "conversations", "tasks", "eval_tasks")
_MODELS: Final = ("model", "critic_model")
_FILES: Final = (*_ONLY_FILES, *_MODELS, "skills")
"""Options that may name a file, on whose contents depends what is trained."""
_LENGTH: Final = ("max_steps", "num_train_epochs")


@contextlib.contextmanager
def hold_for_run(
    folder: Path,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    resume: bool,
    overwrite: bool,
    checkpoint: str | None,
) -> Iterator[Callable[[], None]]:
    """Keep other runs out of `folder` while the block runs, which one run begins or goes on.

    Yields what the run calls when all it needs has been loaded: only then is what `overwrite` gives
    up deleted, and are the settings kept.

    Args:
        folder: The output folder.
        settings: Those of the run, see `settings_of`.
        say: Is told in what a run goes on otherwise than it began.
        resume: See `check_use`.
        overwrite: See `check_use`.
        checkpoint: See `check_use`.

    Raises:
        ConfigurationError: If another run is on there, or would be lost, or goes on with other
            settings.
    """
    check = functools.partial(
        check_use, folder, resume=resume, overwrite=overwrite, checkpoint=checkpoint
    )
    check()
    with hold(folder):
        goes_on = check()  # a run may have ended there before we held it
        if goes_on:
            for difference in check_same_settings(folder, settings):
                say(f"Going on with {difference}.")

        def begin() -> None:
            if overwrite and not goes_on:
                clear(folder, settings)
            write_settings(folder, settings)

        yield begin


@contextlib.contextmanager
def hold(folder: Path, option: str = "--output_dir") -> Iterator[None]:
    """Keep other runs out of `folder`, which `option` named, while the block runs.

    Raises:
        ConfigurationError: If a run is on there, or nothing can be written.
    """
    check_writable(folder, option)
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigurationError(
            f"{option} {folder}: another run writes there now. Wait for it, stop it, or choose "
            "another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()  # the file stays: who waits for it could hold what another one deletes


def check_use(
    folder: Path, *, resume: bool, overwrite: bool, checkpoint: str | None = None
) -> bool:
    """Refuse what a command is not to do with a folder; return whether a run goes on there.

    Args:
        folder: The output folder.
        resume: Whether to go on from the last checkpoint in it.
        overwrite: Whether to delete what a run left there.
        checkpoint: What to go on from, if that was named.

    Raises:
        ConfigurationError: If there is nothing to go on from, or something would be lost.
    """
    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite: give one of the two.")
    if resume and not folder.is_dir():
        raise ConfigurationError(
            f"--resume: there is no folder {folder}, so no run to go on with. Check --output_dir, "
            "or leave --resume out to begin anew."
        )
    if checkpoint and not Path(checkpoint).is_dir():
        raise ConfigurationError(f"--resume_from_checkpoint {checkpoint}: there is no such folder.")
    if resume or (checkpoint and Path(checkpoint).resolve().parent == folder.resolve()):
        return True
    if overwrite:
        _check_ours(folder)
    else:
        check_unused(folder)
    return False


def check_unused(folder: Path) -> None:
    """Refuse a folder in which something would be lost, before any work.

    Raises:
        ConfigurationError: If a run ended or saved a checkpoint there, or files of others lie
            there that a run would replace.
    """
    _check_ours(folder)
    found = None
    if any(folder.glob("checkpoint-*")):
        found = "a run that was stopped, with checkpoints"
    if (folder / RESULTS_FILE).exists() or any(_weights(folder)):
        found = "a finished run"
    if found is not None:
        raise ConfigurationError(
            f"--output_dir {folder} holds {found}. --resume goes on with it, --overwrite deletes "
            "it and begins anew; or choose another folder."
        )


def clear(folder: Path, settings: Mapping[str, Any]) -> None:
    """Delete what a run left in `folder`; other files stay.

    Args:
        folder: The output folder.
        settings: Those of the run that is to begin there, see `settings_of`.

    Raises:
        ConfigurationError: If no run of ours was there, but files that a run would replace; or what
            the settings name is not there, or would be deleted.
    """
    _check_ours(folder)
    lost = {path.resolve() for path in _of_a_run(folder)}
    for name, value in _inputs(settings).items():
        if not os.path.exists(value):  # noqa: PTH110 - no error if too long
            if name in _ONLY_FILES:
                raise ConfigurationError(f"--{name} {value}: there is no such file.")
            continue
        path = Path(value).resolve()
        is_here = name in _MODELS and path == folder.resolve()
        if is_here or not lost.isdisjoint((path, *path.parents)):
            raise ConfigurationError(
                f"--overwrite would delete {value}, from which the run is to begin ({name}). "
                "Choose another --output_dir."
            )
    for path in _of_a_run(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_ours(folder: Path) -> None:
    """Refuse a folder with files that a run would replace or delete, and no run wrote."""
    if any((folder / name).exists() for name in (RUN_FILE, RUN_SETTINGS)):
        return
    if (found := next(_of_a_run(folder), None)) is not None:
        raise ConfigurationError(
            f"--output_dir {folder} holds {found.name}, which no run of this command wrote there, "
            "and which would be replaced. Choose another folder."
        )


def _of_a_run(folder: Path) -> Iterator[Path]:
    for pattern in _OF_A_RUN:
        yield from folder.glob(pattern)


def settings_of(environment: Mapping[str, Any], *settings: Any) -> dict[str, Any]:
    """Return all that decides what a run trains, as JSON has it.

    Args:
        environment: ``env``, ``env_kwargs`` and perhaps ``eval_env_kwargs``, or ``envs``, and
            ``eval_envs``; or ``program``, ``tasks`` and ``eval_tasks``. Of a file that is named
            anywhere the digest is kept, too.
        settings: Dataclasses: the launcher's options, and the trainer's.
    """
    fields = {
        field.name: getattr(part, field.name)
        for part in settings
        for field in dataclasses.fields(part)
        if field.init and field.name not in _MAY_CHANGE
    }
    listed = ("envs", "eval_envs")  # as `environment` has them: a list of one is that one
    chosen = {k: v for k, v in fields.items() if k not in listed} | dict(environment)
    data = {
        name: digest(Path(value))
        for name, value in _inputs(chosen).items()
        if os.path.isfile(value)  # noqa: PTH113 - no error if too long
    }
    return dict(json.loads(json.dumps({**chosen, "data": data}, default=str)))


def _inputs(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what may be files or folders that a run reads, by the name of the setting."""
    arguments = {name: settings.get(name) for name in ("env_kwargs", "eval_env_kwargs")}
    for option in ("envs", "eval_envs"):
        for member in settings.get(option) or ():
            for kwargs in ("kwargs", "eval_kwargs"):
                arguments[f"{option} {member['name']} {kwargs}"] = member.get(kwargs)
    named = {
        f"{name} of {option}": value
        for option, given in arguments.items()
        if isinstance(given, Mapping)
        for name, value in given.items()
    } | {name: settings.get(name) for name in _FILES}
    return {name: value for name, value in named.items() if isinstance(value, str)}


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Keep the settings of a run that begins."""
    write_json(folder / RUN_SETTINGS, settings)


def differences(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return in what the settings that were kept in `folder` differ: by name, as ``a: 1 -> 2``.

    Empty where none were kept: the run was stopped before it began, or an earlier version began it.

    Raises:
        CheckpointError: If what was kept cannot be read.
    """
    path = folder / RUN_SETTINGS
    if not path.exists():
        return {}
    try:
        kept = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). It holds the settings of the run that was begun "
            "there; without them choose another folder."
        ) from None
    return {
        name: f"{name}: {json.dumps(kept[name])} -> {json.dumps(settings[name])}"
        for name in kept
        if name in settings and kept[name] != settings[name]
    }


def check_same_settings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with a run by other settings than it began with.

    Returns:
        What differs in how long the run is, which may, as sentences.

    Raises:
        CheckpointError: If what was kept cannot be read.
        ConfigurationError: If settings differ; names each.
    """
    differing = differences(folder, settings)
    lengths = [differing.pop(name) for name in _LENGTH if name in differing]
    if differing:
        raise ConfigurationError(
            f"--resume: the run in {folder} began with other settings ("
            f"{'; '.join(differing.values())}). Give the same again; or begin another run from its "
            "checkpoint, with --resume_from_checkpoint and another --output_dir."
        )
    return lengths


def _weights(folder: Path) -> Iterator[Path]:
    for name in WEIGHTS:
        yield from folder.glob(f"{name}*.safetensors")
        yield from folder.glob(f"{name}*.bin")
