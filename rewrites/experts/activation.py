"""What stands between the two layers of the experts: which activation, of which halves of the first layer's rows.

Exporters spell activations out: silu as x * Sigmoid(x), gelu by its error function or its tanh. The product that makes
the second layer's input is taken apart into its factors; each but a constant is either a function that an activation is
made of or linear in one of the halves, and what they are functions of is read as a polynomial, so that it does not
matter how it is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ort_moe.graphs.node_kinds import CONTRIB
from ort_moe.ops import AttributeValue
from ort_moe.rewrites.experts.halves import Half, read_half
from ort_moe.rewrites.experts.tokens import named, plain
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.values import is_op, label, may_spread, operands, scalar

_TOLERANCE = {ir.DataType.FLOAT: 1e-5, ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}
"""Of the constants of an activation, which are rounded to the type in which it is computed."""

_ERF = {1: math.sqrt(0.5)}
_TANH = {1: math.sqrt(2.0 / math.pi), 3: math.sqrt(2.0 / math.pi) * 0.044715}
_TWICE_TANH = {power: 2.0 * coefficient for power, coefficient in _TANH.items()}
"""Of the sigmoid that is (tanh + 1) / 2."""
_OTHER_FUNCTIONS = (
    "Abs", "Celu", "Elu", "Erf", "Exp", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "PRelu", "Reciprocal",
    "Selu", "Softmax", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu", "Where",
)  # fmt: skip
"""Functions of which an activation may be made that FusedExperts has not."""
_SLOPES = {(CONTRIB, "QuickGelu"): 1.702, ("", "Swish"): 1.0}
"""Operators that are x * sigmoid(alpha * x), with what alpha is where it is left out."""
_HIGHEST_POWER = 3
_DEEPEST = 8
"""Steps of a polynomial; that of gelu's tanh has 5."""
_MOST_FACTORS = 8


@dataclass(frozen=True)
class Activation:
    """An activation, read.

    Attributes:
        rows: What the first layer made, flat rows of N; or the gates alone, where the values come from elsewhere.
        attributes: Those of FusedExperts that it decides.
        value_rows: The values, where they are not a half of the same rows.
        value_first: Whether the values are the first half of the rows, or their even elements.
    """

    rows: ir.Value
    attributes: Mapping[str, AttributeValue]
    value_rows: ir.Value | None = None
    value_first: bool = False


@dataclass
class _Polynomial:
    """A polynomial in one value; the value is None where it is a constant."""

    of: ir.Value | None
    coefficients: dict[int, float] = field(default_factory=dict)

    def is_close(self, expected: Mapping[int, float], tolerance: float) -> bool:
        powers = {*expected, *self.coefficients}
        return all(
            math.isclose(self.coefficients.get(n, 0.0), expected.get(n, 0.0), rel_tol=tolerance, abs_tol=1e-12)
            for n in powers
        )


@dataclass
class _Factor:
    """A factor: a function ("linear": none) of a polynomial."""

    function: str
    argument: _Polynomial


def read_activation(value: ir.Value, dtype: ir.DataType, width: int) -> Activation:
    """Reads what makes the rows that the second layer takes.

    Args:
        value: Rows of I.
        dtype: Of the experts.
        width: N of the first layer.

    Raises:
        Refusal: FusedExperts has no such activation.
    """
    value = plain(value, dtype)
    factor, factors = _factors(value, dtype, value)
    for each in factors:
        made_by = None if each.argument.of is None else each.argument.of.producer()
        if made_by is not None and is_op(made_by, *_OTHER_FUNCTIONS):
            raise _unknown(value, f"{label(made_by)} is among its factors")
    constants = sum(each.argument.of is None for each in factors)
    functions = [each for each in factors if each.function != "linear"]
    linear = [each for each in factors if each.function == "linear"]
    tolerance = _TOLERANCE[dtype]
    if constants:
        raise _unknown(value, "a factor is a constant")
    of = {id(each.argument.of): each.argument.of for each in functions}
    if len(of) > 1:
        raise _unknown(value, "its functions are of several values")
    if of:
        (gate,) = of.values()
        assert gate is not None
        beside = [each for each in linear if each.argument.of is gate and each.argument.is_close({1: 1.0}, 0.0)]
        others = [each for each in linear if each not in beside]
        attributes = _named(value, functions, len(beside), factor, tolerance)
    else:
        if not linear or not math.isclose(factor, 1.0):
            raise _unknown(value, "no activation is among its factors")
        # Without an activation the halves are alike, but for what is added to the value.
        gates = [each for each in linear if each.argument.is_close({1: 1.0}, 0.0)]
        if not gates:
            raise _unknown(value, "no activation is among its factors")
        # The gate has no lower limit; where both have none, either is.
        gates = [
            each for each in gates if each.argument.of and _limited(each.argument.of, dtype)[1] == -math.inf
        ] or gates
        first = next((each for each in gates if _is_first_half(each.argument.of, dtype, width)), gates[0])
        gate, attributes = first.argument.of, {"activation": "identity"}
        assert gate is not None
        others = [each for each in linear if each is not first]
    if len(others) > 1:
        raise _unknown(value, "it has too many factors")
    if not others:
        if _limited(gate, dtype)[0] is not gate:
            raise _unknown(value, "its input is limited, but not gated")
        return Activation(gate, {**attributes, "gated": 0})
    return _gated(value, gate, others[0], attributes, dtype, width)


def _gated(
    value: ir.Value,
    gate: ir.Value,
    other: _Factor,
    attributes: Mapping[str, AttributeValue],
    dtype: ir.DataType,
    width: int,
) -> Activation:
    polynomial = other.argument
    if polynomial.of is None or polynomial.of is gate or not math.isclose(polynomial.coefficients.get(1, 0.0), 1.0):
        raise _unknown(value, "what it multiplies is not the other half")
    if set(polynomial.coefficients) - {0, 1}:
        raise _unknown(value, "what it multiplies is not the other half")
    beta = polynomial.coefficients.get(0, 0.0)
    gate_source, gate_least, gate_most = _limited(gate, dtype)
    value_source, value_least, value_most = _limited(polynomial.of, dtype)
    limits, limit = (gate_least, gate_most, value_least, value_most), 0.0
    if limits != (-math.inf, math.inf, -math.inf, math.inf):
        limit = gate_most
        if limits != (-math.inf, limit, -limit, limit) or not 0.0 < limit < math.inf:
            told = f"{gate_least:g} .. {gate_most:g}, the value to {value_least:g} .. {value_most:g}"
            raise _unknown(value, f"the gate is limited to {told}")
    first, second = (read_half(plain(each, dtype), width) for each in (gate_source, value_source))
    attributes = {**attributes, "gated": 1, "beta": beta, "limit": limit}
    if first is None and second is None:
        alone = {**attributes, "gate_layout": "concat"}
        return Activation(plain(gate_source, dtype), alone, plain(value_source, dtype))
    if first is None or second is None:
        sentence = f"{named(gate_source)} and {named(value_source)} are not the halves of one layer's rows"
        raise Refusal(sentence, "experts-form")
    rows = _rows_of_halves(first, second, dtype)
    if rows is None:
        told = f"the gate {named(gate_source)} and the value {named(value_source)}"
        raise Refusal(f"{told} are not the two halves of the same rows", "experts-form")
    return Activation(rows, {**attributes, "gate_layout": first.layout}, value_first=first.place == 1)


def _is_first_half(value: ir.Value | None, dtype: ir.DataType, width: int) -> bool:
    half = None if value is None else read_half(_limited(value, dtype)[0], width)
    return half is not None and half.place == 0


def _rows_of_halves(first: Half, second: Half, dtype: ir.DataType) -> ir.Value | None:
    if first.layout != second.layout or first.place == second.place:
        return None
    rows = plain(first.rows, dtype)
    return rows if plain(second.rows, dtype) is rows else None


def _named(
    value: ir.Value, functions: list[_Factor], beside: int, factor: float, tolerance: float
) -> dict[str, AttributeValue]:
    """The activation that functions of the gate, the gate itself so many times, and a constant factor make."""
    names = sorted(each.function for each in functions)
    arguments = [each.argument for each in functions]

    def is_factor(expected: float) -> bool:
        return math.isclose(factor, expected, rel_tol=tolerance)

    is_plain = all(argument.is_close({1: 1.0}, 0.0) for argument in arguments)
    if names == ["sigmoid"] and beside == 1 and is_factor(1.0):
        if set(arguments[0].coefficients) <= {1}:
            return {"activation": "silu", "alpha": arguments[0].coefficients.get(1, 0.0)}
        if arguments[0].is_close(_TWICE_TANH, tolerance):
            return {"activation": "gelu_tanh"}
    if names == ["erf + 1"] and beside == 1 and is_factor(0.5) and arguments[0].is_close(_ERF, tolerance):
        return {"activation": "gelu"}
    if names == ["tanh + 1"] and beside == 1 and is_factor(0.5) and arguments[0].is_close(_TANH, tolerance):
        return {"activation": "gelu_tanh"}
    if is_plain and is_factor(1.0) and beside == 0:
        if names in (["gelu"], ["gelu_tanh"], ["relu"], ["silu"]):
            return {"activation": names[0]}
        if names == ["relu", "relu"]:
            return {"activation": "relu2"}
    if is_plain and is_factor(1.0) and beside == 1 and names == ["relu"]:
        return {"activation": "relu2"}  # what is below zero is multiplied with zero
    raise _unknown(value, f"it is made of {', '.join(names)}")


def _factors(value: ir.Value, dtype: ir.DataType, whole: ir.Value) -> tuple[float, list[_Factor]]:
    """The constant factor and the others."""
    found: list[_Factor] = []
    factor, queue = 1.0, [value]
    while queue:
        each = plain(queue.pop(), dtype)
        node = each.producer()
        if is_op(node, "Mul", "Div"):
            assert node is not None
            left, right = operands(node)
            number = scalar(right)
            if number is not None and number != 0.0:
                factor = factor * number if node.op_type == "Mul" else factor / number
                queue.append(left)
                continue
            number = scalar(left)
            if number is not None and node.op_type == "Mul":
                factor *= number
                queue.append(right)
                continue
            if node.op_type == "Mul":
                if may_spread(left, right):
                    raise _unknown(whole, f"{label(node)} may spread one of its operands over the other")
                queue += [left, right]
                continue
            sigmoid = None if may_spread(left, right) else _reciprocal(right, dtype)
            if sigmoid is not None:
                factor, found = factor * (1.0 if number is None else number), [*found, sigmoid]
                queue += [left] if number is None else []
                continue
        if is_op(node, "Reciprocal") and node is not None and (sigmoid := _reciprocal(operands(node)[0], dtype)):
            found.append(sigmoid)
            continue
        if is_op(node, "Pow") and node is not None and scalar(node.inputs[1]) == 2.0:
            queue += [operands(node)[0]] * 2
            continue
        if node is not None and (node.domain, node.op_type) in _SLOPES:
            default = _SLOPES[node.domain, node.op_type]
            source, slope = operands(node)[0], node.attributes.get_float("alpha", default)
            found.append(_Factor("sigmoid", _scaled(_polynomial(source, dtype), slope)))
            queue.append(source)
            continue
        times, each_factor = _factor(each, node, dtype)
        factor *= times
        found.append(each_factor)
        if len(found) > _MOST_FACTORS:
            raise _unknown(whole, "it has too many factors")
    return factor, found


def _factor(value: ir.Value, node: ir.Node | None, dtype: ir.DataType) -> tuple[float, _Factor]:
    """The factor that a value is, and what it is multiplied with."""
    source = None if node is None or not node.inputs else node.inputs[0]
    if node is not None and source is not None and (node.domain, len(operands(node))) == (CONTRIB, 1):
        kind = {"Gelu": "gelu", "FastGelu": "gelu_tanh"}.get(node.op_type)
        if kind is not None:
            return 1.0, _Factor(kind, _polynomial(source, dtype))
    if node is not None and source is not None and node.domain == "":
        if node.op_type == "Sigmoid":
            return 1.0, _Factor("sigmoid", _polynomial(source, dtype))
        if node.op_type == "Relu" or _is_relu(node):
            other = source if scalar(source) is None else operands(node)[1]
            return 1.0, _Factor("relu", _polynomial(other, dtype))
        if node.op_type == "Gelu":
            kind = node.attributes.get_string("approximate", "none")
            return 1.0, _Factor("gelu_tanh" if kind == "tanh" else "gelu", _polynomial(source, dtype))
    polynomial = _polynomial(value, dtype)
    made_by = None if polynomial.of is None else polynomial.of.producer()
    if made_by is not None and is_op(made_by, "Erf", "Tanh"):
        times = polynomial.coefficients.get(1, 0.0)
        if times != 0.0 and polynomial.coefficients == {0: times, 1: times}:
            return times, _Factor(f"{made_by.op_type.lower()} + 1", _polynomial(operands(made_by)[0], dtype))
    return 1.0, _Factor("linear", polynomial)


def _reciprocal(value: ir.Value, dtype: ir.DataType) -> _Factor | None:
    """The sigmoid that 1 / value is, if the value is 1 + Exp(-x)."""
    denominator = _polynomial(value, dtype)
    power = None if denominator.of is None else denominator.of.producer()
    if not is_op(power, "Exp") or power is None or denominator.coefficients != {0: 1.0, 1: 1.0}:
        return None
    exponent = _polynomial(operands(power)[0], dtype)
    return None if exponent.of is None else _Factor("sigmoid", _scaled(exponent, -1.0))


def _is_relu(node: ir.Node) -> bool:
    if node.op_type == "Max" and len(node.inputs) == 2:
        return 0.0 in (scalar(node.inputs[0]), scalar(node.inputs[1]))
    if node.op_type == "Clip":
        least, most = _clip_limits(node)
        return least == 0.0 and most == math.inf
    return False


def _polynomial(value: ir.Value, dtype: ir.DataType, depth: int = _DEEPEST) -> _Polynomial:
    """The value as a polynomial in what is no sum or product with constants or itself."""
    value = plain(value, dtype)
    number = scalar(value)
    if number is not None:
        return _Polynomial(None, {0: number})
    node = value.producer() if depth else None
    result: _Polynomial | None = None
    if is_op(node, "Add", "Sub", "Mul", "Div"):
        assert node is not None
        left, right = operands(node)
        if scalar(left) is None and scalar(right) is None and may_spread(left, right):
            return _Polynomial(value, {1: 1.0})
        result = _combined(node.op_type, *(_polynomial(each, dtype, depth - 1) for each in (left, right)))
    elif is_op(node, "Neg"):
        assert node is not None
        result = _combined("Mul", _Polynomial(None, {0: -1.0}), _polynomial(operands(node)[0], dtype, depth - 1))
    elif is_op(node, "Pow"):
        assert node is not None
        exponent, base = scalar(node.inputs[1]), _polynomial(operands(node)[0], dtype, depth - 1)
        if exponent in (2.0, 3.0):
            result = _combined("Mul", base, base)
            result = _combined("Mul", base, result) if exponent == 3.0 and result is not None else result
    return _Polynomial(value, {1: 1.0}) if result is None else result


def _scaled(polynomial: _Polynomial, by: float) -> _Polynomial:
    return _Polynomial(polynomial.of, {n: x * by for n, x in polynomial.coefficients.items()})


def _combined(op_type: str, a: _Polynomial, b: _Polynomial) -> _Polynomial | None:
    """The result of one step; None where it is no polynomial of low degree in one value."""
    if a.of is not None and b.of is not None and a.of is not b.of:
        return None
    of = b.of if a.of is None else a.of
    result: dict[int, float] = {}
    if op_type in ("Add", "Sub"):
        sign = 1.0 if op_type == "Add" else -1.0
        result = {
            n: a.coefficients.get(n, 0.0) + sign * b.coefficients.get(n, 0.0)
            for n in {*a.coefficients, *b.coefficients}
        }
    elif op_type == "Mul":
        for n, x in a.coefficients.items():
            for m, y in b.coefficients.items():
                result[n + m] = result.get(n + m, 0.0) + x * y
    elif b.of is None and b.coefficients.get(0, 0.0) != 0.0:
        result = {n: x / b.coefficients[0] for n, x in a.coefficients.items()}
    else:
        return None
    result = {n: x for n, x in result.items() if x != 0.0}
    return _Polynomial(of, result) if max(result, default=0) <= _HIGHEST_POWER else None


def _limited(value: ir.Value, dtype: ir.DataType) -> tuple[ir.Value, float, float]:
    """What is limited, and to what; the value itself and infinities where nothing is."""
    least, most = -math.inf, math.inf
    while True:
        value = plain(value, dtype)
        node = value.producer()
        if is_op(node, "Clip") and node is not None:
            low, high = _clip_limits(node)
            source = node.inputs[0]
        elif is_op(node, "Min", "Max") and node is not None and len(node.inputs) == 2:
            numbers = [scalar(each) for each in node.inputs]
            number = numbers[0] if numbers[1] is None else numbers[1]
            source = node.inputs[1] if numbers[1] is None else node.inputs[0]
            if number is None:
                return value, least, most
            low, high = (number, math.inf) if node.op_type == "Max" else (-math.inf, number)
        else:
            return value, least, most
        if source is None or math.isnan(low + high) or low > most or high < least:
            return value, least, most
        value, least, most = source, max(least, low), min(most, high)


def _clip_limits(node: ir.Node) -> tuple[float, float]:
    """Lower and upper limit; NaN for one that is not known."""
    limits = []
    for place, default in ((1, -math.inf), (2, math.inf)):
        given = node.inputs[place] if len(node.inputs) > place else None
        number = default if given is None else scalar(given)
        limits.append(math.nan if number is None else number)
    return limits[0], limits[1]


def _unknown(value: ir.Value, why: str) -> Refusal:
    return Refusal(f"{named(value)} is made by no activation of FusedExperts: {why}", "experts-activation")
