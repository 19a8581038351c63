"""The output folder of a run: lock, refusal to overwrite, and settings that a resumed run keeps."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from agent_envs.data.files import write_json
from agent_envs.errors import CheckpointError, ConfigurationError
from agent_trainers.checkpointing.checkpoints import UNFINISHED, WEIGHTS, check_writable, digest
from agent_trainers.recipes import RUN_SETTINGS

RESULTS_FILE: Final = "results.json"
EVALUATION_FILE: Final = "evaluation_before.json"
_MODELS: Final = tuple(f"{name}*.{kind}*" for name in WEIGHTS for kind in ("safetensors", "bin"))
_FILES_OF_A_RUN: Final = (
    RESULTS_FILE, RUN_SETTINGS, EVALUATION_FILE, UNFINISHED, "README.md",
    "checkpoint-*", "trajectories", "trajectories.*", "metrics.jsonl", "learning_curve.png",
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "training_args.bin",
    "critic.safetensors", "adapter_*", *_MODELS,
)  # fmt: skip
_MAY_CHANGE: Final = (
    "output_dir", "log", "report_to", "run_name", "project", "trackio", "save_st", "save_total",
    "save_on_", "disable_tqdm", "resume", "overwrite", "push_to_hub", "hub_", "dataloader_num",
    "dataloader_p", "max_tokens_per_micro_batch", "per_device_eval", "eval_st", "eval_delay",
    "step_timeout", "episode_timeout", "max_fault_share", "max_logprob_drift", "ddp_timeout",
    "skip_memory", "vllm_server", "vllm_group", "vllm_gpu", "include_num", "local_rank", "dry_run",
    "num_processes", "accelerate_config", "base_url",
    "max_concurrency", "request_timeout", "batch_size", "program_concurrency", "program_env",
)  # fmt: skip
"""Beginnings of the names of settings that do not change what is trained."""
COMMAND: Final = "command"
"""Setting of a run: the arguments of its command line."""
_LENGTH: Final = ("max_steps", "num_train_epochs")


@contextlib.contextmanager
def open_run(
    folder: Path,
    settings: Mapping[str, Any],
    notify: Callable[[str], None],
    *,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint: str | None = None,
    option: str = "--output_dir",
) -> Iterator[Callable[[], None]]:
    """Lock the output folder of a run that starts or resumes there.

    Yields a function to call when everything has been loaded: only then are the files of an
    overwritten run deleted, and the `settings` (see `settings_of`) saved. `checkpoint` is one to
    resume from, `option` the option that names the folder, for errors. Of several processes the
    main one does it.
    """
    if os.environ.get("RANK", "0") != "0":
        yield lambda: None
        return
    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite: give one of the two.")
    if resume and not folder.is_dir():
        raise ConfigurationError(
            f"--resume: there is no folder {folder}, so no run to resume. Check --output_dir, or "
            "start a new run without --resume."
        )
    if checkpoint and not Path(checkpoint).is_dir():
        raise ConfigurationError(f"--resume_from_checkpoint {checkpoint}: there is no such folder.")
    check_writable(folder, option)
    try:  # the file stays, see filelock's docs
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise ConfigurationError(
            f"{option} {folder}: another run is writing there. Wait for it, stop it, or choose "
            "another folder."
        ) from None
    with lock:
        if resume or (checkpoint and Path(checkpoint).resolve().parent == folder.resolve()):
            is_changed = _check_same_settings(folder, settings, notify, option)
            if resume and not is_changed and (folder / RESULTS_FILE).exists():
                raise ConfigurationError(
                    f"The run in {folder} is finished, so there is nothing to resume. Continue it "
                    "with a larger --max_steps."
                )
            overwrite = False
        else:
            _check_free(folder, overwrite=overwrite)

        def begin() -> None:
            if overwrite:
                _clear(folder, settings)
            (folder / RESULTS_FILE).unlink(missing_ok=True)  # only a finished run has results
            write_json(folder / RUN_SETTINGS, settings)

        yield begin


def read_arguments(
    make_parser: Callable[[Sequence[str]], Any], arguments: Sequence[str]
) -> tuple[Sequence[str], Any, Any]:
    """Return arguments, their parser and their values; with ``--resume`` also those of the run."""
    parser = make_parser(arguments)
    values = parser.read(arguments)
    if values.resume:
        folder = Path(values.output_dir)
        arguments = _resumed_arguments(folder, arguments, parser.setting)
        parser = make_parser(arguments)
        values = parser.read(arguments)
    return arguments, parser, values


def _resumed_arguments(
    folder: Path, arguments: Sequence[str], setting: Callable[[str], str]
) -> list[str]:
    """Return the command line of the run in a folder, with `arguments` in place of its options.

    `setting` returns the name of an option's setting, which may have several options.
    """
    try:
        settings = json.loads((folder / RUN_SETTINGS).read_text(encoding="utf-8"))
        began = shlex.split(settings[COMMAND])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return list(arguments)
    given = {setting(each) for each in arguments if each.startswith("--")}
    given |= {"overwrite", "resume"}
    kept, is_kept = [], True
    for argument in began:
        if argument.startswith("--"):
            is_kept = setting(argument) not in given
        if is_kept:
            kept.append(argument)
    return [*kept, *arguments]


def _check_free(folder: Path, *, overwrite: bool) -> None:
    """Raise `ConfigurationError` if a new run would replace another, or files of no run."""
    found = [path.name for path in _files_of_a_run(folder)]
    if found and RUN_SETTINGS not in found:
        raise ConfigurationError(
            f"--output_dir {folder} contains {found[0]}, which no run of this command wrote and "
            "which would be replaced. Choose another folder."
        )
    is_finished = any(True for name in (RESULTS_FILE, *_MODELS) for _ in folder.glob(name))
    if not overwrite and (is_finished or any(folder.glob("checkpoint-*"))):
        what = "a finished run" if is_finished else "a run that was stopped, with checkpoints"
        raise ConfigurationError(
            f"--output_dir {folder} contains {what}. Resume it with --resume, delete it with "
            "--overwrite, or choose another folder."
        )


def check_unused(folder: Path, *names: str) -> None:
    """Raise `ConfigurationError` if a folder has one of these files, or one of a run."""
    if found := [name for name in names if (folder / name).exists()] or _files_of_a_run(folder):
        raise ConfigurationError(
            f"--output_dir {folder} contains {Path(found[0]).name}. Choose another folder."
        )


def _clear(folder: Path, settings: Mapping[str, Any]) -> None:
    """Delete the files of a run, unless the new run's settings name one of them as input."""
    files = _files_of_a_run(folder)
    lost = {path.resolve() for path in files}
    for name, used in _paths(settings):
        path = used.resolve()
        if path == folder.resolve() or not lost.isdisjoint((path, *path.parents)):
            raise ConfigurationError(
                f"--overwrite would delete {used}, which the new run needs ({name}). Choose "
                "another --output_dir."
            )
    for path in files:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _files_of_a_run(folder: Path) -> list[Path]:
    return list(dict.fromkeys(path for name in _FILES_OF_A_RUN for path in folder.glob(name)))


def settings_of(environment: Mapping[str, Any], *options: Any) -> dict[str, Any]:
    """Return all settings that decide what is trained, with the digests of their files, as JSON.

    `environment` is ``env`` and its arguments, or a program and its tasks; `options` are
    dataclasses.
    """
    fields = {
        field.name: getattr(part, field.name)
        for part in options
        for field in dataclasses.fields(part)
        # a list of one environment has the settings of that environment
        if field.init and field.name not in ("env", "eval_envs")
        if not field.name.startswith(_MAY_CHANGE)
    }
    chosen = json.loads(json.dumps(fields | dict(environment), default=str))
    data = {name: digest(path) for name, path in _paths(chosen) if path.is_file()}
    return {**chosen, "data": data}


def _paths(value: Any, name: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the settings, also inside others, that are files or folders."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, f"{name}.{key}" if name else key)
    elif isinstance(value, str) and value and os.path.exists(value):  # noqa: PTH110 - any length
        yield name, Path(value)


def _check_same_settings(
    folder: Path, settings: Mapping[str, Any], notify: Callable[[str], None], option: str
) -> bool:
    """Check that a resumed run has the settings it began with; print and return a new length."""
    if not (path := folder / RUN_SETTINGS).exists():  # stopped before it began
        return True
    try:
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Choose another folder.") from None
    changes = {
        name: f"{name}: {json.dumps(saved[name])} -> {json.dumps(settings[name])}"
        for name in saved.keys() - {COMMAND}
        if name in settings and saved[name] != settings[name]
    }
    longer = [changes.pop(name) for name in _LENGTH if name in changes]
    if 0 < settings.get("max_steps", 0) < saved.get("max_steps", 0):
        raise ConfigurationError(
            f"--max_steps {settings['max_steps']}: the run in {folder} began with "
            f"{saved['max_steps']}. A resumed run has as many or more."
        )
    if changes:
        way_out = f"Use the same settings or another {option}"
        if option == "--output_dir":
            way_out += "; --resume_from_checkpoint starts another run from a checkpoint of it"
        raise ConfigurationError(
            f"The run in {folder} began with other settings ({'; '.join(changes.values())}). "
            f"{way_out}."
        )
    for change in longer:
        notify(f"Resuming with changed {change}.")
    return bool(longer)
