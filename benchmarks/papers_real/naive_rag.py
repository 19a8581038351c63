"""Naive retrieval-augmented generation: one search with the question, one plain reading prompt.

The number of passages, the instruction and the number of examples are chosen on training questions.
``python -m benchmarks.papers_real.naive_rag FOLDER JSON`` runs the specification given as JSON.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent_envs.core.messages import Message
from agent_envs.data.files import write_json
from agent_envs.data.records import read_records
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.retrieval import Passage
from agent_trainers.cli.environments import count_tasks, environment_maker, first_tasks
from agent_trainers.policies import Generation, GenerationRequest, Policy, PolicyWrapper
from agent_trainers.policies.local import load_policy
from agent_trainers.rollout.evaluation import Evaluation, evaluate_policy
from agent_trainers.trajectory import save_trajectories
from benchmarks.papers_real.questions import TRAIN_ENV

_FORMAT: Final = TOOL_FORMATS["tags"]
_LEADS: Final = ("the answer is", "answer:")
_TAG: Final = re.compile(r"</?\w+>")
BRIEF: Final = "Answer the question with a few words, and nothing else."
READ: Final = "Read the passages and copy the words out of them that answer the question."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingForm:
    """A prompt with retrieved passages."""

    num_passages: int
    num_examples: int
    instruction: str

    @property
    def name(self) -> str:
        """Readable name."""
        kind = "brief" if self.instruction == BRIEF else "copy"
        return f"{self.num_passages} passages, {self.num_examples} examples, {kind}"


FORMS: Final = (
    ReadingForm(num_passages=3, num_examples=0, instruction=BRIEF),
    ReadingForm(num_passages=3, num_examples=0, instruction=READ),
    ReadingForm(num_passages=1, num_examples=2, instruction=BRIEF),
    ReadingForm(num_passages=3, num_examples=2, instruction=BRIEF),
    ReadingForm(num_passages=5, num_examples=2, instruction=BRIEF),
)


class Example(NamedTuple):
    """A question with its answer and the passage that holds it."""

    passage: Passage
    question: str
    answer: str


class NaiveRAG(PolicyWrapper):
    """Search with the question itself, then answer in one plain turn."""

    def __init__(self, model: Policy, form: ReadingForm, examples: Sequence[Example]) -> None:
        """Wrap `model`, prompted by a form."""
        super().__init__(model)
        self._form, self._examples = form, examples[: form.num_examples]

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search in the first turn; then show the question and the results, without tools."""
        question = next(m["content"] for m in request.messages if m["role"] == "user")
        if not any(message["role"] == "assistant" for message in request.messages):
            return Generation(text=_FORMAT.write_call("search", {"query": question}))
        found = request.messages[-1]["content"]
        found = found.removeprefix("<information>").removesuffix("</information>")
        messages = [
            *(message for each in self._examples for message in self._shown(each)),
            self._asked(found, question),
        ]
        return replace(request, messages=messages, tools=None, previous=None)

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Format the generated text as the answer."""
        return replace(generation, text=_FORMAT.write_answer(clean_answer(generation.text)))

    def _shown(self, example: Example) -> list[Message]:
        passage = f"[1] {example.passage.title}\n{example.passage.text}"
        asked = self._asked(passage, example.question)
        return [asked, {"role": "assistant", "content": example.answer}]

    def _asked(self, passages: str, question: str) -> Message:
        text = f"{self._form.instruction}\n\n{passages}\n\nQuestion: {question}\nAnswer:"
        return {"role": "user", "content": text}


def clean_answer(text: str) -> str:
    """Return the first line that a model wrote, without a lead such as "Answer:"."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for lead in _LEADS:
        if line.lower().startswith(lead):
            line = line[len(lead) :]
    return _TAG.sub("", line).strip(" \"'*.:") or "unknown"


def run(folder: Path, spec: Mapping[str, Any]) -> None:
    """Choose the form on training questions, then answer the test sets."""
    model = load_policy(
        spec["model"],
        max_new_tokens=spec["max_new_tokens"],
        max_batch_size=spec["batch_size"],
        temperature=0.0,
    )
    num_tried = spec["num_tried"]
    rows = read_records(spec["train_env_kwargs"]["data"])[num_tried:]
    examples = pick_examples(rows, max(form.num_examples for form in FORMS))
    tried: dict[str, dict[str, float]] = {}
    for form in FORMS:
        rag = NaiveRAG(model, form, examples)
        metrics = _evaluate(rag, form, TRAIN_ENV, spec["train_env_kwargs"], num_tried).metrics
        tried[form.name] = {name: metrics[name] for name in ("exact_match", "f1")}
    best = max(FORMS, key=lambda form: (tried[form.name]["f1"], -form.num_passages))
    for name, (env, kwargs) in spec["test"].items():
        rag = NaiveRAG(model, best, examples)
        evaluation = _evaluate(rag, best, env, kwargs, spec["num_tasks"])
        save_trajectories(folder / f"{name}.jsonl.gz", evaluation.trajectories)
    write_json(folder / "form.json", {"chosen": best.name, "tried": tried})


def pick_examples(rows: Sequence[Mapping[str, Any]], count: int) -> list[Example]:
    """Return examples from the last `count` rows with a passage that contains the answer."""
    picked: list[Example] = []
    for row in reversed(rows):
        passages = [Passage(title, text) for title, (text,) in row["context"]]
        holding = [passage for passage in passages if row["answer"] in passage.text]
        if holding and len(picked) < count:
            picked.append(Example(holding[0], row["question"], row["answer"]))
    return picked


def _evaluate(
    policy: Policy, form: ReadingForm, env: str, kwargs: Mapping[str, Any], num_tasks: int
) -> Evaluation:
    kwargs = {**kwargs, "tool_format": "tags", "top_k": form.num_passages}
    make_env = environment_maker(env, kwargs)
    return evaluate_policy(make_env, policy, first_tasks(count_tasks(make_env), num_tasks))


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
