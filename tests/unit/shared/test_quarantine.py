from shared.protocol import MAX_QUARANTINED, Quarantined, pack_token_ids
from shared.quarantine import Quarantine, prompt_fingerprint


def test_fingerprints_are_the_same_in_every_process() -> None:
    assert prompt_fingerprint(pack_token_ids([1, 2, 3])) == 0xD69C56745F6A3D9E
    assert prompt_fingerprint(pack_token_ids([1, 2, 4])) != prompt_fingerprint(pack_token_ids([1, 2, 3]))


def test_an_entry_ends_by_itself_or_is_let_go() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    assert not quarantine
    quarantine.set(1, 10)
    quarantine.set(2, 20)
    now[0] = 4.0
    assert quarantine.seconds_left(1) == 6
    assert quarantine.entries() == [Quarantined(1, 6.0), Quarantined(2, 16.0)]
    now[0] = 10.0
    assert quarantine.seconds_left(1) == 0
    assert quarantine.entries() == [Quarantined(2, 10.0)]
    quarantine.set(2, 0)
    assert not quarantine
    assert quarantine.seconds_left(3) == 0


def test_it_is_bounded_and_what_would_leave_first_makes_room() -> None:
    quarantine = Quarantine(lambda: 0.0)
    for number in range(MAX_QUARANTINED + 5):
        quarantine.set(number, 100 + number)
    kept = {entry.fingerprint for entry in quarantine.entries()}
    assert kept == set(range(5, MAX_QUARANTINED + 5))
