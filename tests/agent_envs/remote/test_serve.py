"""The command that serves an environment."""

import pytest

from agent_envs.serve import main

MULTI_HOP = "AgentR1/SyntheticMultiHop-v0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MULTI_HOP, "--host", "0.0.0.0"], "lets other machines in. Set AGENT_ENVS_TOKEN"),
        ([MULTI_HOP, "--host", "::"], "lets other machines in"),
        ([MULTI_HOP, "--host", "node-3"], "lets other machines in"),
        ([MULTI_HOP, "--kwargs", "[1]"], "must be a JSON object"),
        ([MULTI_HOP, "--kwargs", "{"], "--kwargs is not valid JSON"),
        ([MULTI_HOP, "--kwargs", '{"hop": 1}'], "'hop'"),
        ([MULTI_HOP, "--max-sessions", "0"], "must be positive"),
        (["AgentR1/SyntheticMultiHap-v0"], "Did you mean: `SyntheticMultiHop`"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    pytest.importorskip("websockets", reason="the extra 'serve' is not installed")
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--port", "0"])
    assert message in str(stopped.value)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main([MULTI_HOP])
    assert "pip install 'agent-r1[serve]'" in str(stopped.value)
