import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.scoring.math_answers import MathJudge, gsm8k_match, last_boxed, math_equal

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "18.0"), ("1,234", "1234"), (r"\frac{3}{4}", "3/4"), (r"\frac{3}{4}", "0.75"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\text{Evelyn}", "Evelyn"), ("5", "$5$"),
        ("5", r"\boxed{5}"), (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)"),
        ("6 - 5i", "-5i+6"), ("x^2-1", "(x-1)(x+1)"),
    ],
)  # fmt: skip
def test_answers_that_mean_the_same_are_equal(gold, answer):
    assert math_equal(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", ""), ("5", " "), ("5", "6"), ("5", "5 or 6"), ("5", "5, 6"), ("5", "1 2 3 4 5"),
        ("5", r"\boxed{5}\boxed{6}"), ("5", "x" * 5000), ("5", "5 = 6"), (r"\frac{3}{4}", "0.7"),
        (r"\text{Evelyn}", "Eve"), ("(1,2)", "(2,1)"), ("5", "\x00"), ("5", "\ud800"),
    ],
)  # fmt: skip
def test_answers_that_do_not_are_not(gold, answer):
    assert not math_equal(answer, gold)


def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_is_judged(monkeypatch):
    judge = MathJudge(seconds=0.01)  # less than the start of its process
    assert not judge.is_equal("0.5", "1/2")
    judge = MathJudge()
    assert not judge.is_equal("9^{9^{9^{9^{9}}}}", "5")
    assert judge.is_equal("0.5", "1/2")
    judge.close()


def test_a_judge_that_died_is_started_again():
    judge = MathJudge()
    assert judge.is_equal("0.5", "1/2")
    first = judge._process
    first.kill()
    first.wait()
    assert judge.is_equal("0.5", "1/2")
    judge.close()
    assert not os.path.exists(f"/proc/{first.pid}")  # noqa: PTH110 - reaped


@given(st.text(max_size=30))
@settings(max_examples=25, deadline=None)
def test_whatever_is_answered_is_judged(text):
    assert isinstance(math_equal(text, "12345"), bool)


@pytest.mark.parametrize(
    ("answer", "match"),
    [("18", 1.0), ("So it is 18.\n#### 18", 1.0), ("#### 1,8", 1.0), ("18.0", 0.0), ("$18", 0.0),
     ("", 0.0), ("#### 19 #### 18", 0.0)],
)  # fmt: skip
def test_gsm8ks_own_rule_compares_the_text_of_the_number(answer, match):
    assert gsm8k_match(answer, "18") == match


@pytest.mark.parametrize(
    ("solution", "answer"),
    [(r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2}", "2"),
     (r"\fbox{7}", "7"), ("no box", None), (r"\boxed{open", None)],
)  # fmt: skip
def test_the_last_box_is_the_answer(solution, answer):
    assert last_boxed(solution) == answer
