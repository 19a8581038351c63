"""Two real processes compared with one, for each kind of credit and of batches."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_trainers import TINY_POLICY
from agent_trainers.monitoring.metrics_log import read_metrics
from tests.agent_trainers.gradients import assert_same_update
from tests.agent_trainers.trainers import distributed_run
from tests.agent_trainers.two_processes import run_in_two_processes

ID = "AgentR1/SyntheticMultiHop-v0"
SKILLS = json.dumps({"agent_trainers.experimental.skills:SkillDistillation": {"weight": 0.5}})
WINDOW = {"name": "window", "turns": 1}
CASES = {
    "bilevel_ppo": {"algorithm": "bilevel_ppo", "context": "full"},
    "tree": {
        "algorithm": "grpo_step",
        "context": "full",
        "changes": {
            "advantage_estimator": "agent_trainers.experimental.branching:tree",
            "extensions": json.dumps(
                {"agent_trainers.experimental.branching:Branching": {"budget": 1.0}}
            ),
        },
    },
    # states that do not extend the last: ranks with different numbers of rows
    "gigpo-window": {"algorithm": "gigpo", "context": WINDOW, "changes": {"seed": 2}},
    "mixture": {
        "algorithm": "reinforce++",
        "context": "full",
        "envs": [
            {"id": ID, "name": "two", "weight": 2},
            {"id": ID, "name": "one", "kwargs": {"hops": 1}, "tasks": list(range(5))},
        ],
    },
    # programs end at other times in each process, and each has a gateway of its own
    "program": {"algorithm": "grpo_step", "context": "full", "program": True},
    # a group in both processes: one shows the other what succeeded
    "skills": {
        "algorithm": "gdpo",
        "context": WINDOW,
        "changes": {"max_steps": 3, "extensions": SKILLS},
    },
    # what comes next follows the results of both
    "resampled": {
        "algorithm": "gagpo",
        "context": "full",
        "changes": {
            "max_steps": 3,
            "save_strategy": "steps",
            "save_steps": 1,
            "max_extra_groups": 3,
            "curriculum": '{"kind": "levels", "groups": 2, "target": 0.01}',
        },
        "envs": [{"id": ID, "name": "two"}, {"id": ID, "name": "one", "kwargs": {"hops": 1}}],
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What one and two processes made of every case, with the same global batch."""
    one, two = (tmp_path_factory.mktemp("distributed") / name for name in ("one.pt", "two.pt"))
    # 6 episodes a process and groups of 4: one group lies in both processes
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 6}
    distributed_run.main(str(one), CASES, settings)
    settings["per_device_train_batch_size"] = 3
    run_in_two_processes(distributed_run, two, json.dumps(CASES), json.dumps(settings))
    return [
        torch.load(path, weights_only=False) | {"command": command(path)} for path in (one, two)
    ]


def command(path):
    """Return the results and gradient norms of the command."""
    folder = path.with_name(f"{path.name}-command")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    norms = [row["grad_norm"] for row in read_metrics(folder) if "grad_norm" in row]
    return results | {"grad_norms": norms}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_result_of_one_with_the_same_global_batch(trained, case):
    one, two = (results[case] for results in trained)
    assert one["lengths"][0] == [*two["lengths"][0], *two["lengths"][1]]
    for entry, other in zip(one["log"], two["log"], strict=True):
        assert entry["reward"] == pytest.approx(other["reward"])
        assert entry["success"] == pytest.approx(other["success"])
    start = AutoModelForCausalLM.from_pretrained(TINY_POLICY).state_dict()
    assert_same_update(start, two["weights"], one["weights"])


def test_any_number_of_processes_plays_the_same_tasks_of_a_mixture(trained):
    one, two = (results["mixture"] for results in trained)
    assert one["played"][0] == [*two["played"][0], *two["played"][1]]
    assert {env for env, _ in one["played"][0]} == {"one", "two"}
    assert one["log"][-1]["env/two/reward"] == pytest.approx(two["log"][-1]["env/two/reward"])


def test_cases_show_what_they_are_for(trained):
    assert max(entry["skill/share"] for entry in trained[1]["skills"]["log"]) > 0.1
    lengths = trained[1]["gigpo-window"]["lengths"]
    assert sum(lengths[0]) != sum(lengths[1])


def test_groups_were_played_anew_and_levels_followed(trained):
    one, two = (results["resampled"]["log"] for results in trained)
    names = ("groups/extra", "groups/played_success", "curriculum/level")
    assert [[e[n] for n in names] for e in one] == [[e[n] for n in names] for e in two]
    assert max(entry["groups/extra"] for entry in one) > 0
    assert [one[0]["curriculum/level"], one[-1]["curriculum/level"]] == [1.0, 2.0]
    for results in trained:
        assert results["resampled"]["resumed"] == results["resampled"]["played"]


def test_the_command_evaluates_and_trains_in_both(trained):
    one, two = (results["command"] for results in trained)
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    # the same tasks, seeds and draws: the same success before, in and after training
    assert two["num_eval_episodes"] == 6  # both share them; none counts twice
    for name in ("success_before", "success_after", "return_after"):
        assert one[name] == pytest.approx(two[name])
    # and the same gradients: an evaluation before must not let each process train by itself
    assert len(one["grad_norms"]) == 2
    assert two["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4)
