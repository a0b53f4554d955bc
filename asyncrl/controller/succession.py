"""The address file of a controller: it holds the state of the run that a successor needs.

No other process knows which hosts are lost. If the file of the earlier controller is damaged, the largest incarnation
of each actor that is heard of counts, and the node agent remembers the address. If the file cannot be written, the user
gets a notice, and it is written again at the next change.
"""

from __future__ import annotations

import asyncio

import msgspec

from asyncrl.controller.joining.known_hosts import KnownHosts
from asyncrl.controller.observation.observation import Observation
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.core.disk import in_words
from asyncrl.core.files import replace_file
from asyncrl.rpc.controller_client import ADDRESS_FILE, AddressFile, read_address_file


class Succession:
    """A controller's knowledge of an earlier one, and what it leaves to a later one."""

    def __init__(self, controller: RunActor, hosts: KnownHosts, observation: Observation) -> None:
        self._controller, self._registry = controller, controller.registry
        self._hosts, self._observation = hosts, observation
        self._path = controller.context.run_dir / "private" / ADDRESS_FILE
        self._changed = asyncio.Event()
        """Set when the file is out of date."""
        self._numbered = 0
        """Changes of the registry that the file has."""
        self.earlier = self._read()
        """Address file of an earlier controller of this attempt; None if this is the first one."""

    def _read(self) -> AddressFile | None:
        try:
            found = read_address_file(self._path)
        except ValueError as error:
            lost = "the list of hosts and the incarnations of the last controller are lost"
            self._controller.log.warning(lost, error=str(error))
            found = AddressFile(address="")
        if address := self._controller.context.address:
            # The other actors look for it there.
            return msgspec.structs.replace(found or AddressFile(address=""), address=address)
        return found

    async def take_over(self) -> None:
        """Take over from an earlier controller, and write the file."""
        if self.earlier is not None:
            self._hosts.recall(self.earlier.hosts, self._controller.clock.now())
            await self._observation.succeed(self.earlier)
        await self._write()

    def changed(self) -> None:
        """Have the file written again."""
        self._changed.set()

    def follow_registry(self) -> None:
        """Have the file written again if the registry has changed since."""
        if self._numbered != self._registry.changes:
            self._numbered = self._registry.changes
            self._changed.set()

    async def run(self) -> None:
        """Keep the file up to date, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write()
            except OSError as error:
                lacks = "the list of hosts and the newest incarnations"
                told = f"a later controller lacks {lacks}: {in_words(error, self._path)}"
                self._controller.notify("hosts", told)

    async def _write(self) -> None:
        said = AddressFile(
            address=self._controller.address,
            incarnation=self._controller.context.incarnation,
            hosts=self._hosts.describe(),
            began=self._observation.began,
            restarts=self._observation.restarts,
            newest=self._registry.newest,
            generations=self._registry.generations,
        )
        text = msgspec.json.encode(said).decode()
        await asyncio.to_thread(replace_file, self._path, text, mode=0o600)
