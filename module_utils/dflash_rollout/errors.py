"""The one exception that reaches the person at the keyboard."""


class RolloutError(Exception):
    """Something that the operator has to know: what was found, what was expected, what to do.

    ``str(error)`` is the whole message, ready to print; it never needs a traceback beside it.
    """

    def __init__(self, message: str, *, found: str = "", expected: str = "", remedy: str = ""):
        self.message = message
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message.rstrip(".") + "."]
        if self.found:
            parts.append(f"Found: {self.found.rstrip('.')}.")
        if self.expected:
            parts.append(f"Expected: {self.expected.rstrip('.')}.")
        if self.remedy:
            parts.append(f"What to do: {self.remedy.rstrip('.')}.")
        return " ".join(parts)
