"""What a configuration may say, and what its errors say."""

import pytest

from agent_envs.errors import ConfigurationError, UnknownNameError
from agent_leaderboard.play.config import PRESETS, load_configs
from agent_leaderboard.play.environments import fill_in
from agent_leaderboard.records.manifest import Protocol
from tests.agent_leaderboard.runs import CONFIG, write_config

ENVIRONMENT = "environments: [{id: AgentR1/SyntheticTable-v0, contamination: none}]\n"
AGENT = "agents: [{name: oracle, kind: oracle}]\n"


def test_files_add_up_and_later_values_of_the_protocol_win(tmp_path):
    one = write_config(tmp_path, "protocol: {seed: 1, temperature: 0.5}\n" + ENVIRONMENT, "a.yaml")
    two = write_config(tmp_path, "protocol: {seed: 2}\n" + AGENT, "b.yaml")
    config = load_configs([one, two])
    assert config.protocol == Protocol(seed=2, temperature=0.5)
    assert [e.slug for e in config.environments] == ["synthetictable"]
    assert [a.slug for a in config.agents] == ["oracle"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enviroments: []", "Did you mean 'environments'"),
        (ENVIRONMENT.replace("contamination", "contaminaton") + AGENT, "Did you mean 'contamin"),
        (ENVIRONMENT.replace("Table", "Tabel") + AGENT, "Did you mean 'AgentR1/SyntheticTable-v0'"),
        (ENVIRONMENT + AGENT.replace("kind: oracle", "kind: orakle"), "Did you mean 'oracle'"),
        (ENVIRONMENT + AGENT + "protocol: {sead: 1}", "Did you mean 'seed'"),
        (ENVIRONMENT + AGENT.replace("}]", ", not_played: [syntheticatble]}]"), "does not play"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_right_one(tmp_path, text, message):
    with pytest.raises(UnknownNameError, match=message):
        load_configs([write_config(tmp_path, text)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AGENT, "a run needs 'environments' and 'agents'"),
        (ENVIRONMENT + AGENT + "protocol: {samples_per_task: 0}", "samples_per_task: .* to 1"),
        (ENVIRONMENT + AGENT + "protocol: {seed: x}", "protocol: seed: .*valid integer"),
        (ENVIRONMENT + AGENT.replace("}]", "}, {name: Oracle, kind: random}]"), "is repeated"),
        (ENVIRONMENT + AGENT.replace("}]", ", prices: {prompt: 1, completion: 1}}]"), "no model"),
        ("environments: 3\n" + AGENT, "'environments' must be a list"),
        (ENVIRONMENT.replace("contamination: none", "tasks: 0, contamination: x") + AGENT, "tasks"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_and_key(tmp_path, text, message):
    path = write_config(tmp_path, text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_configs([path])
    assert str(path) in str(caught.value)


def test_a_part_of_a_run_is_chosen_by_name(tmp_path):
    config = load_configs([write_config(tmp_path, CONFIG)])
    part = config.choose(
        environments=["table", "table"], agents=["oracle", "random", "oracle"], tasks=1
    )
    assert [(e.slug, e.num_tasks) for e in part.environments] == [("table", 1)]
    assert [agent.slug for agent in part.agents] == ["oracle", "random"]
    with pytest.raises(UnknownNameError, match="Did you mean 'table'"):
        config.choose(environments=["tabel"])


def test_model_settings_reach_agents_on_a_model():
    config = load_configs([PRESETS["published"]]).override_models({"model": "m", "base_url": "u"})
    settings = {agent.slug: agent.settings for agent in config.agents}
    assert settings["embedded-policy-before-rl"]["base_url"] == "u"
    assert settings["oracle"] == {}


def test_another_model_has_not_the_name_of_the_presets_model():
    config = load_configs([PRESETS["smollm2"]])
    named = [agent.model for agent in config.agents if agent.model is not None]
    assert named
    served = config.override_models({"base_url": "u"})
    assert [agent.model for agent in served.agents if agent.model is not None] == named
    for agent in config.override_models({"model": "m"}).agents:
        assert agent.model is agent.made_by is None


def test_the_papers_comparison_is_a_preset_for_its_model():
    config = load_configs([PRESETS["paper"]])
    assert [agent.kind for agent in config.agents] == ["base_tool_call", "naive_rag", "checkpoint"]
    assert {a.settings["model"] for a in config.agents} == {
        "Qwen/Qwen2.5-3B-Instruct", "runs/hotpotqa",
    }  # fmt: skip
    assert [environment.id for environment in config.environments] == [
        "AgentR1/HotpotQA-v0", "AgentR1/2WikiMultihopQA-v0", "AgentR1/MuSiQue-v0",
    ]  # fmt: skip


def test_the_published_run_names_every_environment_run_or_left_out():
    from agent_envs.registration import ENVIRONMENTS

    config = load_configs([PRESETS["published"]])
    named = [e.id for e in config.environments] + [e.id for e in config.left_out]
    assert set(named) == {spec.id for spec in ENVIRONMENTS}


def test_an_environment_that_is_added_to_a_board_is_not_left_out(tmp_path):
    text = f"""
board: published
environments: [{{id: AgentR1/SyntheticMarket-v0, contamination: none}}]
{AGENT}"""
    left_out = {one.id for one in load_configs([write_config(tmp_path, text)]).left_out}
    assert "AgentR1/ClaimReview-v0" in left_out
    assert "AgentR1/SyntheticMarket-v0" not in left_out


def test_the_data_folder_is_filled_in_everywhere(tmp_path):
    nested = {"data": "${data}/a", "corpus": ["${data}/b"], "top_k": 3}
    assert fill_in(nested, tmp_path) == {
        "data": f"{tmp_path}/a", "corpus": [f"{tmp_path}/b"], "top_k": 3,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="pass --data"):
        fill_in(nested, None)
    with pytest.raises(UnknownNameError, match="data"):
        fill_in("${date}/a", tmp_path)


def test_a_hidden_split_keeps_the_seed_of_its_file(tmp_path):
    config = load_configs([write_config(tmp_path, ENVIRONMENT + AGENT)])
    path = tmp_path / "seed.txt"
    first, again = config.hide(path).protocol, config.hide(path).protocol
    assert first == again
    assert first.is_hidden
    assert not config.protocol.is_hidden
    assert config.hide(tmp_path / "other.txt").protocol.seed != first.seed
    assert path.stat().st_mode & 0o077 == 0
    for text in ("", "7", "-5000000000", "seed", str(2**63), "9" * 5_000):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="must hold an integer of at least"):
            config.hide(path)
