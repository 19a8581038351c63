import contextlib

import pytest

from agent_trainers import Gateway
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.scripted import ScriptedPolicy


@pytest.fixture
def policy(model, tokenizer):
    """The embedded policy."""
    return transformers_policy(model.eval(), tokenizer, max_new_tokens=24)


@pytest.fixture
def scripted():
    """Opens a gateway on a policy that follows a script; its tokens are bytes."""
    with contextlib.ExitStack() as stack:

        def open_gateway(act, **options):
            return stack.enter_context(Gateway(ScriptedPolicy(act), **options))

        yield open_gateway
