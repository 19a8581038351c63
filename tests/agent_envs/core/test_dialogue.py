"""Environments with a user, who replies to plain text."""

import asyncio

import pytest

from agent_envs import NewConversation, Task, Tool, ToolEnv
from agent_envs.formats.tool_formats import TOOL_FORMATS


class BookingEnv(ToolEnv):
    """A guest wants a table, and says when and for how many only if asked."""

    reward_functions = {"booked": lambda env, event: float(event.is_last and env.is_booked)}  # noqa: RUF012
    default_rewards = {"booked": 1.0}  # noqa: RUF012
    default_system_prompt = "You take bookings for a restaurant."

    def __init__(self, **shared):
        super().__init__(default_tools=[Tool(self.book, timeout=None)], **shared)

    def book(self, day: str, people: int) -> str:
        """Book a table."""
        wanted = self.task.data
        self.is_booked = (day.lower(), people) == (wanted["day"], wanted["people"])
        return "Booked."

    def get_task(self, index):
        wanted = {"day": ("monday", "friday")[index % 2], "people": 2 + index % 5}
        return Task(id=f"table-{index}", question="Hello, I'd like a table.", answers=(),
                    data=wanted)  # fmt: skip

    def begin_episode(self):
        self.is_booked = False

    def on_message(self, message):
        """Reply as the guest would."""
        if "when" in message.lower() or "day" in message.lower():
            return f"On {self.task.data['day']}."
        if "how many" in message.lower():
            return f"There will be {self.task.data['people']} of us."
        return None

    def metrics(self):
        return {"success": float(self.is_booked), **super().metrics()}

    def reference_actions(self):
        call = self.write_call("book", **self.task.data)
        return ["For which day?", "And how many people?", call, self.write_answer("done")]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_user_replies_to_plain_text(name):
    env = BookingEnv(tool_format=name)
    _, info = env.reset(options={"task": 3})
    assert "is said to the user, who replies" in info["messages"][0]["content"]
    broken = env.write_call("book", day="friday", people="many")
    for action in ("", " \n", "<think>for which day?</think>", broken):
        error = env.step(action)[4]["action"]["error"]
        assert error == ("bad_arguments" if action == broken else "no_action")
    when, how_many, book, done = env.reference_actions()
    observation, reward, terminated, _, info = env.step(f"<think>hm</think>{when}")
    assert (observation, reward, terminated) == ("On friday.", 0.0, False)
    assert info["action"] == {"kind": "message", "text": when}
    assert info["messages"][-1] == {"role": "user", "content": "On friday."}
    assert env.step(how_many)[0] == "There will be 5 of us."
    assert "Booked." in env.step(book)[0]
    _, reward, terminated, _, info = env.step(done)
    assert (reward, terminated) == (1.0, True)
    assert info["metrics"] == {
        "success": 1.0, "num_turns": 8, "num_tool_calls": 1, "num_invalid_actions": 4
    }  # fmt: skip


class Others(BookingEnv):
    """Replies with what it was made with."""

    def __init__(self, reply):
        super().__init__()
        self.reply = reply

    async def on_message(self, message):
        await asyncio.sleep(0)
        return self.reply


def test_a_user_may_be_async_and_start_a_new_conversation():
    assert (env := Others("Yes.")).reset(seed=0)
    assert env.step("Hm?")[0] == "Yes."
    env = Others(NewConversation("Good evening!"))
    env.reset(seed=0)
    info = env.step("Hm?")[4]
    assert [m["content"] for m in info["messages"][1:]] == ["Good evening!"]
