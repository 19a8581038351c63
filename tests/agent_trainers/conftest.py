import pytest
import torch

from tests.agent_trainers.short_run import SETTINGS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_policy():
    """The folder of the embedded policy."""
    from agent_trainers import TINY_POLICY

    return str(TINY_POLICY)


@pytest.fixture
def tokenizer(tiny_policy):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_policy, padding_side="left")


@pytest.fixture
def model(tiny_policy):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_policy)


@pytest.fixture
def make_config(tmp_path):
    """Settings of a short run on CPU."""
    from agent_trainers.trainers.config import StepGRPOConfig

    def make(_kind=StepGRPOConfig, **changes):
        return _kind(**(SETTINGS | {"output_dir": str(tmp_path / "run")} | changes))

    return make


@pytest.fixture
def played(make_trainer):
    """Real trajectories of the embedded policy, with several turns and mixed rewards.

    Sampled by the `make_trainer` of the test module.
    """
    trainer = make_trainer()
    trainer.model.train()
    return trainer.rollouts.collect(
        [{"task": i // 4} for i in range(8)], "train", (0, 0)
    ).trajectories
