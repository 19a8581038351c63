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
memory                          process by process and in sum (sampled every 20 ms)
output                          cut while it is produced
number of processes             yes        yes        not for root
scratch space                   in memory  in memory  on disk, no sum
network, other processes        none       none       open
files, environment              system's   image's    open, clean
verdicts cannot be forged       yes        yes        not by chance
==============================  =========  =========  =============

Not promised at any level: protection from a bug in the kernel, from timing side channels, or from
a program that uses all it is allowed to. At ``strong`` a program can read ``/usr``, the Python
installation (not its site-packages), and from ``/proc/self/mountinfo`` where these lie. Files in
the scratch directory take memory beside `Limits.memory_mb`; processor time of a child that nobody
waits for is counted only while it lives, so there the wall clock is what holds.
"""

from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.limits import Level, Limits, Result, Verdict
from agent_envs.sandbox.sandbox import Sandbox, Session, open_sandbox

__all__ = ["Folder", "Level", "Limits", "Result", "Sandbox", "Session", "Verdict", "open_sandbox"]
