"""How good an embedding is, measured on classes it has not seen.

>>> import torch, nearfar as nf
>>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
>>> nf.metrics.retrieval(embeddings, torch.tensor([0, 0, 1, 1]), ks=(1,))
{'recall@1': 1.0}
"""

from nearfar.metrics.retrieval import retrieval

__all__ = ["retrieval"]
