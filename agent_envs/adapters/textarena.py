"""TextArena: our environments in ``textarena.make``, and its games as environments of ours.

TextArena pays the return at the end of a game. The rewards of the steps, their terms, and whether
the episode was truncated are in the steps' infos.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import gymnasium as gym
import textarena as ta
from textarena.envs.registration import ENV_REGISTRY

from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.adapters.own_episode import OwnEpisode
from agent_envs.core.messages import Message

_PLAYER: Final = 0
"""The number of our player."""


class OwnEnv(ta.Env):
    """An environment of ours as a game of one player."""

    def __init__(self, id: str, **kwargs: Any) -> None:
        """Make the environment as ``gymnasium.make(id, **kwargs)`` does."""
        self._episode = OwnEpisode(id, kwargs, only_text_in="TextArena")

    def reset(self, num_players: int = 1, seed: int | None = None) -> None:
        """Begin an episode; the player's prompt is the system prompt, the tools, the question."""
        self._episode.reset(seed=seed)
        # Without a seed, which would seed the process's global generator.
        self.state = ta.SinglePlayerState(num_players=num_players)
        opening = self._episode.opening
        self.state.reset(
            game_state={}, player_prompt_function=lambda player_id, game_state: opening
        )

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        """Take one model turn; the return is paid when the episode is over."""
        episode, state, kind = self._episode, self.state, ta.ObservationType
        state.add_observation(action, kind.PLAYER_ACTION, from_id=state.current_player_id)
        if episode.step(action):
            state.add_observation(episode.text, kind.GAME_MESSAGE)
        state.step_info = {"reward": episode.reward, **episode.summary}
        if episode.is_over:
            reason = "truncated" if episode.truncated else "terminated"
            state.set_outcome(reward=episode.episode_return, reason=reason)
            state.game_info[0]["reward_terms"] = dict(episode.reward_terms)
        return state.step()  # type: ignore[no-any-return]


class TextArenaEnv(ForeignEnv):
    """A game of TextArena as one of ours. A task is a seed of its reset.

    A step is our turn and those of the opponents until our next one. Take the ids that end in
    ``-raw``: with the wrappers of others each observation repeats the whole game.
    """

    draws_globally = True

    def __init__(
        self, *, env_id: str, opponents: Sequence[Callable[[str], str]] = (), **kwargs: Any
    ) -> None:
        """Prepare the game, as ``textarena.make(env_id, **kwargs)`` does.

        `opponents` are the players after us: functions from the messages since their last turn to
        an action, such as agents of TextArena.
        """
        super().__init__(env_id)
        self._opponents = list(opponents)
        self._make = (env_id, kwargs)

    def begin(self, task: int) -> list[Message]:
        """Begin the game of a seed, up to our first turn."""
        env_id, kwargs = self._make
        self._env = ta.make(env_id, **kwargs)  # a new one: wrappers keep the last game's messages
        self._env.reset(num_players=1 + len(self._opponents), seed=task)
        text, _ = self._until_our_turn(is_over=False)
        return [Message(role="user", content=text)]

    def act(self, action: str) -> Reply:
        """Take our turn and those of the opponents."""
        is_over, _ = self._env.step(action=action)
        text, is_over = self._until_our_turn(is_over=bool(is_over))
        reward, metrics = 0.0, {}
        if is_over:
            rewards, game_info = self._env.close()
            reward = float((rewards or {}).get(_PLAYER, 0.0))
            metrics = {"invalid_move": float(bool(game_info[_PLAYER]["invalid_move"]))}
        return Reply(text=text, reward=reward, terminated=is_over, metrics=metrics)

    def _until_our_turn(self, *, is_over: bool) -> tuple[str, bool]:
        while not is_over:
            player, observation = self._env.get_observation()
            if player == _PLAYER:
                return self._text(observation), False
            is_over, _ = self._env.step(action=self._opponents[player - 1](self._text(observation)))
        # The game may have ended at another player's turn.
        self._env.state.current_player_id = _PLAYER
        return self._text(self._env.get_observation()[1]), True

    def _text(self, observation: Any) -> str:
        """Return a player's observation as text; of a list, the messages of others."""
        if isinstance(observation, str):
            return observation
        roles = self._env.state.role_mapping
        lines = [
            message if sender == ta.GAME_ID else f"[{roles.get(sender, sender)}] {message}"
            for sender, message, kind in observation
            if kind is not ta.ObservationType.PLAYER_ACTION
            or sender != self._env.state.current_player_id
        ]
        return "\n".join(lines)


def register(*ids: str) -> None:
    """Register environments of ours with TextArena, under their Gymnasium ids."""
    for id in ids:
        if id not in ENV_REGISTRY:
            ta.register(id, partial(OwnEnv, id))


gym.register(
    "AgentR1/TextArena-v0",
    f"{__name__}:TextArenaEnv",
    order_enforce=False,
    disable_env_checker=True,
)
