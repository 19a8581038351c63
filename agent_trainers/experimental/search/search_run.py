"""A search under way: what it was given so far, and the steps that it takes."""

import dataclasses
from typing import Any

from agent_envs.core.async_bridge import Outcome
from agent_trainers.experimental.branching.saved_states import replay, restore_environment
from agent_trainers.experimental.search.search_tree import Candidate, Node, Plan, Tree, Wish
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.answers import read_reset
from agent_trainers.rollout.collector import TextEnv
from agent_trainers.rollout.episode import Episode, lend_tokenizer
from agent_trainers.trajectory import StopReason, Trajectory


class SearchRun:
    """A search under way."""

    def __init__(self, tree: Tree, plan: Plan) -> None:
        """Begin `plan`, up to its first wish."""
        self.tree = tree
        self.error: Episode | None = None
        """The episode in which something failed."""
        self.reply: list[Candidate] = []
        """What was proposed."""
        self._chosen: Node | None = None
        self._steps = plan(tree)
        self.wish: Wish = ()
        self._go_on(None)

    def advance(self) -> bool:
        """Hand over what was wished for; return whether the search is over."""
        if self.error is not None:
            return True
        reply, self.reply = self.reply, []
        self._go_on(reply)
        return self._chosen is not None

    def fail(self, episode: Episode, error: BaseException, reason: StopReason | None) -> None:
        """End because of an error."""
        failed = dataclasses.replace(episode)
        failed.fail(error, reason)
        self.error = failed

    def tries(self, policy: Policy) -> list["Try"]:
        """Return the steps that are to be taken, as many as the budget has."""
        left = self.tree.budget.steps - self.tree.spent.steps
        new: dict[tuple[Node, str], Try] = {}
        for candidate in self.wish:
            if isinstance(candidate, Candidate) and candidate.result is None:
                new.setdefault((candidate.node, candidate.generation.text),
                               Try(self, candidate, policy))  # fmt: skip
        tries: list[Try] = []
        for each in new.values():
            if (cost := self.tree.next_cost(each.parent)) > left:
                break
            each.env = self.tree.take_live(each.parent)
            left -= cost
            tries.append(each)
        return tries

    def trajectory(self) -> Trajectory:
        """Return the episode that was chosen, or that failed, with what the search took."""
        if self.error is not None:
            played = self.error.trajectory()
        else:
            assert self._chosen is not None
            played = self._chosen.trajectory()
        spent = self.tree.spent
        cost = {"search_steps": float(spent.steps), "search_tokens": float(spent.tokens)}
        usage = dataclasses.asdict(spent.usage)
        return dataclasses.replace(played, metrics=played.metrics | cost, usage=usage)

    def _go_on(self, reply: list[Candidate] | None) -> None:
        try:
            self.wish = next(self._steps) if reply is None else self._steps.send(reply)
        except StopIteration as stop:
            self._chosen, self.wish = stop.value, ()


class Try:
    """An action that is carried out in a state."""

    def __init__(self, search: SearchRun, candidate: Candidate, policy: Policy) -> None:
        """Prepare to carry out `candidate`; `policy` is whose tokens the environment counts in."""
        self.search, self.parent, self._policy = search, candidate.node, policy
        before = candidate.node.episode
        self._before = before
        self._episode = Episode(before.number, before.spec, keeps_states=True)
        self._episode.info = before.info
        self._episode.transitions = list(before.transitions)
        self._episode.generation = candidate.generation
        self.node = Node(self._episode)
        self.is_new = False
        self.env: TextEnv | None = None
        """The environment that is in the state already, if one is."""
        self._replayed = 0

    @property
    def num_calls(self) -> int:
        """How many resets and steps it takes: where no state is saved, all that lead to it."""
        is_there = self._before.saved is not None or self.env is not None
        return 1 if is_there else 2 + self.parent.depth

    def step(self, env: TextEnv, timeout: float) -> Any:
        """Go to the state and take the step; nothing if the state no longer fits the policy."""
        episode = self._episode
        assert episode.generation is not None
        if episode.generation.finish_reason == "overflow":
            return None
        episode.env = env
        if self._before.saved is not None:
            restore_environment(env, self._before.saved)
        elif self.env is None:
            self._replay(env, timeout)
        lend_tokenizer(self._policy, env, episode.info)
        return episode.step(timeout)

    def note(self, outcome: Outcome) -> None:
        """Note what came of it."""
        episode, spent = self._episode, self.search.tree.spent
        spent.steps += self._replayed
        assert episode.generation is not None
        try:
            if (answer := value_of(outcome)) is None:
                episode.overflow()
            else:
                spent.steps += 1
                episode.advance(answer)
        except Exception as error:  # noqa: BLE001 - foreign code; it is recorded
            self.search.fail(episode, error, None)
            return
        self.is_new = True
        self.parent.children[episode.generation.text] = self.node

    def _replay(self, env: TextEnv, timeout: float) -> None:
        """Begin anew and take the steps to the state again; each counts."""
        episode = self._episode
        episode.env = env
        info = read_reset(episode.reset(timeout))
        lend_tokenizer(self._policy, env, info)
        goal = episode.info["messages"]
        states = replay(
            env, info, episode.transitions, goal, task=episode.spec.task, timeout=timeout
        )
        for self._replayed, _ in states:
            pass


def value_of(outcome: Outcome) -> Any:
    """Return what a call returned, or raise what it raised."""
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
