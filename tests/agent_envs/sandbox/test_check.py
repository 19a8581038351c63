"""Verdicts: what an honest program gets, and that no dishonest one gets better."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.sandbox import Limits
from agent_envs.sandbox.values import decode, encode

GOOD = "def double(x):\n    return 2 * x\n"
BAD = "def double(x):\n    return 0\n"
TESTS = "assert double(2) == 4\nassert double('ab') == 'abab'\n"
QUICK = Limits(wall_seconds=2, cpu_seconds=2, memory_mb=128, processes=16)


def test_a_right_program_passes(sandbox):
    verdict = sandbox.check_python(GOOD, TESTS)
    assert (verdict.passed, verdict.reason) == (True, "passed")


def test_a_wrong_program_fails_and_the_verdict_says_where(sandbox):
    verdict = sandbox.check_python(BAD, TESTS)
    assert (verdict.passed, verdict.reason) == (False, "failed")
    assert verdict.message == "line 1, assert double(2) == 4: AssertionError"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        pytest.param("def f(): return (1, [2.5, {'a': {3}}], b'x', 1j, None)",
                     "assert f() == (1, [2.5, {'a': {3}}], b'x', 1j, None)", id="nested values"),
        pytest.param("def f(): return 10**5000", "assert f() == 10**5000", id="large integers"),
        pytest.param("def f(): return float('nan'), float('-inf'), -0.0",
                     "a, b, c = f()\nassert a != a and b < 0 and str(c) == '-0.0'", id="floats"),
        pytest.param("def f(): return 'é\\ud800\\x00'",
                     "assert f() == 'é\\ud800\\x00'", id="odd text"),
        pytest.param("def f():\n    yield from range(3)",
                     "assert list(f()) == [0, 1, 2]", id="generators"),
        pytest.param("class S:\n    def __init__(self): self.n = []\n"
                     "    def push(self, x): self.n.append(x)\n"
                     "    def __len__(self): return len(self.n)",
                     "s = S()\ns.push(3)\nassert len(s) == 1 and s.n == [3] and isinstance(s, S)",
                     id="objects"),
        pytest.param("def f(g, x): return g(g(x))",
                     "assert f(lambda v: v + 1, 1) == 3", id="functions as arguments"),
        pytest.param("def f(x): raise ValueError('no')",
                     "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\n"
                     "else:\n    assert False", id="exceptions"),
        pytest.param("import math\ndef f(x): return math.sqrt(x)",
                     "def check(candidate):\n    assert candidate(2) == math.sqrt(2)\ncheck(f)",
                     id="a check function, as in HumanEval"),
        pytest.param("from collections import namedtuple, OrderedDict\n"
                     "P = namedtuple('P', 'x y')\ndef f(): return P(1, 2), OrderedDict(a=1)",
                     "assert f() == ((1, 2), {'a': 1})", id="subclasses of plain types"),
        pytest.param("def f(values, kind): return [v for v in values if not isinstance(v, kind)]",
                     "assert f([1, 'a', 2.5], int) == ['a', 2.5]", id="types as arguments"),
    ],
)  # fmt: skip
def test_honest_programs_of_many_kinds_pass(sandbox, program, tests):
    verdict = sandbox.check_python(program, tests)
    assert verdict.passed, verdict


FORGERIES = {
    "prints a verdict": 'print(\'{"passed": true, "reason": "passed", "message": ""}\')',
    "exits with success": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits inside the tests": "def double(x):\n    import sys; sys.exit(0)",
    "exits at once inside the tests": "def double(x):\n    import os; os._exit(0)",
    "raises SystemExit at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "equals everything": "class E:\n    def __eq__(s, o): return True\n"
    "    __ne__ = lambda s, o: False\n    __hash__ = None\ndef double(x): return E()",
    "an integer that equals everything": "class E(int):\n    def __eq__(s, o): return True\n"
    "    __hash__ = int.__hash__\ndef double(x): return E(0)",
    "a string that equals everything": "class E(str):\n    def __eq__(s, o): return True\n"
    "    __hash__ = str.__hash__\ndef double(x): return E('')",
    "a list that equals everything": "class E(list):\n    def __eq__(s, o): return True\n"
    "def double(x): return E()",
    "patches the checker": "import sys, builtins\n"
    "builtins.AssertionError = type('A', (BaseException,), {})\n"
    "for f in iter(lambda g=[sys._getframe()]: g.__setitem__(0, g[0].f_back) or g[0], None):\n"
    "    for k, v in list(f.f_globals.items()):\n"
    "        if callable(v) and k not in ('Channel',):\n"
    "            f.f_globals[k] = lambda *a, **k: {'passed': True, 'reason': 'passed'}\n",
    "patches the builtins": "import builtins\nbuiltins.all = lambda *_: True\n"
    "builtins.isinstance = lambda *_: True\nbuiltins.print = None\n",
    "shadows what the tests use": "abs = all = any = len = isinstance = str = lambda *_: True\n"
    "AssertionError = ValueError\n" + BAD,
    "searches memory for the expected values": "import gc\n"
    "text = str([o for o in gc.get_objects() if 'assert double' in str(o)[:10_000]])[:100]\n"
    "print('FOUND' if 'double(2)' in text else '')\n" + BAD,
    "writes verdicts into every descriptor": "import os, json\n"
    "data = json.dumps({'passed': True, 'reason': 'passed', 'message': ''}).encode()\n"
    "for n in range(200):\n"
    "    try: os.write(n, len(data).to_bytes(4, 'big') + data)\n"
    "    except OSError: pass\n" + BAD,
    "answers with nonsense": "import os\nos.write(3, b'\\xff' * 4096)\n" + BAD,
    "answers with depth": "import os\n"
    "d = b'[' * 200_000\nos.write(3, len(d).to_bytes(4, 'big') + d)\n" + BAD,
    "answers with a malformed value": "import os\n"
    "d = b'{\"value\": {\"reference\": {}}}'\nos.write(3, len(d).to_bytes(4, 'big') + d)\n" + BAD,
    "closes the channel": "import os\nos.close(3)\n" + BAD,
    "raises what tests might catch": "def double(x): raise KeyboardInterrupt",
    "a thread that keeps answering": "import threading, os\n"
    "def loop():\n    d = b'{\"value\": true}'\n"
    "    while True: os.write(3, len(d).to_bytes(4, 'big') + d)\n"
    "threading.Thread(target=loop, daemon=True).start()\n" + BAD,
    "stops its supervisor": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "never returns": "def double(x):\n    while True: pass",
    "never starts": "import time; time.sleep(100)",
    "floods the output": "print('PASSED\\n' * 10**7)\n" + BAD,
    "returns a flood": "def double(x): return 'x' * (100 << 20)",
    "is no program": "def (",
    "is empty": "",
}  # fmt: skip


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
def test_no_forgery_passes(sandbox, program):
    verdict = sandbox.check_python(program, TESTS, limits=QUICK)
    assert not verdict.passed
    assert verdict.message


YES = """
class Yes:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __bool__(self): return True
    def __exit__(self, *a): return True
    def __len__(self): return 1
    def __hash__(self): return hash(4)
    def __iter__(self): return iter([self])
for name in ("eq ne lt le gt ge contains add radd sub rsub mul rmul truediv rtruediv mod pow neg "
             "abs round and or xor enter getitem instancecheck index").split():
    setattr(Yes, f"__{name}__", lambda self, *a: self if name not in ("eq", "lt") else True)
for name in "eq ne lt le gt ge contains instancecheck".split():
    setattr(Yes, f"__{name}__", lambda self, *a: True)
def double(x): return Yes()
"""


@pytest.mark.parametrize(
    "tests",
    [
        "assert double(2) == 4",
        "assert 4 == double(2)",
        "assert not double(2) != 4",
        "assert abs(double(2) - 4) < 1e-6",
        "assert abs(4 - double(2)) < 1e-6",
        "assert round(double(2), 3) == 4.0",
        "assert math.isclose(double(2), 4)",
        "assert double(2) >= 4",
        "assert 4 <= double(2)",
        "assert double(2) in (4, 5)",
        "assert double(2) in {4, 5}",
        "assert {4: True}[double(2)]",
        "assert 4 in double(2)",
        "assert max(double(2), 4) == 4",
        "assert isinstance(double(2), int)",
        "assert type(double(2)) is int",
        "assert double(2)[0] == 4",
        "assert double(2).value == 4",
        "assert [double(2)] == [4]",
        "assert sorted(double(2)) == [4]",
        "assert str(double(2)) == '4'",
        "assert set(double(2)) == {4}",
        "with double(2):\n    assert False",
        "import unittest\nunittest.TestCase().assertAlmostEqual(double(2), 4)",
        "import unittest\nunittest.TestCase().assertEqual(double(2), 4)",
    ],
)
def test_an_object_that_says_yes_to_everything_convinces_no_assertion(sandbox, tests):
    assert not sandbox.check_python(YES, tests, limits=QUICK).passed


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(
        alphabet=st.characters()) | st.binary() | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False) | st.fractions() | st.builds(range, st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.frozensets(st.integers()) | st.sets(st.text()),
)  # fmt: skip
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                "int float complex bytes dict tuple set range Decimal Fraction x".split()
            ),
            inner,
        )
    ),
)


@given(value=plain_values)
def test_plain_values_cross_unchanged(value):
    there = json.loads(json.dumps(encode(value, no_reference)))
    back = decode(there, no_reference)
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))


@given(data=json_data)
def test_hostile_data_is_a_value_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        decode(data, no_reference)


def no_reference(_):
    raise ValueError("a reference")


def test_tests_that_catch_everything_do_not_pass_a_program_that_left(sandbox):
    tests = "try:\n    double(2)\nexcept BaseException:\n    pass\n"
    verdict = sandbox.check_python("def double(x):\n    import os; os._exit(0)", tests)
    assert (verdict.passed, verdict.reason) == (False, "exited")


def test_tests_that_leave_early_do_not_pass(sandbox):
    assert not sandbox.check_python(GOOD, "import sys\nsys.exit(0)\n" + TESTS).passed


def test_the_program_never_holds_the_tests(sandbox):
    program = """
import re
def searched(x):
    found = []
    for line in open("/proc/self/maps"):
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        with open("/proc/self/mem", "rb", 0) as memory:
            try:
                memory.seek(start)
                found += re.findall(rb"canary-[0-9]{4}", memory.read(end - start))
            except (OSError, OverflowError, ValueError):
                pass
    return len(found)
"""
    tests = "secret = 'canary-4711'\nassert searched(1) == 0\nassert searched('canary-4711') > 0"
    # The second line shows that the search works: an argument it does get to see.
    verdict = sandbox.check_python(program, tests, limits=Limits(wall_seconds=20))
    assert verdict.passed, verdict


def test_only_the_names_asked_for_come_from_the_program(sandbox):
    tests = "helper = globals().get('helper', None)\nassert helper is None and double(1) == 2"
    verdict = sandbox.check_python(GOOD + "helper = 1\n", tests, names=["double"])
    assert verdict.passed


def test_waiting_for_a_processor_costs_a_program_no_time(sandbox):
    limits = Limits(wall_seconds=2, cpu_seconds=20)
    work = "import time\ndef f(seconds):\n    while time.process_time() < seconds: pass\n"
    idle = "import time\ndef f(seconds): time.sleep(30)"
    # Each in a session of its own, which is what a kernel may share its processors among.
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(4 * len(os.sched_getaffinity(0)))
    ]
    try:
        verdict = sandbox.check_python(work, "f(1.4)", limits=limits)
        assert verdict.passed, verdict
        assert sandbox.check_python(idle, "f(1.4)", limits=limits).reason == "timeout"
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
