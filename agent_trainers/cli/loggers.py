"""TensorBoard, trackio and Weights & Biases: checked before a run, open for all of it.

transformers opens them when training begins and closes them when it ends, but a run is evaluated
before and after. Then, without what is done here, TensorBoard would write into the working
directory, and trackio would raise, or begin another run.
"""

from pathlib import Path
from typing import Any, Final

from transformers.integrations import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)

from agent_envs.core.lookup import require_extra
from agent_trainers.cli.models import refused_settings

LOGGERS: Final = ("tensorboard", "trackio", "wandb")


def check_loggers(config: Any) -> None:
    """Check that what the run reports to is installed; set ``run_name`` where it was not.

    Raises:
        ConfigurationError: If there is no such logger.
        MissingExtraError: If a logger is not installed.
    """
    with refused_settings():
        get_reporting_integration_callbacks(config.report_to)
    for logger in config.report_to:
        if logger in LOGGERS:
            require_extra("loggers", f"--report_to {logger}", logger)
    config.run_name = config.run_name or Path(config.output_dir).name


def open_loggers(trainer: Any) -> None:
    """Open those that are not open. Relies on: their ``on_train_begin`` does nothing twice."""
    _call(trainer, "on_train_begin")


def close_loggers(trainer: Any) -> None:
    """Write out what they hold. Relies on: that is what their ``on_train_end`` does."""
    _call(trainer, "on_train_end")


def _call(trainer: Any, event: str) -> None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback | TrackioCallback | WandbCallback):
            getattr(callback, event)(
                trainer.args,
                trainer.state,
                trainer.control,
                model=trainer.model,
                processing_class=trainer.processing_class,
            )
