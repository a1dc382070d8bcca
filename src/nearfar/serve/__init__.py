"""HTTP server with a JSON API and a search page for an index.

It listens on the loopback interface only, unless it is given another host, which requires a token.
"""

from nearfar.serve.app import create
from nearfar.serve.limits import Limits

__all__ = ["Limits", "create"]
