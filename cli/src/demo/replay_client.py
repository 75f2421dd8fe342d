"""A client of a model's API in the session: makes calls one after the other and streams each answer to its end.

Usage: replay_client.py URL MODEL CALLS LOG. It knows nothing of KeepState: it reads what urllib gives it, writes a line per
ten tokens, and never asks twice. Nothing in a request depends on the clock or on chance.
"""

import hashlib
import json
import sys
import urllib.request

url, model, calls, log_path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


def log(text):
    with open(log_path, "a") as f:
        f.write(text + "\n")


for n in range(1, calls + 1):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "question %d of %d" % (n, calls)}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body, sort_keys=True).encode()
    request = urllib.request.Request(
        url, data, {"content-type": "application/json", "authorization": "Bearer keystate-held-outside"}
    )
    log("call %d begins" % n)
    seen, digest, tokens, done = 0, hashlib.sha256(), 0, False
    try:
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                digest.update(line)
                seen += len(line)
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    tokens += 1
                    if tokens % 10 == 0:
                        log("call %d token %d" % (n, tokens))
        log("call %d %s %d %s" % (n, "whole" if done else "CUT", seen, digest.hexdigest()))
    except Exception as e:
        log("call %d FAILED %s" % (n, e))
log("finished")
