"""`ort_moe.diagnose`: can this installation run fused models, and if not, what is in the way?"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ort_moe.errors import OrtMoeError
from ort_moe.installation.environment import installed_wheels, load_cuda_libraries, require_onnxruntime
from ort_moe.ops import OPS
from ort_moe.printing.printable import Printable, table
from ort_moe.running.session import CPU, CUDA, ON_CPU

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
"""Version of the JSON document; any change of its form raises it."""

_CUDA_OF_THE_WHEEL = 13
"""Major version of CUDA that onnxruntime-gpu 1.27 and newer are built for."""

Status = Literal["ok", "note", "unfit"]


@dataclass(frozen=True)
class Examination:
    """One thing looked at.

    Attributes:
        subject: What.
        status: `note` is worth knowing and harmless.
        finding: What was found; where unfit, what to do about it.
    """

    subject: str
    status: Status
    finding: str


@dataclass(frozen=True)
class Diagnosis(Printable):
    """All that was looked at."""

    examinations: tuple[Examination, ...]

    @property
    def fit(self) -> bool:
        """Whether fused models run here."""
        return all(examination.status != "unfit" for examination in self.examinations)

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/doctor.json` describes."""
        return {
            "schema": SCHEMA,
            "fit": self.fit,
            "examinations": [asdict(examination) for examination in self.examinations],
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        listing = table("subject", "", "finding", prose=("finding",))
        for examination in self.examinations:
            style = {"ok": "green", "note": "yellow", "unfit": "bold red"}[examination.status]
            listing.add_row(examination.subject, Text(examination.status, style), Text(examination.finding))
        unfit = [e.subject for e in self.examinations if e.status == "unfit"]
        verdict = Text("fit", "bold green") if self.fit else Text(f"unfit: {', '.join(unfit)}", "bold red")
        return Group(listing, verdict)


def diagnose() -> Diagnosis:
    """Looks at ONNX Runtime, CUDA, our library and each operator; what is broken is reported, not raised."""
    return Diagnosis(tuple(_examine()))


def _examine() -> Iterator[Examination]:
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    supported = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    yield Examination("platform", "ok" if supported else "unfit", machine + ("" if supported else ": Linux is needed"))
    yield _wheels()
    try:
        onnxruntime = require_onnxruntime()
    except OrtMoeError as error:
        yield Examination("ONNX Runtime", "unfit", str(error))
        yield _library(for_cuda=False)
        return
    yield Examination("ONNX Runtime", "ok", f"version {onnxruntime.__version__}")
    examination = _cuda(onnxruntime.get_available_providers())
    cuda = examination.status == "ok"
    yield examination
    library = _library(for_cuda=cuda)
    yield library
    if library.status == "unfit":
        return
    for op_name in OPS:
        yield _operator(op_name, "CPU", ON_CPU)
        if cuda:
            yield _operator(op_name, "CUDA", (CUDA, CPU))


def _wheels() -> Examination:
    wheels = installed_wheels()
    found = " and ".join(f"{name} {version}" for name, version in wheels.items())
    if len(wheels) > 1:
        advice = "they own the same import folder: uninstall both, then install one of them"
        return Examination("wheels", "unfit", f"{found} are installed, and {advice}")
    if not wheels:
        # A build of one's own, or a path on PYTHONPATH, has no metadata; whether it imports is the next question.
        return Examination("wheels", "note", "neither onnxruntime nor onnxruntime-gpu is installed as a wheel")
    return Examination("wheels", "ok", found)


def _cuda(available: list[str]) -> Examination:
    driver = _driver_version()
    if CUDA not in available:
        if driver is None:
            return Examination("CUDA", "note", "this ONNX Runtime has no CUDA provider: models run on the CPU")
        return Examination(
            "CUDA",
            "note",
            f"there is a driver for CUDA {driver[0]}.{driver[1]}, but this ONNX Runtime has no CUDA provider: "
            "install ort-moe[gpu] in place of ort-moe[cpu]",
        )
    if driver is None:
        return Examination(
            "CUDA", "unfit", "ONNX Runtime has a CUDA provider, but no NVIDIA driver (libcuda.so.1) loads"
        )
    if driver[0] < _CUDA_OF_THE_WHEEL:
        return Examination(
            "CUDA",
            "unfit",
            f"the driver knows CUDA {driver[0]}.{driver[1]}, onnxruntime-gpu needs CUDA {_CUDA_OF_THE_WHEEL}: "
            "upgrade the driver",
        )
    reason = _silently_on_cpu()
    if reason is not None:
        return Examination("CUDA", "unfit", f"a session that asks for CUDA runs on the CPU: {reason}")
    return Examination("CUDA", "ok", f"driver for CUDA {driver[0]}.{driver[1]}, a session runs on the GPU")


def _driver_version() -> tuple[int, int] | None:
    """Newest CUDA that the driver knows; None without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _silently_on_cpu() -> str | None:
    """Why a session that asks for CUDA does not get it; None where it does."""
    import onnxruntime
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", [x], [y])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    load_cuda_libraries()
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CUDA, CPU])
    except Exception as error:  # ORT raises a class of its own for each status code
        from ort_moe.installation.environment import runtime_message

        return runtime_message(error)
    if CUDA in session.get_providers():
        return None
    return (
        f"its libraries of CUDA {_CUDA_OF_THE_WHEEL} (libcudart, libcublas, libcurand, cuDNN) do not load, neither "
        "from the system nor from NVIDIA's packages, which onnxruntime-gpu[cuda,cudnn] brings"
    )


def _library(*, for_cuda: bool) -> Examination:
    from ort_moe.installation.library import build_info, library_path

    try:
        path, info = library_path(), build_info()
    except OrtMoeError as error:
        return Examination("library", "unfit", str(error))
    cuda = info["cuda"]
    if for_cuda and cuda is None:
        return Examination(
            "library", "unfit", f"{path} is built without CUDA: install a wheel with CUDA, or build where nvcc is"
        )
    built = (
        "the CPU alone" if cuda is None else f"the CPU and CUDA {cuda['toolkit']} ({', '.join(cuda['architectures'])})"
    )
    return Examination("library", "ok", f"{path}: version {info['version']}, built for {built} by {info['compiler']}")


def _operator(op_name: str, device: str, providers: tuple[str, ...]) -> Examination:
    from ort_moe.diagnosis.smoke import smoke

    subject = f"{op_name} on {device}"
    try:
        wrong = smoke(op_name, providers)
    except OrtMoeError as error:
        wrong = str(error)
    if wrong is not None:
        return Examination(subject, "unfit", wrong)
    return Examination(subject, "ok", "agrees with the reference")
