from types import SimpleNamespace

import pytest

from agent_trainers.trainers.rollouts import TrainerRollouts


def draws(tasks, mode, **changes):
    """What each episode of two per group begins with: task, seed, and what its generator draws."""
    settings = {"first": 0, "step": (3, 0)} | changes
    trainer = SimpleNamespace(
        args=SimpleNamespace(seed=7), processes=None, extensions=[], num_generations=2,
        num_generations_eval=2,
    )  # fmt: skip
    rollouts = TrainerRollouts(trainer, {})
    specs = [
        rollouts.spec({"task": task}, number, mode, settings["step"])
        for number, task in enumerate(tasks, start=settings["first"])
    ]
    return [(spec.task, spec.seed, spec.rng.random()) for spec in specs]


def test_what_is_evaluated_does_not_depend_on_its_place_nor_on_the_step():
    batch = draws([4, 4, 5, 5], "eval")
    assert draws([5, 5], "eval", step=(9, 1)) == batch[2:]
    assert len(set(batch)) == 4  # members of a group differ


def test_what_is_trained_is_new_at_every_step_and_the_same_on_any_process():
    batch = draws([4, 4, 5, 5], "train")
    assert draws([5, 5], "train", first=2) == batch[2:]
    assert not set(batch) & set(draws([4, 4, 5, 5], "train", step=(4, 0)))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_members_of_a_group_begin_in_the_same_state(mode):
    (_, first, _), (_, second, _) = draws([4, 4], mode)
    assert first == second
