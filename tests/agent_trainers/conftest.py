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
def make_trainer(tiny_policy, tokenizer, make_config):
    """A trainer of the embedded policy; what is not the trainer's goes to its settings."""
    from agent_trainers.trainers.config import StepGRPOConfig, StepPPOConfig
    from agent_trainers.trainers.grpo import StepGRPOTrainer
    from agent_trainers.trainers.ppo import StepPPOTrainer

    of_trainer = ("eval_dataset", "eval_envs", "optimizers", "peft_config")

    def make(env="AgentR1/SyntheticMultiHop-v0", kind=StepGRPOTrainer, model=tiny_policy, **given):
        own = {name: given.pop(name) for name in of_trainer if name in given}
        config = make_config(StepPPOConfig if kind is StepPPOTrainer else StepGRPOConfig, **given)
        return kind(model, env, config, processing_class=tokenizer, **own)

    return make


@pytest.fixture(scope="session")
def played(tiny_policy, tmp_path_factory):
    """Real trajectories of the embedded policy, with several turns and mixed rewards."""
    from transformers import AutoTokenizer

    from agent_trainers.trainers.config import StepGRPOConfig
    from agent_trainers.trainers.grpo import StepGRPOTrainer
    from tests.agent_trainers.gradients import collect

    config = StepGRPOConfig(**SETTINGS, output_dir=str(tmp_path_factory.mktemp("played")))
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy, padding_side="left")
    env = "AgentR1/SyntheticMultiHop-v0"
    trainer = StepGRPOTrainer(tiny_policy, env, config, processing_class=tokenizer)
    trainer.model.train()
    return collect(trainer)
