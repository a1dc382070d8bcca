"""A real Milvus server, which can hang, be killed, and be started again."""

import signal
import socket
from contextlib import contextmanager

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

    @contextmanager
    def hanging(self):
        """Let the server answer nothing, as on a line that is broken."""
        self._server.server_proc.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.server_proc.send_signal(signal.SIGCONT)

    def stop(self):
        self._server.stop()


def _bound(port):
    """A socket on a port that is free, or was used by a server that was killed; None for other ports."""
    try:
        return socket.create_server(("127.0.0.1", port))  # allows addresses that the system still keeps
    except OSError:
        return None
