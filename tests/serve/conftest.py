"""Servers for tests: in this process for the API, in a thread for browsers; a real index."""

import subprocess
import threading
from contextlib import ExitStack

import pytest
import uvicorn
from fake_index import FakeIndex
from fastapi.testclient import TestClient
from waiting import wait_for

from nearfar.serve import create
from nearfar.serve import server as running


@pytest.fixture
def client():
    """Create clients of applications, each with its address; the settings are those of ``create``."""
    with ExitStack() as stack:

        def make(index=None, *, address="127.0.0.1", **settings):
            app = create(FakeIndex(40) if index is None else index, **settings)
            client = TestClient(
                app, base_url="http://127.0.0.1", raise_server_exceptions=False, client=(address, 50000)
            )
            return stack.enter_context(client)

        yield make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "certificate.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.fixture(scope="session")
def site():
    """Serve an application from a thread over a real socket, and return its address."""
    with ExitStack() as stack:

        def serve(index, **settings):
            listening = stack.enter_context(running.listen("127.0.0.1", 0))
            config = running.configure(create(index, **settings))
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()

            def stop():
                server.should_exit = server.force_exit = True
                thread.join(10)

            stack.callback(stop)
            wait_for(lambda: server.started)
            return running.url_of(listening)

        yield serve


@pytest.fixture(scope="session")
def small_index(tmp_path_factory):
    """An index of small images by an untrained network. Tests that change it must copy it."""
    import torch
    from fake_index import picture

    from nearfar import networks
    from nearfar.search import Index

    folder = tmp_path_factory.mktemp("index")
    for number in range(24):
        place = folder / "pictures" / f"class {number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number}.png")
    torch.manual_seed(0)
    model = networks.create("small_cnn", dim=8, channels=3, size=16)
    Index.build(model, folder / "pictures", out=folder / "small.index", device="cpu").close()
    return folder / "small.index"
