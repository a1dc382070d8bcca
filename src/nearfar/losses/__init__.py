"""Losses of embeddings and labels: pair-based losses, losses with proxies, and a registry of all of them.

>>> import torch, nearfar as nf
>>> loss = nf.losses.create("multi_similarity", alpha=2.0)
>>> embeddings = torch.randn(8, 16, requires_grad=True)
>>> value = loss(embeddings, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
>>> value.backward()
"""

from typing import Never

from nearfar.losses.adaface import AdaFace
from nearfar.losses.angular import Angular
from nearfar.losses.arcface import ArcFace
from nearfar.losses.barlow_twins import BarlowTwins
from nearfar.losses.base import Loss, PairLoss, param_groups, register
from nearfar.losses.binomial_deviance import BinomialDeviance
from nearfar.losses.center import Center
from nearfar.losses.circle import Circle
from nearfar.losses.contrastive import Contrastive
from nearfar.losses.cosent import CoSENT
from nearfar.losses.cosface import CosFace
from nearfar.losses.diversity import AdversarialRegularizer, Divergence
from nearfar.losses.facility_location import FacilityLocation
from nearfar.losses.fast_ap import FastAP
from nearfar.losses.group import Group
from nearfar.losses.hierarchical_triplet import HierarchicalTriplet
from nearfar.losses.histogram import Histogram
from nearfar.losses.lifted_structure import LiftedStructure, LiftedStructureGeneralized
from nearfar.losses.margin import Margin
from nearfar.losses.matryoshka import Matryoshka
from nearfar.losses.memory import Memory
from nearfar.losses.multi_similarity import MultiSimilarity
from nearfar.losses.multiple import MultipleLosses
from nearfar.losses.n_pair import NPair
from nearfar.losses.nca import NeighborhoodComponents
from nearfar.losses.normalized_softmax import NormalizedSoftmax
from nearfar.losses.nra import NRA
from nearfar.losses.nt_xent import NTXent
from nearfar.losses.pml import LOSSES as PML_LOSSES
from nearfar.losses.proxies import ClassificationLoss, ProxyLoss, ShardedParameter
from nearfar.losses.proxy_anchor import ProxyAnchor
from nearfar.losses.proxy_nca import ProxyNCA
from nearfar.losses.proxy_repel import ProxyRepel
from nearfar.losses.quadruplet import Quadruplet
from nearfar.losses.ranked_list import RankedList
from nearfar.losses.raw import Raw
from nearfar.losses.registry import create, defaults, describe, get, names, summary
from nearfar.losses.regularized import Regularized
from nearfar.losses.relational import RelationalDistillation
from nearfar.losses.smooth_ap import SmoothAP
from nearfar.losses.soft_triple import SoftTriple
from nearfar.losses.softmax import Softmax
from nearfar.losses.spectral_clustering import SpectralClustering
from nearfar.losses.sphereface import SphereFace
from nearfar.losses.sup_con import SupCon
from nearfar.losses.threshold_consistent_margin import ThresholdConsistentMargin
from nearfar.losses.triplet import Triplet
from nearfar.losses.tuplet_margin import TupletMargin
from nearfar.losses.vicreg import VICReg

__all__ = [
    "NRA", "AdaFace", "AdversarialRegularizer", "Angular", "ArcFace", "BarlowTwins", "BinomialDeviance", "Center",
    "Circle", "ClassificationLoss", "CoSENT", "Contrastive", "CosFace", "Divergence", "FacilityLocation", "FastAP",
    "Group", "HierarchicalTriplet", "Histogram", "LiftedStructure", "LiftedStructureGeneralized", "Loss", "Margin",
    "Matryoshka", "Memory", "MultiSimilarity", "MultipleLosses", "NPair", "NTXent", "NeighborhoodComponents",
    "NormalizedSoftmax", "PairLoss", "ProxyAnchor", "ProxyLoss", "ProxyNCA", "ProxyRepel", "Quadruplet", "RankedList",
    "Raw", "Regularized", "RelationalDistillation", "ShardedParameter", "SmoothAP", "SoftTriple", "Softmax",
    "SpectralClustering", "SphereFace", "SupCon", "ThresholdConsistentMargin", "Triplet", "TupletMargin", "VICReg",
    "create", "defaults", "describe", "get", "names", "param_groups", "register", "summary",
]  # fmt: skip


def __getattr__(name: str) -> Never:
    if name in PML_LOSSES:
        raise AttributeError(f"{name} is a class of pytorch-metric-learning; nearfar has {PML_LOSSES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
