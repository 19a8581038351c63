import dataclasses
import json
import os
import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser

from agent_envs.errors import ConfigurationError
from agent_trainers.cli import first_checks
from agent_trainers.cli.sft import WarmStartArguments
from agent_trainers.cli.train_options import TrainArguments
from agent_trainers.trainers.ppo_config import StepPPOConfig
from agent_trainers.trainers.supervised import WarmStartConfig

WRONG = [
    ("train", ["--learning_rat", "1"], "unknown option --learning_rat. Did you mean"),
    ("train", ["--config"], "--config: expected one argument"),
    ("train", ["--config", "none.yaml"], "--config none.yaml: there is no such file"),
    ("train", ["--config", "hotpotqa_gpro"], "Did you mean 'hotpotqa_grpo'"),
    ("train", ["--config", "broken.yaml"], "--config broken.yaml, line 2, column 2: is not valid"),
    ("train", ["--config", "list.yaml"], "list.yaml: must hold 'option: value' lines"),
    ("train", ["--config", "binary.yaml"], "binary.yaml: is no UTF-8 text"),
    ("train", ["--config", "typo.yaml"], "typo.yaml: unknown option --learning_rat."),
    ("train", ["--config", "no_env.yaml"], "--env must be a Gymnasium id"),
    ("train", ["--env", "AgentR1/HotpotQ-v0"], "Did you mean AgentR1/HotpotQA-v0?"),
    ("train", ["--env", "no_such_module:X-v0"], "No module named 'no_such_module'"),
    ("train", ["--env", "raises:X-v0"], "RuntimeError: no licence (", "raises.py, line 1)"),
    ("train", ["--env", "unparsable:X-v0"], "SyntaxError", "unparsable.py, line 1)"),
    ("train", ["--env_kwargs", "{hops: 2}"], "--env_kwargs is not valid JSON"),
    ("train", ["--eval_env_kwargs", "[1]"], "--eval_env_kwargs must be a JSON object"),
    ("train", ["--model", "./nowhere"], "Model './nowhere': there is no such folder"),
    ("train", ["--model", "none.gguf"], "Model none.gguf: there is no such file"),
    ("train", ["--output_dir", "finished"], "holds a finished run", "--resume", "--overwrite"),
    ("train", ["--output_dir", "project", "--overwrite"], "project holds README.md, which no run"),
    ("train", ["--resume", "--output_dir", "new"], "--resume: there is no folder new"),
    ("train", ["--resume", "--overwrite"], "--resume and --overwrite: give one of the two"),
    ("train", ["--resume_from_checkpoint", "none"], "none: there is no such folder"),
    ("sft", ["--learning_rat", "1"], "unknown option --learning_rat. Did you mean"),
    ("sft", ["--config", "none.yaml"], "--config none.yaml: cannot be read"),
    ("sft", ["--env", "Nowhere-v0"], "--env Nowhere-v0: Environment `Nowhere` doesn't exist"),
    ("sft", ["--output_dir", "finished"], "holds a finished run"),
    ("evaluate", ["--num_task", "1"], "unknown option --num_task. Did you mean --num_tasks?"),
    ("evaluate", ["--env_kwargs", "{"], "--env_kwargs is not valid JSON"),
    ("evaluate", ["--env_kwargs", '{"hop": 1}'], "unexpected keyword argument 'hop'", "'hops'?"),
    ("evaluate", ["--env", "Nowhere-v0"], "--env Nowhere-v0"),
    ("evaluate", ["--model", "a/b/c"], "Model 'a/b/c': there is no such folder"),
    ("evaluate", ["--output", "."], "--output .: is a folder"),
    ("evaluate", ["--trajectories", "x.txt"], "x.txt: unknown kind of file"),
    ("evaluate", ["--base_url", "localhost", "--model", "m"], "must begin with http://"),
    ("collect", ["--keep", "0"], "--keep must be at least 1, not 0"),
    ("collect", ["--output", "x.txt"], "x.txt: unknown kind of file"),
    ("collect", ["--model", "none.gguf"], "Model none.gguf"),
    ("tiny", ["--env", "Nowhere-v0"], "--env Nowhere-v0"),
    ("tiny", ["--num_tasks", "0"], "--num_tasks must be at least 1"),
    ("tiny", ["--env", "AgentR1/SyntheticMultiHop-v0", "--output", "project"], "no tiny policy"),
]
RUN_ALL = """
import contextlib, io, json, sys
from agent_trainers.cli import commands
answers = []
for command, arguments in json.load(sys.stdin):
    sys.argv = [command, *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            if command == "tiny":
                from agent_trainers.make_tiny_policy import __main__
                __main__.main()
            else:
                getattr(commands, command)()
        except SystemExit as end:
            code = end.code
        else:
            code = 0
    answers.append([code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the commands say to `WRONG`: one process for all, for none of them imports torch."""
    folder = tmp_path_factory.mktemp("here")
    for name, text in {
        "broken.yaml": "a: [1\nb: }", "list.yaml": "- 1", "typo.yaml": "learning_rat: 1",
        "no_env.yaml": "env:", "raises.py": "raise RuntimeError('no licence')",
        "unparsable.py": "def f(:",
    }.items():  # fmt: skip
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe")
    for name in ("finished/settings.json", "finished/results.json", "project/README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    root = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps([case[:2] for case in WRONG]), text=True,
        capture_output=True, cwd=folder, env=os.environ | {"PYTHONPATH": root}, check=True,
    )  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[str(case[:2]) for case in WRONG])
def test_a_wrong_command_line_is_answered_in_a_line_without_torch(answers, number):
    code, said, imported_torch = answers[number]
    for part in WRONG[number][2:]:
        assert part in said
    assert code == 2
    assert said.count("\n") <= 2
    assert not imported_torch


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        ("agent-r1-train", (TrainArguments, StepPPOConfig)),
        ("agent-r1-sft", (WarmStartArguments, WarmStartConfig)),
    ],
)
def test_the_options_read_from_the_sources_are_those_that_the_classes_have(program, kinds):
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    own = {field.name for field in fields}
    assert first_checks.option_names(program) == own | {"config", "help_all"}


def test_no_option_of_accelerate_is_refused():
    known = [name for name in launch_command_parser()._option_string_actions if name[:2] == "--"]
    first_checks._check_names(
        "agent-r1-train", known, first_checks._options_of_accelerate() | {"help"}, ""
    )


def test_where_a_class_has_moved_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(first_checks, "OPTIONS", {"agent-r1-sft": {"Moved": "trl.nowhere"}})
    assert first_checks.option_names("agent-r1-sft") == frozenset()
    first_checks._check_names("agent-r1-sft", ["--anything"], frozenset(), "")


def test_what_is_right_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "settings.json").write_text("{}")
    for arguments in (
        [],
        ["--help", "--nonsense"],
        ["--num-generations", "4", "--no_merge_steps", "--learning_rate=1e-3", "--seed", "-1"],
        ["--output_dir", "run", "--resume", "true"],
        ["--output_dir", "run", "--resume_from_checkpoint", str(checkpoint)],
        ["--output_dir", "run", "--dry_run"],
        ["--env", "AgentR1/SyntheticMultiHop", "--mixed_precision=bf16", "--num_machines", "2"],
    ):
        first_checks.check("agent-r1-train", arguments)
    with pytest.raises(ConfigurationError, match="a run that was stopped"):
        first_checks.check("agent-r1-train", ["--output_dir", "run", "--resume", "false"])
