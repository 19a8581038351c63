"""Collect many episodes of a program at once against one policy, as `Rollout` does of environments.

Each episode has a session at the gateway, which makes a trajectory of its calls. A program that
raises, hangs or dies ends its own episode, with the error recorded, and the others go on.
"""

import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agent_envs.core.deadline import CallSession
from agent_envs.core.deadline import Outcome as CallOutcome
from agent_envs.errors import AgentEnvsError
from agent_trainers.gateway import Gateway, Session
from agent_trainers.policies.policy import Policy
from agent_trainers.programs.program import Outcome, ProgramSession, ScoreAnswer, read_outcome
from agent_trainers.programs.runners import Run
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

IDLE_SECONDS: Final = 0.05
"""How long to wait for programs before looking after deadlines."""
StartRun = Callable[[ProgramSession, dict[str, Any]], Run]
