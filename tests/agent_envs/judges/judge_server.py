"""A server with OpenAI's chat completions, whose replies are those of a function."""

import json
from contextlib import contextmanager

from tests.agent_trainers.chat_server import Reply, json_server, says


@contextmanager
def serving(reply):
    """Serve ``reply(request) -> (status, text)``; yield the base URL and the requests.

    A dictionary instead of the text replaces fields of the whole reply.
    """
    requests = []

    def answer(_, request, __):
        requests.append(request)
        status, text = reply(request)
        if status != 200:
            return Reply({"error": {"message": text}}, status)
        whole = json.loads(says(text, usage=(100, 10)).body)
        return Reply(whole | text if isinstance(text, dict) else whole)

    with json_server(answer) as url:
        yield f"{url}/v1", requests
