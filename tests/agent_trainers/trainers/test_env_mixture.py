"""Several environments in one run, through the trainer."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from datasets import Dataset

ID = "AgentR1/SyntheticMultiHop-v0"
ENVS = [{"id": ID, "name": "two", "weight": 3}, {"id": ID, "name": "one", "kwargs": {"hops": 1}}]
VARIANTS = [{"id": ID, "name": "three", "kwargs": {"hops": 3}, "tasks": [0, 1, 2]}]


def test_each_environment_has_its_share_and_variants_are_measured_beside_them(make_trainer):
    tasks = [{"env": name, "task": task} for name in ("two", "one") for task in range(900, 903)]
    trainer = make_trainer(
        env=ENVS, per_device_train_batch_size=16, eval_dataset=Dataset.from_list(tasks),
        eval_envs=VARIANTS, per_device_eval_batch_size=4, num_generations_eval=2,
    )  # fmt: skip
    trainer.train()
    played = trainer.trajectories["train"]
    assert Counter(t.env for t in played) == {"two": 12, "one": 4}
    members = defaultdict(set)
    for trajectory in played:
        members[trajectory.group_id].add((trajectory.env, trajectory.task_id))
    assert [len(tasks) for tasks in members.values()] == [1] * 4
    entry = [entry for entry in trainer.state.log_history if "reward" in entry][-1]
    for name in ("two", "one"):
        own = [t for t in played if t.env == name]
        assert entry[f"env/{name}/share"] == len(own) / 16
        assert entry[f"env/{name}/reward"] == pytest.approx(np.mean([t.return_ for t in own]))
    trainer.evaluate()
    entry = trainer.state.log_history[-1]
    played = trainer.trajectories["eval"]
    assert Counter(t.env for t in played) >= Counter({"two": 6, "one": 6, "three": 6})
    once = {}  # the last batch is filled up with the first tasks
    for t in played:
        once.setdefault((t.env, t.task_id), []).append(t)
    own = {
        name: [t for (env, _), episodes in once.items() for t in episodes[:2] if env == name]
        for name in ("two", "one", "three")
    }
    for name, episodes in own.items():
        assert len(episodes) == 6
        expected = np.mean([t.return_ for t in episodes])
        assert entry[f"eval_env/{name}/reward"] == pytest.approx(expected)
        assert entry[f"eval_env/{name}/share"] == 1 / 3
    in_domain = [*own["two"], *own["one"]]
    assert entry["eval_reward"] == pytest.approx(np.mean([t.return_ for t in in_domain]))
    assert entry["eval_success"] == np.mean([t.success for t in in_domain])
