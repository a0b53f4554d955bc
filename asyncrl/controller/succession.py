"""The address file of a controller: it holds the state of the run that a successor needs.

The agent of a lost host does not register again, so only the file names this host. If the file of the earlier
controller is damaged, the node agent still knows the address. Then the largest incarnation of each actor that registers
counts. The first write raises OSError. If a later write fails, the user gets a notice, and the controller writes the
file again at the next change.
"""

from __future__ import annotations

import asyncio

import msgspec

from asyncrl.controller.health.known_hosts import KnownHosts
from asyncrl.controller.observation.observation import Observation
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.core.disk import in_words
from asyncrl.core.files import replace_file
from asyncrl.rpc.controller_client import ADDRESS_FILE, AddressFile, read_address_file


class Succession:
    """Reads the address file of an earlier controller, and keeps the file up to date for a later one."""

    def __init__(self, controller: RunActor, hosts: KnownHosts, observation: Observation) -> None:
        self._controller, self._registry = controller, controller.registry
        self._hosts, self._observation = hosts, observation
        self._path = controller.context.run_dir / "private" / ADDRESS_FILE
        self._changed = asyncio.Event()
        """Set when the file is out of date."""
        self._seen_changes = 0
        """``Registry.changes`` at the last change that ``follow_registry`` saw."""
        self.earlier = self._read()
        """Address file of an earlier controller of this attempt; None if this is the first one."""

    def _read(self) -> AddressFile | None:
        """Read the file; None if this is the first controller. A damaged file counts as empty, with a warning.

        An address from the node agent replaces that in the file.
        """
        try:
            earlier = read_address_file(self._path)
        except ValueError as error:
            lost = "the list of hosts and the incarnations of the last controller are lost"
            self._controller.log.warning(lost, error=str(error))
            earlier = AddressFile(address="")
        if address := self._controller.context.address:
            # The other actors connect to the address that the node agent gave to this controller.
            return msgspec.structs.replace(earlier or AddressFile(address=""), address=address)
        return earlier

    async def take_over(self) -> None:
        """Restore the hosts and the past of an earlier controller, if there was one, and write the file."""
        if self.earlier is not None:
            self._hosts.recall(self.earlier.hosts, self._controller.clock.now())
            await self._observation.succeed(self.earlier)
        await self._write()

    def changed(self) -> None:
        """Have ``run`` write the file again."""
        self._changed.set()

    def follow_registry(self) -> None:
        """Have ``run`` write the file again if the registry's numbers have changed."""
        if self._seen_changes != self._registry.changes:
            self._seen_changes = self._registry.changes
            self._changed.set()

    async def run(self) -> None:
        """Keep the file up to date, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write()
            except OSError as error:
                missing = "the list of hosts and the newest incarnations"
                text = f"a later controller lacks {missing}: {in_words(error, self._path)}"
                self._controller.notify("hosts", text)

    async def _write(self) -> None:
        """Write the address file from the present state. Raises OSError."""
        content = AddressFile(
            address=self._controller.address,
            incarnation=self._controller.context.incarnation,
            hosts=self._hosts.describe(),
            began=self._observation.began,
            restarts=self._observation.restarts,
            newest=self._registry.newest,
            generations=self._registry.generations,
        )
        text = msgspec.json.encode(content).decode()
        await asyncio.to_thread(replace_file, self._path, text, mode=0o600)
