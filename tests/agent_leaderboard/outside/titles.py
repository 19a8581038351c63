"""An agent of a user's own, as the docs show it: it answers with the first title that it finds."""

from contextlib import closing

from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_leaderboard.agents.agent import PlayedEpisode
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout

HERMES = TOOL_FORMATS["hermes"]


class FirstTitle:
    def __init__(self, prefix=""):
        self.prefix = prefix

    def check(self, make_env):
        """Say with a ConfigurationError where it cannot play; it plays everywhere."""

    def act(self, request):
        said = request.messages[-1]["content"]
        if request.messages[-1]["role"] == "user":
            return (
                f'<tool_call>{{"name": "search", "arguments": {{"query": "{said}"}}}}</tool_call>'
            )
        return HERMES.write_answer(self.prefix + said.splitlines()[0].removeprefix("[1] "))

    def play(self, make_env, specs):
        with closing(Rollout(make_env, ScriptedPolicy(self.act))) as rollout:
            return [PlayedEpisode(trajectory=t) for t in rollout.collect(specs)]
