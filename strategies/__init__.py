"""fedconcord's Flower strategies for heterogeneous federated learning."""

from . import solvers
from .base import RoundsFailed, UpdateStrategy
from .baselines.afl import AFL
from .baselines.conflictfree import ConFIG
from .baselines.fedavg import FedAvg
from .baselines.fedavgm import FedAvgM
from .baselines.fedfv import FedFV
from .baselines.fedlf import FedLF
from .baselines.fedmgda import FedMGDA
from .baselines.fednova import FedNova
from .baselines.fedopt import FedAdagrad, FedAdam, FedYogi
from .baselines.fedprox import FedProx
from .baselines.local import Local
from .baselines.normalised_momentum import NormalisedMomentum
from .baselines.oracle import OracleFedAvg
from .baselines.qfedavg import QFedAvg
from .baselines.robust import FedMedian, FedTrimmedAvg, Krum
from .checkpointed import Checkpointed
from .clair import CLAIR
from .craft import CRAFT
from .fedref import FedRef
from .layers import Layer, LayerMap
from .message import MessageStrategy
from .ordering import partition_order
from .sampling import NotEnoughClients
from .span import SpanStrategy
from .updates import ClientUpdates, LayerDirection

__all__ = [
    "AFL",
    "CLAIR",
    "CRAFT",
    "ConFIG",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedFV",
    "FedLF",
    "FedMGDA",
    "FedMedian",
    "FedNova",
    "FedProx",
    "FedRef",
    "FedTrimmedAvg",
    "FedYogi",
    "Krum",
    "Local",
    "NormalisedMomentum",
    "OracleFedAvg",
    "QFedAvg",
    "UpdateStrategy",
    "SpanStrategy",
    "Checkpointed",
    "ClientUpdates",
    "Layer",
    "LayerDirection",
    "LayerMap",
    "MessageStrategy",
    "NotEnoughClients",
    "RoundsFailed",
    "partition_order",
    "solvers",
]
