"""A web endpoint by the standard library: POST /chat with messages, and the answer with what was cached of them.

python examples/web_endpoint.py     (it asks itself twice, over HTTP, and stops)
"""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import agentkv
from agentkv.sync import Runtime


class Endpoint(BaseHTTPRequestHandler):
    """Each request has a thread; the runtime answers those of all threads side by side."""

    runtime: Runtime

    def do_POST(self) -> None:
        answer: dict[str, Any]
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            reply = self.runtime.generate(request["messages"], max_tokens=16, timeout=60)
            assert isinstance(reply, agentkv.Reply)  # n=1
            status, answer = 200, {"message": reply.message, "usage": reply.usage.to_dict()}
        except (agentkv.RequestError, TimeoutError) as error:
            status, answer = 400, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def post(port: int, messages: list[dict[str, Any]]) -> Any:
    body = json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/chat", body, timeout=120) as response:
        return json.load(response)


with Runtime("smollm2-135m") as Endpoint.runtime, ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
    threading.Thread(target=server.serve_forever).start()
    messages: list[dict[str, Any]] = []
    for question in ("What is a lighthouse for?", "Who lives in it?"):
        messages.append({"role": "user", "content": question})
        answer = post(server.server_port, messages)
        messages.append(answer["message"])
        usage = answer["usage"]
        print(f"{usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens cached")
    server.shutdown()
