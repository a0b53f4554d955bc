"""Episodes: users' code that plays a task against the policy, and the actor that runs it.

An episode is ``async def episode(task: Task, client: Client) -> reward``. The reward is a finite number, a mapping of
components, or None where turn rewards or reward.function say it.
"""

from asyncrl.episodes.playing.client import BlockingClient, Client, Reply
from asyncrl.episodes.playing.task import Task
from asyncrl.errors import ChatRefused, EpisodeOver

__all__ = ["BlockingClient", "ChatRefused", "Client", "EpisodeOver", "Reply", "Task"]
