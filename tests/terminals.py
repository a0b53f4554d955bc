"""A real terminal: tmux on a server of its own."""

import contextlib
import secrets
import shlex
import subprocess
import time


class Terminal:
    """A command in a terminal of tmux, killed at the end with its server.

    The last output of a ``lasting`` one stays visible.
    """

    def __init__(self, columns, rows, argv, *, cwd, env, lasting=False):
        self._server = f"asyncrl-{secrets.token_hex(4)}"
        # The size of the terminal counts, not the environment of the tests.
        words = shlex.join(
            ["env", "-u", "COLUMNS", "-u", "LINES", *(f"{key}={value}" for key, value in env.items()), *map(str, argv)]
        )
        words = f"{words}; sleep 600" if lasting else words
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(cwd), words)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")

    def _tmux(self, *words):
        command = ["tmux", "-L", self._server, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def text(self):
        """The screen as text."""
        return self._tmux("capture-pane", "-p")

    def escaped(self):
        """With its colours."""
        return self._tmux("capture-pane", "-p", "-e")

    def resize(self, columns, rows):
        """Resize it."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def press(self, *keys):
        """Press keys, one after the other."""
        for key in keys:
            self._tmux("send-keys", key)

    def press_at_once(self, *keys):
        """Press keys faster than a person types."""
        self._tmux("send-keys", *keys)

    def until(self, text, within_s=60.0, *, escaped=False):
        """The screen once it holds ``text``; with its escapes if ``text`` has some."""

        def shown():
            seen = self.escaped() if escaped else self.text()
            return seen if text in seen else None

        return self._await(shown, within_s, f"{text!r} does not appear")

    def until_gone(self, text, within_s=60.0):
        """Wait until it no longer holds ``text``."""
        self._await(lambda: text not in self.text(), within_s, f"{text!r} stays")

    def ended(self, within_s=30.0):
        """Wait until the command is over, and tmux with it."""

        def over():
            try:
                self._tmux("list-panes")
            except subprocess.CalledProcessError:
                return True

        self._await(over, within_s, "it still runs")

    def _await(self, look, within_s, otherwise):
        end = time.monotonic() + within_s
        while not (found := look()):
            assert time.monotonic() < end, f"{otherwise}:\n{self.text()}"
            time.sleep(0.1)
        return found

    def pid(self):
        """Pid of the command."""
        return int(self._tmux("list-panes", "-F", "#{pane_pid}"))
