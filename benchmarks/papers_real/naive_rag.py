"""Naive retrieval-augmented generation: one search with the question, one plain reading prompt.

The number of passages is chosen on training questions.
``python -m benchmarks.papers_real.naive_rag FOLDER JSON`` runs the specification given as JSON.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.data.files import write_json
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.cli.environments import first_tasks, inspect_environment
from agent_trainers.policies import Generation, GenerationRequest, Policy, PolicyWrapper
from agent_trainers.policies.local import load_policy
from agent_trainers.rollout.evaluation import Evaluation, evaluate_policy
from agent_trainers.trajectory import save_trajectories
from benchmarks.papers_real.questions import TRAIN_ENV

NUM_PASSAGES: Final = (1, 3, 5)
INSTRUCTION: Final = "Answer the question with a few words, and nothing else."
_FORMAT: Final = TOOL_FORMATS["tags"]
_LEADS: Final = ("the answer is", "answer:")
_TAG: Final = re.compile(r"</?\w+>")


class NaiveRAG(PolicyWrapper):
    """Search with the question itself, then answer in one plain turn."""

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search in the first turn; then show the question and the results, without tools."""
        question = next(m["content"] for m in request.messages if m["role"] == "user")
        if not any(message["role"] == "assistant" for message in request.messages):
            return Generation(text=_FORMAT.write_call("search", {"query": question}))
        found = request.messages[-1]["content"]
        found = found.removeprefix("<information>").removesuffix("</information>")
        text = f"{INSTRUCTION}\n\n{found}\n\nQuestion: {question}\nAnswer:"
        messages: list[Message] = [{"role": "user", "content": text}]
        return replace(request, messages=messages, tools=None, previous=None)

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Format the generated text as the answer."""
        return replace(generation, text=_FORMAT.write_answer(clean_answer(generation.text)))


def clean_answer(text: str) -> str:
    """Return the first line that a model wrote, without a lead such as "Answer:"."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for lead in _LEADS:
        if line.lower().startswith(lead):
            line = line[len(lead) :]
    return _TAG.sub("", line).strip(" \"'*.:") or "unknown"


def run(folder: Path, spec: Mapping[str, Any]) -> None:
    """Choose the number of passages on training questions, then answer the test sets."""
    model = load_policy(
        spec["model"],
        dtype=spec["dtype"],
        max_new_tokens=spec["max_new_tokens"],
        max_batch_size=spec["batch_size"],
        temperature=0.0,
    )
    rag = NaiveRAG(model)
    tried = {}
    for count in NUM_PASSAGES:
        evaluation = _evaluate(rag, count, TRAIN_ENV, spec["train_env_kwargs"], spec["num_tried"])
        tried[count] = {name: evaluation.metrics[name] for name in ("exact_match", "f1")}
    best = max(NUM_PASSAGES, key=lambda count: (tried[count]["f1"], -count))
    for name, (env, kwargs) in spec["test"].items():
        evaluation = _evaluate(rag, best, env, kwargs, spec["num_tasks"])
        save_trajectories(folder / f"{name}.jsonl.gz", evaluation.trajectories)
    write_json(folder / "form.json", {"num_passages": best, "tried": tried})


def _evaluate(
    policy: Policy, num_passages: int, env: str, kwargs: Mapping[str, Any], num_tasks: int
) -> Evaluation:
    kwargs = {**kwargs, "tool_format": "tags", "top_k": num_passages}
    found = inspect_environment(env, kwargs)
    return evaluate_policy(found.make_env, policy, first_tasks(found.num_tasks, num_tasks))


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
