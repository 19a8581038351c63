"""Agreement with BFCL's official checker on the ground truth and on mutations of it.

``python -m benchmarks.bfcl_agreement --mutations 500`` counts by category how many sequences of
calls both judge right or wrong, or differently, and lists the latter. The official checker gets
Python calls as text, as the package writes them for models with function calling.
"""

import argparse
import random
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.envs.functions.bfcl_checks import Call, right_turns
from agent_envs.envs.functions.bfcl_rows import (
    LANGUAGES,
    Row,
    choose_categories,
    read_category,
    tool_name,
)

Turns = list[list[Call]]
"""Calls by turn of the user."""
_MODEL_TABLE: Final = "bfcl_eval.constants.model_config"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bfcl_agreement")
    parser.add_argument("--category", nargs="+", default=["all"])
    parser.add_argument("--mutations", type=int, default=500, help="mutated samples in total")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts, differences = compare(options.category, options.mutations, random.Random(options.seed))  # noqa: S311
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")  # noqa: T201
    for line in differences:
        print(line)  # noqa: T201


def compare(
    categories: Sequence[str],
    num_mutations: int,
    rng: random.Random,
    num_rows: int | None = None,
) -> tuple[Counter[str], list[str]]:
    """Return counts by verdict, and descriptions of the differences.

    Args:
        categories: Names of categories or groups.
        num_mutations: Mutated samples in total, in addition to the ground truth of each row.
        rng: Generator of the mutations.
        num_rows: First rows of each category to use; None for all.
    """
    counts: Counter[str] = Counter()
    differences: list[str] = []
    names = choose_categories(categories)
    rows = [(name, i) for name in names for i in range(len(read_category(name)[:num_rows]))]
    samples: list[tuple[str, int, str, Turns]] = []
    for name, index in rows:
        if turns := right_turns(read_category(name)[index]):
            samples.append((name, index, "ground truth", turns))
        else:
            counts[f"{name}, refused by the package"] += 1
    originals = list(samples)
    for _ in range(num_mutations):
        name, index, _kind, turns = rng.choice(originals)
        samples.append((name, index, *mutate(turns, rng)))
    envs = {
        name: gym.make("AgentR1/BFCL-v0", category=name, max_episode_steps=-1) for name in names
    }
    for name, index, kind, turns in samples:
        row = read_category(name)[index]
        ours = succeeds_here(envs[name], index, turns)
        theirs = judge_officially(row, turns)
        verdict = {True: "right", False: "wrong"}[theirs]
        group = "ground truth" if kind == "ground truth" else "mutated"
        counts[f"{name}, {group}: {'both ' + verdict if ours == theirs else 'DIFFERENT'}"] += 1
        if ours != theirs:
            differences.append(f"{row.id} ({kind}): officially {verdict}: {turns}")
    return counts, differences


def succeeds_here(env: gym.Env[str, str], index: int, turns: Turns) -> bool:
    """Return the success of calls in the environment, with a step for each turn of the user."""
    env.reset(options={"task": index})
    base: Any = env.unwrapped
    info: dict[str, Any] = {"metrics": {"success": 0.0}}
    for calls in turns:
        steps = [calls[start : start + 8] for start in range(0, len(calls), 8)]
        if not base._row.is_multi_turn:
            steps = [calls] if calls else []
        actions = [base._write_calls([(tool_name(n), a) for n, a in step]) for step in steps]
        if base._row.is_multi_turn or not calls:
            actions.append(base.write_answer("Done."))
        for action in actions:
            *_, terminated, _, info = env.step(action)
            if terminated:
                return bool(info["metrics"]["success"])
    return bool(info["metrics"]["success"])


def judge_officially(row: Row, turns: Turns) -> bool:
    """Return the verdict of the official package."""
    if row.is_multi_turn:
        return _judge_turns(row, turns)
    calls = [{tool_name(name): dict(arguments)} for name, arguments in turns[0]]
    if "relevance" in row.category:
        return bool(calls) == ("irrelevance" not in row.category)
    # The handlers of models need many libraries; only this table imports them.
    table = types.ModuleType(_MODEL_TABLE)
    table.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    sys.modules.setdefault(_MODEL_TABLE, table)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    language = Language[LANGUAGES.get(row.category, "Python").upper()]
    truth, functions = list(row.ground_truth), list(row.functions)
    try:
        verdict = ast_checker(functions, calls, truth, language, row.category, "any")
    except Exception:  # noqa: BLE001 - the package itself would stop here: not a right answer
        return False
    return bool(verdict["valid"])


def _judge_turns(row: Row, turns: Turns) -> bool:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    texts = [[[f"{name}({_written(arguments)})"] for name, arguments in calls] for calls in turns]
    entry = {
        "initial_config": dict(row.configuration),
        "involved_classes": list(row.classes),
        "id": row.id,
    }
    before = set(vars(multi_turn_utils))
    try:
        verdict = multi_turn_checker(texts, list(row.ground_truth), entry, row.category, "any")
        return bool(verdict["valid"])
    finally:
        for name in (
            set(vars(multi_turn_utils)) - before
        ):  # the package keeps its objects as globals
            delattr(multi_turn_utils, name)


def _written(arguments: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value!r}" for name, value in arguments.items())


def mutate(turns: Turns, rng: random.Random) -> tuple[str, Turns]:
    """Return the kind of one random change, and the changed turns."""
    nonempty = [turn for turn, calls in enumerate(turns) if calls]
    changes = list(_changes(turns, rng.choice(nonempty), rng)) if nonempty else []
    if not changes:
        return "a call too many", [*turns[:-1], [*turns[-1], ("no_function", {})]]
    return rng.choice(changes)


def _changes(turns: Turns, turn: int, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    calls = turns[turn]
    place = rng.randrange(len(calls))
    name, arguments = calls[place]

    def put(*new: Call) -> Turns:
        return [*turns[:turn], [*calls[:place], *new, *calls[place + 1 :]], *turns[turn + 1 :]]

    yield "dropped", put()
    yield "twice", put(calls[place], calls[place])
    yield "extra argument", put((name, {**arguments, "extra": 1}))
    if len(calls) > 1:
        yield "reordered", [*turns[:turn], calls[::-1], *turns[turn + 1 :]]
    if len(turns) > 1:
        other = rng.choice([t for t in range(len(turns)) if t != turn])
        swapped = list(turns)
        swapped[turn], swapped[other] = turns[other], turns[turn]
        yield "turns swapped", swapped
    if arguments:
        key = rng.choice(list(arguments))
        value = arguments[key]
        yield "argument dropped", put((name, {k: v for k, v in arguments.items() if k != key}))
        wrong = f"{value} or not" if isinstance(value, str) else "wrong"
        yield "wrong value", put((name, {**arguments, key: wrong}))
        number = value + 1 if isinstance(value, int | float) else 7
        yield "wrong number", put((name, {**arguments, key: number}))
        yield "wrong type", put((name, {**arguments, key: [value]}))
        yield "as text", put((name, {**arguments, key: str(value)}))
    if len(arguments) > 1:
        values = list(arguments.values())
        yield "values swapped", put((name, dict(zip(arguments, values[::-1], strict=True))))


if __name__ == "__main__":
    main()
