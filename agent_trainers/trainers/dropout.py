"""Dropout: on in the pass that trains, as in TRL, and off wherever a probability is noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_dropout(*models: Any) -> Iterator[None]:
    """Have models drop nothing out, as in inference."""
    was_training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, was_training, strict=True):
            model.train(training)


def drops_out(model: Any) -> bool:
    """Say whether a model drops anything out in training."""
    return any(
        module.p > 0
        if isinstance(module, torch.nn.Dropout)
        else getattr(module, "attention_dropout", 0.0) > 0
        for module in model.modules()
    )


def disable_attention_dropout(model: Any) -> None:
    """Switch off what TRL's ``disable_dropout`` leaves: dropout that is a number of attention's."""
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
