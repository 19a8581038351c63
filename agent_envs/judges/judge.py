"""`Judge`: a reward term that served models give, by a rubric."""

import abc
import functools
import hashlib
import json
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypedDict

from agent_envs.core.async_bridge import submit
from agent_envs.core.messages import Message
from agent_envs.core.rewards import MAX_COUNTED_MISTAKES, StepEvent
from agent_envs.errors import ConfigurationError
from agent_envs.judges.endpoint import Endpoint
from agent_envs.judges.rubric import Criterion, load_rubric, read_reply, reply_model, write_prompt

LOCK_SECONDS: Final = 60.0


class Judgement(TypedDict):
    """The scores of one record; an entry of ``info["judgements"]``."""

    value: float
    """Weighted mean score of all judges, in [0, 1]."""
    scores: list[dict[str, int]]
    """Score of each criterion, by each judge."""
    tokens: int
    """Tokens that the judgement took when it was made, even if it is cached now."""
    cost: float
    """Their price."""
    record: str
    """Digest of the text that was judged."""


class BaseJudge(abc.ABC):
    """Scores trajectories, or each step, in [0, 1]; a reward term for ``rewards=``.

    A trajectory's score is paid at its last step. A step's score less 1 is a cost, of the first ten
    steps only.
    """

    name: str = "judge"
    """Name in ``info["judgements"]`` and in metrics."""
    each_step: bool = False

    def __call__(self, env: Any, event: StepEvent) -> float:
        """Score the episode up to this step; see `RewardFunction`."""
        observations, actions = env.episode_texts
        value, judgement = self.term(observations, [*actions, event.text], is_last=event.is_last)
        if judgement is not None:
            event.info.setdefault("judgements", {})[self.name] = judgement
        return value

    def term(
        self, observations: Sequence[str], actions: Sequence[str], *, is_last: bool
    ) -> tuple[float, Judgement | None]:
        """Return the reward term of the last action, before its weight, and its judgement."""
        if not (len(actions) <= MAX_COUNTED_MISTAKES if self.each_step else is_last):
            return 0.0, None
        judgement = self.judge(observations, actions)
        return judgement["value"] - self.each_step, judgement

    @abc.abstractmethod
    def judge(self, observations: Sequence[str], actions: Sequence[str]) -> Judgement:
        """Score an episode, an observation before each action."""


class Judge(BaseJudge):
    """Scores by a rubric. If an endpoint fails, a step raises `ServerError` and is unscorable."""

    def __init__(
        self,
        rubric: str | Path | Sequence[Criterion | Mapping[str, Any]],
        *endpoints: Endpoint,
        name: str = "judge",
        each_step: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        """Load the rubric; nothing is sent yet.

        Args:
            rubric: Criteria, or their YAML file.
            endpoints: One or more judges; the value is the mean of theirs.
            name: Name in ``info["judgements"]`` and in metrics.
            each_step: Whether each step is scored, instead of the trajectory.
            cache: SQLite file of judgements by model and prompt, which holds rubric and text.
        """
        if not endpoints:
            raise ConfigurationError(f"The judge {name!r} has no endpoint. Pass Endpoint(...).")
        self.rubric, self.endpoints, self.name = load_rubric(rubric), endpoints, name
        self._form, self.each_step = reply_model(self.rubric), each_step
        self._schema, self._file = self._form.model_json_schema(), cache and Path(cache)
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)

    def judge(self, observations: Sequence[str], actions: Sequence[str]) -> Judgement:
        """Score an episode, an observation before each action; a ServerError if a judge fails."""
        messages = write_prompt(self.rubric, observations, actions)
        asked = [submit(functools.partial(self._ask, each, messages)) for each in self.endpoints]
        replies = [future.result() for future in asked]
        scores, total = [reply["scores"] for reply in replies], sum(c.weight for c in self.rubric)
        weighted = [sum(c.weight * c.share(each[c.name]) for c in self.rubric) for each in scores]
        return Judgement(
            value=statistics.fmean(weighted) / total,
            scores=scores,
            tokens=sum(reply["tokens"] for reply in replies),
            cost=sum(reply["cost"] for reply in replies),
            record=digest(messages[1:]),
        )

    def _ask(self, endpoint: Endpoint, messages: Sequence[Message]) -> Any:
        """Return the judgement of an endpoint as JSON, from the cache if it is there."""
        key = digest([endpoint.model, messages, self._schema])
        if (known := self._cached(key)) is not None:
            return known
        read = functools.partial(read_reply, form=self._form)
        scores, used = endpoint.ask(messages, self._schema, read)
        tokens = used["prompt_tokens"] + used["completion_tokens"]
        return self._cached(key, {"scores": scores, "tokens": tokens, "cost": endpoint.cost(used)})

    def _cached(self, key: str, reply: Any = None) -> Any:
        """Return the cached reply, which is `reply` if no process has added one; or None."""
        if not self._file:
            return reply
        # a connection per use: nothing to share with threads and forks
        with closing(sqlite3.connect(self._file, timeout=LOCK_SECONDS)) as file, file:
            file.execute("CREATE TABLE IF NOT EXISTS judgements (key PRIMARY KEY, value)")
            if reply is not None:
                entry = [key, json.dumps(reply)]
                file.execute("INSERT OR IGNORE INTO judgements VALUES (?, ?)", entry)
            row = file.execute("SELECT value FROM judgements WHERE key = ?", [key]).fetchone()
        return row and json.loads(row[0])


def digest(value: Any) -> str:
    """Return the digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
