"""Train a plain loop around OpenAI's client: no framework, no change, the embedded policy.

    agent-r1-train --program examples.train_openai_loop:run --tasks tasks.jsonl

Or as it stands, ``python -m examples.train_openai_loop``: it writes the tasks and trains on them.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import openai

from agent_envs.formats.actions import ParsedAction
from agent_trainers.programs import EnvironmentTools, Outcome, ProgramSession

ENVIRONMENT = "AgentR1/SyntheticMultiHop-v0"
CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="none")  # made once: it takes its time
MAX_TURNS = 4


def run(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Answer a question: search until the model answers instead of calling."""
    world = EnvironmentTools(ENVIRONMENT, task=task["task"], split=task["split"])
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.key)
    messages: list[Any] = [*world.messages]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model="policy", messages=messages, tools=world.schemas
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return world.outcome(world.read(message.content or "").answer)
        for call in message.tool_calls:
            found = world.call(call.function.name, **json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return world.outcome(None)


def train(program: str, name: str, *options: str) -> None:
    """Train a program on 2,000 worlds, and measure it on 200 others."""
    from agent_trainers.cli.train import main

    folder = Path("runs") / name
    files = {split: write_tasks(folder, split, n) for split, n in (("train", 2000), ("test", 200))}
    given = ["--tasks", files["train"], "--eval_tasks", files["test"], *options, *sys.argv[1:]]
    has_folder = any(option.replace("-", "_").startswith("__output_dir") for option in given)
    defaults = [] if has_folder else ["--output_dir", str(folder), "--overwrite"]
    main(["--program", program, *defaults, *given])


@functools.cache
def solution(task: int, split: str) -> tuple[list[ParsedAction], str]:
    """Return the calls that solve a task, and its answer; for oracles."""
    world = EnvironmentTools(ENVIRONMENT, task=task, split=split)
    *calls, answer = (world.read(turn) for turn in world.reference_actions())
    world.close()
    return calls, answer.answer or ""


def write_tasks(folder: Path, split: str, count: int) -> str:
    """Write the numbers of some worlds, a row for each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}_tasks.jsonl"
    rows = [json.dumps({"task": number, "split": split}) + "\n" for number in range(count)]
    path.write_text("".join(rows))
    return str(path)


if __name__ == "__main__":
    train("examples.train_openai_loop:run", "openai_loop")
