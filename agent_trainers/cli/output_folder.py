"""The folder of a run: whose it is, what lies there, and who writes to it now.

What a run leaves is never touched by another one unless it is told to: a folder in which a run has
ended or saved a checkpoint is refused without ``--resume`` or ``--overwrite``.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
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
)

RESULTS_FILE: Final = "results.json"
SETTINGS_FILE: Final = "settings.json"
EVALUATION_FILE: Final = "evaluation_before.json"
_LOCK_FILE: Final = ".lock"
_OF_A_RUN: Final = (
    RESULTS_FILE, SETTINGS_FILE, EVALUATION_FILE, RUN_FILE, UNFINISHED, "README.md",
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
    program_concurrency program_env
    """.split()
)
"""Settings on which what is trained does not depend."""
_LENGTH: Final = ("max_steps", "num_train_epochs")


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder` while the block runs.

    Raises:
        ConfigurationError: If a run is on there, or nothing can be written.
    """
    check_writable(folder)
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigurationError(
            f"--output_dir {folder}: another run writes there now. Wait for it, stop it, or choose "
            "another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()  # the file stays: who waits for it could hold what another one deletes


def check_unused(folder: Path) -> None:
    """Refuse a folder in which something would be lost, before any work.

    Raises:
        ConfigurationError: If a run ended or saved a checkpoint there, or a model lies there.
    """
    found = "a finished run" if (folder / RESULTS_FILE).exists() else None
    if found is None and any(folder.glob("checkpoint-*")):
        found = "a run that was stopped, with checkpoints"
    if found is not None:
        raise ConfigurationError(
            f"--output_dir {folder} holds {found}. --resume goes on with it, --overwrite deletes "
            "it and begins anew; or choose another folder."
        )
    if not (folder / RUN_FILE).exists() and any(_weights(folder)):
        raise ConfigurationError(
            f"--output_dir {folder} holds a model that no run of this command wrote there, and the "
            "trained one would replace it. Choose another folder."
        )


def clear(folder: Path) -> None:
    """Delete what a run left in `folder`; other files stay.

    Raises:
        ConfigurationError: If a model lies there that no run of this command wrote.
    """
    if not (folder / RUN_FILE).exists():
        check_unused(folder)
    for pattern in _OF_A_RUN:
        for path in folder.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def settings_of(environment: Mapping[str, Any], *settings: Any) -> dict[str, Any]:
    """Return all that decides what a run trains, as JSON has it.

    Args:
        environment: ``env``, ``env_kwargs`` and ``eval_env_kwargs``, or ``program``, ``tasks`` and
            ``eval_tasks``; of a file that is named in them, the digest is kept, too.
        settings: Dataclasses: the launcher's options, and the trainer's.
    """
    fields = {
        field.name: getattr(part, field.name)
        for part in settings
        for field in dataclasses.fields(part)
        if field.init and field.name not in _MAY_CHANGE
    }
    named = {name: environment.get(name) for name in ("tasks", "eval_tasks")} | {
        f"{name} of {kwargs}": value
        for kwargs in ("env_kwargs", "eval_env_kwargs")
        for name, value in environment.get(kwargs, {}).items()
    }
    data = {
        name: _digest(Path(value))
        for name, value in named.items()
        if isinstance(value, str) and Path(value).is_file()
    }
    chosen = {**fields, **environment, "data": data}
    return dict(json.loads(json.dumps(chosen, default=str)))


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Keep the settings of a run that begins."""
    write_json(folder / SETTINGS_FILE, settings)


def check_same_settings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with a run by other settings than it began with.

    Returns:
        What differs in how long the run is, which may, as sentences.

    Raises:
        CheckpointError: If what was kept cannot be read.
        ConfigurationError: If settings differ; names each.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():  # stopped before it began, or begun by an earlier version
        return []
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
    differing = {
        name: f"{name}: {json.dumps(kept[name])} -> {json.dumps(settings[name])}"
        for name in kept
        if name in settings and kept[name] != settings[name]
    }
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
