"""Names on a board: no invisible characters, and no name that looks like another."""

import dataclasses

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.entries.entry import merge_runs
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.records.manifest import EnvironmentRecord, published
from agent_leaderboard.records.names import misleading_names, skeleton, why_unclear
from agent_leaderboard.records.results import Run, read_run
from agent_leaderboard.verify.claims import check_names
from tests.agent_leaderboard.runs import CONFIG, write_config

UNCLEAR = {
    "\u043eracle": "mixes CYRILLIC and LATIN in one word, '\\u043eracle'",
    "my \u03bf1": "imitates Latin letters",
    "gpt-4\u043e": "imitates Latin letters",
    "\uff4fracle": "contains compatibility characters; write 'oracle'",
    "\U0001d428racle": "compatibility characters",
    "two\u00a0words": "compatibility characters",
    "ora\u200bcle": "contains the invisible character U+200B ZERO WIDTH SPACE",
    "ora\u200dcle": "the invisible character U+200D",
    "\u202eelcaro": "the invisible character U+202E RIGHT-TO-LEFT OVERRIDE",
    "oracle\u200f": "the invisible character U+200F RIGHT-TO-LEFT MARK",
    "ora\ufe0fcle": "the invisible character U+FE0F VARIATION SELECTOR-16",
    "ora\u3164cle": "the invisible character U+3164 HANGUL FILLER",
    "ora\u2800cle": "the invisible character U+2800 BRAILLE PATTERN BLANK",
    "ora\u034fcle": "the invisible character U+034F",
    "ora\ncle": "the invisible character U+000A",
    "\ua4f3\ua4e3\ua4ee 1": "a letter of a rare script or of phonetics, '\\ua4f3'",
    "\u13a4\u13a1": "a letter of a rare script",
    "sma\u01c0\u01c0": "or of phonetics, '\\u01c0'",
    "guess\u0269ng": "or of phonetics",
    "oracle ": "begins or ends with a space",
    "two  words": "several in a row",
}


@pytest.mark.parametrize("text", UNCLEAR)
def test_a_misleading_name_is_refused_with_the_reason(text):
    assert UNCLEAR[text] in why_unclear(text)


@pytest.mark.parametrize(
    "text",
    ["", "my agent 7B", "Qwen/Qwen2.5-3B-Instruct", "caf\u00e9 M\u00fcller", "\u0141\u00f3d\u017a",
     "\u042f\u043d\u0434\u0435\u043a\u0441", "\u0421\u0431\u0435\u0440 GigaChat",
     "\u5317\u4eac\u5927\u5b66", "\u682a\u5f0f\u4f1a\u793e\u30e9\u30fc\u30e1\u30f3\u306e\u5e97",
     "\uc11c\uc6b8\u5927", "\u0645\u062f\u0631\u0633\u0629", "\u0939\u093f\u0928\u094d\u0926\u0940",
     "https://example.org/a_b?c=1", "\U0001f989 owl", "\u03b2-VAE"],
)  # fmt: skip
def test_a_name_in_any_one_script_is_allowed(text):
    assert why_unclear(text) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [("oracle", "\u043eracle"), ("oracle", "0RACLE"), ("oracle", "Or\u00e4cle"), ("all", "a1I"),
     ("wise owl", "vvise_owl"), ("modern", "modem"), ("Coco", "\u0421\u043e\u0441\u043e"),
     ("agent", "\u0251gent"), ("rules", "rul\u0119s"), ("lion", "l\u0131\u00f8n"),
     ("BABA", "\u0392\u0391\u0392\u0391"), ("oracle", "oracIe"), ("random", "randorn")],
)  # fmt: skip
def test_names_that_look_alike_have_the_same_skeleton(one, other):
    assert skeleton(one) == skeleton(other)
    names = ["agent 1.1", "agent 11", "agent 12", "agent", "agent a", "agent b", "\u5317\u4eac",
             "\u5317\u6d77"]  # fmt: skip
    assert len(set(map(skeleton, names))) == len(names)


@pytest.fixture(scope="module")
def manifest(small_run):
    return read_run(small_run).manifest


def renamed(manifest, agent, **change):
    agents = [dataclasses.replace(a, **change) if a.slug == agent else a for a in manifest.agents]
    return dataclasses.replace(manifest, agents=agents)


NAMED = "names the kind 'oracle', and is of another, 'heuristic'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({field: "rules\u200b"}, f"'rules', field '{field}': contains the invisible character")
          for field in ("name", "organisation", "model", "licence", "url")),
        *(({"url": url}, "field 'url': ")
          for url in ("javascript:alert(1)", "example", "https://a b", "file:///etc")),
        ({"name": "0racle", "slug": "0racle"}, NAMED),
        ({"name": "my Or\u00e4cle", "slug": "my-or-cle"}, NAMED),
    ],
)  # fmt: skip
def test_verification_names_a_misleading_field(manifest, change, message):
    assert list(check_names(renamed(manifest, "rules", url="https://github.com/a/b"))) == []
    assert message in " ".join(check_names(renamed(manifest, "rules", **change)))


def test_agents_that_look_alike_are_refused_on_one_board(manifest, small_run):
    one = renamed(manifest, "rules", kind="a:A", name="wise owl", slug="wise-owl")
    other = renamed(manifest, "rules", kind="a:A", name="w1se owl", slug="w1se-owl")
    (text,) = misleading_names([one.agent("wise-owl"), other.agent("w1se-owl")])
    assert "'w1se owl' looks like 'wise owl', which is on this board" in text
    firms = [renamed(one, "wise-owl", organisation=name).agent("wise-owl")
             for name in ("Coco", "coco.", "\u0421\u043e\u0441\u043e")]  # fmt: skip
    (text,) = misleading_names(firms)  # another case is no other name
    assert "field 'organisation': '\\u0421\\u043e\\u0441\\u043e' looks like 'Coco'" in text

    assert list(misleading_names([*manifest.agents, *manifest.agents])) == []
    for name in ("wise ow1", "wise owl"):  # taken by an agent of another kind
        taken = dataclasses.replace(manifest.agent("oracle"), kind="react", name=name)
        (text,) = misleading_names([taken, one.agent("wise-owl")])
        assert f"looks like {name!r}, which is on this board" in text

    runs = {}
    for path, own in (("one.zip", one), ("two.zip", other)):
        agents = [agent for agent in own.agents if agent.kind == "a:A"]
        own = dataclasses.replace(own, agents=agents)
        runs[path] = Run(manifest=own, tasks=read_run(small_run).tasks, results={})
    with pytest.raises(DataError, match="looks like 'wise owl'"):
        merge_runs(runs)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("name: rules", "name: r\u200bules", "the invisible character"),
     ("name: rules", "name: 0racle", "names the kind 'oracle'"),
     ("{name: rules,", "{name: rules, organisation: \u041epenAI,", "CYRILLIC and LATIN")],
)  # fmt: skip
def test_a_run_with_such_a_name_is_refused(tmp_path, old, new, message):
    with pytest.raises(ConfigurationError, match=message):
        load_configs([write_config(tmp_path, CONFIG.replace(old, new))])


@pytest.mark.parametrize(
    ("slug", "id", "is_true"),
    [
        ("gsm8k", "AgentR1/GSM8K-v0", True),
        ("gsm8k-short", "AgentR1/GSM8K-v0", True),
        ("gsm8k", "AgentR1/SyntheticArithmetic-v0", False),
        ("math-hard", "AgentR1/SyntheticArithmetic-v0", False),
        ("my-arithmetic", "AgentR1/SyntheticArithmetic-v0", True),
    ],
)
def test_no_environment_has_the_name_of_another(slug, id, is_true):
    one = EnvironmentRecord(slug=slug, id=id, num_tasks=1, contamination="none")
    manifest = dataclasses.replace(published(), environments=[one])
    found = [text for text in check_names(manifest) if "field 'slug'" in text]
    assert (found == []) == is_true
