"""Optional libraries: what needs one says which extra brings it."""

import importlib.util

from agent_envs.errors import MissingExtraError


def require_extra(extra: str, needed_for: str, *modules: str) -> None:
    """Check that the `modules` an extra brings are installed, without importing them.

    Raises:
        MissingExtraError: If one is missing; says what it is `needed_for`, and how to install it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{needed_for} needs {', '.join(missing)}. Install with: "
            f"pip install 'agent-r1[{extra}]'"
        )
