"""Run folders for tests, and hands that change them as somebody who knows their form would."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from noshuffle.noise import Source
from noshuffle.participation import Epochs, Participation
from noshuffle.plan import Plan
from noshuffle.release import ledger_tables as tables
from noshuffle.release.facts import write_statement
from noshuffle.release.files import read_json, write_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Ledger
from noshuffle.strategies import tree
from noshuffle.strategies.base import Strategy
from noshuffle.training import fit_model, in_order, privatize
from noshuffle.training.batches import TensorBatches
from noshuffle.training.private import Private

LOSS = nn.CrossEntropyLoss()
ROWS, SIZE = 24, 6


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 4, generator=made), torch.randint(2, (ROWS,), generator=made)


def open_run(
    path: Path | None,
    *,
    rule: Participation | None = None,
    strategy: Strategy | None = None,
    noise: float = 2.0,
    source: Source | None = None,
    model: nn.Module | None = None,
    lr: float = 0.1,
    **options: Any,
) -> Private:
    """The same small run every time."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2) if model is None else model
    plan = Plan(
        participation=rule or Epochs(epochs=5, steps_per_epoch=4),
        strategy=strategy or tree(),
        noise_multiplier=noise,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings: dict[str, Any] = {"clip_norm": 1.0, "batch_size": SIZE, **options}
    return privatize(model, optimizer, plan, run=path, source=source, **settings)


class Stop(Exception):
    """The process ends here."""


def train(private: Private, *, stop: int | None = None, every: int = 4) -> Private:
    """To the end, or as if killed after `stop` steps."""

    def interrupt(where: Any) -> None:
        if where.step == stop:
            raise Stop

    order = TensorBatches(data(), in_order(ROWS, SIZE))
    with suppress(Stop):
        fit_model(private, order, LOSS, checkpoint_every=every, callbacks=[interrupt])
    return private


def killed(private: Private) -> None:
    """Let go of the files as a killed process would, without any of its last writes."""
    private.ledger._waiting.clear()
    private.ledger.let_go()
    private._parts.release._lock = None
    private._end()


def sql(path: Path, *commands: tuple[Any, ...]) -> None:
    db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    for command, *values in commands:
        db.execute(command, *values)
    db.close()


def relink(path: Path) -> tuple[int, str]:
    """Make the hash chain of a ledger anew; number and link of its last row."""
    db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    steps = "SELECT seq, step, life, time, units, batch, digest, late, ids FROM steps"
    rows: list[tuple[int, str | None, list[Any]]] = [
        (seq, None, row) for seq, *row in db.execute(steps)
    ]
    log = "SELECT seq, kind, time, body FROM log"
    rows += [(seq, kind, row) for seq, kind, *row in db.execute(log)]
    link, number = tables.START, 0
    for number, (seq, kind, row) in enumerate(sorted(rows, key=lambda one: one[0]), start=1):
        if kind is None:
            link = tables.step_link(link, *row)
            db.execute("UPDATE steps SET link = ?, seq = ? WHERE step = ?", (link, -number, row[0]))
        else:
            link = tables.event_link(link, kind, *row)
            db.execute("UPDATE log SET link = ?, seq = ? WHERE seq = ?", (link, -number, seq))
    db.execute("UPDATE steps SET seq = -seq")
    db.execute("UPDATE log SET seq = -seq")
    assert tables.broken_link(db) is None
    db.close()
    return number, link.hex()


def set_fact(path: Path, name: str, value: str, *, in_chain: bool) -> None:
    """Change a fact in `meta`, and perhaps in the log too, with the chain made anew."""
    sql(path, ("UPDATE meta SET value = ? WHERE name = ?", (value, name)))
    if in_chain:
        db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
        for seq, body in db.execute("SELECT seq, body FROM log WHERE kind = 'fact'").fetchall():
            if json.loads(body)[0] == name:
                new = json.dumps([name, value]).encode()
                db.execute("UPDATE log SET body = ? WHERE seq = ?", (new, seq))
        db.close()
        relink(path)


def restate(path: Path) -> None:
    """Write statement.json anew from whatever plan and ledger say now."""
    folder = RunFolder(path)
    plan = folder.plan()
    ledger = Ledger(plan.guarded, path=folder.ledger_file, unit=plan.unit)
    write_statement(folder, plan, ledger)
    ledger.let_go()


def cut(path: Path, steps: int) -> None:
    """Cut the last `steps` steps out, with the summary and the chain made anew."""
    db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    kept = db.execute("SELECT COUNT(*) FROM steps").fetchone()[0] - steps
    (first,) = db.execute("SELECT seq FROM steps WHERE step = ?", (kept,)).fetchone()
    db.execute("DELETE FROM steps WHERE step >= ?", (kept,))
    db.execute("DELETE FROM log WHERE seq > ?", (first,))
    db.execute("DELETE FROM units")
    seen: dict[int, list[int]] = {}
    for step, ids in db.execute("SELECT step, ids FROM steps ORDER BY step"):
        for unit in tables.decode_units(ids).tolist():
            one = seen.setdefault(unit, [step, step, 0])
            one[1], one[2] = step, one[2] + 1
    db.executemany("INSERT INTO units VALUES (?, ?, ?, ?)", [(u, *v) for u, v in seen.items()])
    db.execute("UPDATE meta SET value = ? WHERE name = 'summarised'", (str(kept),))
    db.close()
    relink(path)


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    record = read_json(file)
    change(record)
    write_json(file, record)


def flip(file: Path, *, at: float = 0.9) -> None:
    """One bit of a file."""
    held = bytearray(file.read_bytes())
    held[int(at * len(held))] ^= 1
    file.write_bytes(bytes(held))


def newest(path: Path) -> Path:
    return sorted(p for p in (path / "checkpoints").iterdir() if p.name.startswith("step-"))[-1]


def gradients(private: Private) -> np.ndarray:
    """What the last step released, as one row."""
    return np.concatenate(
        [p.grad.detach().double().numpy().ravel() for p in private.model.parameters()]
    )


def flat(values: Iterable[torch.Tensor]) -> np.ndarray:
    return np.concatenate([v.detach().double().numpy().ravel() for v in values])


def key_pair(folder: Path, name: str = "key") -> tuple[Path, Path, str]:
    """A private key, its public half, and that in hex."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = form.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo))
    raw = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
    return private, public, raw.hex()
