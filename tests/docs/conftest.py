import pytest
import torch


@pytest.fixture
def one_thread():
    """The models are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
