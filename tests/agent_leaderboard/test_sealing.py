"""What a published run says of licensed tasks: nothing, to who lacks the data."""

import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.errors import DataError
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.records.sealing import BLOCK, MARK, Seal, data_seal

SEAL = Seal(b"k" * 32)


@given(text=st.text(max_size=300))
def test_sealed_text_opens_again_to_the_same(text):
    closed = SEAL.close(text)
    assert SEAL.open(closed) == text
    assert SEAL.close(text) == closed
    assert SEAL.open(SEAL.close("\ud800" + text)) == "\ud800" + text


def test_a_seal_opens_with_its_own_data_only_and_not_once_changed():
    closed = SEAL.close("<answer>yes</answer>")
    for text in (closed[:-4] + "AAA=", MARK, "yes", closed + "AAAA", MARK + "!"):
        with pytest.raises(DataError, match="not sealed with these data, or was changed"):
            SEAL.open(text)
    with pytest.raises(DataError, match="not sealed with these data"):
        Seal(b"j" * 32).open(closed)


def test_length_does_not_tell_short_answers_apart():
    lengths = {
        len(SEAL.close(f"<answer>{x}</answer>")) for x in ("no", "yes", "7", "123456", "x" * 90)
    }
    assert len(lengths) == 1
    assert len(SEAL.close("x" * BLOCK)) > lengths.pop()


def test_a_key_is_not_the_digest_that_manifests_publish(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "?", "answer": "yes"}\n')
    seal = data_seal([path])
    assert seal.key != hashlib.sha256(path.read_bytes()).digest()
    assert data_seal([path]) == seal
    path.write_text('{"question": "?", "answer": "no"}\n')
    assert data_seal([path]) != seal


def test_nothing_of_a_sealed_run_can_be_guessed(small_run, small_data):
    """An attacker who guesses every short answer, and knows how digests are made, matches none."""
    folder = RunFolder(small_run)
    lines = [line for agent in ("random", "rules", "oracle")
             for line in folder.read_results("hotpotqa", agent)]  # fmt: skip
    published = "".join(path.read_text() for path in small_run.glob("*/hotpotqa*/*"))
    published += (small_run / "manifest.json").read_text()
    rows = [json.loads(row) for row in (small_data / "hotpot.jsonl").read_text().splitlines()]
    guesses = {str(row["answer"]) for row in rows} | {"yes", "no", *map(str, range(1_000))}
    public = [Seal(b""), Seal(folder.manifest_path.read_bytes()), Seal(b"0" * 32)]
    public += [
        Seal(bytes.fromhex(text)) for text in set(re.findall(r"\b[0-9a-f]{64}\b", published))
    ]
    actions = {action for line in lines for action in line.actions}
    for answer in guesses:
        for action in (answer, f"<answer>{answer}</answer>", f"<answer> {answer} </answer>"):
            assert hashlib.sha256(action.encode()).hexdigest() not in published
            assert not actions & {seal.close(action) for seal in public}
    assert all(action.startswith(MARK) for action in actions)
    for row in rows:
        assert str(row["question"]) not in published


def test_public_text_stays_as_it_is():
    assert Seal().open(Seal().close("as it is")) == "as it is"
    assert Seal().digest("x") == hashlib.sha256(b"x").hexdigest()
