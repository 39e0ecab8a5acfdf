"""Who is behind a Flower node: a stable user id for each node of this run.

Node ids are new with every run (in a simulation) or with every start of a SuperNode (without
registered keys), so no limit may be counted by them. Two ways to know a user:

    Handshake     ask the node; it answers with its partition id, or whatever the app's user_fn says
    PublicKeys    read the node's key from the SuperLink; the node is not asked

A handshake believes the client, within bounds: one node has one id for the whole run, an id belongs
to one node at a time. Keys are proved to the SuperLink with every request; they name the same user
in the next run if SuperNodes are registered by key (`--enable-supernode-auth`).

Guarantees: `online` never gives two users one node, or one user two nodes. A claim to an id is
refused while another node that has it is online; of several that come at once none is believed, as
nobody can tell which is right. A node that names a second id is left out for the rest of the run.
Nothing here costs anybody else a round.

State: which node said what, for one run of Flower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from logging import WARNING
from typing import Protocol

from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from noshuffle.errors import InvalidInput, positive
from noshuffle.federated.cohort import UserId
from noshuffle.federated.flower_wire import ASK_IDENTITY, IDENTITY, USER, is_user_id, section, short


def tell(line: str) -> None:
    """One line into Flower's log."""
    log(WARNING, line)


class Identities(Protocol):
    """The users behind the nodes that are online."""

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
        self._tell(node, why)

    def _tell(self, node: int, why: str) -> None:
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
                for node in group:
                    self._tell(node, f"{len(group)} nodes say that they are user {short(user)}")
                continue
            if holder is None or holder not in group:
                holder = self._holder[user] = group[0]
            found[user] = holder
            for node in group:
                if node != holder:
                    self._tell(node, f"user {short(user)} is another node that is online")
        return found


class Handshake:
    """Ask every node once who it is.

    Arguments:
        kind: int for partition ids, str for names; one kind per run.
        known: the ids that exist, if that is known beforehand; others are refused.
        timeout: seconds to wait for answers. Who is silent is asked again only when too few
            users are there.
    """

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
        question = RecordDict({IDENTITY: ConfigRecord({USER: "who are you?"})})
        messages = [Message(question, node, ASK_IDENTITY) for node in nodes]
        said: dict[int, UserId] = {}
        for reply in grid.send_and_receive(messages, timeout=self._timeout):
            node = reply.metadata.src_node_id
            if node not in nodes:
                continue
            if reply.has_error() or node in said:
                what = "does not say" if reply.has_error() else "says twice"
                tell(f"node {node} {what} who it is; it is asked again when it is needed")
                said.pop(node, None)
                continue
            user = section(reply, IDENTITY).get(USER)
            if not is_user_id(user, kind=self._kind):
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


class PublicKeys:
    """Users are the keys that nodes prove to the SuperLink: 64 hexadecimal digits each."""

    def __init__(self) -> None:
        self._claims = _Claims()

    def online(self, grid: Grid, *, again: bool = False) -> dict[UserId, int]:
        nodes: set[int] = set()
        for info in grid.get_nodes():
            nodes.add(info.node_id)
            if info.node_id in self._claims.user_of or info.node_id in self._claims.barred:
                continue
            if info.public_key:
                self._claims.user_of[info.node_id] = name_of_key(info.public_key)
            else:
                self._claims.bar(info.node_id, "the SuperLink knows no key of it")
        return self._claims.online(nodes)

    def why_not(self, node: int, claimed: object) -> str | None:
        return None  # what a client says about itself is not used


def name_of_key(key: bytes) -> str:
    """A user id from a public key. One key has one name, however it is written down."""
    with suppress(ValueError):  # a simulation has random bytes in its place
        key = serialization.load_pem_public_key(key).public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    return hashlib.sha256(key).hexdigest()
