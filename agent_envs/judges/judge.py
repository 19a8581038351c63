"""`Judge`: a reward term that served models give, by a rubric."""

import functools
import hashlib
import json
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from agent_envs.core.async_bridge import submit
from agent_envs.core.lookup import lookup
from agent_envs.core.messages import Message
from agent_envs.core.rewards import MAX_COUNTED_MISTAKES, StepEvent
from agent_envs.errors import ConfigurationError
from agent_envs.judges.endpoint import Endpoint
from agent_envs.judges.rubric import Criterion, load_rubric, read_reply, reply_model, write_prompt

SCOPES: Final = {"trajectory": False, "step": True}
"""Whether each step is scored."""
LOCK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
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


class Judge:
    """Scores trajectories, or each step, in [0, 1]; a reward term for ``rewards=``.

    A trajectory's score is paid at its last step. A step's score less 1 is a cost, of the first ten
    steps only. If a judge fails, the step raises `ServerError`, and the episode is not scorable.
    """

    def __init__(
        self,
        rubric: str | Path | Sequence[Criterion | Mapping[str, Any]],
        *endpoints: Endpoint,
        name: str = "judge",
        scope: str = "trajectory",
        cache: str | Path | None = None,
    ) -> None:
        """Load the rubric; nothing is sent yet.

        Args:
            rubric: Criteria, or their YAML file.
            endpoints: One or more judges; the value is the mean of theirs.
            name: Name in ``info["judgements"]`` and in metrics.
            scope: ``"trajectory"``, or ``"step"`` to score each step.
            cache: SQLite file of judgements by model and prompt, which holds rubric and text.
        """
        if not endpoints:
            raise ConfigurationError(f"The judge {name!r} has no endpoint. Pass Endpoint(...).")
        self.scores_steps = lookup(SCOPES, scope, kind="scope")
        self.rubric, self.endpoints, self.name = load_rubric(rubric), endpoints, name
        self._form, self._file = reply_model(self.rubric), cache
        self._schema = self._form.model_json_schema()
        if cache is not None:
            Path(cache).parent.mkdir(parents=True, exist_ok=True)
            with closing(self._cache()) as file, file:
                file.execute("CREATE TABLE IF NOT EXISTS judgements (key PRIMARY KEY, value)")

    def __repr__(self) -> str:
        """Return the same text in every process."""
        return f"Judge({self.name!r}, {', '.join(each.model for each in self.endpoints)})"

    def __call__(self, env: Any, event: StepEvent) -> float:
        """Score the episode up to this step; see `RewardFunction`."""
        observations, actions = env.episode_texts
        texts = observations, [*actions, event.text]
        value, judgement = self.term(*texts, is_last=event.is_last)
        if judgement is not None:
            event.info.setdefault("judgements", {})[self.name] = asdict(judgement)
        return value

    def term(
        self, observations: Sequence[str], actions: Sequence[str], *, is_last: bool
    ) -> tuple[float, Judgement | None]:
        """Return the reward term of the last action, before its weight, and its judgement."""
        if not (len(actions) <= MAX_COUNTED_MISTAKES if self.scores_steps else is_last):
            return 0.0, None
        judgement = self.judge(observations, actions)
        return judgement.value - self.scores_steps, judgement

    def judge(self, observations: Sequence[str], actions: Sequence[str]) -> Judgement:
        """Score an episode up to its last action; there is an observation before each action.

        Raises:
            ServerError: If a judge gives no valid judgement.
        """
        messages = write_prompt(self.rubric, observations, actions)
        futures = [
            submit(functools.partial(self._ask, endpoint, messages)) for endpoint in self.endpoints
        ]
        replies = [future.result() for future in futures]
        weights = [criterion.weight for criterion in self.rubric]
        return Judgement(
            value=statistics.fmean(
                criterion.share(reply["scores"][criterion.name]) * criterion.weight
                for reply in replies
                for criterion in self.rubric
            ) / statistics.fmean(weights),
            scores=[reply["scores"] for reply in replies],
            tokens=sum(reply["tokens"] for reply in replies),
            cost=sum(reply["cost"] for reply in replies),
            record=_digest(messages[1:]),
        )  # fmt: skip

    def _ask(self, endpoint: Endpoint, messages: Sequence[Message]) -> Any:
        """Return the judgement of an endpoint as JSON, from the cache if it is there."""
        key = _digest([endpoint.model, endpoint.temperature, messages, self._schema])
        if self._file is not None:
            with closing(self._cache()) as file:
                row = file.execute("SELECT value FROM judgements WHERE key = ?", [key]).fetchone()
            if row:
                return json.loads(row[0])
        read = functools.partial(read_reply, form=self._form)
        scores, used = endpoint.ask(messages, self._schema, read)
        tokens = used["prompt_tokens"] + used["completion_tokens"]
        reply = {"scores": scores, "tokens": tokens, "cost": endpoint.cost(used)}
        if self._file is None:
            return reply
        with closing(self._cache()) as file, file:
            entry = [key, json.dumps(reply)]
            file.execute("INSERT OR IGNORE INTO judgements VALUES (?, ?)", entry)
        return self._ask(endpoint, messages)  # that of another process, if it was first

    def _cache(self) -> sqlite3.Connection:
        # a connection per use: nothing to share with threads and forks
        return sqlite3.connect(str(self._file), timeout=LOCK_SECONDS)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
