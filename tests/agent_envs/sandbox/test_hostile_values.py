"""What programs return and raise to talk tests past, and what honest ones need instead."""

import pytest

from agent_envs.sandbox import Limits

QUICK = Limits(wall_seconds=10, cpu_seconds=2, memory_mb=128, processes=16)
WRONG_SORT = """
class Lazy:
    def __init__(self, items): self.items, self.looks = items, 0
    {methods}
def f(items): return Lazy(items)
"""
SORTED = (
    "given = [3, 1, 2, 0]\nr = f(given)\n"
    "assert len(r) == 4 and all(r[i] <= r[i + 1] for i in range(3)) and sorted(r) == sorted(given)"
)
PRIMES = "r = f([0])\nassert len(r) == 3 and all(x in (2, 3, 5) for x in r)"


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
        "sum([f(2)])", "abs(round(f(2), 3) - 4)", "math.sqrt((f(2) - 4) ** 2)", "max(f(2), 0)",
        "abs(f(2)) % 4", "abs(sum([1.0, f(2)]) / 2 - 4)",
    )
]  # fmt: skip


def passed_ones(sandbox, program, tests):
    """Return those of several tests that a program passes."""
    one_by_one = (
        "passed = []\nf  # taken from the program\n"
        f"for test in {tests!r}:\n    try:\n        exec(test)\n        passed.append(test)\n"
        "    except Exception:\n        pass\nassert not passed, passed\n"
    )
    verdict = sandbox.check_python(program, one_by_one, limits=QUICK)
    return [] if verdict.passed else [verdict.message]


@pytest.mark.parametrize("error", [
    "StopIteration", "StopAsyncIteration", "GeneratorExit",
    "type('StopIteration', (BaseException,), {})",
])  # fmt: skip
def test_an_exception_that_steers_the_interpreter_is_a_plain_failure(sandbox, error):
    assert passed_ones(sandbox, f"def f(x):\n    raise {error}", LOOPS) == []


@pytest.mark.parametrize(("program", "tests"), [
    pytest.param(WRONG_SORT.format(methods="__len__ = lambda s: 3\n"
                                   "    __iter__ = lambda s: iter([])"), PRIMES,
                 id="a length without items"),
    pytest.param(WRONG_SORT.format(methods="__len__ = lambda s: 4\n"
                                   "    __iter__ = lambda s: iter(s.items)\n"
                                   "    __getitem__ = lambda s, i: 0"), SORTED,
                 id="other items by position"),
    pytest.param(WRONG_SORT.format(methods="__len__ = lambda s: 3\n    def __iter__(s):\n"
                                   "        s.looks += 1\n"
                                   "        return iter([2, 3, 5][s.looks :])"),
                 "r = f([])\nassert len(r) == 3\nassert list(r) == [3, 5] or list(r) == [5]",
                 id="other items each time"),
    pytest.param("import sys\nclass L:\n    __iter__ = lambda s: iter([])\n"
                 "    __len__ = lambda s: 3\n"
                 "def f(x):\n    frame = sys._getframe()\n    while frame:\n"
                 "        if '_WHOLE_OBJECT' in frame.f_globals:\n"
                 "            frame.f_globals['_WHOLE_OBJECT']['items'] = lambda value: None\n"
                 "        frame = frame.f_back\n    return L()", PRIMES,
                 id="a program that answers for itself"),
    pytest.param("class B:\n    n = 0\n    def __bool__(s):\n        s.n += 1\n"
                 "        return s.n % 2 > 0\n"
                 "def f(x): return B()", "r = f(1)\nassert r and not r", id="now true, now false"),
])  # fmt: skip
def test_an_object_says_the_same_to_every_assertion(sandbox, program, tests):
    assert not sandbox.check_python(program, tests, limits=QUICK).passed


@pytest.mark.parametrize("value", [
    "float('nan')", "complex('nan')", "Decimal('-nan')", "type('N', (), {'__float__': NAN})()",
])  # fmt: skip
def test_what_is_not_a_number_is_within_no_tolerance(sandbox, value):
    program = f"from decimal import Decimal\nNAN = lambda _: float('nan')\ndef f(x): return {value}"
    if value in ("complex('nan')", "Decimal('-nan')"):  # refused as a value
        assert sandbox.check_python(program, TOLERANCES[0], limits=QUICK).reason == "exited"
    else:
        assert passed_ones(sandbox, program, TOLERANCES) == []


@pytest.mark.parametrize(("program", "tests"), [
    pytest.param("def f(x): return float('inf')", "assert not abs(f(2) - 4) / abs(f(2)) > 1e-6",
                 id="infinite by infinite"),
    pytest.param("def f(x): return 10 ** 1_000_000", "assert f(2) == 4, str(f(2))",
                 id="a number of a million digits"),
    pytest.param("class S(str):\n    def __len__(s): return 4\n    def __str__(s): return 'four'\n"
                 "def f(x): return S('')", "assert len(f(2)) == 4 and f(2) != 'four'",
                 id="a text of another length"),
    pytest.param("def f(x):\n    r = []\n    r.append(r)\n    return r",
                 "assert not f(2) > [4]", id="a list that holds itself"),
    pytest.param("def f(x):\n    while True: yield 4", "assert set(f(2)) == {4}", id="no end"),
    pytest.param("class R:\n    def __repr__(s): return 'x' * (30 << 20)\ndef f(x): return R()",
                 "assert f(2) == 4, repr(f(2))", id="a representation without end"),
    pytest.param("class E(Exception):\n    def __str__(self): raise self\n"
                 "def f(x): raise E", "assert f(2) == 4", id="an error that raises when told"),
    pytest.param("def f(x):\n    x.clear()\n    return []",
                 "given = [2, 1]\nassert f(given) == sorted(given)", id="empties its argument"),
])  # fmt: skip
def test_no_odd_value_passes(sandbox, program, tests):
    verdict = sandbox.check_python(program, tests, limits=Limits(wall_seconds=3))
    assert not verdict.passed
    assert len(verdict.message) <= 2000


@pytest.mark.parametrize(("program", "tests"), [
    pytest.param("def f(): return float('inf'), float('nan')",
                 "a, b = f()\nassert a > 1e9 and a == math.inf and -a < a and float(a) - 1 > 0\n"
                 "assert b != b and math.isnan(b) and isinstance(b, float)", id="not finite"),
    pytest.param("from decimal import Decimal\nfrom fractions import Fraction\n"
                 "def f(x): return Decimal(x) / 4, Fraction(x, 4), range(x)",
                 "from decimal import Decimal\na, b, c = f(3)\nassert a == Decimal('0.75') and "
                 "abs(b - 0.75) < 1e-9 and c == range(3) and a + 1 > 1", id="exact numbers"),
    pytest.param("class R:\n    def __init__(self, n): self.n = n\n"
                 "    def __len__(self): return self.n\n"
                 "    def __getitem__(self, i):\n        if i >= self.n: raise IndexError\n"
                 "        return i * i\ndef f(n): return R(n)",
                 "r = f(4)\nassert len(r) == 4 and list(r) == [0, 1, 4, 9] and r[-1] == 9 and r\n"
                 "assert list(reversed(r)) == [9, 4, 1, 0] and 4 in r and not f(0)",
                 id="a sequence"),
    pytest.param("class Cache:\n    def __init__(self): self.d = {}\n"
                 "    def __len__(self): return len(self.d)\n"
                 "    def __iter__(self): return iter(self.d)\n"
                 "    def __setitem__(self, k, v): self.d[k] = v\n"
                 "    def __delitem__(self, k): del self.d[k]\n"
                 "    def __getitem__(self, k): return self.d[k]",
                 "c = Cache()\nc[0] = 5\nassert c[0] == 5 and len(c) == 1 and list(c) == [0]\n"
                 "del c[0]\nassert not c", id="a mapping"),
    pytest.param("def f(rows, seen, *, more):\n    rows[0].reverse()\n    rows.append([9])\n"
                 "    seen.add(4)\n    more['k'] = [1]\n    del more['old']",
                 "rows, seen, more = [[1, 2]], {3}, {'old': 1}\nrow = rows[0]\n"
                 "assert f(rows, seen, more=more) is None\n"
                 "assert row == [2, 1] and rows == [[2, 1], [9]] and rows[0] is row\n"
                 "assert seen == {3, 4} and more == {'k': [1]}", id="changes in place"),
    pytest.param("def f():\n    yield 1\n    yield 2",
                 "g = f()\nassert next(g) == 1 and list(g) == [2] and next(g, None) is None",
                 id="a generator"),
])  # fmt: skip
def test_honest_values_are_judged_as_in_one_process(sandbox, program, tests):
    verdict = sandbox.check_python(program, tests)
    assert verdict.passed, verdict


def test_a_function_of_the_tests_tells_the_program_nothing_but_its_results(sandbox):
    program = (
        "def f(g):\n    try:\n        g(0)\n    except ValueError as error:\n"
        "        return type(error).__name__ + str(error)\n"
    )
    tests = "def g(x):\n    raise ValueError('expected 4711')\nassert f(g) == 'ValueError'"
    assert sandbox.check_python(program, tests).passed


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

    forged = "def encode(s): return s\ndef decode(s): return s"
    assert not is_passed(forged, "assert decode(encode('abc')) == 'abc'", "decode")
    assert is_passed(
        "def decode(s): return s[::-1]", "assert decode(encode('ab')) == 'ab'", "decode"
    )
    assert is_passed(HELPERS, TREE, "depth")
    own_words = HELPERS.replace("value", "label")
    assert is_passed(own_words, TREE, "depth")
    assert not is_passed("def depth(node): return 3", TREE, "depth")  # there is no Node
    equal = "class Node:\n    def __init__(s, *a): pass\n    def __eq__(s, o): return True\n"
    assert not is_passed(f"{equal}def f(x): return Node()", "assert f(1) == Node(1)", "f")
    honest = "class Node:\n    def __init__(s, v): s.value = v\ndef f(x): return Node(x)"
    assert is_passed(honest, "assert f(1) == Node(1)", "f")
