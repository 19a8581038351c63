from dataclasses import replace

import numpy as np
import pytest

from agent_trainers.report import TrajectorySample, plot_learning_curve, write_trajectory_page
from agent_trainers.trajectory import StopReason, Trajectory, Transition

HOSTILE = "<script>alert(1)</script>\ud800"


class Words:
    """A tokenizer of one word."""

    def decode(self, ids):
        return f"<w{ids[0]}>"


def sample(**changes):
    question = {"role": "user", "content": f"Who? {HOSTILE}"}
    first = Transition(
        messages=[question], prompt_ids=[1], completion_ids=[5, 6],
        logprobs=np.array([-0.5, -1.25], np.float32), action="call", reward=0.1,
        reward_terms={"new_gold_passage": 0.1}, terminated=False, truncated=False,
        info={"action": {"kind": "tool_call"}, "tool_result": HOSTILE},
    )  # fmt: skip
    result = {"role": "tool", "name": "search", "content": HOSTILE}
    second = replace(
        first,
        messages=[question, {"role": "assistant", "content": "call"}, result],
        completion_ids=[7],
        logprobs=np.zeros(1, np.float32),
        info={"action": {"kind": "invalid", "error": "bad_json", "message": "Write it right."},
              "context": {"reason": "window: the last 1 turns"}},
    )  # fmt: skip
    trajectory = Trajectory(
        task_id="task-1", group_id="g", transitions=[first, second],
        metrics={"success": 1.0, "f1": 0.5}, timings={}, stop_reason=StopReason.TURN_LIMIT,
        error=None,
    )  # fmt: skip
    settings = {"label": "training, step 1", "trajectory": trajectory, "advantages": [1.5, -0.25]}
    return TrajectorySample(**(settings | changes))


@pytest.fixture
def page(tmp_path):
    def write(*samples):
        path = tmp_path / "page.html"
        write_trajectory_page(path, samples, tokenizer=Words(), title="A <title>")
        return path.read_text(encoding="utf-8")

    return write


def test_the_page_shows_every_step_with_rewards_results_and_advantages(page):
    html = page(sample())
    for shown in ("Step 1", "Step 2", "new_gold_passage", "+0.100", "task-1", "turn_limit",
                  "advantage +1.500", "log-probability -1.250", "&lt;w5&gt;", "bad_json",
                  "Write it right.", "window: the last 1 turns", "training, step 1"):  # fmt: skip
        assert shown in html


def test_the_page_stands_alone_and_hostile_text_stays_text(page):
    html = page(sample())
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "http" not in html.replace("http-equiv", "")
    assert "<title>Trajectories: A &lt;title&gt;</title>" in html


def test_tokens_are_coloured_by_advantage(page):
    html = page(sample())
    assert 'class="token good4"' in html
    assert 'class="token bad1"' in html
    untrained = page(sample(advantages=None))
    assert 'class="token untrained"' in untrained
    assert "· advantage" not in untrained


def test_an_episode_that_failed_shows_its_error(page):
    failed = replace(sample().trajectory, transitions=[], error="Traceback: broken")
    assert "Traceback: broken" in page(sample(trajectory=failed, advantages=[]))


@pytest.mark.parametrize(
    "history", [[], [{"step": i, "reward": i / 9, "success": i / 9} for i in range(9)]]
)
def test_the_learning_curve_is_a_picture(tmp_path, history):
    path = tmp_path / "curve.png"
    plot_learning_curve(path, history, before={"success": 0.05}, after={"success": 0.97})
    assert path.read_bytes().startswith(b"\x89PNG")
