"""Keys of the link's encryption: ZMQ's CURVE (X25519), each side with a pair of its own and what it knows of the other.

A folder holds them, one key a line, as ZMQ writes keys (Z85, 40 characters); a mounted Secret is such a folder:

    engine.secret     frontend.secret       the first line is the side's own; further ones are of before or after
    engine.public     frontend.public       what the other side knows; derived from the secrets where it is missing

The engines' link and the frontends' read it; `tandem keygen` writes it.
"""

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

Side = Literal["engine", "frontend"]

KEY_CHARACTERS = 40
# What a frame grows by, at most: the command's name, a nonce, flags, and the box's authenticator.
CURVE_OVERHEAD_BYTES = 64
MAX_KEYS = 16
MAX_FILE_BYTES = 64 * 1024


class LinkKeysError(ValueError):
    """The keys cannot be used. The message names the file and what to do, and holds no key."""


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """One side's pair, and the public keys of those it may speak to, in the order of the files."""

    public: bytes
    peers: tuple[bytes, ...]
    secret: bytes = field(repr=False)


def read_link_keys(folder: Path, side: Side) -> LinkKeys:
    """What `side` needs of the keys in `folder`. Raises LinkKeysError."""
    other: Side = "frontend" if side == "engine" else "engine"
    if not folder.is_dir():
        raise LinkKeysError(f"--link-keys {folder} is no folder: `tandem keygen {folder}` makes one with keys")
    secrets = _read(folder / f"{side}.secret")
    if (folder / f"{other}.public").exists():
        peers = _read(folder / f"{other}.public")
    elif (folder / f"{other}.secret").exists():
        peers = [_public(secret, folder / f"{other}.secret") for secret in _read(folder / f"{other}.secret")]
    else:
        raise LinkKeysError(f"--link-keys {folder} has no {other}.public: this side cannot know the other without it")
    return LinkKeys(_public(secrets[0], folder / f"{side}.secret"), tuple(dict.fromkeys(peers)), secrets[0])


def write_link_keys(folder: Path) -> list[Path]:
    """Make a pair for each side, in files that only this user may read. Raises LinkKeysError; overwrites nothing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    sides: tuple[Side, Side] = ("engine", "frontend")
    for side in sides:
        public, secret = zmq.curve_keypair()
        for kind, key in (("secret", secret), ("public", public)):
            path = folder / f"{side}.{kind}"
            try:
                with open(path, "xb", opener=_open_private) as file:
                    file.write(key + b"\n")
            except FileExistsError as error:
                raise LinkKeysError(
                    f"{path} is there already, and keys are not overwritten: name another folder"
                ) from error
            written.append(path)
    return written


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _read(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise LinkKeysError(f"--link-keys {path.parent} has no file {path.name}") from error
    except OSError as error:
        raise LinkKeysError(f"{path} cannot be read: {error.strerror}") from error
    keys = [line.strip() for line in content.splitlines() if line.strip()]
    if not keys:
        raise LinkKeysError(f"{path} is empty: it takes keys of {KEY_CHARACTERS} characters, one a line")
    if len(keys) > MAX_KEYS:
        raise LinkKeysError(f"{path} has {len(keys)} keys, and {MAX_KEYS} are the most that is taken")
    for number, key in enumerate(keys, 1):
        _check(key, path, number)
    return keys


def _check(key: bytes, path: Path, number: int) -> None:
    if len(key) != KEY_CHARACTERS:
        raise LinkKeysError(
            f"{path}, line {number}: {len(key)} characters where a key has {KEY_CHARACTERS} (32 bytes as ZMQ writes "
            "them, in Z85; not base64, not hexadecimal). `tandem keygen FOLDER` makes keys"
        )
    try:
        z85.decode(key)
    except (KeyError, struct.error) as error:
        raise LinkKeysError(f"{path}, line {number}: not a key: it has characters that Z85 does not") from error


def _public(secret: bytes, path: Path) -> bytes:
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise LinkKeysError(f"{path}: the public key of a line cannot be derived: {error.strerror}") from error
