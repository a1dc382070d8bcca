"""Embedding networks: backbones with published weights, pooling, heads and ensembles.

Example:
    >>> from nearfar import networks
    >>> networks.create("mlp", in_dim=64, dim=16).dim
    16
"""

from nearfar.networks.backbones.base import LEVELS, Backbone
from nearfar.networks.backbones.bn_inception import BNInception
from nearfar.networks.backbones.efficientnet_lite import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2
from nearfar.networks.backbones.external import wrap
from nearfar.networks.backbones.googlenet import GoogLeNet
from nearfar.networks.backbones.mobilenet_v2 import MobileNetV2
from nearfar.networks.backbones.resnet import ResNet18, ResNet50
from nearfar.networks.backbones.small import MLP, Linear, SmallCNN
from nearfar.networks.embedder import Embedder, GeM, Pooling
from nearfar.networks.ensemble import Ensemble
from nearfar.networks.registry import create, create_backbone, defaults, get, names, register
from nearfar.networks.weights.export import export
from nearfar.networks.weights.save import load, save

__all__ = [
    "LEVELS", "MLP", "BNInception", "Backbone", "EfficientNetLite0", "EfficientNetLite1", "EfficientNetLite2",
    "Embedder", "Ensemble", "GeM", "GoogLeNet", "Linear", "MobileNetV2", "Pooling", "ResNet18", "ResNet50", "SmallCNN",
    "create", "create_backbone", "defaults", "export", "get", "load", "names", "register", "save",
    "wrap",
]  # fmt: skip
