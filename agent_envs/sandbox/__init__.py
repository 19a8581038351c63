"""Run untrusted Python and shell programs.

::

    with open_sandbox() as sandbox:
        result = sandbox.run_python("print(6 * 7)")
        with sandbox.session() as session:
            session.run("x = 1")
            session.run("x + 1")
        verdict = sandbox.check_python("def f(x): return x + 1", "assert f(1) == 2")

The content of a scratch directory is passed from one program to the next as a `Folder`. The
promises of each level and their tests are in ``SECURITY.md``.
"""

from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.results import Level, Limits, Result, Verdict
from agent_envs.sandbox.sandbox import Sandbox, Session, open_sandbox

__all__ = ["Folder", "Level", "Limits", "Result", "Sandbox", "Session", "Verdict", "open_sandbox"]
