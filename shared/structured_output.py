"""What a request's output must look like, as it travels inside the sampling parameters.

The frontend makes one from the client's request and checks that it compiles; the engine compiles it again,
against the model's vocabulary, and masks the tokens that would break it.
"""

from typing import Annotated

import msgspec

JSON_SCHEMA = "json_schema"
JSON_OBJECT = "json_object"
REGEX = "regex"
CHOICE = "choice"
GRAMMAR = "grammar"
STRUCTURAL_TAG = "structural_tag"
KINDS = (JSON_SCHEMA, JSON_OBJECT, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG)

MAX_VALUE_LENGTH = 1024 * 1024
MAX_TAG_LENGTH = 256


class StructuredOutput(msgspec.Struct, array_like=True, kw_only=True):
    """Positional on the wire: a new field goes to the end and has a default.

    `kind` says what `value` holds: `json_schema` a JSON Schema as JSON text; `json_object` nothing (any JSON
    object); `regex` a regular expression that the whole output matches; `choice` a JSON array of strings;
    `grammar` a Lark grammar in llguidance's dialect, with a rule `start`; `structural_tag` vLLM's JSON object of
    `structures` and `triggers`: text is free between the tags, and what a tag encloses follows its schema.

    Where the model reasons first, `reasoning_end` is the text that closes its reasoning: all before and including
    it is free, and the grammar begins after it. `reasoning_opened`: the output is reasoning from its first token
    on. Otherwise it is reasoning where it begins with `reasoning_start`, and the answer follows at once where it
    does not. Both tags are empty where nothing precedes the answer.
    """

    # A plain string: a kind that only a later version knows is an error of its request, not a malformed message.
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    value: Annotated[str, msgspec.Meta(max_length=MAX_VALUE_LENGTH)] = ""
    reasoning_start: Annotated[str, msgspec.Meta(max_length=MAX_TAG_LENGTH)] = ""
    reasoning_end: Annotated[str, msgspec.Meta(max_length=MAX_TAG_LENGTH)] = ""
    reasoning_opened: bool = False


def structured_output_fault(structured: StructuredOutput) -> str | None:
    """What is wrong with it, whatever its grammar says: "has …". None: nothing is.

    >>> structured_output_fault(StructuredOutput(kind="regex"))
    'has no value for kind regex'
    """
    if structured.kind not in KINDS:
        return f"has the kind {structured.kind!r}, which is none of {', '.join(KINDS)}"
    if not structured.value and structured.kind != JSON_OBJECT:
        return f"has no value for kind {structured.kind}"
    if (structured.reasoning_start or structured.reasoning_opened) and not structured.reasoning_end:
        return "has reasoning that begins, but no reasoning_end"
    return None
