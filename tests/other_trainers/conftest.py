"""What the tests in the environments of other trainers share."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports a Hugging Face library

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)
