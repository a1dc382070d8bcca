"""From files to augmented batches."""

from nearfar.data.dataset import DataSet

__all__ = ["DataSet"]
