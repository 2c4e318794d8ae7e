"""What a checker reports."""


class Finding(Exception):
    """A promise that was seen broken.

    `promise`: its number in docs/guarantees.md, as "I1"; `detail`: what was expected and what was
    found.
    """

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(promise, detail)
        self.promise = promise
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


class Findings:
    """Findings from places that must not raise, such as a copy inside one of vLLM's hooks."""

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def add(self, promise: str, detail: str) -> None:
        self._found.append(Finding(promise, detail))

    def raise_first(self) -> None:
        """Raise the first finding, if there is any."""
        if self._found:
            raise self._found[0]
