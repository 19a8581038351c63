# ruff: noqa: RUF012 - examples as a user would write them
"""Custom data sets, rewards and replies, as users write them."""

import pytest

from agent_envs import (
    DataError,
    DatasetEnv,
    DatasetSpec,
    NewConversation,
    Task,
    ToolEnv,
    text_field,
)


def read_capital(row, index):
    return Task(
        id=f"capital-{index}",
        question=f"What is the capital of {text_field(row, 'country')}?",
        answers=(text_field(row, "capital"),),
    )


class CapitalsEnv(DatasetEnv):
    """Asks for capitals; each file has its own countries."""

    dataset = DatasetSpec(read=read_capital, form="A row needs 'country' and 'capital'.")
    reward_functions = {"right": lambda env, event: float(event.action.answer in env.task.answers)}
    default_rewards = {"right": 1.0}


def test_custom_data_set(tmp_path):
    path = tmp_path / "capitals.jsonl"
    path.write_text('{"country": "Norway", "capital": "Oslo"}\n{"country": "Chile"}\n')
    with pytest.raises(DataError, match=r"capitals\.jsonl, row 2: field 'capital'"):
        CapitalsEnv(data=path)
    path.write_text('{"country": "Norway", "capital": "Oslo"}\n')
    env = CapitalsEnv(data=path)
    assert env.num_tasks == 1
    assert env.reset(seed=0)[0] == "What is the capital of Norway?"
    assert env.step("<answer>Oslo</answer>")[1:3] == (1.0, True)
    with pytest.raises(DataError, match=r"pass data= with a file\. A row needs 'country'"):
        CapitalsEnv()


class Quiz(ToolEnv):
    """Three tries; a wrong answer is replied to in the same conversation."""

    reward_functions = {"solved": lambda env, event: float(env.is_solved)}
    default_rewards = {"solved": 1.0}
    num_tasks = 9

    def get_task(self, index):
        return Task(id=f"quiz-{index}", question=f"Guess a number below {index + 2}.",
                    answers=(str(index),))  # fmt: skip

    def begin_episode(self):
        self.is_solved = False

    def on_answer(self, answer):
        self.is_solved = answer in self.task.answers
        return None if self.is_solved or self.num_turns == 3 else f"{answer} is wrong; try again."


def test_an_answer_can_be_replied_to_or_start_a_new_conversation():
    env = Quiz()
    env.reset(options={"task": 4})
    observation, reward, terminated, _, info = env.step("<answer>3</answer>")
    assert (observation, reward, terminated) == ("3 is wrong; try again.", 0.0, False)
    assert [message["content"] for message in info["messages"][1:]] == [
        "Guess a number below 6.", "<answer>3</answer>", "3 is wrong; try again.",
    ]  # fmt: skip
    assert env.step("<answer>4</answer>")[1:3] == (1.0, True)
    env = Quiz(system_prompt="")
    env.on_answer = lambda answer: False if env.num_turns == 2 else NewConversation("And now?")
    env.reset(options={"task": 4})
    observation, _, terminated, _, info = env.step("<answer>3</answer>")
    assert (observation, terminated) == ("And now?", False)
    assert info["messages"] == [{"role": "user", "content": "And now?"}]
    with pytest.raises(TypeError, match="on_answer returned False; it must return None"):
        env.step("<answer>3</answer>")
