"""Routers in training, for PyTorch: the launchers that ONNX Runtime serves with, with gradients.

Each function works on CPU and CUDA tensors as they lie, on the current stream, and is a `torch.library` op: autograd,
`torch.compile`, `torch.export` and, with `onnx_translations()`, `torch.onnx.export` know it. Needs PyTorch, which
ort-moe does not install; nothing else in ort-moe imports this package.
"""

from ort_moe.torch.functions import RouterProbs as RouterProbs
from ort_moe.torch.functions import RouterScores as RouterScores
from ort_moe.torch.functions import aux_loss as aux_loss
from ort_moe.torch.functions import router_probs as router_probs
from ort_moe.torch.functions import router_scores as router_scores
from ort_moe.torch.modules import Router as Router
from ort_moe.torch.onnx_export import onnx_translations as onnx_translations
