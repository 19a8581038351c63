from pathlib import Path

import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.core.contexts import CONTEXTS
from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_envs.envs.qa.multihop import HotpotQAEnv
from agent_envs.envs.synthetic.world import VARIANTS
from agent_envs.retrieval import RETRIEVERS, SMALL_CORPUS
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
NAMES = [
    *(spec.id for spec in ENVIRONMENTS),
    *CONTEXTS,
    *TOOL_FORMATS,
    *HotpotQAEnv.reward_functions,
    *VARIANTS,
    *RETRIEVERS,
    *ADVANTAGE_ESTIMATORS,
    f"{SMALL_CORPUS:,} passages",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_everything_that_can_be_chosen(name):
    assert name in README


def test_the_readme_has_each_turn_limit():
    for spec in ENVIRONMENTS:
        (row,) = [line for line in README.splitlines() if line.startswith(f"| `{spec.id}`")]
        assert row.endswith(f"| {spec.max_episode_steps} |")
