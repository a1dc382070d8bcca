"""Networks: backbones with the keys of their published weights, pooling, heads, levels, ensembles."""

from nearfar.networks.backbone import LEVELS, Backbone
from nearfar.networks.bn_inception import BNInception
from nearfar.networks.efficientnet_lite import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2
from nearfar.networks.embedder import Embedder
from nearfar.networks.ensemble import Ensemble
from nearfar.networks.exporting import export
from nearfar.networks.googlenet import GoogLeNet
from nearfar.networks.mobilenet_v2 import MobileNetV2
from nearfar.networks.pooling import GeM, Pooling
from nearfar.networks.registry import create, create_backbone, defaults, get, names, register
from nearfar.networks.resnet import ResNet18, ResNet50
from nearfar.networks.saving import load, save
from nearfar.networks.small import MLP, Linear, SmallCNN

__all__ = [
    "LEVELS",
    "MLP",
    "BNInception",
    "Backbone",
    "EfficientNetLite0",
    "EfficientNetLite1",
    "EfficientNetLite2",
    "Embedder",
    "Ensemble",
    "GeM",
    "GoogLeNet",
    "Linear",
    "MobileNetV2",
    "Pooling",
    "ResNet18",
    "ResNet50",
    "SmallCNN",
    "create",
    "create_backbone",
    "defaults",
    "export",
    "get",
    "load",
    "names",
    "register",
    "save",
]
