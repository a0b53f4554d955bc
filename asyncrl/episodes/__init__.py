"""Episodes: users' code that plays a task against the policy, and the actor that runs it.

An episode is ``async def episode(task: Task, client: Client) -> reward``. The reward is a finite number, a mapping of
components, or None if turn rewards or reward.function give the reward.
"""

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.episodes.playing.client import BlockingClient, Client, Reply, Task

__all__ = ["BlockingClient", "ChatRefused", "Client", "EpisodeOver", "Reply", "Task"]
