"""Adversarial edits: an attacker changes a few words of tool results before the model reads them.

A black-box attacker sees the question and the results, neither the model nor the answer, and has a
budget of edits. The environment scores the unedited results.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from agent_envs.core.lookup import lookup_or_import
from agent_envs.core.tasks import Task
from agent_envs.core.tool import ToolResult
from agent_envs.errors import ConfigurationError

MAX_EDIT_CHARS: Final = 80
"""Maximum length of the texts of an edit."""
DEFAULT_BUDGET: Final = 2
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|\n+")
_VALUE: Final = re.compile(r"\d+(?:[.,]\d+)*|(?<!^)\b[A-Z][\w'-]+")
_WORD: Final = re.compile(r"[^\W\d_]{3,}")


class Edit(NamedTuple):
    """Replacement of the first occurrence of `old`, as whole words, by `new`."""

    old: str
    new: str


Attacker = Callable[[str, str, np.random.Generator], Sequence[Edit]]
"""Takes the question and a result; returns edits."""


def apply_edit(text: str, edit: Edit) -> str:
    """Return a text after an edit; unchanged if the edit is empty or too long."""
    if not edit.old or max(map(len, edit)) > MAX_EDIT_CHARS:
        return text
    pattern = rf"(?<!\w){re.escape(edit.old)}(?!\w)"
    return re.sub(pattern, lambda _: edit.new, text, count=1)


class ResultEdits:
    """The edits of an attacker in one episode; the same in each episode of a task."""

    def __init__(self, attacker: str = "swap", budget: int = DEFAULT_BUDGET) -> None:
        """Choose a key of `ATTACKERS` or an import path, and the number of edits per episode."""
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ConfigurationError(f"attack: 'budget' must be a whole number, not {budget!r}.")
        self._attacker = lookup_or_import(ATTACKERS, attacker, kind="attacker")
        self._budget = budget
        self.num_edits = self._num_results = 0

    def begin(self, task: Task) -> None:
        """Start an episode."""
        self._task_id, self._question = task.id, task.question
        self.num_edits = self._num_results = 0

    def edit(self, result: ToolResult) -> ToolResult:
        """Return the edited result."""
        self._num_results += 1
        left = self._budget - self.num_edits
        if left < 1 or result.error is not None or not result.content:
            return result
        place = f"{self._task_id}\n{self._num_results}".encode("utf-8", "replace")
        rng = np.random.default_rng(zlib.crc32(place))
        content = result.content
        for edit in self._attacker(self._question, content, rng)[:left]:
            edited = apply_edit(content, Edit(*edit))
            self.num_edits += edited != content
            content = edited
        return replace(result, content=content)


def swap_values(question: str, text: str, rng: np.random.Generator) -> list[Edit]:
    """Swap the names or numbers of two sentences; a lone number becomes another one."""
    values = _values(question, text)
    if len(values) > 1:
        one, other = rng.choice(len(values), 2, replace=False)
        return [Edit(values[one], values[other])]
    if values and values[0].isdecimal() and len(values[0]) <= MAX_EDIT_CHARS:
        return [Edit(values[0], str(int(values[0]) + int(rng.integers(1, 10))))]
    return []


ATTACKERS: Final[Mapping[str, Attacker]] = {"swap": swap_values}
"""Attackers without a model."""


def _values(question: str, text: str) -> list[str]:
    """Return the last name or number, or else word, of each sentence, each once.

    Words of the question and titles of passages (``[1] ...``) do not count.
    """
    asked = set(question.lower().split())
    told = []
    for sentence in filter(lambda each: not each.startswith("["), _SENTENCE_END.split(text)):
        found = _VALUE.findall(sentence) or _WORD.findall(sentence)
        told += [value for value in found if value.lower() not in asked][-1:]
    return list(dict.fromkeys(told))
