"""The secret of a run, and the keys that follow from it.

    start i of a process    writes a public nonce_i into the log, with the step and the row of noise
                            from which on it draws
    noise, draws, masks     H(secret, nonce_i, purpose), for what nobody drew before start i

The secret never changes, and a fork draws a new one. Two processes that go on from one folder (a
copy, a backup, a log that lost rows) have different nonces, so nothing that they draw can cancel:
what they share is what released rows have used. A test source is the exception: it draws the same
in every process, and its statements say NOT PRIVATE.

>>> keys = Keys(bytes(32)).started(step=0, row=0, nonce="a").started(step=3, row=5, nonce="b")
>>> keys.source("aes").segment(4), keys.source("aes").segment(5)
(0, 1)
>>> keys.draw_key(2) == keys.draw_key(0), keys.draw_key(3) == keys.draw_key(0)
(True, False)
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from noshuffle.errors import InvalidInput
from noshuffle.noise import Source

_BYTES = 32


class Start(NamedTuple):
    """A process that goes on with a run: from which step, and which row of noise."""

    step: int
    row: int
    nonce: str


@dataclass(frozen=True)
class Keys:
    """A secret with the starts of its run, oldest first; `test_key` is that of a test source."""

    secret: bytes = field(repr=False)
    test_key: bytes = field(default=b"", repr=False)
    starts: tuple[Start, ...] = ()

    @staticmethod
    def new(source: Source | None = None) -> Keys:
        """A fresh secret of the operating system, mixed with the key of a source that was given."""
        if source is None:
            return Keys(os.urandom(_BYTES))
        if source.is_test:
            return Keys(_derived(source.key, b"ns-secret"), source.key)
        return Keys(hashlib.blake2b(os.urandom(_BYTES), key=source.key, digest_size=32).digest())

    @property
    def is_test(self) -> bool:
        return bool(self.test_key)

    def started(self, *, step: int, row: int, nonce: str) -> Keys:
        """The keys after a further start."""
        return replace(self, starts=(*self.starts, Start(step, row, nonce)))

    def source(self, kind: str) -> Source:
        """The noise of the run: every row under the key of the last start that had not drawn it."""
        if self.is_test:
            return Source(self.test_key, kind, is_test=True)
        first, *later = self.starts
        source = Source(self._key(first.nonce, b"noise"), kind)
        for start in later:
            source = source.rekeyed(start.row, self._key(start.nonce, b"noise"))
        return source

    def source_of_step(self, step: int) -> Source:
        """For numbers that are drawn once a step (counts of norms)."""
        if self.is_test:
            return Source(self.test_key, is_test=True)
        return Source(self._key(self._start(step).nonce, b"noise"))

    def draw_key(self, step: int) -> bytes:
        """Of the secret draws and the masks of a step."""
        if self.is_test:
            return _derived(self.test_key, b"ns-sampling")
        return self._key(self._start(step).nonce, b"draws")

    def seed(self, step: int, part: int = 0) -> int:
        """For the random layers of a model in one part of a step. Nobody else knows it."""
        data = f"secret {step} {part}".encode()
        digest = hashlib.blake2b(data, key=self.draw_key(step), digest_size=7).digest()
        return int.from_bytes(digest, "little")

    def _start(self, step: int) -> Start:
        return next(start for start in reversed(self.starts) if start.step <= step)

    def _key(self, nonce: str, purpose: bytes) -> bytes:
        return hashlib.blake2b(
            nonce.encode(), key=self.secret, person=purpose, digest_size=_BYTES
        ).digest()

    def to_dict(self) -> dict[str, Any]:
        """What secret.json holds; the starts are in the log."""
        return {"secret": self.secret.hex(), "test_key": self.test_key.hex()}

    @staticmethod
    def from_dict(record: Any) -> Keys:
        """The keys that `to_dict` wrote; anything else is refused."""
        try:
            keys = Keys(bytes.fromhex(record["secret"]), bytes.fromhex(record["test_key"]))
            if len(keys.secret) != _BYTES or len(keys.test_key) not in (0, _BYTES):
                raise ValueError("a secret has 32 bytes")
            return keys
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"secret.json holds no secret of a run ({error})") from None


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(b"", key=key, person=purpose, digest_size=_BYTES).digest()
