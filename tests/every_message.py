"""Every message type, wherever it is declared."""

import importlib
import pkgutil

from asyncrl import messages
from asyncrl.messages import Message, Request


def _declared():
    for found in pkgutil.iter_modules(messages.__path__, "asyncrl.messages."):
        module = importlib.import_module(found.name)
        yield from (kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__)
    yield messages.Done


EVERY_MESSAGE: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in _declared()
    if isinstance(kind, type) and issubclass(kind, Message) and kind not in (Message, Request)
}
