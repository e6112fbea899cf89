"""A hub on this machine: what huggingface_hub and our own downloads ask of the real one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalHub:
    """`files`: what each repository holds. `broken_after`: the connection breaks off after so many bytes of a file.

    `store`: another hub that files are fetched from, as from the real one's.
    """

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self.files = files
        self.gated: set[str] = set()
        self.broken_after: int | None = None
        self.store: LocalHub | None = None
        self.requests: list[str] = []  # METHOD path [range]
        self.tokens: list[str] = []  # of the same requests
        self.url = ""


@contextmanager
def local_hub(files: dict[str, dict[str, bytes]]) -> Iterator[LocalHub]:
    hub = LocalHub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listed(path: str, data: bytes) -> dict[str, object]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
    if path.endswith((".gguf", ".safetensors")):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
    return entry


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

        def _answer(self, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
            hub.tokens.append(self.headers.get("Authorization", ""))
            path = self.path.partition("?")[0].strip("/").split("/")
            if path == [""]:
                self._send(200, b"hub", with_body)
            elif path[:2] == ["api", "models"]:
                self._send_api(*path[2:4], with_body=with_body)
            else:
                self._send_file("/".join(path[:2]), "/".join(path[4:]), with_body)

        def _send_api(self, owner: str, name: str, with_body: bool) -> None:
            repo = f"{owner}/{name}"
            if repo not in hub.files:
                return self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})
            tree = [_listed(path, data) for path, data in hub.files[repo].items()]
            siblings = [{"rfilename": path} for path in hub.files[repo]]
            info = {"id": repo, "modelId": repo, "sha": "0" * 40, "siblings": siblings, "tags": [], "downloads": 0}
            body = tree if "/tree/" in self.path else info
            return self._send(200, json.dumps(body).encode(), with_body, {"Content-Type": "application/json"})

        def _send_file(self, repo: str, file: str, with_body: bool) -> None:
            if repo in hub.gated:
                return self._send(403, b"", with_body, {"X-Error-Code": "GatedRepo"})
            if file not in hub.files.get(repo, {}):
                code = "EntryNotFound" if repo in hub.files else "RepoNotFound"
                return self._send(404, b"", with_body, {"X-Error-Code": code, "X-Repo-Commit": "0" * 40})
            data = hub.files[repo][file]
            if hub.store is not None:
                linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
                return self._send(302, b"", with_body, linked | {"Location": hub.store.url + self.path})
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
            if start > 0 and start >= len(data):
                return self._send(416, b"", with_body, {"Content-Range": f"bytes */{len(data)}"})
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": "0" * 40,
                "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}",
            }
            return self._send(206 if start else 200, data[start:], with_body, headers)

        def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body[: hub.broken_after] if "/resolve/" in self.path else body)

    return Handler
