import itertools
import json
import sys
import types

import gymnasium as gym
import pytest

from agent_envs import UnknownNameError

pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed")
pytest.importorskip("mpmath", reason="the extra bfcl is not installed")

from agent_envs.envs.functions.bfcl_checks import right_turns
from agent_envs.envs.functions.bfcl_rows import LANGUAGES, categories, read_category, tool_name
from tests.agent_envs.envs import playing
from tests.agent_envs.envs.playing import call, solve

ID = "AgentR1/BFCL-v0"
MULTI_TURN = "multi_turn_base"
MODELS = itertools.count()


def make(category=MULTI_TURN, task=0, **kwargs):
    return playing.make(ID, task, category=category, **kwargs)


def answer(env):
    return playing.answer(env, "Done.")


FORMATS = ["hermes", "tags", "json", "react", "openai"]


@pytest.mark.parametrize(
    ("category", "tool_format"),
    [*zip(categories()["all"], FORMATS * 4, strict=False), *((MULTI_TURN, f) for f in FORMATS)],
)
def test_the_ground_truth_is_right_in_every_format(category, tool_format):
    env = make(category, tool_format=tool_format)
    total, info = solve(env, task=2)
    assert info["metrics"]["success"] == info["metrics"]["turns_passed"] == 1.0
    assert total == pytest.approx(1.2)


def succeeds_here(category, index, turns):
    env = make(category, index, max_episode_steps=-1)
    row = env.unwrapped._row
    for calls in turns:
        steps = [calls[start : start + 8] for start in range(0, len(calls), 8)]
        if not row.is_multi_turn:
            steps = [calls] if calls else []
        actions = [
            env.unwrapped._write_calls([(tool_name(n), a) for n, a in step]) for step in steps
        ]
        if row.is_multi_turn or not calls:
            actions.append(env.unwrapped.write_answer("Done."))
        for action in actions:
            *_, terminated, _, info = env.step(action)
            if terminated:
                return bool(info["metrics"]["success"])
    return False


def succeeds_officially(category, index, turns):
    row = read_category(category)[index]
    truth = list(row.ground_truth)
    if row.is_multi_turn:
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

        texts = [
            [[f"{name}({', '.join(f'{n}={v!r}' for n, v in own.items())})"] for name, own in calls]
            for calls in turns
        ]
        # the package keeps its objects as globals by model, so each sample is another model
        entry = {"initial_config": dict(row.configuration), "id": row.id,
                 "involved_classes": list(row.classes)}  # fmt: skip
        model = f"model{next(MODELS)}"
        return multi_turn_checker(texts, truth, entry, category, model)["valid"]
    # the handlers of models need many libraries; only this table imports them
    table = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=True)}
    sys.modules.setdefault(table.__name__, table)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    language = Language[LANGUAGES.get(category, "Python").upper()]
    calls = [{tool_name(name): dict(own)} for name, own in turns[0]]
    try:
        return ast_checker(list(row.functions), calls, truth, language, category, "any")["valid"]
    except Exception:  # noqa: BLE001 - the package itself would stop here: not a right answer
        return False


def mutations(turns):
    """Yield changes of the first call and of its first argument."""
    turn = next(i for i, calls in enumerate(turns) if calls)
    first, *others = turns[turn]
    name, arguments = first
    wrong = [[], [first, first], [(name, {**arguments, "extra": 1})]]
    for key, value in list(arguments.items())[:1]:
        rest = {n: v for n, v in arguments.items() if n != key}
        for new in (f"{value} or not", [value], str(value), 7):
            wrong.append([(name, {**arguments, key: new})])
        wrong.append([(name, rest)])
    for calls in wrong:
        yield [*turns[:turn], [*calls, *others], *turns[turn + 1 :]]
    yield [*turns[:turn], [*others, first], *turns[turn + 1 :]]
    yield [*turns[:-1], [*turns[-1], ("no_function", {})]]


@pytest.mark.parametrize(
    "category", [MULTI_TURN, "multi_turn_miss_func", "parallel_multiple", "simple_java"]
)
def test_verdicts_agree_with_the_package(category):
    truths = [(i, right_turns(row)) for i, row in enumerate(read_category(category)[:8])]
    wrong = 0
    for index, turns in truths:
        if turns:
            assert succeeds_here(category, index, turns)
            assert succeeds_officially(category, index, turns)
            for changed in mutations(turns):
                verdict = succeeds_officially(category, index, changed)
                assert succeeds_here(category, index, changed) == verdict, changed
                wrong += not verdict
    assert wrong > 20


def test_each_passed_turn_earns_once_until_one_fails():
    env = make()
    assert [call(env, "cd", folder="document")[1] for _ in range(2)][-1] <= 0.02
    assert call(env, "mkdir", dir_name="temp")[1] <= 0.02
    call(env, "mv", source="final_report.pdf", destination="temp")
    text, *_, info = answer(env)
    assert text.startswith("Perform a detailed search using grep")
    assert info["reward_terms"]["turns"] == pytest.approx(0.2 / 4)
    steps = [answer(env) for _ in range(3)]  # nothing was called
    assert [step[2] for step in steps] == [False, False, True]
    assert all(step[4]["reward_terms"]["turns"] == 0.0 for step in steps)
    assert steps[-1][4]["metrics"]["success"] == 0.0


def test_added_functions_are_offered_from_their_turn_on():
    env = make("multi_turn_miss_func", task=0)
    assert "sort" not in [tool["function"]["name"] for tool in env.step("")[4]["tools"]]
    for _ in range(3):
        text, *_, info = answer(env)
    assert text == "I have updated some more functions you can choose from. What about now?"
    assert "sort" in [tool["function"]["name"] for tool in info["tools"]]


def test_neither_state_nor_task_contains_the_ground_truth():
    env = make()
    shown = json.dumps(env.step("")[4])
    assert "grep(file_name" not in shown
    assert env.unwrapped.task.answers == ()
    assert "ground_truth" not in json.dumps(env.unwrapped.task.data)


EXPENSIVE = [
    ("power", {"base": 10, "exponent": 10**9}),
    ("round_number", {"number": 5, "decimal_places": -(10**12)}),
    ("square_root", {"number": 2, "precision": 10**9}),
    ("logarithm", {"value": 2, "base": 10, "precision": 10**9}),
    ("mean", {"numbers": "x"}),
    ("mean", {"self": 1, "__class__": 2}),
    ("no such thing", {}),
]


def test_an_expensive_call_is_an_observation():
    index = next(i for i, row in enumerate(read_category(MULTI_TURN)) if "MathAPI" in row.classes)
    env = make(task=index, max_episode_steps=-1)
    for name, arguments in EXPENSIVE:  # some would run for hours
        *_, terminated, _, info = call(env, name, **arguments)
        assert not terminated
        assert "error" in info["action"] or "error" in info["tool_result"]
    env = make(max_episode_steps=-1)  # a folder cannot contain itself
    call(env, "cd", folder="document")
    call(env, "mkdir", dir_name="d")
    *_, info = call(env, "cp", source="d", destination="d")
    assert "a folder would hold itself" in info["tool_result"]
    ends = [call(env, "pwd")[2] for _ in range(18)]  # a user turn has twenty steps
    assert ends == [False] * 17 + [True]


def test_javascript_with_exponential_backtracking_is_wrong():
    rows = read_category("simple_javascript")
    kinds = [row.functions[0]["parameters"]["properties"].values() for row in rows]
    index = next(i for i, each in enumerate(kinds) if "array" in [p["type"] for p in each])
    env = make("simple_javascript", task=index)
    function = env.step("")[4]["tools"][0]["function"]
    arguments = dict.fromkeys(function["parameters"]["properties"], "[[a]" + ",[a]" * 60 + "x")
    *_, terminated, _, info = call(env, function["name"], **arguments)
    assert terminated
    assert info["metrics"]["success"] == 0.0


def test_nothing_a_model_writes_is_evaluated(tmp_path):
    path = tmp_path / "made"
    env = make()
    call(env, "echo", content=f"__import__('pathlib').Path({str(path)!r}).touch()", file_name=None)
    call(env, "cd", folder=f"')) or open({str(path)!r}, 'w') or (('")
    assert not path.exists()


def test_wrong_arguments_are_errors():
    with pytest.raises(UnknownNameError, match="multi_turn_base"):
        gym.make(ID, category="multi_turn_bas")
