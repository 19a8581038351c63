import agent_trainers


def test_every_public_name_is_there_and_no_other():
    for name in {*agent_trainers.__all__} - {"TINY_POLICY"}:  # a folder: it has no name of its own
        assert getattr(agent_trainers, name).__name__ == name
    assert set(agent_trainers.__all__) <= set(dir(agent_trainers))
