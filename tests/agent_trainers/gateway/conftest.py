import contextlib

import pytest

from agent_trainers import TINY_POLICY, Gateway
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.policy import ScriptedPolicy


@pytest.fixture(scope="module")
def policy():
    """The embedded policy."""
    return load_policy(str(TINY_POLICY), max_new_tokens=24)


@pytest.fixture(scope="module")
def gateway(policy):
    """One gateway on the embedded policy for the tests of a module."""
    with Gateway(policy) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared():
    """One gateway whose scripted policy each test chooses."""
    acts = {}
    with Gateway(ScriptedPolicy(lambda request: acts["act"](request))) as opened:
        yield opened, acts


@pytest.fixture
def scripted(shared):
    """Opens a gateway on a policy that follows a script; its tokens are bytes."""
    with contextlib.ExitStack() as stack:

        def open_gateway(act, **options):
            if not options:
                gateway, acts = shared
                acts["act"] = act
                return gateway
            return stack.enter_context(Gateway(ScriptedPolicy(act), **options))

        yield open_gateway
