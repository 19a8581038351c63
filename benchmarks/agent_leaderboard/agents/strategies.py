"""Search strategies: policies that call the search tool by a plan, with a model for the text."""

import re
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from agent_envs.core.messages import Message
from agent_envs.formats.tool_formats import ToolFormat
from agent_envs.formats.turn_reading import without_thoughts
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
SELF_ASK_TEXT: Final = """\
Answer the question by asking yourself follow-up questions, one at a time. After each of them you
are given passages; read the intermediate answer out of them, then ask on or give the final answer.
This is how it goes:

Question: Who lived longer, Theodor Haecker or Harry Vaughan Watkins?
Are follow up questions needed here: Yes.
Follow up: How old was Theodor Haecker when he died?
Intermediate answer: Theodor Haecker was 65 years old when he died.
Follow up: How old was Harry Vaughan Watkins when he died?
Intermediate answer: Harry Vaughan Watkins was 69 years old when he died.
So the final answer is: Harry Vaughan Watkins

Each time, write the intermediate answer, if passages were given, and then either one line that
begins with "Follow up:" or one line that begins with "So the final answer is:". Then stop."""
_SELF_ASK_STEP: Final = re.compile(
    r"^[ \t]*(Follow[ -]?up|So the final answer is)[ \t]*:[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE
)


@dataclass(slots=True)
class Talk:
    """State of a strategy on the current question."""

    question: str
    messages: list[Message] = field(default_factory=list)
    num_searches: int = 0


class SearchStrategy(PolicyWrapper):
    """Base of policies that search by a plan."""

    calls_first: ClassVar[bool] = False
    """Whether the model is called before the first search."""

    def __init__(self, model: Policy, tool_format: ToolFormat) -> None:
        """Use `model`, and write actions in the environment's tool format."""
        super().__init__(model)
        self._format = tool_format
        self._talks: dict[int, Talk] = {}  # by episode

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search for the question, or return the prompt of the model."""
        if not any(message["role"] == "assistant" for message in request.messages):
            # A new question: the first, or the next of an episode with several.
            self._talks[request.episode_id] = Talk(_observation(request))
        talk = self._talks[request.episode_id]
        if talk.num_searches == 0 and not self.calls_first:
            return Generation(text=self.search(talk, ""), usage=Usage())
        messages = self.prompt(talk, _observation(request))
        return replace(request, messages=messages, tools=None, previous=None)

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Convert the model's reply to an action."""
        if generation.finish_reason == "overflow":
            return generation
        said = without_thoughts(generation.text).strip()
        return replace(generation, text=self.read(self._talks[request.episode_id], said))

    def forget(self, episode_id: int) -> None:
        """Drop the state of an episode."""
        self._talks.pop(episode_id, None)

    @abstractmethod
    def prompt(self, talk: Talk, observation: str) -> list[Message]:
        """Return the model's prompt after an observation."""

    @abstractmethod
    def read(self, talk: Talk, reply: str) -> str:
        """Return the action of a reply."""

    def search(self, talk: Talk, words: str) -> str:
        """Search for `words` and the question."""
        talk.num_searches += 1
        return self.write_search(f"{words} {talk.question}".strip())

    def write_search(self, query: str) -> str:
        """Write a search in the environment's format."""
        return self._format.write_call("search", {"query": query})

    def write_answer(self, answer: str) -> str:
        """Write an answer in the environment's format."""
        return self._format.write_answer(_TAG.sub("", answer).strip())

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return no tokens: the model's prompt is not the environment's state."""
        return []


class NaiveRAG(SearchStrategy):
    """Searches once with the question; the model's reply is the answer."""

    def prompt(self, talk: Talk, observation: str) -> list[Message]:
        """Show the passages and the question."""
        talk.messages = talk.messages or _passages_and_question(RAG_TEXT, talk, observation)
        return talk.messages

    def read(self, talk: Talk, reply: str) -> str:
        """Take the reply as the answer."""
        return self.write_answer(short_answer(reply))


class IterativeRAG(SearchStrategy):
    """Iter-RetGen (Shao et al., arXiv 2305.15294): answer and question are the next query."""

    def __init__(self, model: Policy, tool_format: ToolFormat, *, iterations: int) -> None:
        """Search and answer `iterations` times; the last answer counts."""
        super().__init__(model, tool_format)
        self._iterations = iterations

    def prompt(self, talk: Talk, observation: str) -> list[Message]:
        """Show the passages found last, and the question."""
        return _passages_and_question(ITERATIVE_RAG_TEXT, talk, observation)

    def read(self, talk: Talk, reply: str) -> str:
        """Search with the reply and the question, or answer."""
        if talk.num_searches < self._iterations:
            return self.search(talk, reply)
        said = SO_THE_ANSWER.search(reply)
        return self.write_answer(short_answer(said.group(1).strip() if said else reply))


class SelfAsk(SearchStrategy):
    """Self-ask with search (Press et al., arXiv 2210.03350): follow-up questions are queries."""

    calls_first = True

    def prompt(self, talk: Talk, observation: str) -> list[Message]:
        """Prompt for follow-up questions, or show the passages of the last one."""
        if not talk.messages:
            question = f"Question: {talk.question}\nAre follow up questions needed here:"
            talk.messages = [
                {"role": "system", "content": SELF_ASK_TEXT},
                {"role": "user", "content": question},
            ]
        else:
            found = f"Passages:\n{observation}\n\nIntermediate answer:"
            talk.messages.append({"role": "user", "content": found})
        return list(talk.messages)

    def read(self, talk: Talk, reply: str) -> str:
        """Search for the first follow-up question, or answer; other replies are answers, too."""
        step = _SELF_ASK_STEP.search(reply)
        # Drop what the model made up after its question.
        said = reply[: step.end()] if step else reply
        talk.messages.append({"role": "assistant", "content": said})
        if step and step.group(1).lower().startswith("follow") and step.group(2).strip():
            talk.num_searches += 1
            return self.write_search(step.group(2).strip())
        return self.write_answer(short_answer(step.group(2) if step else reply))


def short_answer(text: str) -> str:
    """Extract the answer from a reply."""
    if tagged := _ANSWER_TAG.search(text):
        return tagged.group(1).strip()
    answer = re.sub(r"^\s*(the )?(final )?answer( is)?\s*:?\s+", "", text, flags=re.IGNORECASE)
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return lines[0] if lines else ""


def _observation(request: GenerationRequest) -> str:
    return request.messages[-1]["content"]


def _passages_and_question(task: str, talk: Talk, passages: str) -> list[Message]:
    shown = f"Passages:\n{passages}\n\nQuestion: {talk.question}\nAnswer:"
    return [{"role": "system", "content": task}, {"role": "user", "content": shown}]
