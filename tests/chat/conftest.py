import pytest
from chat_models import FAMILIES, write_chat_model


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """The folder of a model with the template of a family, by its name."""
    made = {}

    def folder(name):
        if name not in made:
            template, eos = FAMILIES[name]
            made[name] = write_chat_model(tmp_path_factory.mktemp("family") / "model", template, eos=eos)
        return made[name]

    return folder
