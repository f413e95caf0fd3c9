"""One family of user-facing errors: each says what is wrong, where, and what to do about it.

Only the command line picks an exit code; everything else raises one of these, and a program error (our own bug)
stays an ordinary exception or an `assert`.
"""


class SkerryError(Exception):
    """Something a user can act on.

    `message` says what is wrong and where; `hint` says what to do about it (it may be empty).
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(SkerryError):
    """The configuration cannot be used; `problems` lists every fault, one line each."""

    def __init__(self, problems: list[str], hint: str = "") -> None:
        super().__init__("\n".join(problems), hint)
        self.problems = problems


class ModelError(SkerryError):
    """A model file or folder is broken, unsupported, or does not belong to this version."""


class CapacityError(SkerryError):
    """A request needs more memory than the arena holds."""


class RequestError(SkerryError):
    """A request is malformed: an unknown role, a sampling value out of range, an empty prompt."""
