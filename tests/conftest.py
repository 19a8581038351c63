import json
from pathlib import Path

import pytest

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
