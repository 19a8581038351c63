import pytest
import torch

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
        settings = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "num_generations": 4,
            "num_generations_eval": 1,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 4,
            "max_completion_length": 24,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return _kind(**(settings | changes))

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
