"""The folder that is passed from one program to the next, as one value."""

import copy
import gc
import os
import pickle

import gymnasium as gym
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox import Folder, Limits
from agent_envs.sandbox import folder as folder_module

NAMES = st.binary(min_size=1, max_size=30).filter(lambda n: not {*b"/\0"} & {*n} and n[:1] != b".")
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(b"/".join).map(os.fsdecode)
CONTENTS = st.dictionaries(PATHS, st.binary(max_size=50), max_size=8).filter(
    lambda contents: not any(p.startswith(q + "/") for p in contents for q in contents)
)


def leave(sandbox, script, files=None, **limits):
    result = sandbox.run_shell(
        script, files=files, collect_files=True, limits=Limits(**{"wall_seconds": 20, **limits})
    )
    assert result.status == "ok", result
    return result.folder


@settings(max_examples=15, deadline=None)
@given(CONTENTS)
def test_a_folder_goes_through_a_sandbox_unchanged(sandbox, contents):
    folder = Folder.of(contents)
    result = sandbox.run_shell(":", files=folder, collect_files=True)
    assert result.files == contents
    assert result.folder.contents() == folder.contents()
    assert pickle.loads(pickle.dumps(folder)) == folder
    assert leave(sandbox, ":", result.folder) == result.folder


@pytest.mark.parametrize("level", ["sandbox", "plain_sandbox"])
def test_folders_links_modes_and_names_stay_between_commands(request, level):
    sandbox = request.getfixturevalue(level)
    folder = leave(
        sandbox,
        "mkdir out closed; echo 'echo run' > r.sh; chmod 755 r.sh; ln -s r.sh link; ln r.sh hard\n"
        "mkfifo pipe; printf x > \"$(printf 'a\\377')\"; printf y > \"$(printf 'a\\376')\"\n"
        "ln -s /nowhere dangling; truncate -s 5M sparse; echo z > closed/in; chmod 000 closed\n"
        "mkdir wide; chmod 777 wide",
    )
    contents = folder.contents()
    assert (contents[os.fsdecode(b"a\xff")], contents[os.fsdecode(b"a\xfe")]) == (b"x", b"y")
    assert contents["hard"] == contents["r.sh"] == b"echo run\n"
    assert contents["link"] is contents["out"] is contents["pipe"] is None
    checks = (
        "set -e; ./r.sh; ./link; rmdir out; [ ! -e dangling ]; [ -L dangling ]; [ -p pipe ]\n"
        "[ hard -ef r.sh ]; stat -c %a r.sh closed wide; stat -c %s sparse\n"
        "chmod 700 closed; cat closed/in"
    )
    result = sandbox.run_shell(checks, files=pickle.loads(pickle.dumps(folder)))
    assert result.stderr == ""
    assert result.stdout.split() == "run run 755 0 777 5242880 z".split()


def test_the_same_commands_leave_equal_folders_and_newer_files_are_newer(sandbox):
    def run():
        folder = leave(sandbox, "echo 1 > old; mkdir d; ln -s old l", {"first": "1"})
        return leave(sandbox, "echo 2 > new; touch -d 1999-02-03 dated", folder)

    folder = run()
    assert folder == run()
    checks = "[ new -nt old ] && [ old -nt first ] && date -r dated +%F; ls -la --full-time"
    first, second = (sandbox.run_shell(checks, files=folder).stdout for _ in range(2))
    assert first.startswith("1999-02-03\n")
    assert first.replace("..", "") == second.replace("..", "")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("printf x > \"$(head -c 250 /dev/zero | tr '\\0' '\\377')\"", id="odd name"),
        pytest.param("head -c 9M /dev/zero > f; for i in 1 2 3 4 5; do ln f $i; done", id="hard"),
        pytest.param("head -c 9M /dev/urandom > f; truncate -s 1M g", id="full"),
        pytest.param("i=0; while ! [ $i = 4090 ]; do : > $i; i=$((i+1)); done; :", id="many files"),
        pytest.param(
            'python3 -c \'import os\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\'',
            id="deep",
        ),
    ],
)
def test_any_tree_can_be_continued(sandbox, script):
    folder = leave(sandbox, script, scratch_mb=10)
    again = leave(sandbox, ":", folder, scratch_mb=10)
    assert again == folder


def test_what_is_left_out_is_reported(plain_sandbox):
    result = plain_sandbox.run_shell(
        "head -c 2M /dev/zero > big; echo x > small; n=$(printf '%0240d' 0)\n"
        "for i in 0 1 2 3 4 5 6 7 8 9 a b c d e f g h; do mkdir $n; cd $n; done\n"
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")' 2>/dev/null; :",
        limits=Limits(scratch_mb=1, wall_seconds=20),
        collect_files=True,
    )
    assert result.files == {"small": b"x\n"}
    assert "big: no room" in result.left_out
    assert any("too long" in line for line in result.left_out)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a\0b", "x" * 256, "b"])
def test_a_path_that_leads_out_or_is_file_and_folder_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"leads out of the scratch|both a file and"):
        Folder.of({path: "x", "b/a": "y"})


def test_large_folders_are_on_disk_once_as_long_as_something_refers_to_them(monkeypatch):
    gc.collect()

    def num_bytes():
        return sum(file.path.stat().st_size for file in folder_module._FILES.values())

    before = num_bytes()
    folder = Folder.of({"noise": os.urandom(1 << 20)})
    again, copied = pickle.loads(pickle.dumps(folder)), copy.deepcopy(folder)
    assert folder == again == copied
    assert 1 << 20 < num_bytes() - before < 2 << 20
    assert again.contents() == folder.contents()
    monkeypatch.setattr(folder_module, "MAX_STORED_BYTES", before + (2 << 20))
    with pytest.raises(OSError, match="the folders of this process exceed"):
        Folder.of({"noise": os.urandom(2 << 20)})
    assert folder._archive is again._archive
    path = folder._archive.path
    del folder, again, copied
    gc.collect()
    assert num_bytes() == before
    assert not path.exists()


def test_snapshots_share_the_folder_of_an_episode(strong_sandbox):
    env = gym.make("AgentR1/CommandLine-v0", max_episode_steps=9)
    env.reset(seed=0)
    env.step(env.unwrapped.write_call("shell", command="head -c 2000000 /dev/urandom > noise"))
    snapshots = [env.unwrapped.snapshot() for _ in range(3)]
    assert all(len(snapshot.state) < 100_000 for snapshot in snapshots)
    elsewhere = pickle.loads(pickle.dumps(snapshots[0]))  # with the content
    look = env.unwrapped.write_call("shell", command="cksum noise")
    expected = env.step(look)[0]
    for snapshot in (snapshots[1], elsewhere):
        env.unwrapped.restore(snapshot)
        assert env.step(look)[0] == expected
