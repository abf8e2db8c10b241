"""Tags in text that arrives in pieces: how much of its end may still become one."""


def partial_tag(text: str, tag: str) -> int:
    """The length of the longest end of the text that the tag begins with, short of the whole tag."""
    position = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while position >= 0:
        if tag.startswith(text[position:]):
            return len(text) - position
        position = text.find(tag[0], position + 1)
    return 0
