from types import SimpleNamespace

import numpy as np

from agent_trainers.advantages import estimate
from agent_trainers.cli.results import SampleCollector
from agent_trainers.report import write_trajectory_page
from agent_trainers.trajectory import StopReason, Trajectory, Transition


class Words:
    """A tokenizer of one word."""

    def decode(self, ids):
        return f"<w{ids[0]}>"


def trajectory(stop_reason=StopReason.ANSWERED, error=None):
    step = Transition(
        messages=[{"role": "user", "content": "Who?"}], prompt_ids=[1], completion_ids=[2],
        logprobs=np.zeros(1, np.float32), action="call", reward=0.0, reward_terms={},
        terminated=stop_reason is StopReason.ANSWERED, truncated=False,
        info={"action": {"kind": "tool_call"}},
    )  # fmt: skip
    return Trajectory(
        task_id="t", group_id="g", transitions=[step], metrics={"success": 0.0}, timings={},
        stop_reason=stop_reason, error=error,
    )  # fmt: skip


def test_a_sample_that_failed_after_its_first_step_is_shown_without_advantages(tmp_path):
    failed = trajectory(StopReason.ENVIRONMENT_ERROR, "RuntimeError: the site is down")
    played = [failed, trajectory()]
    advantages = estimate("grpo", played, gamma=1.0, scale="group")
    trainer = SimpleNamespace(trajectories={"train": played}, advantages={"train": advantages})
    collector = SampleCollector(trainer)

    collector.collect("train", "training, step 1")
    page = tmp_path / "page.html"
    write_trajectory_page(page, collector.samples, tokenizer=Words(), title="A run")

    assert [sample.advantages for sample in collector.samples] == [None, [0.0]]
    assert "the site is down" in page.read_text(encoding="utf-8")
