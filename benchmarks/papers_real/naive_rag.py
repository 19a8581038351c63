"""Naive retrieval-augmented generation, as fair as it can be made.

It searches once with the question, reads what was found in a plain prompt (no tools, no tags), and
what it writes is the answer. How many passages it reads, by which instruction, and after how many
examples, is tried on questions of the train split, and the best way is taken.

``python -m benchmarks.papers_real.naive_rag FOLDER`` does what ``FOLDER/run.json`` says.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

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
    """A way to ask a model that has passages before it."""

    num_passages: int
    num_examples: int
    instruction: str

    @property
    def name(self) -> str:
        """What to call it."""
        kind = "brief" if self.instruction == BRIEF else "copy"
        return f"{self.num_passages} passages, {self.num_examples} examples, {kind}"


FORMS: Final = (
    ReadingForm(num_passages=3, num_examples=0, instruction=BRIEF),
    ReadingForm(num_passages=3, num_examples=0, instruction=READ),
    ReadingForm(num_passages=1, num_examples=2, instruction=BRIEF),
    ReadingForm(num_passages=3, num_examples=2, instruction=BRIEF),
    ReadingForm(num_passages=5, num_examples=2, instruction=BRIEF),
)


@dataclass(frozen=True, slots=True)
class Example:
    """A question that was answered after reading."""

    passages: tuple[Passage, ...]
    question: str
    answer: str


class NaiveRAG(PolicyWrapper):
    """Searches with the question as it stands, then answers in one plain turn."""

    def __init__(self, model: Policy, form: ReadingForm, examples: Sequence[Example]) -> None:
        """Let `model` read by a form, after its number of `examples`."""
        super().__init__(model)
        self._form, self._examples = form, examples[: form.num_examples]

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search at first; then show the question and what was found, and nothing of tools."""
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
        """Take what was said as the answer."""
        return replace(generation, text=_FORMAT.write_answer(clean_answer(generation.text)))

    def _shown(self, example: Example) -> list[Message]:
        asked = self._asked(write_passages(example.passages), example.question)
        return [asked, {"role": "assistant", "content": example.answer}]

    def _asked(self, passages: str, question: str) -> Message:
        text = f"{self._form.instruction}\n\n{passages}\n\nQuestion: {question}\nAnswer:"
        return {"role": "user", "content": text}


def write_passages(passages: Sequence[Passage]) -> str:
    """Write passages as a search shows them."""
    return "\n".join(f"[{rank}] {p.title}\n{p.text}" for rank, p in enumerate(passages, 1))


def clean_answer(text: str) -> str:
    """Return the answer in what a model wrote: its first line, without what leads up to it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for lead in _LEADS:
        if line.lower().startswith(lead):
            line = line[len(lead) :]
    return _TAG.sub("", line).strip(" \"'*.:") or "unknown"


def run(folder: Path) -> None:
    """Choose the form on training questions, then answer the test sets; nothing is done twice."""
    spec = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    model = load_policy(
        spec["model"],
        max_new_tokens=spec["max_new_tokens"],
        max_batch_size=spec["batch_size"],
        temperature=0.0,
    )
    rows = read_records(spec["train_env_kwargs"]["data"])[spec["num_tried"] :]
    examples = pick_examples(rows, max(form.num_examples for form in FORMS))
    tried: dict[str, dict[str, float]] = {}
    for number, form in enumerate(FORMS):
        path = folder / "forms" / f"{number}.json"
        if not path.exists():
            rag = NaiveRAG(model, form, examples)
            num_tried = spec["num_tried"]
            measured = _play(rag, form, TRAIN_ENV, spec["train_env_kwargs"], num_tried).metrics
            kept = {name: measured[name] for name in ("exact_match", "f1")}
            write_json(path, {"form": asdict(form), **kept})
        tried[form.name] = json.loads(path.read_text(encoding="utf-8"))
    best = max(FORMS, key=lambda form: (tried[form.name]["f1"], -form.num_passages))
    write_json(folder / "form.json", {"chosen": best.name, "tried": tried})
    for name, (env, kwargs) in spec["test"].items():
        path = folder / f"{name}.jsonl.gz"
        if not path.exists():
            rag = NaiveRAG(model, best, examples)
            played = _play(rag, best, env, kwargs, spec["num_tasks"])
            save_trajectories(path, played.trajectories)


def pick_examples(rows: Sequence[Mapping[str, Any]], count: int) -> list[Example]:
    """Return the last `count` of the rows in which one passage holds the answer."""
    picked: list[Example] = []
    for row in reversed(rows):
        passages = [Passage(title, text) for title, (text,) in row["context"]]
        holding = [passage for passage in passages if row["answer"] in passage.text]
        if holding and len(picked) < count:
            picked.append(Example((holding[0],), row["question"], row["answer"]))
    return picked


def _play(
    policy: Policy, form: ReadingForm, env: str, kwargs: Mapping[str, Any], num_tasks: int
) -> Evaluation:
    kwargs = {**kwargs, "tool_format": "tags", "top_k": form.num_passages}
    make_env = environment_maker(env, kwargs)
    return evaluate_policy(make_env, policy, first_tasks(count_tasks(make_env), num_tasks))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
