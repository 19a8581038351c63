"""Folders that contradict themselves: the careful way solves, the obvious one does not."""

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.envs.shell.command_line import make_shell_task
from agent_envs.envs.shell.conflicts import CONFLICT_KINDS
from agent_envs.envs.shell.tasks import KINDS

ID = "AgentR1/CommandLine-v0"
pytestmark = pytest.mark.usefixtures("strong_sandbox")

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


def play(env, task, commands):
    env.reset(options={"task": task})
    for command in commands:
        env.step(env.unwrapped.write_call("shell", command=command))
    return env.step(env.unwrapped.write_answer("done"))


@pytest.mark.parametrize("kind", CONFLICT_KINDS)
def test_the_reference_solves_and_no_tempting_way_does(kind):
    for difficulty in (1, 3):
        env = gym.make(ID, kinds=kind, difficulty=difficulty)
        for task in range(2):
            env.reset(options={"task": task})
            commands = env.unwrapped.task.data["task"].commands
            *_, info = play(env, task, commands)
            metrics = info["metrics"]
            assert metrics["success"] == metrics["partial_score"] == metrics["share_right"] == 1.0
            for name, command in WRONG[kind].items():
                _, reward, *_, info = play(env, task, [command])
                metrics = info["metrics"]
                assert metrics["success"] == info["reward_terms"]["solved"] == 0.0, name
                assert 0.0 < metrics["partial_score"] < 1.0, name
                assert reward < 0.1
            *_, info = play(env, task, [])
            assert info["metrics"]["partial_score"] < 0.75
            *_, info = play(env, task, ["rm -rf *"])
            assert info["metrics"]["partial_score"] < 0.6


def test_a_wrong_way_that_is_mended_is_right():
    env = gym.make(ID, kinds="contradictory_sources", difficulty=2)
    wrong = WRONG["contradictory_sources"]["takes the defaults"]
    assert play(env, 0, [wrong, RIGHT_BY_THE_SAME_MEANS])[4]["metrics"]["success"] == 1.0
    damaged = [RIGHT_BY_THE_SAME_MEANS, "echo >> log.txt"]
    metrics = play(env, 0, damaged)[4]["metrics"]
    assert metrics["success"] == 0.0
    assert metrics["partial_score"] > 0.8


@pytest.mark.parametrize("kind", CONFLICT_KINDS)
def test_every_task_of_a_kind_holds_its_conflict(kind):
    for seed in range(100):
        task = make_shell_task(np.random.default_rng(seed), kind, 1 + seed % 3)
        assert (task.kind, task.checks(task.expected)) == (kind, [True] * len(task.checks({})))
        assert task.checks(task.files).count(False) >= 2
        assert all(text.endswith("\n") or not text for text in task.expected.values())


def test_these_kinds_are_played_only_where_they_are_asked_for():
    assert not set(KINDS) & set(CONFLICT_KINDS)
    env = gym.make(ID).unwrapped
    assert {env.get_task(i).data["task"].kind for i in range(60)} == set(KINDS)
    env = gym.make(ID, kinds=[*KINDS, *CONFLICT_KINDS]).unwrapped
    assert {env.get_task(i).data["task"].kind for i in range(120)} == {*KINDS, *CONFLICT_KINDS}
