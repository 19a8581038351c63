import functools
import json

import gymnasium as gym
import pytest
from safetensors.torch import load_file
from trl import SFTTrainer

from agent_envs.errors import ConfigurationError, DataError, RolloutError
from agent_trainers.batching.collate import collate
from agent_trainers.batching.rows import make_rows
from agent_trainers.batching.shared_prefix import forward_rows
from agent_trainers.cli import evaluate, sft
from agent_trainers.cli import train as command
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference, retell
from agent_trainers.trajectory import StopReason, load_trajectories, save_trajectories
from tests.agent_trainers.cli.test_train import AlwaysFails
from tests.agent_trainers.gradients import TOLERANCE
from tests.agent_trainers.made import trajectory, transition

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def demonstrations(tokenizer):
    return list(play_reference(functools.partial(gym.make, ID), ChatRenderer(tokenizer), range(6)))


def test_the_loss_is_that_of_the_rows_of_reinforcement_learning(
    demonstrations, tokenizer, tiny_policy, tmp_path
):
    dataset, _ = sft.supervised_dataset(demonstrations, None)
    config = sft.WarmStartConfig(str(tmp_path), report_to="none", per_device_train_batch_size=6)
    trainer = SFTTrainer(
        tiny_policy, args=config, train_dataset=dataset, processing_class=tokenizer
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(dataset))])
    theirs = trainer.compute_loss(trainer.model, dict(batch)).item()

    rows = [row for i, t in enumerate(demonstrations) for row in make_rows(t, i)]
    tensors = collate(rows, tokenizer.pad_token_id)
    ours = -(forward_rows(trainer.model, tensors).logprobs * tensors["tool_mask"]).sum()
    ours = (ours / tensors["tool_mask"].sum()).item()
    assert theirs == pytest.approx(ours, rel=TOLERANCE)


def test_rows_that_are_too_long_are_left_out_whole_and_counted(demonstrations):
    lengths = [len(row["input_ids"]) for row in sft.supervised_dataset(demonstrations, None)[0]]
    demonstrations[0].transitions.pop()  # a shorter one
    dataset, num_too_long = sft.supervised_dataset(demonstrations, min(lengths) - 1)
    assert (len(dataset), num_too_long) == (1, 5)
    with pytest.raises(DataError, match="No demonstration is left"):
        sft.supervised_dataset(demonstrations, 3)


def test_a_turn_that_was_cut_off_is_not_trained(tokenizer):
    renderer = ChatRenderer(tokenizer)
    cut = trajectory(transition(info={"finish_reason": "length"}), transition(action="ada holm"))
    dataset, _ = sft.supervised_dataset([retell(cut, renderer, None)], None)
    (labels,) = dataset["labels"]
    assert [label for label in labels if label >= 0] == renderer.turn_ids("ada holm")
    only = retell(trajectory(cut.transitions[0]), renderer, None)
    with pytest.raises(DataError, match="No demonstration is left"):
        sft.supervised_dataset([only], None)


def train(output, *arguments):
    sft.run(["--num_tasks", "6", "--per_device_train_batch_size", "3", "--output_dir", str(output),
             "--disable_tqdm", "true", *arguments])  # fmt: skip


def test_fine_tuning_on_reference_actions_resumes_and_is_overwritten_on_request(
    tmp_path, capsys, caplog
):
    saving = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2")
    train(tmp_path / "run", *saving)
    said = capsys.readouterr().err
    assert "6 of 6 demonstrations, 6 rows" in said
    assert "agent-r1-train --model" in said
    evaluate.run(["--model", str(tmp_path / "run"), "--num_tasks", "2"])
    with pytest.raises(ConfigurationError, match="contains a finished run"):
        train(tmp_path / "run", *saving)
    with pytest.raises(ConfigurationError, match=r"learning_rate: 0\.0002 -> 0\.5"):
        train(tmp_path / "run", *saving, "--resume", "--learning_rate", "0.5")
    (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").unlink()  # as if it was cut off
    (tmp_path / "run" / "model.safetensors").unlink()
    train(tmp_path / "run", *saving, "--resume")
    assert "optimizer.pt is missing" in caplog.text
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").exists()
    for wrong in (["--report_to", "nothing_known"], ["--model", str(tmp_path / "run")]):
        with pytest.raises(ConfigurationError, match=r"nothing_known is not|would delete"):
            train(tmp_path / "run", "--overwrite", *wrong)
        assert (tmp_path / "run" / "model.safetensors").exists()
    train(tmp_path / "run", "--max_steps", "1", "--overwrite", "--learning_rate", "0.5",
          "--lora_r", "2", "--lora_target_modules", "q_proj")  # fmt: skip
    kept = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert kept["learning_rate"] == 0.5
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert all("lora" in name for name in load_file(tmp_path / "run" / "adapter_model.safetensors"))
    assert "Merge the adapters" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="has adapters only"):
        command.run(["--model", str(tmp_path / "run"), "--output_dir", str(tmp_path / "next")])


def test_the_best_episodes_are_collected_resumably_and_trained_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "TASKS_PER_PORTION", 6)
    command = ["--num_tasks", "16", "--samples_per_task", "4",
               "--output", str(tmp_path / "best.jsonl.gz")]  # fmt: skip
    save, saved = evaluate.save_trajectories, []

    def save_two(path, trajectories):
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(path)
        save(path, trajectories)

    monkeypatch.setattr(evaluate, "save_trajectories", save_two)
    with pytest.raises(KeyboardInterrupt):
        evaluate.collect(command)
    monkeypatch.setattr(evaluate, "save_trajectories", save)
    with pytest.raises(ConfigurationError, match=r"seed: 0 -> 1\)\. .* or another --output\.$"):
        evaluate.collect([*command, "--seed", "1"])
    evaluate.collect(command)  # goes on after the second portion
    cut = load_trajectories(tmp_path / "best.jsonl.gz")
    evaluate.collect([*command[:-1], str(tmp_path / "whole.jsonl.gz")])
    whole = load_trajectories(tmp_path / "whole.jsonl.gz")
    assert [t.transitions for t in cut] == [t.transitions for t in whole]
    assert all(t.success for t in cut)
    assert len({t.group_id for t in cut}) == len(cut)
    train(tmp_path / "warm", "--trajectories", str(tmp_path / "best.jsonl.gz"), "--env", ID)
    assert f"{len(cut)} of {len(cut)} demonstrations" in capsys.readouterr().err


def test_episodes_that_could_not_be_scored_are_no_demonstrations(tmp_path):
    stopped = trajectory(transition(), stop_reason=StopReason.TIMEOUT)
    save_trajectories(tmp_path / "x.jsonl", [stopped])
    command = ["--trajectories", str(tmp_path / "x.jsonl"), "--output_dir", str(tmp_path / "run")]
    with pytest.raises(DataError, match=r"none of 1 .* and 1 could not be scored"):
        sft.run([*command, "--keep_failures"])


@pytest.mark.parametrize("option", [("--env_kwargs", "{}"), ("--num_tasks", "3")])
def test_options_of_an_environment_are_refused_with_trajectories_alone(tmp_path, option):
    with pytest.raises(ConfigurationError, match=f"{option[0]} does nothing"):
        sft.run(["--trajectories", "x.jsonl", "--output_dir", str(tmp_path), *option])


def test_if_all_episodes_fail_nothing_is_saved_and_the_error_is_printed(tmp_path, capsys):
    gym.register("Own/Unplayable-v0", AlwaysFails, disable_env_checker=True)
    output = tmp_path / "best.jsonl"
    with pytest.raises(RolloutError, match=r"4 of 4 episodes failed.*the database is down"):
        evaluate.collect(
            ["--env", "Own/Unplayable-v0", "--num_tasks", "1", "--output", str(output)]
        )
    assert not output.exists()
    assert not list(tmp_path.rglob("*.jsonl.gz"))  # so that the same command plays it again
    with pytest.raises(SystemExit) as end:
        evaluate.main(["--env", "Own/Unplayable-v0", "--num_tasks", "1"])
    assert end.value.code == 1
    assert "1 of 1 episodes failed because of errors outside the model" in capsys.readouterr().err
