"""A registry on this machine's loopback that serves one image: enough for a pull, by tag and by digest."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"


@dataclass(frozen=True)
class Registry:
    """Serves `reference` (HOST:PORT/NAME:TAG). `digest` is that of the manifest."""

    reference: str
    digest: str
    asked: list[str]


@contextmanager
def serve_image(saved: Iterable[bytes], name: str = "base", tag: str = "1") -> Iterator[Registry]:
    """Serve the image in a tar from `docker save`."""
    blobs, manifest = _blobs(b"".join(saved))
    digest = _digest(manifest)
    documents = {f"/v2/{name}/manifests/{tag}": manifest, f"/v2/{name}/manifests/{digest}": manifest}
    documents |= {f"/v2/{name}/blobs/{key}": blob for key, blob in blobs.items()}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            found = b"{}" if self.path == "/v2/" else documents.get(self.path)
            self.send_response(404 if found is None else 200)
            if found == manifest:
                self.send_header("Content-Type", MANIFEST)
                self.send_header("Docker-Content-Digest", digest)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found or b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Registry(f"127.0.0.1:{server.server_port}/{name}:{tag}", digest, asked)
    finally:
        server.shutdown()
        server.server_close()


def _blobs(saved: bytes) -> tuple[dict[str, bytes], bytes]:
    """By digest, and the manifest that names them."""
    with tarfile.open(fileobj=io.BytesIO(saved)) as tar:

        def read(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        entry = json.loads(read("manifest.json"))[0]
        config, layers = read(entry["Config"]), [read(name) for name in entry["Layers"]]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _described(CONFIG, config),
        "layers": [_described(LAYER, layer) for layer in layers],
    }
    return {_digest(blob): blob for blob in (config, *layers)}, json.dumps(manifest).encode()


def _described(kind: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(blob), "digest": _digest(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
