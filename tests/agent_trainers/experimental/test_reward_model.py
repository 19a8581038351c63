"""Reward models of trajectories: from recorded episodes to a reward term and a choice."""

import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.errors import ConfigurationError, DataError, UnknownNameError
from agent_trainers.experimental import reward_model, search
from agent_trainers.experimental.reward_model import (
    CUT,
    RewardModel,
    auc,
    fit_scale,
    make_pairs,
    read_episodes,
    token_ids,
)
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.trajectory import load_trajectories, save_trajectories
from tests.agent_trainers.made import roll_out

ID = "AgentR1/SyntheticMultiHop-v0"


def right_or_wrong(request):
    """Answer at once, by chance with a word that the task never has as its answer."""
    return f"<answer> {request.rng.choice(['berlin', 'search'])} </answer>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one member that has seen which of two words is right."""
    place = tmp_path_factory.mktemp("reward_model")
    episodes = roll_out(ScriptedPolicy(right_or_wrong), [i // 2 for i in range(80)])
    for episode in episodes:
        episode.metrics["success"] = float("berlin" in episode.transitions[-1].action)
    save_trajectories(place / "episodes.jsonl", episodes)
    command = [str(place / "episodes.jsonl"), "--num_members", "2", "--epochs", "2"]
    reward_model.run(["train", *command, "--output_dir", str(place / "model")])
    return place / "model"


def test_a_trained_model_tells_success_from_failure_on_held_out_tasks(folder):
    results = json.loads((folder / "reward_model.json").read_text(encoding="utf-8"))
    assert results["held_out"]["auc"] == 1.0
    assert 0 <= results["held_out"]["calibration_error"] < 0.5
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")


def test_the_reward_term_the_scored_file_and_the_judge_agree(folder, tmp_path):
    model = RewardModel(folder)
    env = gym.make(ID, rewards={"model": (model, 1.0)})
    env.reset(seed=3)
    first, *_ = env.unwrapped.reference_actions()
    for action, is_last in ((first, False), ("<answer> berlin </answer>", True)):
        *_, info = env.step(action)
        assert (info["reward_terms"]["model"] > 0) is is_last
    judgement = info["judgements"]["reward_model"]
    assert info["reward_terms"]["model"] == judgement["value"]
    assert len(judgement["scores"]) == 2
    source = str(folder.parent / "episodes.jsonl")
    output = str(tmp_path / "scored.jsonl")
    reward_model.run(["score", source, "--reward_model", str(folder), "--output", output])
    for episode in load_trajectories(output):
        term = episode.transitions[-1].reward_terms["reward_model"]
        assert (term > 0.5) is episode.success


def test_caution_lowers_the_reward_by_the_disagreement_of_the_members(folder):
    texts = ["who ?", "hm"], ["<answer> a </answer>", "<answer> b </answer>"]
    plain, careful = (RewardModel(folder, caution=c).judge(*texts) for c in (0.0, 1.0))
    assert plain["scores"] == careful["scores"]
    assert careful["value"] < plain["value"]


def test_other_episodes_calibrate_the_scale(folder, capsys):
    before = RewardModel(folder).log_odds([[5, 6]])
    source = str(folder.parent / "episodes.jsonl")
    reward_model.run(["calibrate", source, "--reward_model", str(folder)])
    assert "auc 1.000" in capsys.readouterr().err
    assert not np.allclose(RewardModel(folder).log_odds([[5, 6]]), before)


def test_episodes_of_one_outcome_are_no_calibration(folder, tmp_path):
    episodes = load_trajectories(str(folder.parent / "episodes.jsonl"))
    path, before = tmp_path / "solved.jsonl", (folder / "reward_model.json").read_text()
    command = ["calibrate", str(path), "--reward_model", str(folder)]
    save_trajectories(path, [episode for episode in episodes if episode.success])
    with pytest.raises(DataError, match="no success, or no failure"):
        reward_model.run(command)
    save_trajectories(path, [replace(episode, metrics={}) for episode in episodes])
    with pytest.raises(DataError, match="no scorable episode with the metric 'success'"):
        reward_model.run(command)
    assert (folder / "reward_model.json").read_text() == before


@pytest.mark.parametrize("text", ["{", "{}", '{"num_members": 9}', "[]"])
def test_a_damaged_reward_model_is_refused(tmp_path, text):
    (tmp_path / "reward_model.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"no reward_model\.json with its members"):
        RewardModel(tmp_path)


def test_the_best_of_several_attempts_is_chosen(folder, capsys):
    source = str(folder.parent / "episodes.jsonl")
    search.run([source, "--value", str(folder)])
    lines = capsys.readouterr().out.splitlines()[:2]
    sample, best = (float(line.split()[2]) for line in lines)
    episodes = load_trajectories(source)
    solved = {episode.task_id for episode in episodes if episode.success}
    assert sample < best == len(solved) / 40


def test_pairs_train_a_model_too(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"what {i} ?"}],
         "chosen": [{"role": "assistant", "content": "berlin"}],
         "rejected": [{"role": "assistant", "content": "search"}]}
        for i in range(40)
    ]  # fmt: skip
    path, output = tmp_path / "pairs.jsonl", tmp_path / "model"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ["--pairs", str(path), "--num_members", "1", "--output_dir", str(output)]
    reward_model.run(["train", *command])
    assert RewardModel(output).results["held_out"]["auc_within_tasks"] == 1.0
    path.write_text('{"chosen": [], "rejected": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match="row 1: not two conversations"):
        reward_model.run(["train", "--pairs", str(path), "--output_dir", str(tmp_path / "other")])


def test_pairs_are_of_one_task_or_across_tasks():
    tasks = [[([1], True), ([2], False)], [([3], True)], [([4], False)]]
    rng = np.random.default_rng(0)
    within = make_pairs(tasks, 3, rng, across=False)
    assert within == 6 * [{"chosen_ids": [1], "rejected_ids": [2]}]
    across = make_pairs(tasks, 50, rng, across=True)
    found = {(*pair["chosen_ids"], *pair["rejected_ids"]) for pair in across}
    assert found == {(1, 2), (1, 4), (3, 2), (3, 4)}
    with pytest.raises(DataError, match="None of 1 training tasks has successes and failures"):
        make_pairs(tasks[1:2], 1, rng, across=True)


def test_the_start_of_a_long_trajectory_is_cut_with_a_note(tokenizer, tmp_path, capsys):
    renderer = ChatRenderer(tokenizer)
    messages = [{"role": "user", "content": "who ? " * 50}, {"role": "assistant", "content": "ada"}]
    whole = token_ids(renderer, messages, 1000)
    cut, note = token_ids(renderer, messages, 60), renderer.note_ids(CUT)
    assert len(cut) == 60
    assert cut == [*note, *whole[len(note) - 60 :]]
    path = str(tmp_path / "episodes.jsonl")
    save_trajectories(path, roll_out(ScriptedPolicy(right_or_wrong), [0, 0]))
    read_episodes([path], renderer, 10)
    assert "2 trajectories reach 10 tokens" in capsys.readouterr().err


def test_auc_is_the_share_of_ordered_pairs_and_the_scale_that_of_platt():
    scores, good = np.array([0.0, 1.0, 1.0, 2.0]), np.array([False, True, False, True])
    # of four pairs three are ordered and one is a tie
    assert auc(scores, good) == pytest.approx(3.5 / 4)
    assert np.isnan(auc(scores, good | True))
    # odds of 3 at 1, of 1/3 at -1: log(3) x, were it not for Platt's targets
    x = np.repeat([1.0, -1.0], 4000)
    y = np.tile([True] * 3 + [False], 1000)
    slope, offset = fit_scale(x, np.concatenate([y, ~y]))
    assert (slope, offset) == (pytest.approx(np.log(3), rel=0.01), pytest.approx(0, abs=0.01))


@pytest.mark.parametrize(("command", "error", "words"), [
    ("trian", UnknownNameError, "Did you mean 'train'"),
    ("", UnknownNameError, "calibrate, score, train"),
    ("score x.jsonl --reward_model nowhere", ConfigurationError, "no reward_model.json"),
    ("score none.jsonl --output scored.json", DataError, "unknown kind of file"),
    ("train x.jsonl --epochs 0", ConfigurationError, "epochs"),
    ("train", ConfigurationError, "either files of trajectories or --pairs"),
    ("train x.jsonl --pairs y.jsonl", ConfigurationError, "either files of trajectories or --pa"),
])  # fmt: skip
def test_wrong_commands_are_refused(command, error, words):
    with pytest.raises(error, match=words):
        reward_model.run(command.split())
