from dataclasses import replace

import numpy as np
import pytest

from agent_trainers.batching.rows import make_rows
from agent_trainers.monitoring.report import (
    COLOURS,
    MAX_TOKENS_SHOWN,
    plot_learning_curve,
    write_trajectory_page,
)
from agent_trainers.monitoring.trajectory_samples import Mark, StepTokens, TrajectorySample
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory, transition

HOSTILE = "<script>alert(1)</script>\ud800"


class Words:
    """A tokenizer of one word."""

    def decode(self, ids):
        return " ".join(f"<w{i}>" for i in ids)


def trained(**changes):
    settings = {"row": 0, "fork_reason": None, "is_trained": [True], "advantages": [0.0],
                "values": None, "ratios": None}  # fmt: skip
    return StepTokens(**(settings | changes))


STEPS = [
    trained(
        is_trained=[True, False], advantages=[1.5, 1.5], values=[0.75, 0.25], ratios=[1.25, 0.5]
    ),
    trained(row=1, fork_reason="window: the last 1 turns", advantages=[-0.25], ratios=[1.0]),
]


def sample(**changes):
    question = {"role": "user", "content": f"Who? {HOSTILE}"}
    first = transition(
        [1], [5, 6], 0.1, messages=[question], logprobs=np.array([-0.5, -1.25], np.float32),
        action="call", reward_terms={"new_gold_passage": 0.1},
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
    played = trajectory(
        first, second, task_id="task-1", metrics={"success": 1.0, "f1": 0.5},
        stop_reason=StopReason.TURN_LIMIT, step_seconds=[0.0125, 0.5],
    )  # fmt: skip
    settings = {"label": "training, step 1", "trajectory": played,
                "steps": STEPS, "rows": make_rows(played)}  # fmt: skip
    return TrajectorySample(**(settings | changes))


@pytest.fixture
def page(tmp_path):
    def write(*samples):
        path = tmp_path / "page.html"
        write_trajectory_page(path, samples, tokenizer=Words(), title="A <title>")
        return path.read_text(encoding="utf-8")

    return write


def test_the_page_shows_every_step_stands_alone_and_hostile_text_stays_text(page):
    marks = [
        Mark(sign="format_farming", step=None, seen=f"'talk' paid {HOSTILE}"),
        Mark(sign="empty_thoughts", step=1, seen="a thought without content"),
    ]
    html = page(sample(marks=marks))
    for shown in ("Step 1", "Step 2", "new_gold_passage", "+0.100", "task-1", "turn_limit",
                  "advantage +1.500", "log-probability -1.250", "&lt;w5&gt;", "bad_json",
                  "Write it right.", "window: the last 1 turns", "training, step 1",
                  "Training rows: 2", "prompt, 1", "step 1, 2", "12.5 ms",
                  "A new row begins here: window: the last 1 turns",
                  "value +0.250 · ratio 0.500", "· masked ·",
                  "<title>Trajectories: A &lt;title&gt;</title>", "&lt;script&gt;alert(1)",
                  "format_farming: &#39;talk&#39; paid"):  # fmt: skip
        assert shown in html
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert "no longer in the state" not in html  # the second state only adds
    # tokens are coloured: 1.5 / 0.5, 0.75 / 0.25 0.25 / 0.1, plus 1
    for colours in ("ap4 vp4 rp3", "masked ap4 vp2 rn4", "an1 r0"):
        assert f'class="token {colours}"' in html
    assert html.index("Step 2") < html.index("empty_thoughts: a thought without content")
    assert html.index("a sign of reward hacking") < html.index("Step 1")
    assert "a sign of reward hacking" not in page(sample())


def test_an_untrained_trajectory_is_masked_and_has_no_advantage(page):
    failed = replace(sample().trajectory, error="Traceback: broken")
    html = page(sample(trajectory=failed, steps=None, rows=()))
    assert "Traceback: broken" in html
    assert 'class="token masked"' in html
    assert "· advantage" not in html
    assert "Training rows" not in html


def test_the_page_shows_what_a_summary_kept_and_what_was_dropped(page):
    asked, written = sample().trajectory.transitions
    asked = replace(asked, info={"context": {"is_summary_requested": True}})
    reason = "policy: the model's summary of 1 turns"
    info = {"action": {"kind": "summary", "text": "it was <b>here</b>"},
            "context": {"num_dropped": 2, "reason": reason}}  # fmt: skip
    written = replace(written, info=info)
    after = replace(asked, messages=[{"role": "user", "content": "Who? it was here"}], info={})
    trajectory = replace(sample().trajectory, transitions=[asked, written, after])
    html = page(sample(trajectory=trajectory, steps=None, rows=()))
    assert "context of the next state: a summary is requested</div>" in html
    assert "kept of 2 dropped messages</span>it was &lt;b&gt;here&lt;/b&gt;" in html
    assert "context of the next state: policy: the model&#39;s summary of 1 turns</div>" in html
    assert "4 messages no longer in the state" in html


def test_dropped_messages_are_shown_and_a_long_turn_is_cut(page):
    count = MAX_TOKENS_SHOWN + 7
    first, second = sample().trajectory.transitions
    long = replace(first, completion_ids=[1] * count, logprobs=np.zeros(count, np.float32))
    shorter = replace(second, messages=[second.messages[0], second.messages[2]])
    trajectory = replace(sample().trajectory, transitions=[long, shorter])
    html = page(sample(trajectory=trajectory, steps=None))
    assert "1 message no longer in the state" in html
    assert html.count("message dropped") == 1
    assert "and 7 more tokens" in html


@pytest.mark.parametrize(
    "history", [[], [{"step": i, "reward": i / 9, "success": i / 9} for i in range(9)]]
)
def test_the_learning_curve_is_a_picture(tmp_path, history):
    path = tmp_path / "curve.png"
    plot_learning_curve(path, history, before=0.05, after=0.97)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_filters_by_outcome_task_and_group(page):
    first = sample()
    lost = replace(first.trajectory, task_id="Task-1", group_id="h", metrics={"success": 0.0})
    text = page(first, replace(first, trajectory=lost), first)
    for wanted in ("solved t0 g0", "failed t1 g1"):
        assert f'class="card {wanted}"' in text
    for name in ("<option>task-1</option><option>Task-1</option>", "<option>h</option>"):
        assert name in text
    assert "#task option:nth-child(3):checked) .card:not(.t1) { display: none; }" in text
    assert f"<option>{first.trajectory.group_id} (2)</option>" in text
    assert " of 3 shown" in text


def test_tokens_are_coloured_only_by_numbers_that_they_have(page):
    first, second = STEPS
    steps = [replace(first, values=None), second]
    assert [f'id="by-{name}"' in page(sample(steps=steps)) for name in COLOURS] == [1, 1, 0]
    assert "Colour tokens by" not in page(sample(steps=None))


def test_a_summary_without_its_context_is_shown(page):
    summary = transition(info={"action": {"kind": "summary", "text": "so far"}})
    shown = page(sample(trajectory=trajectory(summary, transition()), steps=None, rows=()))
    assert "so far" in shown
