"""Train by each algorithm, save the weights, and run the command; started with torchrun."""

import json
import sys
import urllib.request
from pathlib import Path

import gymnasium as gym
import torch
from transformers import AutoTokenizer

from agent_trainers import TINY_POLICY
from agent_trainers.cli import train as command
from agent_trainers.programs import ProgramTasks
from agent_trainers.trainers.config import PRESETS, config_class
from agent_trainers.trainers.ppo import trainer_class
from tests.agent_trainers.cli.conftest import SHORT
from tests.agent_trainers.short_run import SETTINGS


def main(output, cases, settings):
    results = {
        name: train(f"{output}-{name}", **case, settings=settings) for name, case in cases.items()
    }
    if results and all(result is not None for result in results.values()):
        torch.save(results, output)
    batch = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command.run([
        *SHORT, *batch, "--steps_per_generation", "2", "--num_eval_tasks", "6",
        "--output_dir", f"{output}-command",
    ])  # fmt: skip


def converse(session, task):
    """Ask twice; the reward follows what the model wrote."""
    messages = [{"role": "user", "content": f"what is the award of {task['of']} ?"}]
    for _ in range(2):
        request = urllib.request.Request(
            f"{session.base_url}/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "why ?"}]
    return len(set(said.split())) / 10


def make_trainer(output, algorithm, context, settings, changes=None, envs=None, program=False):
    config = config_class(algorithm)(
        f"{output}-run",
        **SETTINGS | {"max_steps": 2, "learning_rate": 0.1, "optim": "sgd"}
        | PRESETS[algorithm] | settings | (changes or {}),
    )  # fmt: skip

    def make_env(**kwargs):
        return gym.make("AgentR1/SyntheticMultiHop-v0", context=context, **kwargs)

    if program:
        names = ("ada holm", "hugo dorn", "olga petrov")
        envs = ProgramTasks(converse, [{"of": names[i % 3]} for i in range(9)])
    return trainer_class(algorithm)(
        str(TINY_POLICY), envs or make_env, config,
        processing_class=AutoTokenizer.from_pretrained(TINY_POLICY, padding_side="left"),
    )  # fmt: skip


def train(output, **case):
    """What came of it, on the main process."""
    trainer = make_trainer(output, **case)
    trainer.train()
    everything = gathered(trainer, [len(t.transitions) for t in trainer.trajectories["train"]])
    played = gathered(trainer, [(t.env, t.task_id) for t in trainer.trajectories["train"]])
    resumed = None
    if trainer.args.save_strategy != "no":
        again = make_trainer(output, **case)
        again.train(resume_from_checkpoint=f"{output}-run/checkpoint-2")
        resumed = gathered(again, [(t.env, t.task_id) for t in again.trajectories["train"]])
    if not trainer.accelerator.is_main_process:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = dict(model.state_dict())
    if hasattr(trainer, "critic"):
        critic = trainer.accelerator.unwrap_model(trainer.critic)
        weights |= {f"critic.{name}": v for name, v in critic.state_dict().items()}
    return {"weights": weights, "lengths": everything, "log": log, "played": played,
            "resumed": resumed}  # fmt: skip


def gathered(trainer, own):
    """What each process has, in order."""
    everything = [own]
    if trainer.accelerator.num_processes > 1:
        everything = [None] * trainer.accelerator.num_processes
        torch.distributed.all_gather_object(everything, own)
    return everything


def gloo_threads():
    """Return the names of gloo's threads in this process; Linux only."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    if remaining := gloo_threads():  # one of them may abort the process at its end
        sys.exit(f"threads of the process group still run: {remaining}")
