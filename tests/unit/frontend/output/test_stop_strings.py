"""Stop strings against a plain search of the whole text, for every way of cutting it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.output.stop_strings import StopMatcher
from tests.unit.frontend.output.strategies import cut

stop_lists = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str], after: int = 0) -> tuple[int, str] | None:
    """From the definition: the match that ends first (beyond `after`), of those the longest; where it begins."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


def must_wait(text: str, stops: list[str]) -> int:
    """How many last characters may still become a stop string."""
    starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(len(text) + 1) if text[len(text) - length :] in starts), default=0)


def stream(matcher: StopMatcher, parts: list[str]) -> tuple[list[str], str | None]:
    chunks = []
    for part in parts:
        chunk, stop = matcher.push(part)
        chunks.append(chunk)
        if stop is not None:
            return chunks, stop
    return [*chunks, matcher.flush()], None


@given(text=st.text(alphabet="ab<c", max_size=30), stops=stop_lists, include=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_earliest_match_wins_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    chunks, stop = stream(StopMatcher(stops, include), cut(data.draw, text))
    match = first_match(text, stops)
    if match is None:
        assert ("".join(chunks), stop) == (text, None)
    else:
        start, expected = match
        assert stop == expected
        assert "".join(chunks) == text[: start + (len(expected) if include else 0)]


@given(text=st.text(alphabet="ab<c", max_size=30), stops=stop_lists, data=st.data())
@settings(max_examples=400, deadline=None)
def test_no_character_waits_that_cannot_become_a_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for part in cut(data.draw, text):
        seen += part
        chunk, stop = matcher.push(part)
        sent += chunk
        if stop is not None:
            return
        assert sent == seen[: len(seen) - must_wait(seen, stops)]


@given(parts=st.lists(st.text(alphabet="ab<", max_size=4), max_size=12), early=st.integers(0, 12), stops=stop_lists)
@settings(max_examples=400, deadline=None)
def test_matches_that_end_early_do_not_count(parts: list[str], early: int, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent, stop = "", None
    for number, part in enumerate(parts):
        chunk, stop = matcher.push(part, ignore_matches=number < early)
        sent += chunk
        if stop is not None:
            break
    else:
        sent += matcher.flush()
    text = "".join(parts)
    match = first_match(text, stops, after=len("".join(parts[:early])))
    assert stop == (match[1] if match else None)
    # A match may begin in what was sent while matches did not count: nothing is sent twice or taken back.
    assert text.startswith(sent)
    assert match is not None or sent == text


def test_with_include_nothing_waits() -> None:
    matcher = StopMatcher(["stop"], include=True)
    assert matcher.push("a st") == ("a st", None)
    assert matcher.push("op, and more") == ("op", "stop")


@pytest.mark.parametrize(
    ("stops", "text", "sent", "stop"),
    [
        (["abcdef", "cd"], "xabcdef", "xab", "cd"),  # complete first
        (["cd", "abcd"], "xabcd", "x", "abcd"),  # end together: begins first
        (["]"], "a]b]", "a", "]"),
        (["^-\\"], "a^^-\\", "a^", "^-\\"),
        (["👨‍👩‍👧"], "x👨‍👩👨‍👩‍👧", "x👨‍👩", "👨‍👩‍👧"),
        (["\n\n"], "\n", "\n", None),
    ],
)
def test_single_cases(stops: list[str], text: str, sent: str, stop: str | None) -> None:
    for parts in ([text], list(text)):
        chunks, found = stream(StopMatcher(stops), parts)
        assert ("".join(chunks), found) == (sent, stop)


def test_a_very_long_stop_string_costs_no_more_per_character() -> None:
    matcher = StopMatcher(["a" * 50_000 + "b"])
    assert matcher.push("a" * 20_000) == ("", None)
    for _ in range(5_000):
        assert matcher.push("a") == ("", None)
    assert matcher.push("c") == ("a" * 25_000 + "c", None)


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(stops)
