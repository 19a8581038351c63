"""Runs untrusted Python and shell programs.

::

    with open_sandbox() as sandbox:
        result = sandbox.run_python("print(6 * 7)")
        with sandbox.session() as session:
            session.run("x = 1")
            session.run("x + 1")
        verdict = sandbox.check_python("def f(x): return x + 1", "assert f(1) == 2")

==============================  =========  =========  =============
holds at the level              strong     container  limits
==============================  =========  =========  =============
wall clock, processor time      whole tree, one kill ends it at every level
memory, however it is held      counted    engine's   counted
output                          cut while it is produced
number of processes             yes        yes        root: counted
scratch space                   in memory  in memory  on disk, no sum
network, other processes        none       none       open
files, environment              system's   image's    open, clean
verdicts cannot be forged       yes        yes        not by chance
==============================  =========  =========  =============

What a scratch directory holds goes from one program to the next as a `Folder`. ``python -m
agent_envs.sandbox`` says what this machine offers. What each level promises, with the test of each
line, and what none does, stands in ``docs/project/security.md``.
"""

from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.limits import Level, Limits, Result, Verdict
from agent_envs.sandbox.sandbox import Sandbox, Session, open_sandbox

__all__ = ["Folder", "Level", "Limits", "Result", "Sandbox", "Session", "Verdict", "open_sandbox"]
