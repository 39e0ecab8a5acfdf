"""Who is behind a Flower node: a stable user id for each node of this run.

Node ids are new with every run or start of a SuperNode, so no limit may be counted by them:

    Handshake          ask the node: its partition id, or whatever the app's user_fn says
    PublicKeys         the node's key at the SuperLink, if it was registered; the node is not asked
    UnregisteredKeys   the same for any key; only by this name, since a restart makes a new one

A handshake believes the client; keys are proved to the SuperLink. Which way it was is
`user_identity`, a fact of the log and a sentence of the statement.

Guarantees: `online` never gives two users one node, or one user two nodes. A claim to an id is
refused while another node that has it is online; of several that come at once none is believed. A
node that names a second id is left out for the rest of the run.

State: which node said what, for one run of Flower.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from noshuffle.errors import InvalidInput, positive
from noshuffle.federated import flower_wire as wire
from noshuffle.federated.cohort import UserId
from noshuffle.federated.flower_replies import ask
from noshuffle.federated.flower_wire import short
from noshuffle.release.spending import CLAIMED, REGISTERED, UNREGISTERED


def tell(line: str) -> None:
    log(WARNING, line)


class Identities(Protocol):
    """The users behind the nodes that are online.

    `user_identity` says how they are told apart; without it, the caller vouches.
    """

    def online(self, grid: Grid, *, again: bool = False) -> dict[UserId, int]:
        """User id → node id. `again` also asks those who did not answer before."""

    def why_not(self, node: int, claimed: object) -> str | None:
        """One line if a reply of this node names another user than the node stands for."""


class _Claims:
    """One node, one user; one user, one node at a time."""

    def __init__(self) -> None:
        self.user_of: dict[int, UserId] = {}
        self.barred: set[int] = set()
        self._holder: dict[UserId, int] = {}
        self._told: set[str] = set()

    def bar(self, node: int, why: str) -> None:
        """Leave a node out for the rest of the run."""
        self.barred.add(node)
        self._leave_out(node, why)

    def _leave_out(self, node: int, why: str) -> None:
        line = f"node {node} is left out: {why}"
        if line not in self._told:
            tell(line)
        self._told.add(line)

    def online(self, nodes: Iterable[int]) -> dict[UserId, int]:
        """Who holds an id keeps it while online; a single other claimant takes it over after."""
        claimants: dict[UserId, list[int]] = {}
        for node in sorted(nodes):
            if node in self.user_of and node not in self.barred:
                claimants.setdefault(self.user_of[node], []).append(node)
        found: dict[UserId, int] = {}
        for user, group in claimants.items():
            holder = self._holder.get(user)
            if holder not in group and len(group) > 1:
                why = f"{len(group)} nodes say that they are user {short(user)}"
            else:
                holder = holder if holder in group else group[0]
                found[user] = self._holder[user] = group.pop(group.index(holder))
                why = f"user {short(user)} is another node that is online"
            for node in group:
                self._leave_out(node, why)
        return found


class Handshake:
    """Ask every node once who it is, and believe it; the statement of the run says so.

    Arguments:
        kind: int for partition ids, str for names; one kind per run.
        known: the ids that exist, if that is known beforehand; others are refused.
        timeout: seconds to wait for answers. Who is silent is asked again only when too few
            users are there.
    """

    user_identity = CLAIMED

    def __init__(
        self,
        *,
        kind: type[int] | type[str] = int,
        known: Collection[UserId] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if kind not in (int, str):
            raise InvalidInput(f"kind must be int or str, got {kind!r}")
        positive(timeout=timeout)
        self._kind = kind
        self._known = None if known is None else frozenset(known)
        self._timeout = timeout
        self._claims = _Claims()
        self._asked: set[int] = set()

    def online(self, grid: Grid, *, again: bool = False) -> dict[UserId, int]:
        nodes = set(grid.get_node_ids())
        settled = self._claims.user_of.keys() | self._claims.barred
        if not again:
            settled = settled | self._asked
        unknown = sorted(nodes - settled)
        if unknown:
            self._claims.user_of.update(self._ask(unknown, grid))
        return self._claims.online(nodes)

    def _ask(self, nodes: list[int], grid: Grid) -> dict[int, UserId]:
        self._asked.update(nodes)
        question = RecordDict({wire.IDENTITY: ConfigRecord({wire.USER: "who are you?"})})
        messages = [Message(question, node, wire.ASK_IDENTITY) for node in nodes]
        said: dict[int, UserId] = {}
        for reply in ask(grid, messages, timeout=self._timeout):
            node = reply.metadata.src_node_id
            if reply.has_error() or node in said:
                what = "does not say" if reply.has_error() else "says twice"
                tell(f"node {node} {what} who it is; it is asked again when it is needed")
                said.pop(node, None)
                continue
            user = wire.section(reply, wire.IDENTITY).get(wire.USER)
            if not wire.is_user_id(user, kind=self._kind):
                self._claims.bar(node, f"{short(user)} is no user id ({self._kind.__name__})")
            elif self._known is not None and user not in self._known:
                self._claims.bar(node, f"there is no user {short(user)}")
            else:
                said[node] = user  # type: ignore[assignment]
        return said

    def why_not(self, node: int, claimed: object) -> str | None:
        user = self._claims.user_of.get(node)
        if claimed is None or (type(claimed) is type(user) and claimed == user):
            return None
        if node not in self._claims.barred:
            self._claims.bar(node, f"it said that it is {short(user)}, and now {short(claimed)}")
        return f"its node said that it is user {short(user)}, and now {short(claimed)}"


class _NodeKeys:
    """Users are the keys that nodes prove to the SuperLink: 64 hexadecimal digits each."""

    def __init__(self, registered: frozenset[str] | None) -> None:
        self._registered = registered
        self._claims = _Claims()

    def online(self, grid: Grid, *, again: bool = False) -> dict[UserId, int]:
        nodes: set[int] = set()
        for info in grid.get_nodes():
            node = info.node_id
            nodes.add(node)
            if node in self._claims.user_of or node in self._claims.barred:
                continue
            user = name_of_key(info.public_key) if info.public_key else None
            if user is None:
                self._claims.bar(node, "the SuperLink knows no key of it")
            elif self._registered is not None and user not in self._registered:
                self._claims.bar(node, f"its key {user[:16]}… was not registered")
            else:
                self._claims.user_of[node] = user
        return self._claims.online(nodes)

    def why_not(self, node: int, claimed: object) -> str | None:
        return None  # what a client says about itself is not used


class PublicKeys(_NodeKeys):
    """Users are keys that were registered; a node with another key is left out.

    `registered` are public keys in OpenSSH or PEM form (`read_public_keys`). A SuperLink that does
    not authenticate SuperNodes takes any key, a SuperNode makes up a new one at every start, and a
    ServerApp is not told whether keys are authenticated (Flower 1.41), so they are given here.
    """

    user_identity = REGISTERED

    def __init__(self, registered: Collection[bytes | str] = ()) -> None:
        if isinstance(registered, bytes | str) or not isinstance(registered, Collection):
            raise InvalidInput(
                "registered must be a list of public keys, got "
                f"{type(registered).__name__}; read_public_keys(path) makes one"
            )
        if not registered:
            raise InvalidInput(
                "PublicKeys needs the registered keys, PublicKeys(read_public_keys(folder)); to "
                "take keys that nobody registered, use UnregisteredKeys()"
            )
        super().__init__(frozenset(name_of_key(_checked_key(key)) for key in registered))


class UnregisteredKeys(_NodeKeys):
    """Users are whatever keys nodes come with: a restarted SuperNode may be a new user.

    For devices that keep their own limits (`Timer`), where the server recognises nobody. The
    statement of the run says so.
    """

    user_identity = UNREGISTERED

    def __init__(self) -> None:
        super().__init__(None)


def read_public_keys(path: str | Path) -> list[bytes]:
    """The public keys in a file (one a line, or PEM blocks), or in all .pub files of a folder."""
    if not str(path):
        raise InvalidInput("path must name a file or folder of public keys, got ''")
    path = Path(path).expanduser()
    files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
    found: list[bytes] = []
    for file in files:
        try:
            text = file.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{file} cannot be read ({error.strerror}); give the keys") from None
        blocks = re.findall(rb"-----BEGIN .*?-----END [^\n]*", text, flags=re.DOTALL)
        lines = [line for line in map(bytes.strip, text.splitlines()) if line[:1] not in b"#"]
        found += [_checked_key(key) for key in blocks or lines]
    if not found:
        raise InvalidInput(f"{path} holds no public keys; give a folder of .pub files, or a file")
    return found


def _checked_key(key: bytes | str) -> bytes:
    """A key that can be read, in DER."""
    given = key.encode() if isinstance(key, str) else key
    found = _der_of(given) if isinstance(given, bytes) else None
    if found is None:
        raise InvalidInput(
            f"a registered key must be a public key in OpenSSH or PEM form, got {key[:20]!r}…"
        )
    return found


def _der_of(key: bytes) -> bytes | None:
    """One key has one DER form, however it is written down; None if this is none."""
    for load in (
        serialization.load_pem_public_key,
        serialization.load_ssh_public_key,
        serialization.load_der_public_key,
    ):
        with suppress(ValueError, UnsupportedAlgorithm):
            return load(key).public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
    return None


def name_of_key(key: bytes) -> str:
    """A user id from a public key; a simulation has random bytes in its place."""
    return hashlib.sha256(_der_of(key) or key).hexdigest()
