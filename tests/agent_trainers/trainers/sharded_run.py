"""Train with a model that is plain or sharded, and save the weights; started with torchrun.

Accelerate shards on accelerators only. Here it is told that this CPU is one; what it is told to do
comes from our recipe, by its own parser.
"""

import gc
import os
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from agent_trainers.cli.launch import leave_process_group
from agent_trainers.policies.sampling import SamplingSettings, sample
from agent_trainers.recipes import ACCELERATE_CONFIGS
from agent_trainers.trainers import config as trainer_config
from tests.agent_trainers.trainers.distributed_run import make_trainer


def recipe_environment(name):
    """The environment variables by which Accelerate hands a recipe on to the processes."""
    config = str(ACCELERATE_CONFIGS[name])
    arguments = ["--config_file", config, "--mixed_precision", "no", "script.py"]
    parsed = launch_command_parser().parse_args(arguments)
    options, defaults, _ = _validate_launch_command(parsed)
    if name == "deepspeed_zero3":
        fields = ",".join(defaults.deepspeed_config)
        options.deepspeed_fields_from_accelerate_config = fields
        _, variables = prepare_deepspeed_cmd_env(options)
    else:
        variables = prepare_multi_gpu_env(options)
    wanted = ("ACCELERATE_", "FSDP_")
    return {k: v for k, v in variables.items() if k.startswith(wanted) and k not in os.environ}


def pretend_to_be_an_accelerator(backend):
    """Let Accelerate shard on this CPU."""
    prepare = PartialState._prepare_backend

    def prepare_backend(self, cpu=False, *arguments, **options):
        if "LOCAL_RANK" in os.environ:
            return "gloo", DistributedType.MULTI_GPU
        return prepare(self, cpu, *arguments, **options)

    def set_device(self):
        self.device = torch.device("cpu")

    trainer_config.follow_the_machine = lambda config: None  # it would see what this is
    PartialState._prepare_backend = prepare_backend
    PartialState.set_device = set_device
    if backend == "deepspeed_zero3":
        os.environ["DS_ACCELERATOR"] = "cpu"


def sample_unequally(trainer):
    """Sample fewer tokens on the second process; all must still be there for every layer."""
    settings = SamplingSettings(
        max_new_tokens=9 if trainer.accelerator.is_main_process else 3,
        eos_token_ids=(10**6,),
        pad_token_id=0,
    )
    (completion,) = sample(trainer.model, [[5, 6, 7]], [np.random.default_rng(0)], settings)
    return completion.token_ids


def main(recipe, output):
    if recipe != "plain":
        os.environ.update(recipe_environment(recipe))
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # loads onto the accelerator
        pretend_to_be_an_accelerator(recipe)
    settings = {
        "learning_rate": 0.3, "use_cpu": recipe == "plain",
        "per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", 1)),
    }  # fmt: skip
    trainer = make_trainer(output, "grpo_step", "full", settings)
    trainer.train()
    parameter = next(trainer.model.parameters())
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    sampled = sample_unequally(trainer) if recipe != "deepspeed_zero3" else []
    if trainer.accelerator.is_main_process:
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        result = {
            "kind": str(trainer.accelerator.distributed_type),
            "is_sharded": hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id"),
            "weights": {name: value.float() for name, value in state.items()},
            "loss": [entry["loss"] for entry in log],
            "success": [entry["success"] for entry in log],
            "sampled": sampled,
        }
        torch.save(result, output)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
    gc.collect()
    leave_process_group()
