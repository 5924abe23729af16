"""The ops: their table, and what follows from a row of it.

`table` has the rows, those for training from `training_rows`, of what `row` defines; a node's attributes are checked as
a `router_config`, an `experts_config` or a `training_config`; `schemas` teaches the rows to ONNX.
"""

from ort_moe.ops.row import ACTIVATION_TYPES as ACTIVATION_TYPES
from ort_moe.ops.row import ROUTING_MAPS as ROUTING_MAPS
from ort_moe.ops.row import Attribute as Attribute
from ort_moe.ops.row import AttributeValue as AttributeValue
from ort_moe.ops.row import Op as Op
from ort_moe.ops.row import Tensor as Tensor
from ort_moe.ops.table import CONVERTED_FROM as CONVERTED_FROM
from ort_moe.ops.table import DOMAIN as DOMAIN
from ort_moe.ops.table import FINALIZE_ROUTING as FINALIZE_ROUTING
from ort_moe.ops.table import FUSED_EXPERTS as FUSED_EXPERTS
from ort_moe.ops.table import FUSED_ROUTER as FUSED_ROUTER
from ort_moe.ops.table import GATHER_FINALIZE as GATHER_FINALIZE
from ort_moe.ops.table import OPS as OPS
from ort_moe.ops.table import PERMUTE_TOKENS as PERMUTE_TOKENS
from ort_moe.ops.table import ROUTER_PROBS as ROUTER_PROBS
from ort_moe.ops.table import RUNTIME_VERSION as RUNTIME_VERSION
from ort_moe.ops.table import SCALED as SCALED
from ort_moe.ops.table import SHARED_GATE_ROUTER as SHARED_GATE_ROUTER
from ort_moe.ops.table import VERSION as VERSION
from ort_moe.ops.training_rows import AUX_LOSS as AUX_LOSS
from ort_moe.ops.training_rows import ROUTER_SCORES as ROUTER_SCORES
