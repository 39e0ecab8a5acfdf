"""The keys of a run: fresh ones at every start of a process, old ones only for old draws.

    ring = ((step 0, row 0, key_0), (step s_1, row r_1, key_1), …)         one entry a life

If one key served for ever, two continuations of one folder (a clone, a ledger that lost rows) would
put the same noise on different sums. So every process takes fresh entropy for all draws that no
released step has used; used ones keep their key, since trees, taps and banded inverses need them
again. Two continuations are then at worst a second release, which composes. The same holds for
secret samples, but not where a draw decides about later rows too (`Participation.keeps_draws`): a
budget refuses a second one. A `Source` that is given is mixed with fresh entropy; test sources stay
as they are, and their statements say NOT PRIVATE.

State: none; a ring is a value, and `folder` keeps it in a file of mode 0600 until it is sealed.

>>> ring = KeyRing.new()
>>> later = ring.renewed(step=3, row=5)
>>> [(life.step, life.row) for life in later.lives], later.name == ring.name
([(0, 0), (3, 5)], True)
>>> later.lives[0].noise == ring.lives[0].noise, later.lives[1].noise == ring.lives[0].noise
(True, False)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from noshuffle.errors import InvalidInput
from noshuffle.noise import Source, new_key

FORMAT = "noshuffle-key/2"
_BYTES = 32


@dataclass(frozen=True)
class Life:
    """The keys of one process, and from which step and draw on they are used."""

    step: int
    row: int
    noise: bytes = field(repr=False)
    sampling: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """A public name of these keys: recognises them, reveals nothing about them."""
        return hashlib.blake2b(
            self.sampling, key=self.noise, person=b"ns-life", digest_size=16
        ).hexdigest()


@dataclass(frozen=True)
class KeyRing:
    """All keys of a run. `secret` keys its fingerprints and digests, and never changes."""

    secret: bytes = field(repr=False)
    lives: tuple[Life, ...]
    kind: str = "auto"
    is_test: bool = False
    given: str = ""

    @staticmethod
    def new(source: Source | None = None) -> KeyRing:
        """The keys of a new run: of the operating system, or those of a test source.

        Guarantees: two rings share a key only if both come from the same test source.
        """
        if source is None:
            return KeyRing(os.urandom(_BYTES), (Life(0, 0, new_key(), os.urandom(_BYTES)),))
        if not source.is_test:  # mixed with fresh entropy: the same source may serve other runs
            mixed = hashlib.blake2b(os.urandom(_BYTES), key=source.key, digest_size=_BYTES).digest()
            life = Life(0, 0, mixed, os.urandom(_BYTES))
            return KeyRing(os.urandom(_BYTES), (life,), source.kind, False, source.fingerprint)
        life = Life(0, 0, source.key, _derived(source.key, b"ns-sampling"))
        secret = _derived(source.key, b"ns-secret")
        return KeyRing(secret, (life,), source.kind, True, source.fingerprint)

    @property
    def name(self) -> str:
        """A public name of the ring, the same in every life."""
        return hashlib.blake2b(b"", key=self.secret, person=b"ns-ring", digest_size=16).hexdigest()

    @property
    def digest(self) -> str:
        """Of all that is kept of the ring; the ledger holds it of every life."""
        text = json.dumps(self.to_dict(), sort_keys=True).encode()
        return hashlib.blake2b(
            text, key=self.secret, person=b"ns-rings", digest_size=16
        ).hexdigest()

    def is_newest(self, lives: Sequence[Mapping[str, Any]], *, used: int) -> bool:
        """Whether this is the ring of life `used`, the last that released a step, or a later one.

        An older ring would draw other noise for steps of that life: a second release of their sums.
        `lives`: as the ledger has them; those of earlier versions have no digest of their ring.
        """
        told = [life.get("ring") for life in lives[used:]]
        return None in told or self.digest in told

    @property
    def source(self) -> Source:
        """The noise of the run: every draw under the key of its life."""
        (_, first), *later = {life.row: life.noise for life in self.lives}.items()
        return Source(first, self.kind, self.is_test, tuple(later))

    def of_step(self, step: int) -> Life:
        """The keys that a step was, or will be, released under."""
        return next(life for life in reversed(self.lives) if life.step <= step)

    def source_of_step(self, step: int) -> Source:
        """For numbers that are drawn once a step (counts): a source under the key of its life."""
        return Source(self.of_step(step).noise, self.kind, self.is_test)

    def sampling_key(self, step: int) -> bytes:
        return self.of_step(step).sampling

    def renewed(self, *, step: int, row: int) -> KeyRing:
        """The ring of the next process: fresh keys from this step and this draw on.

        Guarantees: keys of steps before `step` and of draws before `row` stay. A test ring stays
        as it is.
        """
        if self.is_test:
            return self
        kept = tuple(life for life in self.lives if life.step < step or life.row < row)
        return replace(self, lives=(*kept, Life(step, row, new_key(), os.urandom(_BYTES))))

    def on(self, kind: str) -> KeyRing:
        return replace(self, kind=kind)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "is_test": self.is_test,
            "given": self.given,
            "secret": self.secret.hex(),
            "lives": [
                {**vars(life), "noise": life.noise.hex(), "sampling": life.sampling.hex()}
                for life in self.lives
            ],
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> KeyRing:
        """The ring that `to_dict` wrote; anything else is refused."""
        try:
            if record["format"] != FORMAT:
                raise InvalidInput(f"expected a {FORMAT} record, got {record['format']!r}")
            lives = tuple(
                Life(
                    int(life["step"]),
                    int(life["row"]),
                    bytes.fromhex(life["noise"]),
                    bytes.fromhex(life["sampling"]),
                )
                for life in record["lives"]
            )
            if not lives or lives[0].step or lives[0].row:
                raise ValueError("the first life must begin at step 0")
            ring = KeyRing(
                bytes.fromhex(record["secret"]),
                lives,
                str(record["kind"]),
                bool(record["is_test"]),
                str(record["given"]),
            )
            _ = ring.source  # checks the keys
            return ring
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"not a {FORMAT} record ({error})") from None


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(b"", key=key, person=purpose, digest_size=_BYTES).digest()
