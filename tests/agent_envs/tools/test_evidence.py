import pickle

import pytest

from agent_envs.retrieval import Corpus, Passage, build_retriever
from agent_envs.tools.evidence import MAX_CHARS, MAX_QUERIES, MAX_ROWS, EvidenceTable
from tests.agent_envs.envs.playing import make

HOTPOT = "AgentR1/HotpotQA-v0"


@pytest.fixture
def env(hotpot_file):
    return make(HOTPOT, data=hotpot_file, tools=["evidence"], max_episode_steps=40)


def call(env, name, **arguments):
    return env.step(env.unwrapped.write_call(name, **arguments))[0]


def test_evidence_is_kept_by_sub_question_with_its_source(env):
    questions = ["Who directed Red Harbor?", "Where was that person born?"]
    assert call(env, "decompose", questions=questions) == (
        "Without evidence:\n1. Who directed Red Harbor?\n2. Where was that person born?"
    )
    claim = {"claim": "Ada Holm directed it.", "title": "red harbor", "question": 1}
    assert call(env, "add_evidence", **claim).startswith("No search has shown 'red harbor'.")
    call(env, "search", query="Red Harbor film")
    kept = "Kept as row 1. Without evidence:\n2. Where was that person born?"
    assert call(env, "add_evidence", **claim) == kept
    call(env, "search", query="Ada Holm born")
    call(env, "add_evidence", claim="In Norway.", title="Ada Holm", question=2)
    assert call(env, "evidence_table") == (
        "[1] question 1 | Ada Holm directed it. | Red Harbor | for\n"
        "[2] question 2 | In Norway. | Ada Holm | for\nEvery question has evidence."
    )
    assert call(env, "query_log").splitlines()[0].startswith("[1] Red Harbor film: ")
    env.reset(options={"task": 1})
    assert call(env, "evidence_table") == "There is no evidence yet."
    assert call(env, "query_log") == "There was no search yet."


def test_a_filtered_search_filters_and_earns_like_a_search(env):
    call(env, "search", query="harbor")
    found = call(env, "filtered_search", query="harbor", must_not_have=["RED"])
    assert found == "[1] Blue Harbor\nBlue Harbor is a port in Denmark."
    assert call(env, "filtered_search", query="harbor", must_have=["film"]).startswith("[1] Red")
    assert call(env, "filtered_search", query="harbor", only_new=True) == (
        "No passage matches this query."
    )
    env.reset(options={"task": 0})
    action = env.unwrapped.write_call("filtered_search", query="Ada Holm", must_have=["Norway"])
    *_, info = env.step(action)
    assert info["reward_terms"]["new_gold_passage"] > 0
    assert info["metrics"]["gold_passage_recall"] == 0.5


def test_mistakes_are_observations(env):
    call(env, "search", query="Red Harbor")
    assert call(env, "decompose", questions=[" "]) == "Write 1 to 12 sub-questions, not 0."
    assert call(env, "add_evidence", claim=" ", title="x") == "A row of evidence needs a claim."
    assert call(env, "add_evidence", claim="a", title="Red Harbor", question=1) == (
        "There is no sub-question 1 (there are 0). Write them down with decompose."
    )


def test_the_state_is_bounded():
    corpus = Corpus([Passage("Oslo" * 100_000, "A town.")])
    table = EvidenceTable(build_retriever(corpus), top_k=3)
    for _ in range(MAX_QUERIES + 5):
        table.log("town " * 50_000, table.filtered_search("town").data)
    table.decompose(["why " * 50_000] * 12)
    for _ in range(MAX_ROWS):
        table.add_evidence("because " * 50_000, "Oslo" * 100_000)
    with pytest.raises(Exception, match="The table is full: it holds 40 rows"):
        table.add_evidence("a", "Oslo" * 100_000)
    assert table.query_log().startswith("[6] town town")
    assert max(len(line) for line in table.query_log().splitlines()) < 3 * MAX_CHARS
    state = {name: value for name, value in vars(table).items() if name != "_retriever"}
    assert len(pickle.dumps(state)) < 80_000


def test_snapshots_keep_the_table(env):
    call(env, "decompose", questions=["Who?"])
    call(env, "search", query="Red Harbor")
    saved = env.unwrapped.snapshot()
    env.reset(options={"task": 1})
    env.unwrapped.restore(saved)
    text = env.unwrapped.step(env.unwrapped.write_call("evidence_table"))[0]
    assert text == "There is no evidence yet.\nWithout evidence:\n1. Who?"
