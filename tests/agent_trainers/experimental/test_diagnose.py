import functools
import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.core.spaces import UnicodeText
from agent_envs.errors import ConfigurationError, ReplayError
from agent_trainers.cli.arguments import run_command
from agent_trainers.experimental.diagnose import NEVER_SOLVED, PROGRAM, diagnose_by_oracle
from agent_trainers.experimental.diagnose import run as diagnose
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import save_trajectories

ENV = ("--env", "tests.agent_trainers.experimental.test_diagnose:Corridor-v0")


class Corridor(gym.Env):
    """Walk to the end, three steps on; a pit ends nothing, but nobody gets out of it."""

    observation_space = action_space = UnicodeText()
    is_immediate = True
    num_tasks = 30
    length = 3
    max_steps = 6
    fatal = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = (options or {}).get("task", 0)
        self.place, self.taken, self.is_lost = 0, 0, False
        return "", self.info()

    def step(self, action):
        if action == self.fatal and self.task == 4:
            raise RuntimeError("the corridor collapsed")
        self.taken += 1
        self.is_lost |= action == "pit"
        self.place += {"on": 1, "back": -1}.get(action, 0) * (not self.is_lost)
        is_there = self.place >= self.length
        return "", float(is_there), is_there, self.taken >= self.max_steps, self.info()

    def info(self):
        text = f"task {self.task}, place {self.place}"  # a pit cannot be seen
        return {
            "messages": [{"role": "user", "content": text}],
            "task_id": f"corridor-{self.task}",
            "metrics": {"success": float(self.place >= self.length)},
        }

    def reference_actions(self):
        return ["on"] * self.length


class Clueless(Corridor):
    """Knows where one is: asked on the way, it says what is left."""

    def reference_actions(self):
        return ["on"] * (self.length - self.place)


class Brittle(Corridor):
    """Breaks at an action of one task."""

    fatal = "break"


def play(actions, make_env=Corridor, task=4):
    left = iter(actions)
    rollout = Rollout(make_env, ScriptedPolicy(lambda _: next(left)))
    spec = EpisodeSpec(task=task, seed=task, group_id=str(task), rng=np.random.default_rng(0))
    (trajectory,) = rollout.collect([spec])
    assert not trajectory.success
    return trajectory


def pit(task=4):
    """Falls into the pit in the second step."""
    return play(["on", "pit", "on", "on", "on", "on"], task=task)


@pytest.mark.parametrize(("actions", "lost"), [
    ("on pit on on on on", 1),
    ("wait on back pit on on", 3),
    # no pit: six turns for three steps, so after the fourth wait two turns are too few
    ("wait wait wait wait on on", 3),
    ("on on wait wait wait wait", 5),
    ("pit pit on on on on", 0),
])  # fmt: skip
@pytest.mark.parametrize("make_env", [Corridor, Clueless])
def test_the_oracle_names_the_step_after_which_it_cannot_win(make_env, actions, lost):
    actions = actions.split()
    (found,) = diagnose_by_oracle(make_env, [play(actions, make_env)])
    assert found.lost_step == lost
    env = Corridor()
    env.reset(seed=4, options={"task": 4})
    for action in [*actions[:lost], *found.solution]:
        *_, info = env.step(action)
    assert info["metrics"]["success"] == 1.0


def test_where_the_reference_actions_lead_nowhere_no_step_is_named():
    class Partial(Corridor):
        def reference_actions(self):
            raise NotImplementedError

    class Short(Corridor):
        def reference_actions(self):
            return ["on"]

    class Silent(Corridor):
        reference_actions = None

    class Longer(Corridor):
        def info(self):
            return super().info() | {"messages": [{"role": "user", "content": "another"}]}

    lost = [play(["pit"] * 6)]
    for make_env in (Partial, Short):
        (found,) = diagnose_by_oracle(make_env, lost)
        assert (found.lost_step, found.note) == (None, NEVER_SOLVED)
    with pytest.raises(ConfigurationError, match="no reference_actions"):
        diagnose_by_oracle(Silent, lost)
    with pytest.raises(ReplayError, match="after 0 of"):  # another than the one that was played
        diagnose_by_oracle(Longer, lost)


def test_an_episode_that_breaks_or_cannot_be_repeated_leaves_the_others_alone():
    class Drifting(Corridor):
        def info(self):
            return super().info() | ({"messages": [{"role": "user", "content": "now here"}]}
                                     if self.task == 4 and self.place else {})  # fmt: skip

    broken = play(["on", "break", "pit", "on", "on", "on"])
    for make_env, first, note in (
        (Brittle, broken, "RuntimeError: the corridor collapsed"),
        (Drifting, pit(), "after 1 of"),
        (Corridor, replace(pit(), seed=None), "no seed"),
    ):
        found = diagnose_by_oracle(make_env, [first, pit(task=5)])
        assert [each.lost_step for each in found] == [None, 1]
        assert note in found[0].note


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """A file with a success and two failures, and its environment."""
    monkeypatch.chdir(tmp_path)
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "tests.agent_trainers.experimental.test_diagnose", module)
    gym.register("Corridor-v0", Corridor, disable_env_checker=True, order_enforce=False)
    second = play(["wait", "wait", "<script>", "pit", "on", "on"], task=5)
    won = replace(pit(), metrics={"success": 1.0})
    save_trajectories("lost.jsonl", [won, pit(), second])
    save_trajectories("won.jsonl", [won])
    save_trajectories("unmeasured.jsonl", [replace(won, metrics={"score": 0.0})])
    (tmp_path / "bad.jsonl").write_text('{"task_id": "1"}')
    yield tmp_path
    gym.registry.pop("Corridor-v0")


def test_failed_episodes_are_named_in_table_figures_and_page(lost, capsys):
    diagnose(["lost.jsonl", *ENV])
    assert "2 of 6" in capsys.readouterr().out
    page = (lost / "lost.diagnosis.html").read_text()
    for link, target in (('href="#s0-2"', 'id="s0-2"'), ('href="#s1-4"', 'id="s1-4"')):
        assert link in page
        assert target in page
    assert page.count("this step lost it") == 2
    assert "What wins from here: 2 steps" in page
    assert "<script" not in page


def test_a_trajectory_file_is_diagnosed_without_any_other_argument(lost, capsys):
    kwargs = {"hops": 1, "split": "test"}
    table = functools.partial(gym.make, "AgentR1/SyntheticTable-v0")
    hop = functools.partial(gym.make, "AgentR1/SyntheticMultiHop-v0", max_episode_steps=2, **kwargs)
    recorded = [play(["nothing"] * 9, make_env, task=7) for make_env in (hop, table)]
    save_trajectories("mixed.jsonl", recorded)
    assert recorded[0].env_kwargs == {**kwargs, "max_episode_steps": 2}
    diagnose(["mixed.jsonl"])
    printed = capsys.readouterr().out
    assert "lost at 2 of 2" in printed  # each within its own turn limit
    assert "lost at 6 of 6" in printed
    with pytest.raises(ReplayError, match="the replayed messages"):
        diagnose(["mixed.jsonl", "--env_kwargs", '{"hops": 3}'])


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "required: --trajectories"),
    (("missing.jsonl",), "cannot be read (No such file or directory)"),
    (("bad.jsonl",), "row 1: not a trajectory: group_id: Field required"),
    (("won.jsonl",), "none of the 1 episodes failed"),
    (("unmeasured.jsonl",), "none of the 1 episodes failed (1 could not be scored"),
])  # fmt: skip
def test_wrong_options_and_files_are_refused(lost, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        run_command(PROGRAM, diagnose, [*arguments, *ENV])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_answer_among_several_is_named(seed):
    make_env = functools.partial(gym.make, "AgentR1/SyntheticLongHorizon-v0")
    env = make_env()
    env.reset(options={"task": seed})
    actions = env.unwrapped.reference_actions()
    answers = [i for i, action in enumerate(actions) if "<answer>" in action]
    lost = answers[seed % len(answers)]
    actions[lost] = env.unwrapped.write_answer("nobody")
    actions.insert(lost, env.unwrapped.write_call("search", query="nothing"))  # a harmless detour
    (found,) = diagnose_by_oracle(make_env, [play(actions, make_env, task=seed)])
    assert found.lost_step == lost + 1
