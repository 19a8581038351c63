"""TextArena: our environments by ``textarena.make``, and its games as environments of ours.

::

    import textarena as ta
    from agent_envs.adapters.textarena import register

    register("AgentR1/SyntheticMultiHop-v0")
    env = ta.make("AgentR1/SyntheticMultiHop-v0")
    env.reset(num_players=1, seed=7)

and the other way round, for games of one player and, against `opponents`, of several::

    name = "agent_envs.adapters.textarena:AgentR1/TextArena-v0"
    env = gym.make(name, env_id="GuessTheNumber-v0-raw")

TextArena pays at the end of a game: the return. The reward of a step, its terms, and whether the
episode was cut off stand in the step's info.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import textarena as ta
from textarena.envs.registration import ENV_REGISTRY

from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.adapters.own_episode import OwnEpisode
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError


class OwnEnv(ta.Env):
    """An environment of ours as a game of one player."""

    def __init__(self, id: str, **kwargs: Any) -> None:
        """Make the environment.

        Args:
            id: Its Gymnasium id.
            kwargs: Its other arguments, as for ``gymnasium.make``.

        Raises:
            ConfigurationError: If TextArena's loop cannot play it.
        """
        self._episode = OwnEpisode(id, kwargs, only_text_in="TextArena")

    def reset(self, num_players: int = 1, seed: int | None = None) -> None:
        """Begin an episode; the player's prompt is the system prompt, the tools, the question."""
        self._episode.reset(seed=seed)
        # Not seeded: that would seed the generator that all of a process share.
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

    A step is our turn and those of the others, until it is our turn again. With an id that ends in
    ``-raw`` each observation follows the others in a conversation; the wrappers of other ids make
    each the whole state.
    """

    draws_globally = True

    def __init__(
        self,
        *,
        env_id: str,
        opponents: Sequence[Callable[[str], str]] = (),
        player: int = 0,
        **kwargs: Any,
    ) -> None:
        """Make the game.

        Args:
            env_id: Its id, as for ``textarena.make``.
            opponents: Who plays the other seats, in their order: functions from what they have been
                told since their last turn to an action, such as agents of TextArena.
            player: Our seat.
            kwargs: Its other arguments, as for ``textarena.make``.

        Raises:
            ConfigurationError: If there is no such seat.
        """
        super().__init__(env_id)
        self._num_players = 1 + len(opponents)
        if not 0 <= player < self._num_players:
            raise ConfigurationError(
                f"player must be 0 to {self._num_players - 1}, not {player}: there are "
                f"{len(opponents)} opponents."
            )
        seats = [seat for seat in range(self._num_players) if seat != player]
        self._opponents = dict(zip(seats, opponents, strict=True))
        self._player = player
        self._make = (env_id, kwargs)

    def begin(self, task: int) -> list[Message]:
        """Begin the game of a seed, up to our first turn."""
        # Made anew: its wrappers show what was said in the game before.
        env_id, kwargs = self._make
        self._env = ta.make(env_id, **kwargs)
        self._env.reset(num_players=self._num_players, seed=task)
        text, _ = self._until_our_turn(is_over=False)
        return [Message(role="user", content=text)]

    def act(self, action: str) -> Reply:
        """Take our turn, and let the others take theirs."""
        is_over, _ = self._env.step(action=action)
        text, is_over = self._until_our_turn(is_over=bool(is_over))
        reward, metrics = 0.0, {}
        if is_over:
            rewards, game_info = self._env.close()
            reward = float((rewards or {}).get(self._player, 0.0))
            metrics = {"invalid_move": float(bool(game_info[self._player]["invalid_move"]))}
        return Reply(
            text=text,
            reward=reward,
            terminated=is_over,
            is_state=self._is_state,
            metrics=metrics,
        )

    def _until_our_turn(self, *, is_over: bool) -> tuple[str, bool]:
        while not is_over:
            player, told = self._env.get_observation()
            if player == self._player:
                return self._text(told), False
            is_over, _ = self._env.step(action=self._opponents[player](self._text(told)))
        # The seat that the game stopped at may be another's.
        self._env.state.current_player_id = self._player
        return self._text(self._env.get_observation()[1]), True

    def _text(self, told: Any) -> str:
        """Return what a player is told; of a list, what others said."""
        self._is_state = isinstance(told, str)
        if isinstance(told, str):
            return told
        roles = self._env.state.role_mapping
        lines = [
            message if sender == ta.GAME_ID else f"[{roles.get(sender, sender)}] {message}"
            for sender, message, kind in told
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
