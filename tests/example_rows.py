"""Made-up rows in the form of each data set; tests read them, and the gallery shows the first."""

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
            }
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

EXAMPLE_ROWS = {
    "HotpotQA": HOTPOT_ROWS,
    "2WikiMultihopQA": TWO_WIKI_ROWS,
    "ClaimVerification": [*HOTPOT_ROWS, *TWO_WIKI_ROWS],
    "ClaimReview": [*HOTPOT_ROWS, *TWO_WIKI_ROWS],
    "MuSiQue": MUSIQUE_ROWS,
    "Bamboogle": BAMBOOGLE_ROWS,
    "GSM8K": GSM8K_ROWS,
    "HumanEval": HUMANEVAL_ROWS,
    "MBPP": MBPP_ROWS,
    "MATH": MATH_ROWS,
    **dict.fromkeys(("NaturalQuestions", "TriviaQA", "PopQA"), SEARCH_R1_ROWS),
}
"""By the name of the environment, without namespace and version."""
