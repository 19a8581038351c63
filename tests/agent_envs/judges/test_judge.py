"""Judges: rubrics, replies, retries, limits, caches, and texts that try to instruct them."""

import json
import time

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.errors import ConfigurationError, DataError, ServerError
from agent_envs.judges import Endpoint, Judge
from agent_envs.judges import endpoint as endpoints
from agent_envs.judges.rubric import load_rubric, write_prompt
from tests.agent_envs.judges.by_rules import RUBRIC, ByRules, replies
from tests.agent_envs.judges.injections import ANSWER, ATTEMPTS, QUESTION, follow
from tests.agent_trainers.chat_server import Reply, chat_server, refuses, says

TEXTS = ([QUESTION, "Ada Holm was born in Oslo."], ["search", "Oslo"])
ENV = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(endpoints, "PAUSE_SECONDS", 0.0)


def test_the_value_is_the_weighted_mean_of_scaled_scores():
    first, second = ByRules(lambda _: replies(5, 0)), ByRules(lambda _: replies(3, 2))
    # the first has (2 * 1 + 0) / 3, the second (2 * 0.5 + 1) / 3: the same
    assert Judge(RUBRIC, first).judge(*TEXTS)["value"] == pytest.approx(2 / 3)
    third = ByRules(lambda _: replies(1, 0))
    assert Judge(RUBRIC, second, third).judge(*TEXTS)["value"] == pytest.approx(1 / 3)
    assert Judge(RUBRIC, second).judge(*TEXTS)["scores"] == [{"grounded": 3, "brief": 2}]


def test_tokens_and_cost_are_those_of_every_attempt():
    texts = iter(["garbage", replies(5, 0)])
    endpoint = ByRules(lambda _: next(texts), price=(1.0, 10.0))
    judgement = Judge(RUBRIC, endpoint).judge(*TEXTS)
    assert judgement["tokens"] == 2 * 1050
    assert judgement["cost"] == pytest.approx(2 * (1000 * 1.0 + 50 * 10.0) / 1e6)
    assert endpoint.usage == {
        "requests": 2, "failures": 1, "prompt_tokens": 2000, "completion_tokens": 100
    }  # fmt: skip


@pytest.mark.parametrize(
    "reply",
    [
        "", "5", "I give it a 5.", '{"grounded": 5, "brief": 2}', replies("5", 2), replies(6, 2),
        replies(5, True), replies(4.5, 2), replies(5, 2, extra=1), replies(5, 2) + replies(5, 2),
        f"The record says {replies(5, 2)}", replies(5, 2)[:-1],
    ],
)  # fmt: skip
def test_an_invalid_reply_is_no_judgement(reply):
    with pytest.raises(ServerError, match=r"(?s)no judgement in 5 attempts.*validation"):
        Judge(RUBRIC, ByRules(lambda _: reply)).judge(*TEXTS)


@pytest.mark.parametrize("form", ["{}", "```json\n{}\n```", "<think>Hm. {{</think>\n{}"])
def test_a_reply_may_have_thoughts_or_a_fence(form):
    reply = form.replace("{}", replies(5, 2))
    assert Judge(RUBRIC, ByRules(lambda _: reply)).judge(*TEXTS)["value"] == 1.0


def test_the_reason_of_a_reply_may_mention_the_end_of_a_thought():
    reply = json.dumps({"reason": "It ends with </think>.", "grounded": 5, "brief": 2})
    assert Judge(RUBRIC, ByRules(lambda _: reply)).judge(*TEXTS)["value"] == 1.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- {name: grounded}", "entry 0.description: Field required"),
        ("- {name: a, description: b, scale: [5, 1]}", "must rise"),
        ("- {name: a, description: b, weight: -1}", "entry 0.weight"),
        ("- {name: a, description: b}\n- {name: a, description: c}", "unique"),
        ("- {name: reason, description: b}", "not 'reason'"),
        ("[]", "unique"),
        ("- {name", "rubric.yaml"),
        ("name: a", "entry"),
    ],
)
def test_a_malformed_rubric_is_refused_by_entry_and_field(tmp_path, text, problem):
    path = tmp_path / "rubric.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=problem):
        load_rubric(path)


def test_a_judge_without_an_endpoint_is_refused():
    with pytest.raises(ConfigurationError, match="no endpoint"):
        Judge(RUBRIC)


def test_a_served_judge_gets_the_schema_and_the_record(tmp_path):
    (tmp_path / "rubric.yaml").write_text(json.dumps(RUBRIC), encoding="utf-8")
    with chat_server(lambda *_: says(replies(4, 1), usage=(100, 10))) as server:
        judge = Judge(tmp_path / "rubric.yaml", Endpoint(base_url=server.url, model="m"))
        judgement = judge.judge(*TEXTS)
    assert judgement["value"] == pytest.approx((2 * 0.75 + 0.5) / 3)
    assert judgement["tokens"] == 110
    (request,) = server.bodies
    form = request["response_format"]["json_schema"]
    assert form["strict"]
    grounded = form["schema"]["properties"]["grounded"]
    assert (grounded["minimum"], grounded["maximum"]) == (1, 5)
    lines = request["messages"][1]["content"].splitlines()[1:-1]
    assert [json.loads(line) for line in lines] == [
        {"from": "task", "text": QUESTION},
        {"from": "agent", "text": "search"},
        {"from": "environment", "text": "Ada Holm was born in Oslo."},
        {"from": "agent", "text": "Oslo"},
    ]


@pytest.mark.parametrize("choices", [
    "abc", [], [None], {"a": 1}, [{"message": "hi"}], [{"message": {"content": 5}}],
    [{"message": {"content": [{"type": "text", "text": replies(4, 1)}]}}],
])  # fmt: skip
def test_a_malformed_completion_is_no_judgement(choices):
    with chat_server(lambda *_: Reply({"choices": choices})) as server:
        judge = Judge(RUBRIC, Endpoint(base_url=server.url, model="m", attempts=2))
        with pytest.raises(ServerError, match=r"in 2 attempts.*not a chat completion"):
            judge.judge(*TEXTS)


@pytest.mark.parametrize("usage", [None, "x", {}, {"prompt_tokens": None}])
def test_a_judgement_counts_though_its_usage_is_malformed(usage):
    content = [{"message": {"content": replies(4, 1)}}]
    with chat_server(lambda *_: Reply({"choices": content, "usage": usage})) as server:
        judgement = Judge(RUBRIC, Endpoint(base_url=server.url, model="m")).judge(*TEXTS)
    assert (judgement["scores"], judgement["tokens"]) == ([{"grounded": 4, "brief": 1}], 0)


def test_faults_of_the_judge_never_change_a_score():
    """30 % errors of three kinds, and then garbage and timeouts that outlive the attempts."""
    rng = np.random.default_rng(0)

    def reply(request, _):
        lines = request["messages"][1]["content"].splitlines()[1:-1]
        number = int(json.loads(lines[-1])["text"])
        if number % 10 == 9 or rng.random() < 0.3:  # every tenth always fails
            fault = int(rng.integers(3))
            if fault == 0:
                return refuses(503, "overloaded")
            if fault == 1:
                return says(replies(5, 2)[: int(rng.integers(20))])
            time.sleep(0.6)  # later than the timeout
        return says(replies(1 + number % 5, number % 3))

    outcomes = {}
    with chat_server(reply) as server:
        endpoint = Endpoint(base_url=server.url, model="m", timeout_seconds=0.3)
        judge = Judge(RUBRIC, endpoint)
        for number in range(60):
            try:
                (scores,) = judge.judge([QUESTION], [str(number)])["scores"]
                outcomes[number] = scores
            except ServerError:
                outcomes[number] = None
    scored = {number: scores for number, scores in outcomes.items() if scores is not None}
    wrong = [n for n, s in scored.items() if s != {"grounded": 1 + n % 5, "brief": n % 3}]
    assert wrong == []
    assert {number for number in outcomes if number % 10 == 9}.isdisjoint(scored)
    assert len(scored) >= 50
    assert endpoint.usage["failures"] > 30


def test_a_refusal_that_retries_cannot_change_is_not_retried():
    with chat_server(lambda *_: refuses(401, "wrong key")) as server:
        with pytest.raises(ServerError, match=r"in 1 attempts.*wrong key"):
            Judge(RUBRIC, Endpoint(base_url=server.url, model="m")).judge(*TEXTS)
        assert len(server.bodies) == 1


def test_judgements_are_cached_by_rubric_model_and_text(tmp_path):
    path, calls = tmp_path / "cache" / "judgements.sqlite", []

    def rule(messages):
        calls.append(messages)
        return replies(len(calls) % 5 + 1, 1)

    def judge(rubric=RUBRIC, model="rules", texts=TEXTS):
        return Judge(rubric, ByRules(rule, model), cache=path).judge(*texts)

    first = judge()
    assert judge() == first
    assert len(calls) == 1
    reworded = [{**RUBRIC[0], "description": "Another."}, RUBRIC[1]]
    for other in ({"rubric": reworded}, {"model": "other"}, {"texts": ([QUESTION], ["Oslo"])}):
        assert judge(**other) != first
    assert len(calls) == 4
    assert judge() == first


def test_a_judge_without_a_cache_opens_no_database(monkeypatch):
    monkeypatch.setattr("sqlite3.connect", lambda *_, **__: pytest.fail("opened"))
    assert Judge(RUBRIC, ByRules(lambda _: replies(5, 2))).judge(*TEXTS)["value"] == 1.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        # the third and the fifth request wait until a minute after the first and the third
        ({"requests": 2}, [0, 0, 60, 60, 120]),
        # 100 tokens a minute: requests of 40 fit twice
        ({"tokens": 100}, [0, 0, 60, 60, 120]),
        ({"tokens": 30}, [0, 60, 120, 180, 240]),  # each is above the limit: alone
        ({}, [0, 0, 0, 0, 0]),
    ],
)
def test_requests_wait_for_the_limits_of_a_minute(limits, expected):
    limit, clock, sent = endpoints.RateLimit(**limits), Clock(), []
    limit.clock, limit.sleep = clock, clock.sleep
    for _ in expected:
        limit.acquire(40)
        sent.append(clock.now)
    assert sent == expected


def episode(judge, **options):
    """Run the reference actions; return the judged contribution of each step, and the last info."""
    env = gym.make(ENV, rewards={"exact_match": 1.0, "judged": (judge, 0.5)}, **options)
    env.reset(seed=3)
    terms = []
    for action in env.unwrapped.reference_actions():
        *_, info = env.step(action)
        terms.append(info["reward_terms"]["judged"])
    return terms, info


def test_a_trajectory_is_scored_at_its_end():
    judge = Judge(RUBRIC, ByRules(lambda _: replies(3, 1)), name="reasoning")
    terms, info = episode(judge)
    assert terms == [0.0] * (len(terms) - 1) + [0.25]
    assert info["judgements"]["reasoning"]["scores"] == [{"grounded": 3, "brief": 1}]


def test_a_step_costs_what_it_lacks():
    terms, _ = episode(Judge(RUBRIC, ByRules(lambda _: replies(3, 1)), each_step=True))
    assert terms == [-0.25] * len(terms)
    flawless, _ = episode(Judge(RUBRIC, ByRules(lambda _: replies(5, 2)), each_step=True))
    assert flawless == [0.0] * len(terms)


def test_a_failed_judgement_ends_the_step_with_an_error():
    with pytest.raises(ServerError, match="the episode cannot be scored"):
        episode(Judge(RUBRIC, ByRules(lambda _: "garbage")))


def records(attempt):
    """Return two records without evidence, with the attempt in a result and in an answer."""
    if ANSWER not in attempt:
        yield [QUESTION, f"Nothing was found.{attempt}"], ["search", ANSWER]
    yield [QUESTION, "Nothing was found."], ["search", f"{attempt}{ANSWER}"]


def naive_prompt(observations, actions):
    lines = [f"task: {observations[0]}", f"agent: {actions[0]}"]
    lines += [f"environment: {observations[1]}", f"agent: {actions[1]}"]
    return [{"role": "user", "content": "<record>\n" + "\n".join(lines) + "\n</record>"}]


def test_fifty_attempts_to_instruct_a_judge_change_no_score():
    assert len(set(ATTEMPTS)) == 50
    rubric = load_rubric(RUBRIC)
    clean = [QUESTION, f"Ada Holm was born in {ANSWER}."], ["search", ANSWER]
    assert follow(write_prompt(rubric, *clean)) == 5
    naive = 0
    for attempt in ATTEMPTS:
        for texts in records(attempt):
            assert follow(write_prompt(rubric, *texts)) == 1, repr(attempt)
        naive += any(follow(naive_prompt(*texts)) == 5 for texts in records(attempt))
    assert naive >= 40  # the judge follows them where the texts are pasted into the prompt


def test_invisible_characters_are_escaped():
    hidden = "\u061c\u180e\u3164\ufe00\ufe0f\U000e0100\U000e01ef\u200b"
    record = write_prompt(load_rubric(RUBRIC), [QUESTION], [f"Oslo{hidden}"])[1]["content"]
    assert not set(hidden) & set(record)


def test_a_record_ends_at_the_digest_of_its_text_only():
    prompt = write_prompt(load_rubric(RUBRIC), *TEXTS)
    first, *_, last = prompt[1]["content"].splitlines()
    assert first.replace("<", "</") == last
    other = write_prompt(load_rubric(RUBRIC), [QUESTION, last], ["search", "Oslo"])
    assert last not in other[1]["content"]
