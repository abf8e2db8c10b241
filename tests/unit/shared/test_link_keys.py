"""Keys of the link: what a folder must hold, and how a mistake is told without showing a key."""

import stat
from pathlib import Path

import pytest
import zmq

from services.command import main
from shared.link_keys import MAX_KEYS, LinkKeysError, Side, read_link_keys, write_link_keys

A_SECRET = "q" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_link_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_each_side_has_its_pair_and_knows_the_other(folder: Path) -> None:
    engine, frontend = read_link_keys(folder, "engine"), read_link_keys(folder, "frontend")
    assert zmq.curve_public(engine.secret) == engine.public
    assert (engine.peers, frontend.peers) == ((frontend.public,), (engine.public,))
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("side", ["engine", "frontend"])
def test_a_side_needs_its_own_secret_and_the_others_public_key_alone(folder: Path, side: Side) -> None:
    whole = read_link_keys(folder, side)
    other = "frontend" if side == "engine" else "engine"
    (folder / f"{side}.public").unlink()
    (folder / f"{other}.secret").unlink()
    assert read_link_keys(folder, side) == whole


def test_public_keys_are_derived_where_only_secrets_are(folder: Path) -> None:
    whole = read_link_keys(folder, "frontend")
    for path in folder.glob("*.public"):
        path.unlink()
    assert read_link_keys(folder, "frontend") == whole


def test_forty_letters_and_digits_are_a_secret_key(folder: Path) -> None:
    # Helm's randAlphaNum makes them.
    for letters in ("Z" * 40, "0" * 39 + "z", "aB3" * 13 + "x"):
        (folder / "engine.secret").write_text(letters)
        (folder / "engine.public").unlink(missing_ok=True)
        assert read_link_keys(folder, "engine").secret == letters.encode()
        assert read_link_keys(folder, "frontend").peers == (zmq.curve_public(letters.encode()),)


def test_the_first_line_is_the_own_key_and_all_lines_are_peers(folder: Path, tmp_path: Path) -> None:
    write_link_keys(tmp_path / "new")
    for name in ("engine.secret", "engine.public"):
        (folder / name).write_text("\n" + (folder / name).read_text() + "  " + (tmp_path / "new" / name).read_text())
    new = read_link_keys(tmp_path / "new", "engine")
    engine, frontend = read_link_keys(folder, "engine"), read_link_keys(folder, "frontend")
    assert frontend.peers == (engine.public, new.public)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n  \n", "is empty"),
        (A_SECRET[:-1], "line 1: 39 characters where a key has 40"),
        ("c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNlYw==", "not base64"),
        (f"{'Z' * 40}\n{'q' * 39}'", "line 2: not a key: it has characters that Z85 does not"),
        ("#" * 40, "line 1: not a key"),
        ("\n".join(["Z" * 40] * (MAX_KEYS + 1)), f"has {MAX_KEYS + 1} keys"),
        (b"\xff" * 40, "line 1: not a key"),
        (b"\0" * 100_000, "line 1"),
    ],
)
@pytest.mark.parametrize("name", ["engine.secret", "frontend.public"])
def test_a_malformed_key_is_told_by_its_place_and_not_shown(
    folder: Path, name: str, content: str | bytes, message: str
) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LinkKeysError) as error:
        read_link_keys(folder, "engine")
    assert message in str(error.value)
    assert name in str(error.value)
    for key in content.split() if isinstance(content, str) else ():
        assert key not in str(error.value)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LinkKeysError, match="is no folder: `tandem keygen"):
        read_link_keys(tmp_path / "nowhere", "engine")
    (folder / "frontend.public").unlink()
    (folder / "frontend.secret").unlink()
    with pytest.raises(LinkKeysError, match=r"has no frontend\.public"):
        read_link_keys(folder, "engine")
    with pytest.raises(LinkKeysError, match=r"has no file frontend\.secret"):
        read_link_keys(folder, "frontend")


def test_keys_are_not_in_the_text_of_the_object(folder: Path) -> None:
    keys = read_link_keys(folder, "engine")
    assert keys.secret.decode() not in repr(keys)


def test_keygen_makes_a_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "deep" / "keys")]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(Path(path).name for path in written) == [
        "engine.public", "engine.secret", "frontend.public", "frontend.secret",
    ]  # fmt: skip
    before = {path: Path(path).read_bytes() for path in written}
    assert main(["keygen", str(tmp_path / "deep" / "keys")]) == 1
    assert "is there already" in capsys.readouterr().err
    assert before == {path: Path(path).read_bytes() for path in written}
    assert main(["keygen"]) == 2
    assert main(["keygen", "--help"]) == 0
