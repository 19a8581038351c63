"""What a trainer makes of given trajectories: micro-batches, and the gradient of their loss."""

import torch


def micro_batches(trainer, trajectories, **changes):
    """The micro-batches of one optimiser step, with `changes` to the trainer's settings."""
    trainer.player.play = lambda *_: list(trajectories)
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
