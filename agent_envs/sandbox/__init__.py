"""Run untrusted Python and shell programs.

::

    with open_sandbox() as sandbox:
        result = sandbox.run_python("print(6 * 7)")
        with sandbox.session() as session:
            session.run("x = 1")
            session.run("x + 1")
        verdict = sandbox.check_python("def f(x): return x + 1", "assert f(1) == 2")

==============================  =========  =========  =============
guarantee at the level          strong     container  limits
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

The content of a scratch directory is passed from one program to the next as a `Folder`.
``python -m agent_envs.sandbox`` reports what this machine offers. ``docs/project/security.md``
lists the promises of each level with their tests, and what no level promises.
"""

from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.results import Level, Limits, Result, Verdict
from agent_envs.sandbox.sandbox import Sandbox, Session, open_sandbox

__all__ = ["Folder", "Level", "Limits", "Result", "Sandbox", "Session", "Verdict", "open_sandbox"]
