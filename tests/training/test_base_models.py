"""Ids of the hub that cannot be downloaded, against a server that answers as the hub does."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

from tfidf_tune.training import HFCheckpointer


class Hub(BaseHTTPRequestHandler):
    """Refuses every file, as the hub does for gated repositories."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch):
    with ThreadingHTTPServer(("localhost", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://localhost:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield
        server.shutdown()


def test_an_id_that_cannot_be_downloaded_is_refused_with_the_reason(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    message = r"some/gated is not a local folder and could not be downloaded .*\(GatedRepoError.*: .*/some/gated/"
    with pytest.raises(FileNotFoundError, match=message):
        HFCheckpointer(checkpoint_dir="some/gated")
