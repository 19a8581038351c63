"""A process with programs in threads; with the standard library only, so that many start quickly.

Each sends its own word in every call, and checks that the replies are about that word.
"""

import http.client
import json
import sys
import threading
from urllib.parse import urlsplit


def play(base_url, key, word, num_calls):
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    messages = []
    for number in range(num_calls):
        messages.append({"role": "user", "content": f"{word} {number}"})
        body = json.dumps({"model": "any", "messages": messages})
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        reply = json.loads(connection.getresponse().read())
        message = reply["choices"][0]["message"]
        assert message["content"] == f"I heard {word} {number}", reply
        messages.append(message)
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


threads = [threading.Thread(target=play, args=program) for program in json.loads(sys.argv[1])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
