"""Losses of embeddings and labels.

>>> import torch, nearfar as nf
>>> loss = nf.losses.create("multi_similarity", alpha=2.0)
>>> embeddings = torch.randn(8, 16, requires_grad=True)
>>> value = loss(embeddings, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
>>> value.backward()
"""

from nearfar.losses.base import Loss, PairLoss
from nearfar.losses.binomial_deviance import BinomialDeviance
from nearfar.losses.contrastive import Contrastive
from nearfar.losses.lifted_structure import LiftedStructure, LiftedStructureGeneralized
from nearfar.losses.margin import Margin
from nearfar.losses.n_pair import NPair
from nearfar.losses.nra import NRA
from nearfar.losses.ranked_list import RankedList
from nearfar.losses.raw import MultiSimilarity, Raw
from nearfar.losses.registry import create, defaults, describe, get, names, register, summary
from nearfar.losses.triplet import Triplet

__all__ = [
    "NRA",
    "BinomialDeviance",
    "Contrastive",
    "LiftedStructure",
    "LiftedStructureGeneralized",
    "Loss",
    "Margin",
    "MultiSimilarity",
    "NPair",
    "PairLoss",
    "RankedList",
    "Raw",
    "Triplet",
    "create",
    "defaults",
    "describe",
    "get",
    "names",
    "register",
    "summary",
]
