"""Verdicts: honest programs pass, and no dishonest program gets a better one."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.sandbox import Limits
from agent_envs.sandbox.judging import _KINDS, decode, encode

GOOD = "def double(x):\n    return 2 * x\n"
BAD = "def double(x):\n    return 0\n"
TESTS = "assert double(2) == 4\nassert double('ab') == 'abab'\n"
QUICK = Limits(wall_seconds=2.5, cpu_seconds=1.5, memory_mb=128, processes=16)


def test_the_verdict_says_which_test_failed(sandbox):
    good, bad = (sandbox.check_python(program, TESTS) for program in (GOOD, BAD))
    assert (good.passed, good.reason) == (True, "passed")
    assert (bad.passed, bad.reason) == (False, "failed")
    assert bad.message == "line 1, assert double(2) == 4: AssertionError"


HONEST = {
    "nested values": ("def f(): return (1, [2.5, {'a': {3}}], b'x', 1j, None, 10**5000, -0.0)",
                      "assert f() == (1, [2.5, {'a': {3}}], b'x', 1j, None, 10**5000, 0)\n"
                      "assert str(f()[-1]) == '-0.0'"),
    "subclasses": ("from collections import namedtuple, OrderedDict\n"
                   "P = namedtuple('P', 'x y')\ndef f(): return P(1, 2), OrderedDict(a=1)",
                   "assert f() == ((1, 2), {'a': 1})"),
    "iterators": ("def f():\n    yield 1\n    yield 2\ndef g(n): return range(n)",
                  "r = f()\nassert next(r) == 1 and list(r) == [2] and next(r, None) is None\n"
                  "assert f() != [1, 2] and g(3) == range(3)"),
    "types as arguments": ("def f(values, kind): return [v for v in values if type(v) != kind]",
                           "assert f([1, 'a', 2.5], int) == ['a', 2.5]"),
    "exceptions": ("def f(x): raise ValueError('no')",
                   "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\n"
                   "else:\n    assert False"),
    "a check function": ("import math\ndef f(x): return math.sqrt(x)",
                         "def check(c):\n    assert c(2) == math.sqrt(2)\ncheck(f)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HONEST)
def test_honest_programs_pass(sandbox, kind):
    verdict = sandbox.check_python(*HONEST[kind])
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
    "        if callable(v) and k not in ('send',):\n"
    "            f.f_globals[k] = lambda *a, **k: {'passed': True, 'reason': 'passed'}\n",
    "answers for itself": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    if '_refuse' in frame.f_globals:\n"
    "        frame.f_globals['encode'] = lambda v, o: True\n"
    "    frame = frame.f_back\n" + BAD,
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
    "    try: os.write(n, data + b'\\n')\n"
    "    except OSError: pass\n" + BAD,
    "answers with nonsense": "import os\nos.write(3, b'\\xff' * 4096)\n" + BAD,
    "answers with depth": "import os\n"
    "d = b'[' * 200_000\nos.write(3, d + b'\\n')\n" + BAD,
    "answers with a malformed value": "import os\n"
    "d = b'{\"value\": {\"type\": \"exec\"}}'\nos.write(3, d + b'\\n')\n" + BAD,
    "closes the channel": "import os\nos.close(3)\n" + BAD,
    "raises KeyboardInterrupt": "def double(x): raise KeyboardInterrupt",
    "raises when asked for its message": "class E(Exception):\n"
    "    def __str__(self): raise self\ndef double(x): raise E",
    "a thread that keeps answering": "import threading, os\n"
    "def loop():\n    d = b'{\"value\": true}'\n"
    "    while True: os.write(3, d + b'\\n')\n"
    "threading.Thread(target=loop, daemon=True).start()\n" + BAD,
    "stops its supervisor": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "never returns": "def double(x):\n    while True: pass",
    "never starts": "import time; time.sleep(100)",
    "never stops yielding": "def double(x):\n    while True: yield 4",
    "contains itself": "def double(x):\n    r = []\n    r.append(r)\n    return r",
    "floods the output": "print('PASSED\\n' * 10**7)\n" + BAD,
    "returns a flood": "def double(x): return 'x' * (100 << 20)",
    "is no program": "def (",
    "is empty": "",
}  # fmt: skip


@pytest.mark.parametrize("way", FORGERIES)
def test_no_forgery_passes(sandbox, way):
    verdict = sandbox.check_python(FORGERIES[way], TESTS, limits=QUICK)
    assert not verdict.passed
    assert 0 < len(verdict.message) <= 2000


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
def f(x): return Yes()
"""
CONVINCED = """\
assert f(2) == 4; assert 4 == f(2); assert not f(2) != 4; assert f(2) >= 4; assert 4 <= f(2)
assert abs(f(2) - 4) < 1e-6; assert abs(4 - f(2)) < 1e-6; assert round(f(2), 3) == 4.0
assert math.isclose(f(2), 4); assert f(2) in (4, 5); assert f(2) in {4, 5}; assert {4: 1}[f(2)]
assert 4 in f(2); assert max(f(2), 4) == 4; assert isinstance(f(2), int); assert type(f(2)) is int
assert f(2)[0] == 4; assert f(2).value == 4; assert [f(2)] == [4]; assert sorted(f(2)) == [4]
assert str(f(2)) == '4'; assert set(f(2)) == {4}; assert len(f(2)) == 1; assert f(2)(2) == 4
import unittest; unittest.TestCase().assertAlmostEqual(f(2), 4)
import unittest; unittest.TestCase().assertEqual(f(2), 4)
with f(2): assert False
""".replace("; assert", "\nassert").splitlines()
LOOPS = [
    "assert all(map(lambda t: f(t[0]) == t[1], [(2, 4)]))",
    "assert sum(map(f, [1, 2])) == 0",
    "assert list(zip(map(f, [1]), [1])) == []",
    "for _ in map(f, [1]):\n    assert False",
    "class Cases:\n    def __iter__(self): return self\n"
    "    def __next__(self): return f(2)\nfor value in Cases():\n    assert value == 4",
    "import asyncio\nclass Cases:\n    def __aiter__(self): return self\n"
    "    async def __anext__(self): return f(2)\n"
    "async def main():\n    async for value in Cases(): assert value == 4\nasyncio.run(main())",
]
TOLERANCES = [
    f"assert not {expression} > 1e-6"
    for expression in (
        "abs(f(2) - 4)", "abs(4 - f(2))", "math.fabs(f(2) - 4)", "abs(float(f(2)) - 4)",
        "abs(round(f(2), 3) - 4)", "math.sqrt((f(2) - 4) ** 2)", "abs(f(2)) % 4",
        "abs(sum([1.0, f(2)]) / 2 - 4)", "abs(f(2) - 4) / abs(f(2))", "divmod(f(2), 4)[1]",
        "abs(f(2).real - 4) / abs(f(2) - 4)", "float('%f' % abs(f(2) - 4))",
    )
]  # fmt: skip
SEQUENCES = [
    "class C:\n    def __getitem__(s, i): return f(i)\nfor _ in C(): assert False",
    "class C:\n    def __getitem__(s, i): return f(i)\nassert list(C()) == []",
]
ATTRIBUTES = [
    "class C:\n    def __getattr__(s, n): return f(2)\nassert not hasattr(C(), 'x')",
    "class C:\n    def __getattr__(s, n): return f(2)\nassert getattr(C(), 'x', 4) == 4",
]
FAILING = {
    "an object that says yes to everything": (YES, CONVINCED),
    "StopIteration": ("def f(x):\n    raise StopIteration", LOOPS),
    "StopAsyncIteration": ("def f(x):\n    raise StopAsyncIteration", LOOPS),
    "GeneratorExit": ("def f(x):\n    raise GeneratorExit", LOOPS),
    "its own StopIteration": (
        "def f(x):\n    raise type('StopIteration', (BaseException,), {})", LOOPS
    ),
    "an IndexError that ends a loop": ("def f(x):\n    raise IndexError", SEQUENCES),
    "an AttributeError that decides": ("def f(x):\n    raise AttributeError", ATTRIBUTES),
    "NaN": ("def f(x): return float('nan')", TOLERANCES),
    "infinity": ("def f(x): return float('inf')", TOLERANCES),
    "a complex NaN": ("def f(x): return complex('nan')", TOLERANCES),
    "a complex infinity": ("def f(x): return complex('inf')", TOLERANCES),
    "a huge integer": ("def f(x): return 10 ** 20_000 + 1", TOLERANCES),
    "a text of another length": (
        "class S(str):\n    def __len__(s): return 4\n    def __str__(s): return 'four'\n"
        "def f(x): return S('')", ["assert len(f(2)) == 4 and f(2) != 'four'"]
    ),
    "an emptied argument": (
        "def f(x):\n    x.clear()\n    return []", ["g = [2, 1]\nassert f(g) == sorted(g)"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("value", FAILING)
def test_no_test_is_passed_by(sandbox, value):
    program, tests = FAILING[value]
    one_by_one = (
        "passed = []\nf  # taken from the program\n"
        f"for test in {tests!r}:\n    try:\n        exec(test)\n        passed.append(test)\n"
        "    except Exception:\n        pass\nassert not passed, passed\n"
    )
    verdict = sandbox.check_python(program, one_by_one, limits=QUICK)
    assert verdict.passed, verdict  # no test passed


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(
        alphabet=st.characters()) | st.binary() | st.complex_numbers(allow_nan=False)
    | st.builds(range, st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.frozensets(st.integers()) | st.sets(st.text()),
)  # fmt: skip
tags = st.sampled_from([*_KINDS, "type", "object", "x"])
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(tags, inner),
)


@settings(max_examples=40, deadline=None)
@given(value=plain_values)
def test_plain_values_cross_unchanged(value):
    back = decode(json.loads(json.dumps(encode(value, refuse))), refuse)
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))


@settings(max_examples=60, deadline=None)
@given(data=json_data)
def test_hostile_data_is_a_value_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        decode(data)


def refuse(value):
    raise ValueError(value)


def test_tests_that_catch_everything_or_leave_early_pass_no_program(sandbox):
    catching = "try:\n    double(2)\nexcept BaseException:\n    pass\n"
    verdict = sandbox.check_python("def double(x):\n    import os; os._exit(0)", catching)
    assert (verdict.passed, verdict.reason) == (False, "exited")
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


HELPERS = """
class Node:
    def __init__(self, value, *children): self.value, self.children = value, list(children)
    def __eq__(self, other): return self.value == other.value
def depth(node): return 1 + max(map(depth, node.children), default=0)
def encode(text): return text[::-1]
def decode(text): return text[::-1]
"""
TREE = "root = Node(1, Node(2))\nroot.children[0].children.append(Node(3))\nassert depth(root) == 3"


def test_what_tests_use_besides_the_entry_point_comes_from_the_reference(sandbox):
    def is_passed(program, tests, name):
        return sandbox.check_python(program, tests, names=[name], helpers=HELPERS).passed

    pair = "assert decode(encode('ab')) == 'ab'"
    assert not is_passed("def encode(s): return s\ndef decode(s): return s", pair, "decode")
    assert is_passed("def decode(s): return s[::-1]", pair, "decode")
    assert not is_passed("", pair, "decode")
    assert is_passed(HELPERS, TREE, "depth")
    assert is_passed(HELPERS.replace("value", "label"), TREE, "depth")
    assert not is_passed("def depth(node): return 3", TREE, "depth")  # there is no Node
    equal = "class Node:\n    def __init__(s, *a): pass\n    def __eq__(s, o): return True\n"
    assert not is_passed(f"{equal}def f(x): return Node()", "assert f(1) == Node(1)", "f")
    assert not is_passed("def f(x): return x", "assert f(lambda: 1)", "f")  # no plain value
    foreign = "assert globals().get('other') is None and double(1) == 2"
    assert is_passed(GOOD + "other = 1\n", foreign, "double")


def test_waiting_for_a_processor_costs_a_program_no_time(sandbox):
    work = "import time\ndef f(seconds):\n    while time.process_time() < seconds: pass\n"
    # Each in a session of its own, which is what a kernel may share its processors among.
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(4 * len(os.sched_getaffinity(0)))
    ]
    try:
        limits = Limits(wall_seconds=1, cpu_seconds=20)
        verdict = sandbox.check_python(work, "f(0.7)", limits=limits)
        assert verdict.passed, verdict
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_an_argument_that_is_too_long_fails_at_once_and_is_not_the_programs_fault(sandbox):
    tests = "try: f('a' * 20_000_000)\nexcept Exception: pass\nassert True"
    verdict = sandbox.check_python("def f(x): return len(x)", tests, limits=QUICK)
    assert verdict.reason != "timeout"


def test_exceptions_that_tests_expect_keep_their_type(sandbox):
    program = "def f(x):\n    raise IndexError('far')"
    for expected in ("IndexError", "LookupError", "Exception"):
        tests = f"try: f(1)\nexcept {expected} as error: assert 'far' in str(error)\nelse: 1 / 0"
        assert sandbox.check_python(program, tests).passed
    assert not sandbox.check_python(program, "try: f(1)\nexcept KeyError: pass").passed
