"""Gymnasium environments in which a language model acts: it calls tools and answers.

Importing the package registers the ids of `agent_envs.registration.ENVIRONMENTS`::

    import gymnasium as gym
    import agent_envs

    env = gym.make("AgentR1/HotpotQA-v0", data="hotpotqa.jsonl.gz")
"""

from agent_envs.core.contexts import History, View
from agent_envs.core.rewards import RewardFunction, StepEvent, format_term
from agent_envs.core.snapshots import Snapshot
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolError, ToolResult, tool
from agent_envs.core.tool_env import NewConversation, ToolEnv
from agent_envs.data.dataset_env import DatasetEnv
from agent_envs.data.sources import DatasetSpec, Hub, text_field
from agent_envs.errors import (
    AgentEnvsError,
    ConfigurationError,
    DataError,
    MissingExtraError,
    SnapshotError,
    UnknownNameError,
)
from agent_envs.formats.actions import ParsedAction, ToolFormat
from agent_envs.registration import ENVIRONMENTS, register_all

__version__ = "0.1.0"
__all__ = [
    "ENVIRONMENTS",
    "AgentEnvsError",
    "ConfigurationError",
    "DataError",
    "DatasetEnv",
    "DatasetSpec",
    "History",
    "Hub",
    "MissingExtraError",
    "NewConversation",
    "ParsedAction",
    "RewardFunction",
    "Snapshot",
    "SnapshotError",
    "StepEvent",
    "Task",
    "Tool",
    "ToolEnv",
    "ToolError",
    "ToolFormat",
    "ToolResult",
    "UnknownNameError",
    "View",
    "format_term",
    "text_field",
    "tool",
]

register_all()
