import json
import os
from pathlib import Path

# Before any library reads them; the programs that tests start get them, too.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gymnasium as gym
import pytest

import agent_envs  # noqa: F401 - registers the environments

ROOT = Path(__file__).parent.parent

HOTPOT_ROWS = [
    {
        "id": "row-a",
        "question": "In which country was the director of Red Harbor born?",
        "answer": "Norway",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["Red Harbor", "Ada Holm"], "sent_id": [0, 0]},
        "context": {
            "title": ["Red Harbor", "Ada Holm", "Blue Harbor"],
            "sentences": [
                ["Red Harbor is a film.", " It was directed by Ada Holm."],
                ["Ada Holm was born in Norway."],
                ["Blue Harbor is a port in Denmark."],
            ],
        },
    },
    {
        "id": "row-b",
        "question": "Are both Leo Dorn and Mira Lund painters?",
        "answer": "yes",
        "type": "comparison",
        "level": "easy",
        "supporting_facts": {"title": ["Leo Dorn", "Mira Lund"], "sent_id": [0, 0]},
        "context": {
            "title": ["Leo Dorn", "Mira Lund"],
            "sentences": [["Leo Dorn is a painter."], ["Mira Lund paints landscapes."]],
        },
    },
]

TWO_WIKI_ROWS = [
    {
        "_id": "wiki-a",
        "type": "compositional",
        "question": "Where was the director of Iron River born?",
        "answer": "Oslo",
        "context": [
            ["Iron River", ["Iron River is a film.", "Leo Falk directed it."]],
            ["Leo Falk", ["Leo Falk was born in Oslo."]],
            ["Iron Bridge", ["Iron Bridge is a bridge."]],
        ],
        "supporting_facts": [["Iron River", 1], ["Leo Falk", 0]],
        "evidences": [
            ["Iron River", "director", "Leo Falk"],
            ["Leo Falk", "place of birth", "Oslo"],
        ],
    }
]
MUSIQUE_ROWS = [
    {
        "id": "2hop__1_2",
        "question": "Who is the mayor of the town where Ada Holm lives?",
        "answer": "Mira Lund",
        "answer_aliases": ["M. Lund"],
        "answerable": True,
        "paragraphs": [
            {
                "idx": 0,
                "title": "Ada Holm",
                "paragraph_text": "Ada Holm lives in Vik.",
                "is_supporting": True,
            },
            {
                "idx": 1,
                "title": "Vik",
                "paragraph_text": "The mayor of Vik is Mira Lund.",
                "is_supporting": True,
            },
            {
                "idx": 2,
                "title": "Vik",
                "paragraph_text": "Vik has a harbour.",
                "is_supporting": False,
            },
        ],
    },
    {
        "id": "2hop__3_4",
        "question": "Who is the mayor of the town where Leo Dorn lives?",
        "answer": "Nico Arden",
        "answer_aliases": [],
        "answerable": False,
        "paragraphs": [
            {
                "idx": 0,
                "title": "Leo Dorn",
                "paragraph_text": "Leo Dorn lives in Aas.",
                "is_supporting": True,
            },
        ],
    },
]
BAMBOOGLE_ROWS = [{"Question": "Who led Norway when Ibsen was born?", "Answer": "Charles John"}]
SEARCH_R1_ROWS = [
    {
        "id": "test_0",
        "data_source": source,
        "question": f"What is asked in {source}?",
        "golden_answers": [f"{source} one", f"{source} two"],
    }
    for source in ("nq", "triviaqa", "popqa")
]  # fmt: skip
GSM8K_ROWS = [
    {
        "question": "Each of 3 children has 4 red and 5 blue balls. How many balls are there?",
        "answer": "A child has 4+5=<<4+5=9>>9 balls.\nSo 9*3=<<9*3=27>>27.\n#### 27",
    }
]
MATH_ROWS = [
    {
        "problem": "What is half of 1?",
        "solution": r"It is $\boxed{\frac{1}{2}}$.",
        "answer": r"\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 2,
        "unique_id": "test/1.json",
    },
    {
        "problem": "How many sides has a heptagon?",
        "solution": r"It has $\boxed{7}$.",
        "type": "Geometry",
        "level": "Level 5",
    },
]

HUMANEVAL_ROWS = [
    {
        "task_id": "HumanEval/900",
        "prompt": "def helper(x):\n    return x + 1\n\n\ndef add_one(values):\n"
        '    """Add one.\n    >>> add_one([1, 2])\n    [2, 3]\n    """\n',
        "canonical_solution": "    return [helper(x) for x in values]\n",
        "test": "def check(candidate):\n    assert candidate([]) == []\n"
        "    assert candidate([5]) == [helper(5)]\n",
        "entry_point": "add_one",
    }
]
MBPP_ROWS = [
    {
        "task_id": 901,
        "text": "Write a function to double a number.",
        "code": "def double(x):\r\n    return 2 * x\r\n",
        "test_list": ["assert double(2) == 4", "assert double(5) == 10", "assert double(0) == 0"],
        "test_setup_code": "",
        "challenge_test_list": ["assert double(-1) == -2"],
    }
]


@pytest.fixture(scope="session")
def text_world_game(tmp_path_factory):
    """A small game of TextWorld."""
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("games")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        gym.make("AgentR1/TextWorld-v0", rooms=2, objects=3, quest_length=2).reset(seed=1)
    (path,) = folder.rglob("*.z8")
    return str(path)


@pytest.fixture(scope="session")
def strong_sandbox():
    """Skip where this machine has no strong isolation."""
    from agent_envs.errors import SandboxUnavailableError
    from agent_envs.tools.code import shared_sandbox

    try:
        return shared_sandbox("strong")
    except SandboxUnavailableError as error:
        pytest.skip(f"no strong isolation here: {error}")


@pytest.fixture(scope="session")
def data_files(tmp_path_factory):
    """A file of made-up rows for each environment that reads data."""
    rows = {
        "HotpotQA": HOTPOT_ROWS,
        "2WikiMultihopQA": TWO_WIKI_ROWS,
        "MuSiQue": MUSIQUE_ROWS,
        "Bamboogle": BAMBOOGLE_ROWS,
        "GSM8K": GSM8K_ROWS,
        "HumanEval": HUMANEVAL_ROWS,
        "MBPP": MBPP_ROWS,
        "MATH": MATH_ROWS,
        **dict.fromkeys(("NaturalQuestions", "TriviaQA", "PopQA"), SEARCH_R1_ROWS),
    }
    folder = tmp_path_factory.mktemp("rows")
    for name, own in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in own)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {f"AgentR1/{name}-v0": str(folder / f"{name}.jsonl") for name in rows}


@pytest.fixture(scope="session")
def shared_data():
    """Real rows of the data sets, which lie beside the repository where there are any."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data are not at hand: {folder} is missing")
    return folder


@pytest.fixture(scope="session")
def hotpot_file(tmp_path_factory):
    """A file of two made-up questions in the hub's form."""
    path = tmp_path_factory.mktemp("data") / "hotpot.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HOTPOT_ROWS), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The embedded policy behind ``transformers serve``."""
    pytest.importorskip("transformers", reason="the extra train is not installed")
    from tests.served_model import transformers_serve

    with transformers_serve(tmp_path_factory.mktemp("served")) as models:
        yield models
