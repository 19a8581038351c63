import pickle

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import ConfigurationError, UnknownNameError
from agent_envs.envs.shell.command_line import ALL_KINDS
from agent_envs.envs.shell.conflicts import CONFLICT_KINDS
from agent_envs.envs.shell.tasks import KINDS
from agent_envs.errors import SandboxError
from agent_envs.sandbox import Sandbox
from agent_envs.tools.code import BROKEN_TEXT
from tests.agent_envs.envs.playing import answer, call, solve

ID = "AgentR1/CommandLine-v0"
pytestmark = pytest.mark.usefixtures("strong_sandbox")


def run(env, task, commands):
    env.reset(options={"task": task})
    for command in commands:
        call(env, "shell", command=command)
    return answer(env, "done")


@pytest.mark.parametrize("kind", KINDS)
def test_reference_commands_solve_every_kind_and_doing_nothing_does_not(kind):
    for difficulty in (1, 3):
        env = gym.make(ID, kinds=kind, difficulty=difficulty)
        for task in range(2):
            info = run(env, task, [])[4]
            assert info["metrics"]["success"] == info["reward_terms"]["solved"] == 0.0
            total, info = solve(env, task)
            assert info["metrics"]["success"] == info["metrics"]["share_right"] == 1.0
            assert 1.0 < total <= 1.2


@pytest.mark.parametrize("kind", [*KINDS, *CONFLICT_KINDS])
def test_no_task_is_solved_from_the_beginning(kind):
    for seed in range(100):
        task = ALL_KINDS[kind](np.random.default_rng(seed), 1 + seed % 3)
        assert task.files != task.expected
        assert all(text.endswith("\n") or not text for text in task.expected.values())
        assert task.checks(task.expected) == [True] * len(task.checks({}))
        assert task.checks(task.files).count(False) >= (2 if kind in CONFLICT_KINDS else 1)


@pytest.fixture
def env():
    env = gym.make(ID, kinds="rename").unwrapped
    env.reset(seed=0)
    return env


def test_every_command_starts_in_the_folder_as_the_last_one_left_it(env):
    shell = env.shell
    assert shell("mkdir -p new && cd new && echo hello > a && pwd | grep -c new") == "1"
    assert shell("cat new/a; cat nothing").startswith("hello\n")
    assert "[exit code" in shell("exit 7")
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    env.reset(seed=0)
    assert "No such file" in shell("cat new/a")
    env.restore(snapshot)
    assert env.shell("cat new/a") == "hello"
    assert "[not kept: sparse: no room]" in shell(
        "head -c 9M /dev/urandom > m; truncate -s 9M sparse"
    )


def test_a_file_that_must_be_gone_is_not_gone_as_a_folder_or_a_link():
    env = gym.make(ID, kinds="merge")
    env.reset(options={"task": 0})
    commands = env.unwrapped.task.data["task"].commands
    for damage in ("mkdir ours.conf", "ln -s merged.conf ours.conf", "rm merged.conf", "true"):
        info = run(env, 0, [*commands, damage])[4]
        assert info["metrics"]["success"] == float(damage == "true")


def test_a_command_that_breaks_its_sandbox_is_an_observation(env, monkeypatch):
    env.shell("echo 1 > kept")

    def break_down(*_, **__):
        raise SandboxError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "run_shell", break_down)
        observation, *_, info = env.step(env.write_call("shell", command="rm kept"))
    assert BROKEN_TEXT in observation
    assert "error" not in info["action"]
    assert env.shell("cat kept") == "1"


def test_unknown_kinds_and_difficulties_are_refused():
    with pytest.raises(UnknownNameError, match="extract"):
        gym.make(ID, kinds=["extrakt"])
    with pytest.raises(ConfigurationError, match="difficulty must be 1 to 3"):
        gym.make(ID, difficulty=4)


TOTALS = (
    'for f in data/*.txt; do n=$(basename "$f" .txt); {skip} awk -v n="$n" '
    '\'NR == 1 {{r = $2; next}} {{s += $1}} END {{print n "," r "," s}}\' "$f"; done'
    " | LC_ALL=C sort > new; mv new table.csv"
)
DEAD = 'for l in *.lock; do grep -qx "$(cat "$l")" running.txt || rm "$l"; done'
MOVE = (
    'for f in old/*.txt; do n=$(basename "$f" .txt); {{ echo "# $n"; cat "$f"; }} > "new/$n.md"; '
    'rm "$f"; echo "$n" >> index.txt; done; {index}'
)
INDEX = "ls new | sed 's/[.]md$//' | LC_ALL=C sort > index.txt"
SETTINGS = (
    "p=$(grep -H 'valid from' policy/*.txt | {policy} sort -k3 | tail -n 1 | cut -d: -f1); "
    "for s in $(sed -n 's/^order: //p' $p) defaults; do if [ $s = log ]; then {log}; "
    "else cat $s.conf; fi; done | awk -F= '!seen[$1]++' | sort > settings.conf"
)
VALID = "awk -v t=$(cat today.txt) '$3 <= t' |"
LATEST = "sort -r log.txt | awk '$3 == \"approved\" {print $2}'"
WRONG = {
    "stale_state": {
        "trusts the table": DEAD,
        "makes all anew": f"{DEAD}; {TOTALS.format(skip='')}",
        "deletes every lock": f"rm *.lock; {TOTALS.format(skip='')}",
        "deletes no lock": TOTALS.format(skip='[ -e "$n.lock" ] && grep "^$n," table.csv ||'),
        "drops what is locked": f"{DEAD}; " + TOTALS.format(skip='[ -e "$n.lock" ] ||'),
    },
    "half_done": {
        "begins again": MOVE.format(index=INDEX),
        "only appends": MOVE.format(index=":"),
        "trusts what is there": "for f in old/*.txt; do n=$(basename $f .txt); [ -e new/$n.md ] || "
        f'{{ echo "# $n"; cat $f; }} > new/$n.md; rm $f; done; {INDEX}',
        "clears up only": f"rm old/*; {INDEX}",
    },
    "name_collision": {
        "overwrites": "find incoming -type f -exec mv {} library/ ';'",
        "skips": "find incoming -type f -exec mv -n {} library/ ';'; rm -r incoming",
        "keeps copies": "find incoming -type f -exec mv --backup=numbered {} library/ ';'",
        "splits at blanks": "for f in $(find incoming -type f | LC_ALL=C sort); do "
        "mv -n $f library/; done",
    },
    "contradictory_sources": {
        "takes the newest policy": SETTINGS.format(policy="", log=LATEST),
        "takes the log's last lines": SETTINGS.format(
            policy=VALID, log="tac log.txt | awk '$3 == \"approved\" {print $2}'"
        ),
        "takes what is proposed": SETTINGS.format(
            policy=VALID, log="sort -r log.txt | awk '{print $2}'"
        ),
        "takes the defaults": "cp defaults.conf settings.conf",
    },
}
RIGHT_BY_THE_SAME_MEANS = SETTINGS.format(policy=VALID, log=LATEST)


@pytest.mark.parametrize("kind", CONFLICT_KINDS)
def test_the_reference_solves_a_conflict_and_no_tempting_way_does(kind):
    for difficulty in (1, 3):
        env = gym.make(ID, kinds=kind, difficulty=difficulty)
        env.reset(options={"task": 0})
        metrics = run(env, 0, env.unwrapped.task.data["task"].commands)[4]["metrics"]
        assert metrics["success"] == metrics["partial_score"] == metrics["share_right"] == 1.0
        for name, command in WRONG[kind].items():
            _, reward, *_, info = run(env, 0, [command])
            assert info["metrics"]["success"] == info["reward_terms"]["solved"] == 0.0, name
            assert 0.0 < info["metrics"]["partial_score"] < 1.0, name
            assert reward < 0.1
        assert run(env, 0, [])[4]["metrics"]["partial_score"] < 0.75
        assert run(env, 0, ["rm -rf *"])[4]["metrics"]["partial_score"] < 0.6


def test_a_corrected_mistake_is_right():
    env = gym.make(ID, kinds="contradictory_sources", difficulty=2)
    wrong = WRONG["contradictory_sources"]["takes the defaults"]
    assert run(env, 0, [wrong, RIGHT_BY_THE_SAME_MEANS])[4]["metrics"]["success"] == 1.0
    metrics = run(env, 0, [RIGHT_BY_THE_SAME_MEANS, "echo >> log.txt"])[4]["metrics"]
    assert metrics["success"] == 0.0
    assert metrics["partial_score"] > 0.8


def test_conflicts_are_drawn_only_if_they_are_named():
    env = gym.make(ID).unwrapped
    assert {env.get_task(i).data["task"].kind for i in range(60)} == set(KINDS)
    env = gym.make(ID, kinds=[*KINDS, *CONFLICT_KINDS]).unwrapped
    assert {env.get_task(i).data["task"].kind for i in range(120)} == {*KINDS, *CONFLICT_KINDS}
