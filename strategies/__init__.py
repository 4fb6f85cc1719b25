"""fedconcord's Flower strategies for heterogeneous federated learning."""

from . import solvers
from .base import RoundsFailed, UpdateStrategy
from .baselines.fedavg import FedAvg
from .baselines.fedavgm import FedAvgM
from .craft import CRAFT
from .layers import Layer, LayerMap
from .ordering import partition_order
from .sampling import NotEnoughClients
from .updates import ClientUpdates

__all__ = [
    "CRAFT",
    "FedAvg",
    "FedAvgM",
    "UpdateStrategy",
    "ClientUpdates",
    "Layer",
    "LayerMap",
    "NotEnoughClients",
    "RoundsFailed",
    "partition_order",
    "solvers",
]
