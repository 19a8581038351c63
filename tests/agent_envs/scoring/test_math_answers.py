# ruff: noqa: RUF001 - Unicode is what is tested
import os

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent_envs.scoring.math_answers import MathJudge, gsm8k_match, last_boxed, math_equal

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "18.0"), ("1,234", "1234"), (r"\frac{3}{4}", "3/4"), (r"\frac{3}{4}", "0.75"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\text{Evelyn}", "Evelyn"), ("5", "$5$"),
        ("5", r"\boxed{5}"), (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)"),
        ("6 - 5i", "-5i+6"), ("x^2-1", "(x-1)(x+1)"), (r"\$3800", "3800"), (r"\$3800", "$3800"),
        (r"\$3800", r"\boxed{3800}"), (r"\$3800", r"\boxed{\$3800}"), ("18", "**18**"),
        ("18", "# 18"),
        ("18", "`18`"), ("18", "**Answer:** 18"), ("18", "The answer is $18$."), ("18", "x = 18"),
        ("18", "17 + 1 = 18"), ("3,5", "3 and 5"), (r"\frac{1}{2}", r"\frac 1 2"), ("18", "$18"),
        ("18", "so it is " * 500 + r"\boxed{18}"), ("10,000", r"10\,000"), ("8", "```\n8\n```"),
        (
            r"\begin{pmatrix} 6 \\ -15 \end{pmatrix}",
            r"x=\begin{pmatrix} 6 \\ -15 \end{pmatrix}",
        ),
        (r"x = 3 \text{ or } 5", r"x = 3 \text{ or } 5"),
    ],
)  # fmt: skip
def test_answers_that_mean_the_same_are_equal(gold, answer):
    assert math_equal(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("34", "3  4"), ("34", "3\n\n4"), ("56", r"5\quad 6"), ("5", "5 & 6"), ("5", "5\u3001 6"),
        ("42", r"\leq 42"), ("42", "< 42"), ("42", r"\ne 42"), ("42", r"x \ge 42"),
        ("5", "5_6"), ("5", "5\u20266"), ("101", "101_2"),
        ("5", ""), ("5", " "), ("5", "6"), ("5", "5 or 6"), ("5", "5, 6"), ("5", "1 2 3 4 5"),
        ("5", r"\boxed{5}\boxed{6}"), ("5", "x" * 5000), ("5", "5 = 6"), (r"\frac{3}{4}", "0.7"),
        (r"\text{Evelyn}", "Eve"), ("(1,2)", "(2,1)"), ("5", "\x00"), ("5", "\ud800"),
        ("34", "3 4"), ("34", "3\t4"), ("34", "3\u00a04"), ("3.5", "3 .5"), ("34", r"3\,4"),
        ("1", "x 1e999\\boxed{"), ("18", "17 = 18"), ("18", "18 = 17"), ("18", r"18\\19"),
        ("18", "The answer to 3 is 18"), ("18", "$18$ and $19$"), ("5", r"\boxed{5} or \boxed{6}"),
        (r"\frac{1}{2}", r"0 \frac{1}{2}"), (r"\$38", "3"), ("5", "{5"), ("5", "either 5"),
        ("5", "not 5"),
    ],
)  # fmt: skip
def test_answers_that_do_not_are_not(gold, answer):
    assert not math_equal(answer, gold)


NOTATIONS = [  # gold, what means the same, what does not
    (r"\frac{1}{2}", "½", "2½"), (r"\frac{5}{2}", "2½", "21/2"), ("123", "１２３", "１２４"),
    ("10000", "10\u2009000", "10\u200900"), ("12345", "12\u202f345", "12\u202f34"),
    ("5", r"\boxed{\boxed{5}}", r"\boxed{5 \boxed{6}}"), ("x^2-1", "x²−1", "x2−1"),
    (r"3\sqrt{2}", "3√2", "√32"), (r"2\pi", "2π", "2"), (r"45^\circ", "45°", "45 rad"),
    (r"5\text{ cm}", "5 centimeters", "5 m"), (r"5\text{ cm}^2", "5 square cm", "5 cm"),
    ("5 m", "5\u00a0m", "5\u00a0km"), ("101_2", "$101_{2}$", "101_3"), (".5", "0.50", "50%"),
    (r"\frac{7}{4}", "1 3/4", "13/4"), ("1000000", "1e6", "1e5"), ("-7", "\u20137", "2\u20137"),
    ("42", "٤٢", "٤٣"), (r"\$12.50", "12.50 USD", "1250 cents"),
    (r"25\%", "25 percent", "25\u2030"),
    ("-3,5", "x = -3 or x = 5", "-3 or 4"), ("-3,5", "x = -3, x = 5", "x = -3"),
    (r"2\sqrt{3}", r"\begin{align*}\mathbf{2\sqrt{3}}\end{align*}", r"\approx 2\sqrt{3}"),
    ("42", "The final answer is: 42", "42\u219243"), ("42", "= 42", "42+"), ("42", "42.", "~42"),
    ("42", "Answer: 42", "42//43"), ("42", "42", r"42 \approx 43"), ("42", "42", "42?"),
    (r"50\%", "50", "0.5"), (r"\$5", "5 dollars", "5 €"), ("(1,2)", "（1，2）", "（2，1）"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "same", "other"), NOTATIONS)
def test_notations_are_read_as_people_do(gold, same, other):
    assert math_equal(same, gold)
    assert not math_equal(other, gold)


QUESTION = (
    r"Compute $\sqrt{242} + 0.5 - \frac12$, $\sqrt{98}$, $\binom{8}{3}$; simplify $\frac{12x}{3}$, "
    "where $x = a + b$."
)


@pytest.mark.parametrize(
    ("copy", "gold"),
    [
        (r"-\frac12 + \sqrt{242} + 0.5", r"11\sqrt2"), (r"98^{1/2} \cdot 1 + 0", r"7\sqrt2"),
        (r"{8 \choose 3}", "56"),
        (r"\sqrt{242}", r"11\sqrt2"), (r"$\sqrt {242}$", r"11\sqrt2"), ("√242", r"11\sqrt2"),
        (r"0.5 + \sqrt{242} - \frac{1}{2}", r"11\sqrt2"), ("0.5", r"\frac{1}{2}"),
        (r"\sqrt{242} + 0.5 - \dfrac{1}{2} + 7 - 7", r"11\sqrt2"), ("12x/3", "4x"),
        ("(12 x) / 3", "4x"), (r"4x = \frac{12x}{3}", "4x"),
    ],
)  # fmt: skip
def test_an_expression_of_the_question_is_no_answer(copy, gold):
    assert math_equal(copy, gold)  # it has the same value
    assert not math_equal(copy, gold, question=QUESTION)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"11\sqrt{2}", r"11\sqrt2"), (r"\sqrt{242} = 11\sqrt{2}", r"11\sqrt2"), ("4x", "4x"),
        ("x * 4", "4x"), ("a+b", "a + b"), ("b + a", "a+b"), ("(a+b)^2", "a^2+2ab+b^2"),
        ("0.50", "0.5"), ("3", "3.0"), ("A", r"\text{(A)}"),
    ],
)  # fmt: skip
def test_an_answer_of_its_own_counts_whatever_the_question_shares_with_it(answer, gold):
    assert math_equal(answer, gold, question=QUESTION)


@pytest.mark.parametrize(
    ("answer", "is_number"),
    [("18", True), ("$18.00", True), ("18 dollars", True), ("x = 18", True), ("9 * 2 = 18", True),
     ("18-7+7", False), ("9 * 2", False), (r"\sqrt{324}", False)],
)  # fmt: skip
def test_where_a_number_is_wanted_nothing_is_left_to_calculate(answer, is_number):
    assert math_equal(answer, "18", wants_number=True) == is_number


def test_a_number_has_the_noun_that_is_asked_for():
    question = "Natalia sold 48 clips, then half as many. How many clips is that in dozens?"
    assert math_equal("72 clips", "72", question=question, wants_number=True)
    assert not math_equal("72 dozen", "72", question=question, wants_number=True)


@pytest.mark.parametrize("answer", ["81*2-12", r"162 - 12", r"2 \cdot 75", r"15 \times 10"])
def test_a_number_is_not_left_as_a_sum_or_product(answer):
    assert not math_equal(answer, "150")
    assert math_equal(f"{answer} = 150", "150")


VALUES = st.integers(-99, 999).map(str) | st.sampled_from([r"\frac{1}{2}", "x+1", r"\pi", "0.25"])
SEVERAL = st.sampled_from(
    [
        "{} (or {})", "{} or {}", "{}\n{}", "{} {}", "either {} or {}", "{}; {}", "{} | {}",
        r"{} \text{{ or }} {}", "${}$ or ${}$", r"\boxed{{{}}} \boxed{{{}}}", "{} ({} also)",
        "{}, or maybe {}", "{} = {}", "not {} but {}", "{}... {}",
    ]
)  # fmt: skip


@given(VALUES, VALUES, SEVERAL)
@settings(max_examples=30, deadline=None)
def test_an_answer_that_says_two_things_is_none_of_them(one, other, several):
    assume(not math_equal(one, other))
    assume(not (several == "{} {}" and "-" in other))  # 3 -4 is a difference
    assume(not (several == "{} {}" and one in ("0", "1")))  # a product that is one of the two
    answer = several.format(one, other)
    assume("=" not in answer or (one != "x+1" and other != "x+1"))
    # whatever else it may mean, such as a product, it is neither of the two
    assert not math_equal(answer, one)
    assert not math_equal(answer, other)


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
