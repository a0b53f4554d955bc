import pytest


@pytest.fixture(scope="module")
def parity_folder(tmp_path_factory):
    """A folder with the model, the reward function and the prompts of a parity run."""
    from parity import write_assets

    folder = tmp_path_factory.mktemp("parity")
    write_assets(folder)
    return folder
