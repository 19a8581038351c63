import pytest

from agent_envs import ConfigurationError
from agent_trainers.algorithms.reward_schedules import parse_schedules, reward_factors


def factor(schedule, progress=0.0, log=()):
    schedules = parse_schedules({"term": schedule})
    return reward_factors(schedules, progress, log)["term"]


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [
        ({"kind": "linear", "start": 2.0, "end": 1.0}, 0.25, 1.75),
        ({"kind": "linear", "start": 2.0, "end": 1.0}, 1.0, 1.0),
        ({"kind": "cosine"}, 1 / 3, 0.75),
        ({"kind": "cosine"}, 1.0, 0.0),
    ],
)
def test_a_line_and_half_a_cosine(schedule, progress, expected):
    assert factor(schedule, progress) == pytest.approx(expected)


def test_an_adaptive_factor_changes_when_the_rate_is_met_and_stays_changed():
    schedule = {"kind": "adaptive", "metric": "success", "target": 0.8, "end": 0.1}
    assert factor(schedule, log=[]) == 1.0
    assert factor(schedule, log=[{"success": 0.79}, {"eval_loss": 1.0}, {"success": None}]) == 1.0
    assert factor(schedule, log=[{"success": 0.8}, {"success": 0.2}]) == 0.1


def test_schedules_are_read_from_json():
    schedules = parse_schedules('{"format": {"kind": "linear"}}')
    assert reward_factors(schedules, 0.5, []) == {"format": 0.5}
    assert parse_schedules(None) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not valid JSON"),
        ({"format": {"kind": "square"}}, "format"),
        ({"format": {"kind": "linear", "begin": 1}}, r"format\.begin"),
        ({"format": {"kind": "linear", "start": float("nan")}}, r"format\.start"),
        ("[1]", "reward_schedules"),
    ],
)
def test_a_malformed_schedule_names_its_place(value, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_schedules(value)
