"""A judge by rules, and a term that scores by the digest of a record and fails for some."""

import json
import zlib

from agent_envs.errors import ServerError
from agent_envs.judges import Endpoint, Judge

RUBRIC = [
    {"name": "grounded", "weight": 2, "description": "The answer follows from results."},
    {"name": "brief", "scale": [0, 2], "description": "No step is superfluous."},
]


class ByRules(Endpoint):
    """A function of the messages gives its replies."""

    def __init__(self, rule, model="rules", **options):
        super().__init__(base_url="rules", model=model, **options)
        self.rule = rule

    def send(self, messages, schema, used):
        used.update(prompt_tokens=1000, completion_tokens=50)
        return self.rule(messages)


def replies(grounded, brief, **more):
    return json.dumps({"reason": "So.", "grounded": grounded, "brief": brief, **more})


def by_digest(messages):
    content = messages[-1]["content"]
    if "no judgement" in content:
        raise ServerError("status 400: refused")
    number = zlib.crc32(content.encode())
    return replies(1 + number % 5, number // 5 % 3)


def by_half_digest(messages):
    """Agree with `by_digest` about one criterion."""
    scores = json.loads(by_digest(messages))
    return replies(scores["grounded"], 2 - scores["brief"])


def make_judge(name, **options):
    endpoints = ByRules(by_digest, "a", price=(1.0, 0.0)), ByRules(by_half_digest, "b")
    return Judge(RUBRIC, *endpoints, name=name, **options)


reasoning = make_judge("reasoning")
steps = make_judge("steps", each_step=True)
