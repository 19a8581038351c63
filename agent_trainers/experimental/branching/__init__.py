"""Branching: advantages measured by several continuations of the same state.

``--advantage_estimator agent_trainers.experimental.branching:vine`` (or ``:tree``) attaches
`Branching`; ``--extensions '{"agent_trainers.experimental.branching:Branching": {"budget": 2}}'``
sets its budget.
"""

from agent_trainers.experimental.branching.branch_estimators import (
    allocate_branches,
    tree,
    uses_branches,
    vine,
)
from agent_trainers.experimental.branching.branching import Branching

__all__ = ["Branching", "allocate_branches", "tree", "uses_branches", "vine"]
