import pytest

from agent_envs.errors import RolloutError
from agent_trainers.monitoring.episode_statistics import FaultWatch, summarise
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory


def episodes(num_failed):
    """Return four episodes, the first of which failed."""
    error, ended = "Traceback: the database is down", [StopReason.ANSWERED] * (4 - num_failed)
    reasons = [StopReason.ENVIRONMENT_ERROR] * num_failed + ended
    return [summarise(trajectory(stop_reason=reason, error=error)) for reason in reasons]


def test_a_batch_of_failures_ends_the_run_with_the_first_error():
    with pytest.raises(RolloutError, match=r"(?s)4 of 4 .*environment_error 4.*database is down"):
        FaultWatch(0.5).check("train", episodes(4))


def test_a_run_survives_two_bad_batches_and_ends_at_the_third_in_a_row():
    watch = FaultWatch(0.5)
    for num_failed in (3, 3, 2, 3, 3):
        watch.check("train", episodes(num_failed))
    watch.check("eval", episodes(3))  # counted by itself
    with pytest.raises(RolloutError, match="3 of 4"):
        watch.check("train", episodes(3))


def test_without_a_limit_failures_are_only_counted():
    FaultWatch(None).check("train", episodes(4))
