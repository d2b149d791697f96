"""The relatives of EDiT and DiLoCo, one file each. A new one: its file, and a row in this table."""

from relatives.co2 import CO2
from relatives.eager import Eager
from relatives.noloco import NoLoCo
from relatives.one_bit_edit import OneBitEDiT
from relatives.post_local_sgd import PostLocalSGD
from relatives.qsr import QSR
from relatives.robust import Robust
from relatives.slowmo import SlowMo
from relatives.sparse_loco import SparseLoCo
from relatives.streaming_diloco import StreamingDiLoCo
from relatives.streaming_edit import StreamingEDiT
from relatives.top_k import TopK
from relatives.zero_one_adam import ZeroOneAdam

RELATIVES = {  # --method -> class
    "post_local_sgd": PostLocalSGD,
    "qsr": QSR,
    "slowmo": SlowMo,
    "streaming_diloco": StreamingDiLoCo,
    "co2": CO2,
    "noloco": NoLoCo,
    "streaming_edit": StreamingEDiT,
    "zero_one_adam": ZeroOneAdam,
    "one_bit_edit": OneBitEDiT,
    "sparse_loco": SparseLoCo,
    "top_k": TopK,
    "eager": Eager,
    "robust": Robust,
}
