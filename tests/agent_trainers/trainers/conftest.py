import pytest

from agent_trainers.trainers.config import StepGRPOConfig, StepPPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer

OF_TRAINER = ("eval_dataset", "eval_envs", "optimizers", "peft_config")


@pytest.fixture
def make_trainer(tiny_policy, tokenizer, make_config):
    """A trainer of the embedded policy; what is not the trainer's goes to its settings."""

    def make(env="AgentR1/SyntheticMultiHop-v0", kind=StepGRPOTrainer, model=tiny_policy, **given):
        own = {name: given.pop(name) for name in OF_TRAINER if name in given}
        config = make_config(StepPPOConfig if kind is StepPPOTrainer else StepGRPOConfig, **given)
        return kind(model, env, config, processing_class=tokenizer, **own)

    return make
