"""Errors in the form of OpenAI's API, so that its client libraries raise the right exception."""

from agent_trainers.trajectory import StopReason


class ApiError(Exception):
    """A request that is refused or that failed.

    Client libraries retry the statuses 408, 409, 429, and 500 and above. `stop_reason` is the
    episode's if no later call succeeds; None for a mistake of the program itself.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        stop_reason: StopReason | None = None,
    ) -> None:
        """Describe the failure; `code` is for programs."""
        super().__init__(message)
        self.status, self.stop_reason = status, stop_reason
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        self.body = {"error": error}
