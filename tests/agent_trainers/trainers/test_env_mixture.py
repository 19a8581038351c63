"""Several environments in one run, through the trainer."""

import functools
from collections import Counter, defaultdict

import numpy as np
import pytest
from datasets import Dataset

from agent_envs import ConfigurationError

ID = "AgentR1/SyntheticMultiHop-v0"
ENVS = [
    {"id": ID, "name": "two", "weight": 3},
    {"id": ID, "name": "one", "kwargs": {"hops": 1}},
]
VARIANTS = [{"id": ID, "name": "three", "kwargs": {"hops": 3}, "tasks": [0, 1, 2]}]


@pytest.fixture
def make_trainer(make_trainer):
    return functools.partial(make_trainer, env=ENVS, per_device_train_batch_size=16)


def test_groups_are_of_one_environment_and_batches_hold_each_share(make_trainer):
    trainer = make_trainer()
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


def test_variants_are_measured_under_their_own_names_beside_what_is_trained_in(make_trainer):
    tasks = [{"env": name, "task": task} for name in ("two", "one") for task in range(900, 903)]
    trainer = make_trainer(
        eval_dataset=Dataset.from_list(tasks), eval_envs=VARIANTS,
        per_device_eval_batch_size=4, num_generations_eval=2,
    )  # fmt: skip
    trainer.evaluate()
    (entry,) = trainer.state.log_history
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


@pytest.mark.parametrize(("arguments", "message"), [
    ({"env": [{"id": ID, "tasks": [0]}, ENVS[0], ENVS[0]]}, "have the name 'two'"),
    ({"eval_dataset": Dataset.from_dict({"task": [1]})}, "needs a column 'env'"),
    ({"eval_dataset": Dataset.from_list([{"env": "tow", "task": 1}])}, "needs a column 'env'"),
    ({"eval_envs": [{"id": ID, "weight": 2}]}, "weight does nothing"),
    ({"eval_envs": [{"id": ID, "name": "one", "kwargs": {"hops": 3}}]}, "'one'"),
])  # fmt: skip
def test_what_is_not_clear_is_refused(make_trainer, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(**arguments)
