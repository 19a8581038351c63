"""TorchRL: our spaces as its specs, so that ``GymWrapper`` and ``GymEnv`` take our environments.

Actions and observations are text in ``NonTensor`` entries. This module imports torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs.gym_like import BaseInfoDictReader
from torchrl.envs.libs.gym import register_gym_spec_conversion

from agent_envs.core.spaces import UnicodeText


@register_gym_spec_conversion(UnicodeText)
def _convert_text(space: UnicodeText, device: Any = None, **_: Any) -> NonTensor:
    return NonTensor((), device=device, example_data="text")


class InfoReader(BaseInfoDictReader):
    """Writes the terms of the reward into the tensordict, each as ``("reward_terms", name)``."""

    def __init__(self, reward_terms: Sequence[str]) -> None:
        """Write the terms with these names."""
        self._names = tuple(reward_terms)
        terms = {name: Unbounded(()) for name in self._names}
        self._spec = Composite({"reward_terms": Composite(terms)})

    def __call__(self, info_dict: dict[str, Any], tensordict: Any) -> Any:
        """Write the terms in `info_dict`; they are 0 at a reset."""
        terms = info_dict.get("reward_terms", {})
        for name in self._names:
            tensordict["reward_terms", name] = np.float32(terms.get(name, 0.0))
        return tensordict

    @property
    def info_spec(self) -> Composite:
        return self._spec
