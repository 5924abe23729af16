"""Calls CUDA kernels of the library directly, without ONNX Runtime, on device memory given by address.

For code that has its own tensors and streams: PyTorch (`tensor.data_ptr()`, `stream.cuda_stream`), CuPy, benchmarks.
The launches are asynchronous and can be captured into a CUDA graph. `ort_moe.kernels.training` has the ops for
training, which run on the host, too.
"""

from ort_moe.kernels.calls import RoutingMaps as RoutingMaps
from ort_moe.kernels.experts import ExpertLayer as ExpertLayer
from ort_moe.kernels.experts import fused_experts as fused_experts
from ort_moe.kernels.experts import fused_experts_scratch_bytes as fused_experts_scratch_bytes
from ort_moe.kernels.finalize import finalize_routing as finalize_routing
from ort_moe.kernels.finalize import gather_finalize as gather_finalize
from ort_moe.kernels.permute import permute_tokens as permute_tokens
from ort_moe.kernels.permute import permute_tokens_scratch_bytes as permute_tokens_scratch_bytes
from ort_moe.kernels.permute import routing_maps as routing_maps
from ort_moe.kernels.permute import routing_maps_scratch_bytes as routing_maps_scratch_bytes
from ort_moe.kernels.router import fused_router as fused_router
from ort_moe.kernels.router import router_scratch_bytes as router_scratch_bytes
from ort_moe.kernels.router import shared_gate_router as shared_gate_router
from ort_moe.kernels.router import shared_gate_router_scratch_bytes as shared_gate_router_scratch_bytes
