"""The signature of a run that has ended: who says that log, plan and files are those they made.

A hash chain shows that single rows were changed, not that all of it was made anew. For that there
is a signature by an ordinary Ed25519 key over the newest link, the plan and the digests of the
files beside them (RFC 8032, from the `cryptography` package). State: none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan
from noshuffle.release.files import file_digest, read_json, write_json
from noshuffle.release.folder import RunFolder


def _signed_text(plan: Plan, record: dict[str, Any]) -> bytes:
    """What a signature is of."""
    parts = {name: record[name] for name in ("log_link", "files")}
    return json.dumps({"plan": plan.hash, **parts}, sort_keys=True, separators=(",", ":")).encode()


def _files(folder: RunFolder) -> dict[str, str]:
    """Digests of the files beside the log, which its newest link is of."""
    apart = {folder.log_file, folder.signature_file, folder.secret_file}
    files = [p for p in sorted(folder.path.iterdir()) if p.is_file() and p.name[0] != "."]
    return {file.name: file_digest(file) for file in files if file not in apart}


def write_signature(folder: RunFolder, plan: Plan, link: str, key: Any) -> None:
    """Sign what there is; signature.json holds the signature and what it is of."""
    from cryptography.hazmat.primitives import serialization as form

    record = {"log_link": link, "files": _files(folder)}
    public = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
    signature = key.sign(_signed_text(plan, record))
    signed = {**record, "public_key": public.hex(), "signature": signature.hex()}
    write_json(folder.signature_file, signed)


def private_key(path: Path) -> Any:
    """The Ed25519 key that a PEM file holds; refused in one line where it holds none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"sign must be a PEM file with an Ed25519 private key without a password, got {path} "
            f"({error}); make one with: openssl genpkey -algorithm ed25519 -out key.pem"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(f"{path} holds a key of another kind than Ed25519; make a new one")
    return key


def signature_failure(
    folder: RunFolder, plan: Plan, link: str, *, public_key: bytes | None
) -> str | None:
    """What is wrong with the signature in the folder; None if it holds.

    `public_key` is the one that must have signed; without it the one in the file is taken.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        record = read_json(folder.signature_file)
        signer = bytes.fromhex(record["public_key"])
        if public_key not in (signer, None):
            return "signature.json was made with another key than the one given"
        text = _signed_text(plan, record)
        Ed25519PublicKey.from_public_bytes(signer).verify(bytes.fromhex(record["signature"]), text)
    except InvalidInput as error:
        return f"signature.json cannot be read: {error}"
    except (InvalidSignature, KeyError, ValueError, TypeError) as error:
        return f"the signature does not hold ({type(error).__name__})"
    if record["log_link"] != link:
        return "the log is not the one that was signed, or rows were added to it since"
    if _files(folder) != record["files"]:
        return "the files are not those that were signed"
    return None


def public_bytes(given: str | Path) -> bytes:
    """The Ed25519 key of a PEM file, or of 64 hex digits."""
    from cryptography.hazmat.primitives import serialization as form

    try:
        if isinstance(given, str) and len(given) == 64 and not Path(given).exists():
            return bytes.fromhex(given)
        key: Any = form.load_pem_public_key(Path(given).read_bytes())
        raw: bytes = key.public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
        return raw
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"public_key must be a PEM file or 64 hex digits, got {given} ({error})"
        ) from None
