"""A run of a few seconds: two generated environments, one over rows of a file."""

import shutil
from pathlib import Path

CONFIG = """
protocol: {samples_per_task: 2, concurrency: 3, seed: 5}
environments:
  - {id: AgentR1/SyntheticTable-v0, name: table, kwargs: {split: test}, tasks: 3,
     contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: multi-hop, kwargs: {split: test}, tasks: 2,
     contamination: none}
  - {id: AgentR1/HotpotQA-v0, kwargs: {data: "${data}/hotpot.jsonl"}, contamination: made up}
agents:
  - {name: random, kind: random}
  - {name: rules, kind: heuristic}
  - {name: oracle, kind: oracle}
"""


def write_config(folder, text=CONFIG, name="config.yaml"):
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return path


def make_data_folder(folder, hotpot_file):
    data = Path(folder) / "data"
    data.mkdir()
    shutil.copyfile(hotpot_file, data / "hotpot.jsonl")
    return data


def files_of(run):
    """Every file of a run but those that vary, by name."""
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(Path(run).rglob("*"))
        if path.is_file() and path.relative_to(run).parts[0] not in ("seconds", "work")
    }
