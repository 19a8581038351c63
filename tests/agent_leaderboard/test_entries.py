"""From a template to a submission, as a newcomer does it; and the workflow that verifies it."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_leaderboard import cli
from agent_leaderboard.entries.entry import invalid_fields
from agent_leaderboard.play import episodes
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.records.results import read_run, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    """An empty folder in which an agent was made from the template and run on two environments."""
    folder = tmp_path_factory.mktemp("stranger")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("AGENT_R1_DATA", raising=False)
        patch.setattr(cli, "CHECKOUT_DATA", folder / "none")
        cli.main(["new", "wise_owl"])
        config = folder / "wise_owl.yaml"
        config.write_text(config.read_text().replace("my organisation", "Owls of the Wood"))
        cli.main(
            ["--config", "wise_owl.yaml", "--output", "run", "--environments", "synthetic-table"]
        )
    return folder


@pytest.fixture
def here(entry, tmp_path, monkeypatch):
    """A copy of the folder, to work in."""
    shutil.copytree(entry, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.delenv("AGENT_R1_DATA", raising=False)
    monkeypatch.setattr(cli, "CHECKOUT_DATA", tmp_path / "none")
    forget()
    return tmp_path / "copy"


def forget():
    """Forget the agent, as a process that begins does."""
    sys.modules.pop("wise_owl", None)
    episodes._agent.cache_clear()


def test_the_template_is_an_agent_with_its_own_name(entry, monkeypatch):
    (agent,) = load_configs([entry / "wise_owl.yaml"]).agents
    assert (agent.name, agent.kind) == ("wise owl", "wise_owl:WiseOwl")
    monkeypatch.chdir(entry)
    with pytest.raises(SystemExit, match="exists; nothing was written"):
        cli.main(["new", "wise_owl"])
    with pytest.raises(SystemExit, match="cannot name a module"):
        cli.main(["new", "wise owl"])


def test_environments_without_data_are_left_out_with_the_reason(here, capsys):
    config = load_configs([here / "wise_owl.yaml"])
    assert config.optional == {environment.slug for environment in config.environments}
    names = ["hotpotqa", "synthetic-table"]
    cli.main(["--config", "wise_owl.yaml", "--output", "part", "--tasks", "1",
              "--environments", *names])  # fmt: skip
    manifest = read_run(Path("part")).manifest
    assert [record.slug for record in manifest.environments] == ["synthetic-table"]
    left_out = next(one for one in manifest.left_out if one.id == "AgentR1/HotpotQA-v0")
    assert "its data are missing: hotpotqa_dev_distractor.jsonl.gz" in left_out.reason


def test_a_submission_verifies_and_its_text_has_facts_and_scores(here, capsys):
    cli.main(["submit", "run", "--jobs", "1"])
    folder = here / "submissions" / "wise-owl"
    cli.main(["verify", str(folder), "--jobs", "1"])
    assert "Verified in full: 100 of 100" in capsys.readouterr().out.replace("\n", " ")
    text = folder.with_suffix(".md").read_text()
    assert "# Leaderboard entry: wise owl" in text
    assert "- organisation: Owls of the Wood" in text
    assert "| `synthetic-table`" in text
    assert "- `synthetic-arithmetic`: not chosen" in text  # --environments left it out
    assert "`synthetic-table`: not chosen" not in text
    assert not list(folder.glob("leaderboard.*"))
    with pytest.raises(SystemExit, match="exists; choose another"):
        cli.main(["submit", "run", "--jobs", "1"])


def test_an_unfit_run_is_refused_with_the_reason(here):
    found = read_run(here / "run")
    manifest = found.manifest
    (agent,) = manifest.agents
    protocol = dataclasses.replace(manifest.protocol, seed=3)
    for changes, message in (
        ({"agents": [dataclasses.replace(agent, organisation=None)]}, "has no organisation"),
        ({"agents": [dataclasses.replace(agent, url="TBD")]}, "a placeholder in the field 'url'"),
        ({"protocol": protocol}, "field 'seed': is 3, not 0"),
    ):
        changed = dataclasses.replace(manifest, **changes)
        write_run(here / "run", dataclasses.replace(found, manifest=changed))
        with pytest.raises(SystemExit, match=message):
            cli.main(["submit", "run", "--jobs", "1"])


def test_placeholders_are_refused(entry):
    (agent,) = load_configs([entry / "wise_owl.yaml"]).agents
    assert list(invalid_fields(agent)) == []
    for field in ("organisation", "licence", "model", "url"):
        for text in ("my organisation", "TODO", "<name>", "???", "xxx", "Your company",
                     "example.com"):  # fmt: skip
            (problem,) = invalid_fields(dataclasses.replace(agent, **{field: text}))
            assert problem == f"has a placeholder in the field {field!r}, {text!r}"
        for text in ("X", "Mylan", "Example Ltd", "my-llama", "https://a.org/example.html"):
            assert list(invalid_fields(dataclasses.replace(agent, **{field: text}))) == []


def test_an_os_error_and_ctrl_c_are_one_line(here, monkeypatch, capsys):
    (here / "file").write_text("")
    with pytest.raises(SystemExit, match="file"):
        cli.main(["--config", "wise_owl.yaml", "--output", "file", "--tasks", "1"])

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("agent_leaderboard.play.run.run", stop)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--config", "wise_owl.yaml"])
    assert ended.value.code == 130
    assert "Repeat the command to resume" in capsys.readouterr().err


@pytest.fixture
def checkout(tmp_path):
    """A repository with a submission in a commit of its own; returns it and the commit before."""
    folder = tmp_path / "checkout"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "code.py").write_text("")
    git(folder, "init", "--quiet")
    return folder, commit(folder)


def git(folder, *words):
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *own, *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


def verify_submission(tmp_path, folder, base):
    """Run the workflow's script, with a command that records its arguments."""
    command = tmp_path / "bin" / "agent-r1-bench"
    command.parent.mkdir(exist_ok=True)
    command.write_text('#!/bin/sh\necho "asked: $*"\n')
    command.chmod(0o755)
    return subprocess.run(
        ["bash", ROOT / ".ci" / "verify_submission", folder, base],
        env=os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def add(folder, *names, text="{}"):
    """Commit files of a submission."""
    for name in names:
        path = folder / "benchmarks" / "submissions" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return commit(folder)


def test_the_workflow_verifies_each_folder_that_is_added(tmp_path, checkout):
    folder, base = checkout
    add(folder, "owl/manifest.json", "fox/manifest.json")
    done = verify_submission(tmp_path, folder, base)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("/")[-1] for line in done.stdout.splitlines() if "asked" in line] == [
        "fox --reference published --jobs 2", "owl --reference published --jobs 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../code.py", "changes nothing outside"),
        ("../../setup.py", "changes nothing outside"),
        ("../../.github/workflows/x.yml", "changes nothing outside"),
        *((f"owl/{name}", "is no file of a run") for name in
          ("work/model.py", "conftest.py", "leaderboard.html", "results/x.py", "a\nb.json")),
    ],
)  # fmt: skip
def test_the_workflow_refuses_other_files(tmp_path, checkout, name, message):
    folder, base = checkout
    add(folder, "owl/manifest.json", name, text="print()")
    done = verify_submission(tmp_path, folder, base)
    assert done.returncode == 1
    assert message in done.stdout
    assert "asked" not in done.stdout


def test_the_workflow_refuses_links_changes_and_nothing(tmp_path, checkout):
    folder, base = checkout
    for same in ("HEAD", "0" * 40):
        done = verify_submission(tmp_path, folder, same)
        assert done.returncode != 0
        assert "asked" not in done.stdout
    link = folder / "benchmarks" / "submissions" / "owl" / "manifest.json"
    link.parent.mkdir(parents=True)
    link.symlink_to("/etc/passwd")
    commit(folder)
    done = verify_submission(tmp_path, folder, base)
    assert done.returncode == 1
    assert "plain files only" in done.stdout
    link.unlink()
    base = add(folder, "owl/manifest.json")
    add(folder, "owl/manifest.json", text="{} ")
    done = verify_submission(tmp_path, folder, base)
    assert done.returncode == 1
    assert "was there before" in done.stdout
