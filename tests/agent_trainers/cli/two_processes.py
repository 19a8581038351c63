"""Two processes of a launcher: a dry run, then a training run, into the folder of the argument."""

import sys

from agent_trainers.cli import train
from agent_trainers.cli.launch import leave_process_group
from tests.agent_trainers.cli.conftest import SHORT

if __name__ == "__main__":
    command = [*SHORT, "--num_eval_tasks", "6", "--per_device_train_batch_size", "4"]
    train.run([*command, "--dry_run", "--output_dir", f"{sys.argv[1]}/dry"])
    train.run([*command, "--output_dir", f"{sys.argv[1]}/two"])
    leave_process_group()
