"""Snapshots that a client keeps and can neither read nor make.

A snapshot holds the task with its answers, and to restore one can run code. So it leaves a server
encrypted and signed with the server's key (Fernet: AES-128-CBC and HMAC-SHA256). Servers with the
same key restore each other's.
"""

import base64
import hashlib
import pickle
import secrets
from typing import Any, Final

from agent_envs.errors import ConfigurationError
from agent_envs.remote.protocol import KEY_VARIABLE, ErrorCode, Refusal

MIN_KEY_CHARS: Final = 16
MAX_SEALED_CHARS: Final = 512 * 2**10
"""Larger ones are not sent with every turn; an episode is then resumed by its actions."""


class Seal:
    """Seals snapshots and opens them again."""

    def __init__(self, key: str | None) -> None:
        """Use `key`, or a new one that no other server has.

        Raises:
            ConfigurationError: If the key is too short to be a secret.
        """
        from cryptography.fernet import Fernet

        if key is not None and len(key) < MIN_KEY_CHARS:
            raise ConfigurationError(
                f"{KEY_VARIABLE} has {len(key)} characters; a secret has {MIN_KEY_CHARS} or more. "
                "Make one with: python -c 'import secrets; print(secrets.token_hex())'"
            )
        chosen = key or secrets.token_hex()
        self._fernet = Fernet(base64.urlsafe_b64encode(hashlib.sha256(chosen.encode()).digest()))

    def close(self, snapshot: Any) -> str | None:
        """Return a sealed snapshot; None if it is too large to go with every turn.

        It is not compressed: how well what a client wrote compresses beside an answer that it may
        not see would tell it the answer. What it does learn is the snapshot's size.
        """
        sealed = self._fernet.encrypt(pickle.dumps(snapshot)).decode()
        return sealed if len(sealed) <= MAX_SEALED_CHARS else None

    def open(self, sealed: str) -> Any:
        """Return the snapshot.

        Raises:
            Refusal: If it was not sealed with this key, was changed, or holds what is not here.
        """
        from cryptography.fernet import InvalidToken

        try:
            pickled = self._fernet.decrypt(sealed.encode())
            return pickle.loads(pickled)  # noqa: S301 - signed: only a server with this key made it
        except (InvalidToken, UnicodeEncodeError):
            text = "The snapshot was sealed with another key. Start all servers with the same "
            raise Refusal(ErrorCode.SNAPSHOT_REFUSED, f"{text}{KEY_VARIABLE}.") from None
        except Exception as error:
            text = f"The snapshot cannot be read by this server: {type(error).__name__}."
            raise Refusal(ErrorCode.SNAPSHOT_REFUSED, text) from error
