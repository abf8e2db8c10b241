"""The one error of building a prompt; the HTTP side answers it with 400."""


class InvalidPrompt(ValueError):
    """The prompt cannot be used. `param` is the request's field at fault, `code` an OpenAI error code if it has one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
