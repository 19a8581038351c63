import subprocess
import sys

import agent_trainers


def test_every_public_name_is_there_and_no_other():
    for name in {*agent_trainers.__all__} - {"TINY_POLICY"}:  # a folder: it has no name of its own
        assert getattr(agent_trainers, name).__name__ == name
    assert set(agent_trainers.__all__) <= set(dir(agent_trainers))


def test_importing_the_package_imports_no_torch():
    code = "import sys; from agent_trainers import Trajectory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
