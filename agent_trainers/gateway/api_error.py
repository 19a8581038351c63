"""Errors in the form of OpenAI's API, so that its client libraries raise the right exception."""

from typing import Any

from agent_trainers.trajectory import StopReason


class ApiError(Exception):
    """A request that is refused or that failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        stop_reason: StopReason | None = None,
    ) -> None:
        """Describe the failure.

        Args:
            status: The HTTP status. Client libraries retry 408, 409, 429, and 500 and above.
            message: The cause, and how to fix it.
            param: The refused parameter.
            code: A short code for programs.
            stop_reason: The episode's stop reason if no later call succeeds; None for a mistake
                of the program itself.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.stop_reason = stop_reason

    @property
    def body(self) -> dict[str, Any]:
        """The body of the reply."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        members = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": members}
