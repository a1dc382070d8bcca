"""A server and a page to search with. It binds to this machine alone unless told, and then asks for a token."""

from nearfar.serve.app import create
from nearfar.serve.limits import Limits

__all__ = ["Limits", "create"]
