"""Replies of clients, one by one: whatever is wrong with one ends with it.

    push all messages  →  pull each one's reply by itself  →  addressed by whom we wrote to

`Grid.send_and_receive` (Flower 1.41) pulls all replies in one call and makes messages of bytes that
clients have sent. One that cannot be made (garbage, another kind of object) ends the call, the app
with it, and the replies of all others are lost; one whose parts are announced and never come holds
the call for minutes, beyond every timeout. And the sender and the message that a reply names are
inside of these bytes too: the SuperLink compares the envelope only, which a Grid does not hand out.

So every reply is pulled by the id of the message that asked for it, in a thread that is left alone
when it does not come back. The SuperLink gives out under this id what the node that we wrote to has
answered; it is taken for that node's, whatever is written inside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from flwr.app import Error, Message
from flwr.serverapp import Grid

#: Seconds to wait for one reply before the next one is looked at.
PATIENCE = 1.0
#: Seconds between two looks, as in Flower's own grid, unless the grid says it.
INTERVAL = 3.0
#: Flower's code for a reply that cannot be handed out.
UNREADABLE = 0


def ask(grid: Grid, messages: Iterable[Message], *, timeout: float) -> Iterator[Message]:
    """Send messages, and yield what comes back within `timeout` seconds, each reply by itself.

    Guarantees: sender of a reply is the node that the message was sent to. One that cannot be read
    comes as an error of that node; one that does not come at all delays nobody else's.
    """
    sent = list(messages)
    end = time.monotonic() + timeout
    ids = set(grid.push_messages(sent)) if sent else set()
    waiting = [_Pull(grid, message) for message in sent if message.metadata.message_id in ids]
    while waiting:
        is_last = time.monotonic() >= end
        for pull in waiting:
            yield from pull.look()
        waiting = [pull for pull in waiting if not pull.is_over]
        if is_last:
            return
        if waiting:
            interval = getattr(grid, "pull_interval", INTERVAL)
            time.sleep(max(0.0, min(interval, end - time.monotonic())))


class _Pull:
    """The reply to one message."""

    def __init__(self, grid: Grid, asked: Message) -> None:
        self._grid = grid
        self._asked = asked
        self._thread: threading.Thread | None = None
        self._came: list[Message] = []
        self.is_over = False

    def look(self) -> list[Message]:
        """What has come; nothing while a look is under way."""
        is_new = self._thread is None
        if self._thread is None:
            self._thread = threading.Thread(target=self._pull, daemon=True)
            self._thread.start()
        self._thread.join(PATIENCE if is_new else 0.0)
        if self._thread.is_alive():
            return []
        self._thread = None
        self.is_over = bool(self._came)
        return self._came

    def _pull(self) -> None:
        try:
            found = list(self._grid.pull_messages([self._asked.metadata.message_id]))
            self._came = [self._addressed(reply) for reply in found]
        except Exception as error:  # bytes of a stranger: whatever goes wrong is their fault
            why = f"its reply cannot be read ({type(error).__name__})"
            self._came = [Message(Error(UNREADABLE, why), reply_to=self._asked)]

    def _addressed(self, reply: Message) -> Message:
        what = reply.error if reply.has_error() else reply.content
        return Message(what, reply_to=self._asked)
