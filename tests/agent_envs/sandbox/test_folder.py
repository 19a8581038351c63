"""The folder that goes from one program to the next, as one value."""

import contextlib
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox import Folder, Limits, tree
from agent_envs.sandbox.tree import Record

NAMES = st.binary(min_size=1, max_size=30).filter(lambda n: not {*b"/\0"} & {*n} and n[:1] != b".")
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(b"/".join)
CONTENTS = st.dictionaries(PATHS, st.binary(max_size=50), max_size=8)


def leave(sandbox, script, files=None, **limits):
    result = sandbox.run_shell(
        script, files=files, collect_files=True, limits=Limits(**{"wall_seconds": 20, **limits})
    )
    assert result.status == "ok", result
    return result.folder


@given(CONTENTS)
def test_what_a_folder_is_made_of_can_be_read_from_it(contents):
    try:
        folder = Folder.of(contents)
    except ConfigurationError:  # one path is both
        assert any(p != q and p.startswith(q + b"/") for p in contents for q in contents)
        return
    assert folder.files() == contents
    assert all(folder.read(path) == content for path, content in contents.items())
    assert pickle.loads(pickle.dumps(folder)) == folder
    assert folder.read(b"no such file") is None


@settings(max_examples=15, deadline=None)
@given(CONTENTS)
def test_a_folder_goes_through_a_sandbox_unchanged(sandbox, contents):
    try:
        folder = Folder.of(contents)
    except ConfigurationError:
        return
    once = leave(sandbox, ":", folder)
    assert once.files() == contents
    assert leave(sandbox, ":", once).archive[16:] == once.archive[16:]  # but for the count of calls


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: tree.header() + data))
def test_no_bytes_break_the_reader(data):
    with contextlib.suppress(ValueError):
        list(Folder(data).entries())


@pytest.mark.parametrize("level", ["sandbox", "plain_sandbox"])
def test_folders_links_modes_and_names_stay_between_commands(request, level):
    sandbox = request.getfixturevalue(level)
    folder = leave(
        sandbox,
        "mkdir out closed; echo 'echo run' > r.sh; chmod 755 r.sh; ln -s r.sh link; ln r.sh hard\n"
        "mkfifo pipe; printf x > \"$(printf 'a\\377')\"; printf y > \"$(printf 'a\\376')\"\n"
        "ln -s /nowhere dangling; truncate -s 5M sparse; echo z > closed/in; chmod 000 closed",
    )
    assert folder.read(b"a\xff") == b"x"
    assert folder.read(b"a\xfe") == b"y"
    assert folder.read("link") is None
    assert folder.read("hard") == folder.read("r.sh") == b"echo run\n"
    assert len(folder.archive) < 2000  # holes are not stored
    checks = (
        "set -e; ./r.sh; ./link; rmdir out; [ ! -e dangling ]; [ -L dangling ]; [ -p pipe ]\n"
        "[ hard -ef r.sh ]; stat -c %a r.sh closed; stat -c %s sparse; du -k sparse | cut -f1\n"
        "chmod 700 closed; cat closed/in"
    )
    result = sandbox.run_shell(checks, files=pickle.loads(pickle.dumps(folder)))
    assert result.stderr == ""
    assert result.stdout.split() == "run run 755 0 5242880 0 z".split()


def test_the_same_commands_leave_equal_folders_and_newer_files_are_newer(sandbox):
    def play():
        folder = leave(sandbox, "echo 1 > old; mkdir d; ln -s old l", {"first": "1"})
        return leave(sandbox, "echo 2 > new; touch -d 2001-02-03 dated", folder)

    folder = play()
    assert folder == play()
    result = sandbox.run_shell(
        "[ new -nt old ] && [ old -nt first ] && date -r dated +%F", files=folder
    )
    assert result.stdout == "2001-02-03\n"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            "n=$(printf '%0240d' 0); for i in 0 1 2 3 4 5 6 7 8 9 a b c d e f g h; do"
            " mkdir $n; cd $n; done; echo x > f; ln f g",
            id="long paths",
        ),
        pytest.param("printf x > \"$(head -c 250 /dev/zero | tr '\\0' '\\377')\"", id="odd name"),
        pytest.param("head -c 9M /dev/zero > f; for i in 1 2 3 4 5; do ln f $i; done", id="hard"),
        pytest.param("for i in 1 2 3 4 5 6 7 8 9; do truncate -s 16M $i; done", id="sparse"),
        pytest.param("i=0; while ! [ $i = 4090 ]; do : > $i; i=$((i+1)); done; :", id="many files"),
    ],
)
def test_any_tree_comes_back_and_goes_on(sandbox, script):
    folder = leave(sandbox, script, scratch_mb=10)
    again = leave(sandbox, ":", folder, scratch_mb=10)
    assert again.archive[16:] == folder.archive[16:]


def test_a_tree_of_any_depth_comes_back_and_goes_on(sandbox):
    deep = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"
    folder = sandbox.run_python(deep, collect_files=True).folder
    assert sum(record.kind == b"d" for record in tree.read(folder.archive)) == 1500
    assert leave(sandbox, ":", folder).archive[16:] == folder.archive[16:]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_link_into_a_closed_folder_can_be_made_by_any_user(tmp_path):
    records = [
        Record(b"d", 0, name=b"closed"),
        Record(b"f", name=b"a", size=1, parts=((0, b"x"),)),
        tree.UP,
        Record(b"h", name=b"hard", target=b"closed/a"),
    ]
    data = tree.header() + b"".join(map(tree.write, records))
    os.chown(tmp_path, 1000, 1000)
    if (pid := os.fork()) == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.chdir(tmp_path)
            os.setresuid(1000, 1000, 1000)
            tree.unpack(data)
            code = int(Path("hard").read_bytes() != b"x")
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_is_left_out_is_said(plain_sandbox):
    limits = Limits(scratch_mb=1, wall_seconds=20)
    result = plain_sandbox.run_shell(
        "head -c 2M /dev/zero > big; echo x > small; i=0\n"
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")' 2>/dev/null; :",
        limits=limits,
        collect_files=True,
    )
    assert result.files == {"small": b"x\n"}
    assert "big: no room" in result.left_out


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a\0b", "x" * 256])
def test_a_path_that_leads_out_is_refused(path):
    with pytest.raises(ConfigurationError, match="leads out of the scratch directory"):
        Folder.of({path: "x"})


def test_a_path_that_is_file_and_folder_is_refused():
    with pytest.raises(ConfigurationError, match="'a' is both a file and a folder"):
        Folder.of({"a": "x", "a/b": "y"})


def test_a_huge_hole_costs_no_memory_to_read():
    hole = tree.write(Record(b"f", name=b"hole", size=1 << 60))
    folder = Folder(tree.header() + hole)
    assert len(folder.read("hole")) == 64 << 20
    assert folder.files() == {}
    assert next(folder.entries()).size == 1 << 60


def test_an_unreadable_name_is_a_file_like_any_other(sandbox):
    name = os.fsdecode(b"\xff.txt")
    result = sandbox.run_shell("cat *", files={name: "text"}, collect_files=True)
    assert (result.stdout, result.files) == ("text", {name: b"text"})
