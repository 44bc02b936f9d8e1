import pytest
from analysis_fakes import a_passage, greedy_without_cache, random_ids, tiny_llama


@pytest.fixture(scope="session")
def llama():
    return tiny_llama()


@pytest.fixture(scope="session")
def recited(llama):
    """Targets that the model has memorized: a random prompt of 8 ids and its own greedy continuation."""
    prompts = [random_ids(8, seed) for seed in range(3)]
    continuations = greedy_without_cache(llama, prompts, 44)
    texts = zip(prompts, continuations, strict=True)
    return [a_passage(f"target-{i}", prompt + continuation) for i, (prompt, continuation) in enumerate(texts)]


@pytest.fixture(scope="session")
def unseen():
    return [a_passage(f"control-{i}", random_ids(52, 100 + i), kind="control") for i in range(3)]
