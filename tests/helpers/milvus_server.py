"""A real Milvus server, which can be killed and started again, and a slow line to it."""

import contextlib
import socket
import threading

# How often the parts of the server look at each other, and for how long a server that was killed counts as running.
# With the defaults of up to a second, and of 30 seconds, tests would mostly wait.
SETTINGS = {
    "proxy.timeTickInterval": 50,  # milliseconds
    "queryCoord.checkInterval": 50,
    "queryCoord.distPullInterval": 50,
    "common.session.ttl": 10,  # seconds
}


class Server:
    """A Milvus server with its data in a folder; it keeps its port when it is started again."""

    def __init__(self, folder):
        from milvus import MilvusServer

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._server = MilvusServer(data_dir=str(folder), proxy_port=self.port)
        self._server.config.try_bind_port = _bound
        for name, value in SETTINGS.items():
            self._server.config.set(name, value)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self._server.start()

    def kill(self):
        """As ``kill -9`` does."""
        process, self._server.server_proc = self._server.server_proc, None
        process.kill()
        process.wait()

    def stop(self):
        self._server.stop()


def _bound(port):
    """A socket on a port that is free, or was used by a server that was killed; None for other ports."""
    try:
        return socket.create_server(("127.0.0.1", port))  # allows addresses that the system still keeps
    except OSError:
        return None


class SlowLine:
    """A proxy of a port of this machine, whose answers come ``seconds`` late."""

    def __init__(self, port):
        self.seconds = 0.0
        self._port, self._done = port, threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._done.set()
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source, target, is_answer):
        with contextlib.suppress(OSError), source, target:
            while part := source.recv(1 << 16):
                if is_answer and self._done.wait(self.seconds):
                    return
                target.sendall(part)
