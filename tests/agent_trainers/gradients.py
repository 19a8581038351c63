"""Micro-batches of given trajectories, the gradient of their loss, and how to compare them."""

import torch

from agent_trainers.batching.micro_batch import RowGroups
from agent_trainers.trainers.rollouts import CollectedBatch

TOLERANCE = 1000 * torch.finfo(torch.float32).eps
"""Rounding of float32 sums of a few thousand terms, relative to the largest term."""


def assert_close(found, expected):
    """Assert that tensors differ by float32 rounding at most, relative to the largest entry."""
    difference, scale = (found - expected).abs().max(), expected.abs().max()
    assert difference <= TOLERANCE * scale, f"{difference:.3g} of {scale:.3g}"


def assert_same_update(start, found, expected):
    """Assert that two trainings moved the weights alike.

    Adam divides a gradient by its size, so rounding moves weights without a gradient by up to the
    learning rate: only the whole update can be compared.
    """
    names = [name for name in expected if name in start]
    moved = torch.cat([(expected[name] - start[name]).flatten() for name in names])
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in names])
    assert moved.norm() > 0
    assert apart.norm() <= 0.01 * moved.norm()
    for name in expected.keys() - start.keys():  # of a critic, whose start is not known
        difference = (found[name] - expected[name]).norm()
        assert difference <= 0.01 * expected[name].norm(), name


def each_by_itself(*columns):
    """In place of `group_rows`: no rows are taken to be equal."""
    numbers = list(range(len(columns[0])))
    return RowGroups(numbers, numbers)


def collect(trainer, num_episodes=8):
    """Trajectories of a training batch: groups of four of the first tasks."""
    rows = [{"task": i // 4} for i in range(num_episodes)]
    return trainer.rollouts.collect(rows, "train", (0, 0)).trajectories


def micro_batches(trainer, trajectories, **changes):
    """The micro-batches of one optimiser step, with `changes` to the trainer's settings."""
    trainer.rollouts.collect = lambda *_: CollectedBatch(list(trajectories), {}, 0.0)
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.model.train()
    inputs = [{"task": i} for i in range(len(trajectories))]
    batches = []
    for step in range(trainer.args.steps_per_generation):
        trainer._step = step
        batches.append(trainer._prepare_inputs(inputs))
    return batches


def gradient(trainer, batches):
    """The gradient of the loss, policy's and critic's weights in one row."""
    trainer.model.train()
    parameters = [*trainer.model.parameters()]
    if hasattr(trainer, "critic"):
        parameters += trainer.critic.parameters()
    for parameter in parameters:
        parameter.grad = None
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    for batch in batches:
        trainer.compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
