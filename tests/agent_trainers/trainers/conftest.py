import pytest


@pytest.fixture
def played(make_trainer):
    """Real trajectories of the embedded policy, with several turns and mixed rewards.

    Played by the test module's own `make_trainer`.
    """
    trainer = make_trainer()
    trainer.model.train()
    return trainer.player.play([{"task": i // 4} for i in range(8)], "train", (0, 0))
