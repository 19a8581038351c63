"""Libraries that the examples of the documentation may need, and that no test asks for."""

import ast
from importlib.util import find_spec

OPTIONAL = {
    "gem",
    "inspect_ai",
    "openenv",
    "skyrl_gym",
    "stable_baselines3",
    "textarena",
    "torchrl",
    "verifiers",
}


def missing_libraries(code):
    """Return which of them `code` needs, as its imports and our adapters' names say, and lacks."""
    needed = set()
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            needed |= {*name.removeprefix("agent_envs.adapters.").split(".")[:1]}
    return sorted(name for name in needed & OPTIONAL if find_spec(name) is None)
