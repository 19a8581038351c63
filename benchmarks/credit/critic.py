"""A critic for a policy as it is: a linear head on its hidden states, fitted to returns.

The head is that of the package's critic (`agent_trainers.trainers.critic.ValueHead`), but fitted at
once, by ridge regression to the returns-to-go of other episodes of the same policy, so that what is
scored is the estimator with a fair critic, not how long one was trained.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from agent_trainers.algorithms.episodes import discount
from agent_trainers.trajectory import Trajectory, Transition

RIDGE: Final = 1.0
"""Added to the diagonal of the normal equations of standardised features."""
_BATCH: Final = 64
Array = npt.NDArray[np.float64]


class FittedCritic:
    """Values of the states before tokens."""

    def __init__(self, model: Any, pad_token_id: int, shown: Sequence[Trajectory]) -> None:
        """Fit a head on the body of `model` to the returns of the episodes `shown`."""
        self._body, self._pad = model.model, pad_token_id
        steps = [transition for trajectory in shown for transition in trajectory.transitions]
        returns = np.concatenate([discount(t.rewards, 1.0) for t in shown])
        features = self._features(steps)
        x = np.concatenate(features)
        y = np.repeat(returns, [len(each) for each in features])
        self._mean, self._scale = x.mean(0), x.std(0) + 1e-6
        x = (x - self._mean) / self._scale
        self._bias = float(y.mean())
        gram = x.T @ x + RIDGE * np.eye(x.shape[1])
        self._weights: Array = np.linalg.solve(gram, x.T @ (y - self._bias))

    def values(self, trajectories: Sequence[Trajectory]) -> list[list[list[float]]]:
        """Return the value before each token of each step of each episode."""
        steps = [transition for trajectory in trajectories for transition in trajectory.transitions]
        features = iter(self._features(steps))
        return [[self._value(next(features)) for _ in t.transitions] for t in trajectories]

    def _value(self, features: Array) -> list[float]:
        values = (features - self._mean) / self._scale @ self._weights + self._bias
        rounded: list[float] = np.round(values, 4).tolist()
        return rounded

    @torch.no_grad()
    def _features(self, steps: Sequence[Transition]) -> list[Array]:
        """Return the hidden state before each token of each action, (tokens, H) each."""
        found: list[Array] = []
        for i in range(0, len(steps), _BATCH):
            some = steps[i : i + _BATCH]
            rows = [torch.tensor([*t.prompt_ids, *t.completion_ids]) for t in some]
            # padded on the right, where nothing that counts looks
            ids = pad_sequence(rows, batch_first=True, padding_value=self._pad)
            hidden = self._body(input_ids=ids.to(self._body.device)).last_hidden_state
            for row, step in zip(hidden.double().cpu().numpy(), some, strict=True):
                start = len(step.prompt_ids) - 1
                found.append(row[start : start + len(step.completion_ids)])
        return found
