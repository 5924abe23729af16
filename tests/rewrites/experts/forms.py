"""Experts in every form: functions from how the parts of a block are spelt to its nodes, by the form's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tests.rewrites.blocks import EXPERTS
from tests.rewrites.experts.texts import SORT, UNSORT, WEIGH_SORTED, ranges

if TYPE_CHECKING:
    from tests.rewrites.experts.spellings import Spelling


def _batched(spelling: Spelling) -> str:
    def layer(number: int, rows: str) -> str:
        axis = "one" if spelling.transposed else "minus1"
        operands = f"column{number}, matrices{number}" if spelling.transposed else f"matrices{number}, column{number}"
        text = f"""
            matrices{number} = Gather <axis = 0> (fc{number}, list)
            column{number} = Unsqueeze ({rows}, {axis})
            product{number} = MatMul ({operands})
            bare{number} = Squeeze (product{number}, {axis})"""
        return text + (
            f"\n row{number} = Gather (bias{number}, list)\n made{number} = Add (bare{number}, row{number})"
            if spelling.bias
            else f"\n made{number} = Identity (bare{number})"
        )

    return f"""
        xk = Unsqueeze (x, one)
        copies = Tile (xk, tile_k)
        rows = Reshape (copies, rows_of_x)
        list = Reshape (ids, minus1)
        {layer(1, "rows")}
        {spelling.between()}
        {layer(2, "active")}
        flat_weights = Reshape (weights, minus1)
        weight_column = Unsqueeze (flat_weights, minus1)
        weighted = Mul (made2, weight_column)
        by_token = Reshape (weighted, by_token_shape)
        routed = ReduceSum <keepdims = 0> (by_token, one)"""


def _grouped(spelling: Spelling) -> str:
    def layer(number: int, rows: str) -> str:
        lines = []
        pieces = ", ".join(f"m{number}_{e}" for e in range(EXPERTS))
        lines.append(f"{pieces} = Split <axis = 0, num_outputs = {EXPERTS}> (stack{number})")
        for e in range(EXPERTS):
            lines.append(f"r{number}_{e} = Gather ({rows}, range{e})")
            lines.append(f"w{number}_{e} = Squeeze (m{number}_{e}, start)")
            lines.append(f"p{number}_{e} = MatMul (r{number}_{e}, w{number}_{e})")
        parts = ", ".join(f"p{number}_{e}" for e in range(EXPERTS))
        lines.append(f"bare{number} = Concat <axis = 0> ({parts})")
        if spelling.bias:
            lines += [f"row{number} = Gather (bias{number}, sorted)", f"made{number} = Add (bare{number}, row{number})"]
        else:
            lines.append(f"made{number} = Identity (bare{number})")
        return "\n".join(lines)

    turn = "Identity" if spelling.transposed else "Transpose <perm = [0, 2, 1]>"
    return f"""
        stack1 = {turn} (fc1)
        stack2 = {turn} (fc2)
        list = Reshape (ids, minus1)
        {SORT.replace("one_float", "one_choice")}
        {ranges()}
        {layer(1, "rows")}
        {spelling.between()}
        {layer(2, "active")}
        {WEIGH_SORTED}
        {UNSORT.replace("y =", "routed =")}"""


def _dense(spelling: Spelling, *, on_input: bool) -> str:
    turn = "Identity" if spelling.transposed else "Transpose <perm = [0, 2, 1]>"
    text = f"\n stack1 = {turn} (fc1)\n stack2 = {turn} (fc2)"
    if spelling.bias:
        text += "\n row1 = Unsqueeze (bias1, one)\n row2 = Unsqueeze (bias2, one)"
    rows = "x"
    if on_input:
        text += """
            copies = Tile (x, tile_experts)
            column = Reshape (by_expert, column_shape)
            weighed = Mul (copies, column)
            rows = Reshape (weighed, by_expert_shape)"""
        rows = "rows"

    def layer(number: int, rows: str) -> str:
        bias = f"Add (bare{number}, row{number})" if spelling.bias else f"Identity (bare{number})"
        return f"\n bare{number} = MatMul ({rows}, stack{number})\n made{number} = {bias}"

    text += layer(1, rows) + spelling.between() + layer(2, "active")
    if on_input:
        return text + "\n routed = ReduceSum <keepdims = 0> (made2, start)"
    return (
        text
        + """
        column = Unsqueeze (by_expert, minus1)
        weighted = Mul (made2, column)
        routed = ReduceSum <keepdims = 0> (weighted, start)"""
    )


def _single(spelling: Spelling, term: Callable[[int, str, str], str], start: str = "", total: str = "zeros") -> str:
    """The experts one by one; `term` weighs what one returns, and adds it to the total."""
    text = start

    def layer(number: int, rows: str, e: int) -> str:
        if spelling.bias:
            if spelling.transposed:
                return f"\n made{number}{e} = Gemm ({rows}, fc{number}_{e}, bias{number}_{e})"
            return (
                f"\n t{number}{e} = Transpose <perm = [1, 0]> (fc{number}_{e})"
                f"\n bare{number}{e} = MatMul ({rows}, t{number}{e})"
                f"\n made{number}{e} = Add (bias{number}_{e}, bare{number}{e})"
            )
        if spelling.transposed:
            return f"\n made{number}{e} = MatMul ({rows}, fc{number}_{e})"
        return f"\n made{number}{e} = Gemm <transB = 1> ({rows}, fc{number}_{e})"

    for e in range(EXPERTS):
        after = "routed" if e == EXPERTS - 1 else f"total{e}"
        before, behind = term(e, total, after).split("EXPERT\n")
        rows = f"rows{e}" if f"rows{e} =" in before else "x"
        text += before + layer(1, rows, e) + spelling.between(str(e)) + layer(2, f"active{e}", e) + "\n" + behind
        total = after
    return text


def _compared(e: int, total: str, after: str) -> str:
    return f"""EXPERT
        is{e} = Equal (ids, number{e})
        masked{e} = Where (is{e}, weights, none_chosen)
        share{e} = ReduceSum <keepdims = 1> (masked{e}, minus1)
        term{e} = Mul (made2{e}, share{e})
        {after} = Add ({total}, term{e})"""


def _by_table(e: int, total: str, after: str) -> str:
    return f"""EXPERT
        share{e} = Slice (scattered, place{e}, place{e + 1}, minus1)
        term{e} = Mul (share{e}, made2{e})
        {after} = Add ({total}, term{e})"""


def _by_row_of_table(e: int, total: str, after: str) -> str:
    return f"""EXPERT
        row{e} = Gather (by_expert, number{e})
        share{e} = Unsqueeze (row{e}, minus1)
        term{e} = Mul (made2{e}, share{e})
        {after} = Add (term{e}, {total})"""


ONE_HOT = """
    table = OneHot <axis = -1> (ids, all_experts, off_on)
    turned = Transpose <perm = [2, 1, 0]> (table)
    x_shape = Shape (x)
    zero_rows = Expand (none_chosen, x_shape)"""
EQUALS = """
    apart_ids = Unsqueeze (ids, minus1)
    equal = Equal (apart_ids, each_expert)
    table = Cast <to = 7> (equal)
    turned = Transpose <perm = [2, 1, 0]> (table)
    x_shape = Shape (x)
    zero_rows = Expand (none_chosen, x_shape)"""


def _dispatched(e: int, total: str, after: str) -> str:
    """As torch's exporter writes index_add."""
    return f"""
        mask{e} = Gather (turned, number{e})
        found{e} = NonZero (mask{e})
        pairs_of{e} = Transpose <perm = [1, 0]> (found{e})
        slot{e} = Slice (pairs_of{e}, place0, place1, one)
        token{e} = Slice (pairs_of{e}, place1, place2, one)
        flat_token{e} = Squeeze (token{e}, one)
        rows{e} = Gather (x, flat_token{e})
        EXPERT
        at{e} = Concat <axis = -1> (token{e}, slot{e})
        apart_weights{e} = Unsqueeze (weights, two)
        share{e} = GatherND (apart_weights{e}, at{e})
        term{e} = Mul (made2{e}, share{e})
        {after} = ScatterND <reduction = "add"> ({total}, token{e}, term{e})"""


def _dispatched_apart(e: int, total: str, after: str) -> str:
    """As its older exporter, which traces, does."""
    return f"""
        row_mask{e} = Gather (turned, number{e})
        mask{e} = Cast <to = 9> (row_mask{e})
        found{e} = NonZero (mask{e})
        pairs_of{e} = Transpose <perm = [1, 0]> (found{e})
        slot_column{e}, token_column{e} = Split <axis = 1, num_outputs = 2> (pairs_of{e})
        slot{e} = Squeeze (slot_column{e}, one)
        token{e} = Squeeze (token_column{e}, one)
        x1{e} = Unsqueeze (x, place0)
        rows1{e} = Gather <axis = 1> (x1{e}, token{e})
        rows{e} = Reshape (rows1{e}, rows_of_x)
        EXPERT
        list_of_weights{e} = Reshape (weights, column_shape)
        base{e} = Mul (token{e}, two)
        at{e} = Add (slot{e}, base{e})
        share{e} = Gather (list_of_weights{e}, at{e})
        term{e} = Mul (made2{e}, share{e})
        first_row{e} = Slice ({total}, corner, first_end, both)
        first_shape{e} = Shape (first_row{e})
        spread{e} = Expand (term{e}, first_shape{e})
        token_again{e} = Unsqueeze (token{e}, minus1)
        spread_shape{e} = Shape (spread{e})
        spread_token{e} = Expand (token_again{e}, spread_shape{e})
        total_shape{e} = Shape ({total})
        empty{e} = Expand (none_chosen, total_shape{e})
        put{e} = ScatterElements <axis = 0> (empty{e}, spread_token{e}, spread{e})
        {after} = Add ({total}, put{e})"""


def _batched_einsum(spelling: Spelling) -> str:
    """Choices are an axis of their own."""

    def layer(number: int, rows: str, letters: str) -> str:
        matrices = "tkdn" if spelling.transposed else "tknd"
        text = f"""
            matrices{number} = Gather <axis = 0> (fc{number}, ids)
            bare{number} = Einsum <equation = "{letters},{matrices}->tkn"> ({rows}, matrices{number})"""
        if not spelling.bias:
            return text + f"\n made{number} = Identity (bare{number})"
        return text + f"\n row{number} = Gather (bias{number}, ids)\n made{number} = Add (row{number}, bare{number})"

    between = spelling.between()
    return f"""
        {layer(1, "x", "td")}
        {between}
        {layer(2, "active", "tkd")}
        routed = Einsum <equation = "tk,tkn->tn"> (weights, made2)"""


def _dense_einsum(spelling: Spelling) -> str:
    def layer(number: int, rows: str, letters: str) -> str:
        matrices = "edn" if spelling.transposed else "end"
        text = f"""
            bare{number} = Einsum <equation = "{matrices}, {letters} -> etn"> (fc{number}, {rows})"""
        if not spelling.bias:
            return text + f"\n made{number} = Identity (bare{number})"
        text += f"\n row{number} = Unsqueeze (bias{number}, one)"
        return text + f"\n made{number} = Add (bare{number}, row{number})"

    return f"""
        {layer(1, "x", "td")}
        {spelling.between()}
        {layer(2, "active", "etd")}
        routed = Einsum <equation = "eth,te->th"> (made2, scattered)"""


FORMS: Mapping[str, Callable[[Spelling], str]] = {
    "batched": _batched,
    "grouped": _grouped,
    "batched by Einsum": _batched_einsum,
    "dense by Einsum": _dense_einsum,
    "dense": lambda spelling: _dense(spelling, on_input=False),
    "dense, weights on the input": lambda spelling: _dense(spelling, on_input=True),
    "unrolled": lambda spelling: _single(spelling, _compared),
    "unrolled, by columns of a table": lambda spelling: _single(spelling, _by_table),
    "unrolled, by rows of a table": lambda spelling: _single(spelling, _by_row_of_table),
    "dispatched": lambda spelling: _single(spelling, _dispatched, ONE_HOT, "zero_rows"),
    "dispatched by comparison": lambda spelling: _single(spelling, _dispatched, EQUALS, "zero_rows"),
    "dispatched, put among zeros": lambda spelling: _single(spelling, _dispatched_apart, ONE_HOT, "zero_rows"),
}
