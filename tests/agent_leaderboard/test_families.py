"""Families, difficulty and attacks: what the page says of slices of a board."""

import pytest

from agent_envs.errors import UnknownNameError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.report.families import family_of, slices, under_attack
from agent_leaderboard.report.summary import read_run, summarise
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.small_config import write_config

CONFIG = """
environments:
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops, kwargs: {hops: [1, 2, 3]}, tasks: 12,
     contamination: none}
  - {id: AgentR1/SyntheticTable-v0, name: table, tasks: 4, contamination: none}
  - {id: AgentR1/CommandLine-v0, name: shell, kwargs: {split: test}, tasks: 2, contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops edited, tasks: 12, attack: edits, attack_on: hops,
     kwargs: {hops: [1, 2, 3], attack: {attacker: swap, budget: 4}}, contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops injected, tasks: 12, attack: injection,
     attack_on: hops, kwargs: {hops: [1, 2, 3], variant: injected}, contamination: none}
agents:
  - {name: reader, kind: "tests.agent_leaderboard.outside.acting:reader"}
  - {name: random, kind: random}
  - {name: oracle, kind: oracle}
"""


@pytest.fixture(scope="module")
def attacked_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    return run(load_configs([write_config(folder, CONFIG)]), folder / "run").path


@pytest.fixture(scope="module")
def attacked_board(attacked_run):
    return summarise(read_run(attacked_run))


def test_an_attack_changes_what_an_agent_reads_and_not_what_is_right(attacked_board):
    found = {(one.agent, one.attack): one for one in under_attack(attacked_board)}
    reader = found["reader", "edits"]
    assert reader.clean == 1.0
    assert reader.attacked < 0.75  # it believes what it reads
    assert (reader.num_lost, reader.num_won) == (round(12 * (1 - reader.attacked)), 0)
    assert reader.obeyed is None
    assert reader.p_value == pytest.approx(2 * 0.5**reader.num_lost)  # all lost, none won
    oracle = found["oracle", "edits"]  # it knows the answers
    assert (oracle.clean, oracle.attacked, oracle.num_lost) == (1.0, 1.0, 0)
    assert found["reader", "injection"].obeyed is not None
    assert found["oracle", "injection"].obeyed == 0.0


def test_environments_under_attack_count_in_no_mean_and_no_family(attacked_board):
    by_name = {(one.kind, one.name): one for one in slices(attacked_board)}
    assert by_name["family", "synthetic"].num_environments == 2
    assert by_name["family", "shell"].num_environments == 1
    cells = [
        attacked_board.cells[slug, "random"].success.mean for slug in ("hops", "table", "shell")
    ]
    assert attacked_board.overall["random"].mean == pytest.approx(sum(cells) / 3)
    assert [name for kind, name in by_name if kind == "hops"] == ["1", "2", "3"]
    group = next(g for g in attacked_board.cells["hops", "random"].groups if g.value == "2")
    # Table tasks take two look-ups, too, so both environments have tasks of two hops.
    assert by_name["hops", "2"].num_environments in (1, 2)
    assert 0.0 <= group.success.mean <= 1.0


def test_the_family_is_the_folder_of_the_class(attacked_board):
    families = {r.slug: family_of(r) for r in attacked_board.run.manifest.environments}
    assert families == {
        "hops": "synthetic", "table": "synthetic", "shell": "shell",
        "hops-edited": "synthetic", "hops-injected": "synthetic",
    }  # fmt: skip


def test_the_page_shows_attacks_families_and_tasks_and_the_run_verifies(attacked_run):
    write_reports(attacked_run)
    page = (attacked_run / "leaderboard.html").read_text(encoding="utf-8")
    matrix, rest = page.split('id="long"', 1)
    assert "hops-edited" not in matrix.split("<tbody>")[1]
    for part in ('id="robust"', 'id="families"', 'id="tasks"', "family: synthetic"):
        assert part in rest
    assert verify(attacked_run).problems == []


def test_an_attack_on_an_environment_that_is_not_there_is_named(tmp_path):
    text = CONFIG.replace("attack_on: hops,", "attack_on: hop,", 1)
    with pytest.raises(UnknownNameError, match="Did you mean 'hops'"):
        load_configs([write_config(tmp_path, text)])
