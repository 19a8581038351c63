"""Search strategies: policies that call the search tool by a plan, with a model for the text."""

import re
from dataclasses import dataclass, replace
from typing import Final

from agent_envs.core.messages import Message
from agent_envs.formats.actions import without_thoughts
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.policies import Generation, GenerationRequest, Policy, PolicyWrapper, Usage

_ANSWER_TAG: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAG: Final = re.compile(r"</?\w+>")

RAG_TEXT: Final = (
    "Answer the question with the help of the passages. Reply with nothing but the answer, in as "
    "few words as possible. If the passages do not tell, give your best guess."
)
ITERATIVE_RAG_TEXT: Final = (
    "Answer the question with the help of the passages. Think step by step, in a few sentences, "
    'and end with "So the answer is:" and the answer in as few words as possible.'
)
SO_THE_ANSWER: Final = re.compile(r"so the answer is:?(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(slots=True)
class Talk:
    """State of a strategy on the current question."""

    question: str
    passages: str | None = None
    """Those found last."""
    num_searches: int = 0


class SearchStrategy(PolicyWrapper):
    """Naive RAG, one search with the question; with `iterations`, Iter-RetGen.

    Iter-RetGen (Shao et al., arXiv 2305.15294) searches and answers several times: answer and
    question are the next query, and the last answer counts.
    """

    def __init__(
        self, model: Policy, tool_format: ToolFormat, *, iterations: int | None = None
    ) -> None:
        """Use `model`, and write actions in the environment's tool format."""
        super().__init__(model)
        self._format = tool_format
        self._iterations = iterations
        self._talks: dict[int, Talk] = {}  # by episode

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search for the question, or return the prompt of the model."""
        observation = request.messages[-1]["content"]
        if not any(message["role"] == "assistant" for message in request.messages):
            # A new question: the first, or the next of an episode with several.
            self._talks[request.episode_id] = Talk(observation)
        talk = self._talks[request.episode_id]
        if talk.num_searches == 0:
            return Generation(text=self._search(talk, talk.question), usage=Usage())
        talk.passages = talk.passages or observation  # later ones are about mistakes
        shown = f"Passages:\n{talk.passages}\n\nQuestion: {talk.question}\nAnswer:"
        task = RAG_TEXT if self._iterations is None else ITERATIVE_RAG_TEXT
        messages: list[Message] = [
            {"role": "system", "content": task}, {"role": "user", "content": shown}
        ]  # fmt: skip
        return replace(request, messages=messages, tools=None, previous=None)

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Search with the model's reply and the question, or answer."""
        if generation.finish_reason == "overflow":
            return generation
        talk, reply = self._talks[request.episode_id], without_thoughts(generation.text).strip()
        if talk.num_searches < (self._iterations or 1):
            return replace(generation, text=self._search(talk, f"{reply} {talk.question}".strip()))
        said = SO_THE_ANSWER.search(reply)
        answer = short_answer(said.group(1).strip() if said else reply)
        text = self._format.write_answer(_TAG.sub("", answer).strip())
        return replace(generation, text=text)

    def _search(self, talk: Talk, query: str) -> str:
        talk.num_searches += 1
        talk.passages = None
        return self._format.write_call("search", {"query": query})

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return no tokens: the model's prompt is not the environment's state."""
        return []


def short_answer(text: str) -> str:
    """Extract the answer from a reply."""
    if tagged := _ANSWER_TAG.search(text):
        return tagged.group(1).strip()
    answer = re.sub(r"^\s*(the )?(final )?answer( is)?\s*:?\s+", "", text, flags=re.IGNORECASE)
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return lines[0] if lines else ""
