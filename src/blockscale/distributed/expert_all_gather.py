"""Experts by all-gather and reduce-scatter: layers 0 and 1 of a mixture, forward and backward, beside communication.

Every rank gets the tokens of all ranks and multiplies the rows that go to its experts, or to its hidden units of them:

    layer 0   tokens [t, K] are gathered; gate and up [M, 2H] of the rows of a rank's tokens when they are there
    layer 1   rows [M, D] of the tokens of a rank are multiplied, summed by gate weight, and sent to that rank

The backward is the dual: gradients of tokens are gathered beside dgrad of layer 1, and those of x are summed over ranks
beside dgrad of layer 0, whose parts they are, and beside both wgrads. Casts, products and saved operands are those of
`autograd.mlp_plan.MLPPlan`: one launch for all rows, or one for the rows of each rank, give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.dtensor import DTensor, unchanged_until_backward
from ..autograd.linear import accumulates_grad, check_weight_operands, main_grad_of, output_dtype
from ..autograd.linear_plan import dgrad, fprop, wgrad
from ..autograd.mlp import swiglu
from ..autograd.mlp_plan import MLPSaved, Weights, swiglu_bias_gradient
from ..autograd.operands import (
    Casts,
    GradScatter,
    NeedsGrad,
    column_sums,
    matrix,
    needed_grads,
    save_operand,
)
from ..autograd.recipe import Recipe
from ..autograd.transforms import no_double_backward
from ..casts.permuted import permute_cast_columns
from ..casts.requantize import requantize_columns
from ..errors import ShardingError, refuse
from ..formats.cast_spec import Cast
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from ..grouped import Routing
from ..grouped.routing import clear_rows, combine_dots, combine_rows, permute_rows
from ..library import empty
from ..nn.experts import GroupedExperts
from . import underflows
from .agreement import check_same_call
from .collectives import reduce_scatter, wait
from .divided_experts import LowCall, check_fused
from .expert_plan import check_low
from .overlap.decision import Work, expert_work, payload_of
from .overlap.expert_rows import ExpertRows, PlacedRows, RowsOfTokens, multiply_rows
from .overlap.expert_sharing import ExpertSharing, experts_of
from .wire import cast_rows

Gradients = tuple[Tensor | None, ...]


def all_gather_experts(
    x: Tensor,
    routing: Routing,
    gate_weights: Tensor,
    call: LowCall,
    sharing: ExpertSharing,
    *,
    low: bool,
) -> Tensor:
    """y [.., D] of this rank's tokens x [.., K], their routing to the experts of all ranks and gate weights [t, k].

    call: weights and biases of this rank's experts or hidden units, a recipe that quantizes all products or none, and
    operands.  low: tokens travel as codes, which wgrad's columns are made from. Collective, and so is its backward.
    """
    weights, biases, recipe, _ = call
    check_recipe(recipe)
    if low:
        check_low(recipe)
    for pair, weight in zip(call.operands, weights, strict=True):
        if pair is not None:
            check_weight_operands(pair, weight)
    first = needed_grads(x, weights[0], biases[0])
    needs = first, needed_grads(x, weights[1], biases[1])._replace(x=any(first))
    wanted = torch.is_grad_enabled() and gate_weights.requires_grad
    shapes = tuple(x.shape), tuple(gate_weights.shape), routing.experts, *(tuple(each.shape) for each in weights)
    facts = *shapes, x.dtype, gate_weights.dtype, recipe.name, low, sharing.link is None, wanted, *needs[0], *needs[1]
    check_same_call(sharing.ranks, x.device, 'experts with overlap="on"', *facts)
    plan = AllGatherExpertsPlan(recipe, needs, output_dtype(x), sharing, low)
    main_grads = main_grad_of(weights[0]), main_grad_of(weights[1])
    args = x, gate_weights, *weights, *biases, *main_grads, routing, call.operands, plan
    y: Any = AllGatherExperts.apply(*args)
    return y


def layer_by_all_gather(
    layer: GroupedExperts, x: Tensor, routing: Routing, gate_weights: Tensor, sharing: ExpertSharing, *, low: bool
) -> Tensor:
    """`all_gather_experts` of a layer that has this rank's experts or hidden units."""
    first, second = layer.gate_up, layer.down
    fused = layer.is_fused and first.recipe == second.recipe
    check_fused(fused=fused, option='overlap="on"', instead='overlap="off"')
    (weight, bias), (other_weight, other_bias) = first.own_parameters(), second.own_parameters()
    operands = first.call_state()[1], second.call_state()[1]
    call = LowCall((weight, other_weight), (bias, other_bias), first.recipe_now, operands)
    shards = [each for each in layer.parameters() if isinstance(each, DTensor)]
    given = [x, gate_weights, weight, other_weight]
    for place, each in enumerate(given):  # not the result: it would be a view, which nothing may change
        if each.requires_grad:
            given[place] = unchanged_until_backward(each, *shards)
            break
    x, gate_weights, *weights = given
    call = call._replace(weights=(weights[0], weights[1]))
    return all_gather_experts(x, routing, gate_weights, call, sharing, low=low)


def works_of(
    tokens: int, topk: int, ranks: int, recipe: Recipe, weights: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Work, ...]:
    """Forward of both layers of experts that are cut, for the model; none if the recipe cannot overlap.  tokens: of all
    ranks.  weights: shapes of a rank's."""
    if _reason_against(recipe) is not None:
        return ()
    (first, second), rest = weights, (tokens, topk, ranks, payload_of(recipe))
    return (
        expert_work("all_gather_grouped_mm", first, *rest),
        expert_work("grouped_mm_reduce_scatter", second, *rest),
    )


def check_recipe(recipe: Recipe) -> None:
    """Raise unless rows of a recipe can arrive one after the other."""
    reason = _reason_against(recipe)
    if reason is not None:
        refuse(
            f"overlap for experts with recipe {recipe.name!r}",
            rule=f"rows are cast as they arrive, each by itself, for all three products or none; {reason}",
            fix='use a recipe such as fp8_blockwise, mxfp8 or bf16, or overlap="off"',
            error=ShardingError,
        )


def _reason_against(recipe: Recipe) -> str | None:
    """Why rows of a recipe cannot arrive one after the other; None if they can."""
    if recipe.is_quantized and None in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        return "this one leaves a product unquantized"
    travelling = (recipe.operand(role) for role in ("fprop_x", "dgrad_dy"))
    scaled = any(each is not None and get_format(each.format).family == "nvfp4" for each in travelling)
    return "this one has tensor scales or rounds stochastically" if scaled or recipe.stochastic else None


class AllGatherExpertsPlan(NamedTuple):
    """Casts, communication and products of one call.  needs: gradients of the first layer and of the second.  dtype:
    of results.  low: tokens travel as codes."""

    recipe: Recipe
    needs: tuple[NeedsGrad, NeedsGrad]
    dtype: torch.dtype
    sharing: ExpertSharing
    low: bool

    def forward(self, x: Tensor, gate_weights: Tensor, routing: Routing, call: LowCall) -> tuple[Tensor, MLPSaved]:
        """y [t, D], and what the backward needs of the rows [M, ..] of all tokens. M is T * k, whichever experts this
        rank has."""
        sharing, recipe, (first_needs, needs) = self.sharing, self.recipe, self.needs
        slots = sharing.route(experts_of(routing), gate_weights)
        quantized, device = recipe.is_quantized, x.device
        spec = Casts(recipe, None, routing).quantized_spec("fprop_x", x) if quantized else None
        sent = cast_rows(x, spec) if self.low and spec is not None else x if quantized else x.to(self.dtype)
        tokens = sharing.gather(sent)
        rows, gates = slots.wait()
        first = second = Casts(recipe, None, rows.routing)
        (weight, other), (bias, other_bias), _, operands = call
        saves = recipe.weight_cast != "twice"
        w_row, w_col = operands[0] or first.weight(weight, save=first_needs.x and saves)
        other_row, other_col = operands[1] or second.weight(other, save=needs.x and saves)
        count = rows.routing.permutation[0].shape[0]

        # layer 0
        placed = PlacedRows(count, x.shape[1], spec and spec.plan, self.dtype, device)
        gate_up = empty((count, weight.shape[1]), self.dtype, device)
        product = self._fprop(weight, bias) if w_row is None else w_row
        of = rows.part(weight.shape[1], x.shape[1], sent.shape[1] * sent.itemsize, quantized)
        for at in tokens.arrivals(rows, of):
            arrived = tokens.values()[at.tokens]
            placed.place(at, arrived if self.low or spec is None else cast_rows(arrived, spec))
            multiply_rows(placed.operand(), product, at, gate_up, bias)
        x_rows = placed.operand()

        # layer 1
        hidden = second.swiglu(gate_up, "fprop_x") if quantized else swiglu(gate_up)
        y_rows = self._rows(count, other.shape[1], rows, device)
        product = self._fprop(other, other_bias) if other_row is None else other_row

        def part(at: RowsOfTokens) -> Tensor:
            multiply_rows(hidden, product, at, y_rows, other_bias)
            return combine_rows(y_rows, at.rows, gates[at.tokens])

        of = rows.part(other.shape[1], other.shape[2], other.shape[1] * self.dtype.itemsize, quantized)
        y = sharing.sum(rows, of, self.dtype, part)
        saved_x, x_col = self._columns(x_rows, tokens.values(), first, x)  # beside the sum
        saved = MLPSaved(
            x=saved_x,
            gate_up=gate_up if needs.x or needs.weight else None,
            gate_up_weight=weight,
            down_weight=other,
            x_col=save_operand(x_col),
            gate_up_col=save_operand(w_col if first_needs.x else None),
            down_col=save_operand(other_col if needs.x else None),
            y=y_rows,
            gate_weights=gates,
            routing=rows.routing,
            recording=None,
        )
        return y.wait(), saved

    def backward(
        self, grad: Tensor, saved: MLPSaved, main_grads: tuple[Tensor | None, Tensor | None], dtype: torch.dtype
    ) -> Gradients:
        """Gradients of x [t, K] in this dtype, of gate weights [t, k], both weights and both biases, from grad [t, D].
        saved.y: None if gate weights need none."""
        sharing, recipe, (first_needs, needs) = self.sharing, self.recipe, self.needs
        routing, gates, gate_up = saved.routing, saved.gate_weights, saved.gate_up
        assert routing is not None
        assert gates is not None
        rows = ExpertRows.of(routing, sharing.tokens, sharing.ranks.size)
        quantized, device, (sorted_tokens, by_slot) = recipe.is_quantized, grad.device, routing.permutation
        weight, other = saved.gate_up_weight, saved.down_weight
        count, casts = sorted_tokens.shape[0], Casts(recipe, None, routing)
        tokens = sharing.gather(grad)

        # layer 1
        spec = casts.spec("dgrad_dy", grad)
        dy = PlacedRows(count, grad.shape[1], spec and spec.plan, grad.dtype, device) if needs.x else None
        takes_values = needs.bias or (needs.weight and not quantized)
        dy_values = PlacedRows(count, grad.shape[1], None, grad.dtype, device) if takes_values else None
        down_col = casts.column(saved.down_col, other, "dgrad_w") if needs.x else None
        dh = None if gate_up is None or dy is None else empty((count, gate_up.shape[1] // 2), gate_up.dtype, device)
        of = rows.part(other.shape[2], grad.shape[1], grad.shape[1] * grad.itemsize, quantized)
        for at in tokens.arrivals(rows, of):
            if dy is None and dy_values is None:
                continue
            dy_at = self._gradients_of_slots(tokens.values()[at.tokens], gates[at.tokens])
            if dy_values is not None:
                dy_values.place(at, dy_at)
            if dy is not None and dh is not None:
                sent = dy_at if spec is None else cast_rows(dy_at.flatten(0, 1), spec).unflatten(0, dy_at.shape[:2])
                dy.place(at, sent)
                multiply_rows(
                    dy.operand(), self._dgrad(other, dh.dtype) if down_col is None else down_col.operand, at, dh
                )
        all_grad, dgates = tokens.values(), None
        if saved.y is not None:
            dgates = combine_dots(saved.y, all_grad, by_slot).to(gates.dtype)
            dgates = reduce_scatter(dgates, sharing.tokens, sharing.ranks)
        row = col = hidden = dgate_up = dx = db = other_db = dw = other_dw = None
        if dh is not None and gate_up is not None and (first_needs.x or first_needs.weight or first_needs.bias):
            if quantized and (first_needs.x or first_needs.weight):
                wanted = casts.spec("wgrad_x", gate_up) if needs.weight else None
                row, col, hidden = casts.swiglu_gradient(dh, gate_up, wanted)
            if not quantized:
                dgate_up = swiglu_gradient(dh, gate_up)
            if first_needs.bias:
                db = (
                    swiglu_bias_gradient(dh, gate_up, routing.offs)
                    if dgate_up is None
                    else column_sums(dgate_up, routing.offs)
                )

        # layer 0
        if first_needs.x:
            gate_up_col = casts.column(saved.gate_up_col, weight, "dgrad_w")
            product = self._dgrad(weight, dtype) if gate_up_col is None else gate_up_col.operand
            operand = dgate_up if row is None else row
            dx_rows = self._rows(count, weight.shape[2], rows, device, dtype)
            assert operand is not None

            def part(at: RowsOfTokens) -> Tensor:
                multiply_rows(operand, product, at, dx_rows)
                return combine_rows(dx_rows, at.rows, None)

            of = rows.part(weight.shape[2], weight.shape[1], weight.shape[2] * dtype.itemsize, quantized)
            dx = sharing.sum(rows, of, dtype, part)

        # both wgrads, beside the sum
        ends = Routing(routing.offs)
        if needs.bias and dy_values is not None:
            other_db = column_sums(self._values(dy_values), routing.offs)
        if needs.weight:
            assert gate_up is not None
            values = None if dy_values is None else self._values(dy_values)
            if quantized:
                hidden = casts.swiglu(gate_up, "wgrad_x", axis=-2) if hidden is None else hidden
                dy_col = self._gradient_columns(casts, all_grad, values, gates)
                other_dw = wgrad(grad, dy_col, None, hidden, other.dtype, main_grads[1], ends)
            else:
                assert values is not None
                other_dw = wgrad(values, None, swiglu(gate_up), None, other.dtype, main_grads[1], ends)
        if first_needs.weight:
            x_col = casts.column(saved.x_col, saved.x, "wgrad_x")
            source = grad if dgate_up is None else dgate_up
            dw = wgrad(source, col, saved.x, x_col, weight.dtype, main_grads[0], routing)
        done = None if dgates is None else wait(dgates)
        return None if dx is None else dx.wait(), done, dw, other_dw, db, other_db

    def _rows(
        self, count: int, columns: int, rows: ExpertRows, device: torch.device, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Rows [M, columns] for products. Those of no expert, which no product writes, are zero."""
        made = empty((count, columns), dtype or self.dtype, device)
        clear_rows(made, rows.routing.offs)
        return made

    def _columns(
        self, x_rows: BlockScaled | Tensor, values: Tensor, casts: Casts, like: Tensor
    ) -> tuple[Tensor | None, BlockScaled | None]:
        """What wgrad of layer 0 needs: tokens of all ranks, or the column operand of their rows."""
        if not self.needs[0].weight:
            return None, None
        if not isinstance(x_rows, BlockScaled):
            return values, None
        cast: Cast = casts.quantized_spec("wgrad_x", like)
        assert casts.offs is not None
        if self.low:
            # above bf16's own range, it holds every value of the formats that `check_low` admits
            columns = requantize_columns(x_rows, cast, casts.offs, torch.bfloat16)
            underflows.record(x_rows, columns, casts.offs)
            return None, columns
        if self.recipe.saves == "source":
            return values, None
        assert casts.routing is not None
        return None, permute_cast_columns(values, casts.routing.permutation[0], cast, casts.offs)

    @staticmethod
    def _gradients_of_slots(grad: Tensor, gates: Tensor) -> Tensor:
        """Gradients [t, k, D] of the rows of tokens, from grad [t, D] and gate weights [t, k]."""
        tokens, slots = gates.shape
        rows = torch.arange(tokens * slots, dtype=torch.int32, device=grad.device).view(tokens, slots)
        of = (rows // slots).flatten()
        return permute_rows(grad.contiguous(), of, rows, gates.contiguous()).view(tokens, slots, -1)

    @staticmethod
    def _gradient_columns(casts: Casts, grad: Tensor, rows: Tensor | None, gates: Tensor) -> BlockScaled | None:
        """wgrad's operand of the gradients of rows, from grad [T, D] of tokens, or from the rows if they are there."""
        if rows is not None:
            return casts.gradient(rows, NeedsGrad(False, True, False))[1]
        assert casts.routing is not None
        tokens, slots = casts.routing.permutation
        factors = torch.empty(tokens.shape, dtype=torch.float32, device=grad.device)
        factors = factors.scatter(0, slots.reshape(-1).to(torch.int64), gates.reshape(-1).to(torch.float32))
        return casts.scattered_gradient(grad, GradScatter(tokens, factors))[1]

    @staticmethod
    def _values(placed: PlacedRows) -> Tensor:
        values = placed.operand()
        assert isinstance(values, Tensor)
        return values

    def _fprop(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Unquantized product of sorted rows."""
        return lambda values, routing: fprop(values, weight, bias, None, None, self.dtype, routing)

    @staticmethod
    def _dgrad(weight: Tensor, dtype: torch.dtype) -> Any:
        """Unquantized dgrad of sorted rows."""
        return lambda values, routing: dgrad(values, None, weight, None, dtype, routing)


def swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient [M, 2H] of gate and up from that of silu(gate) * up [M, H], by torch, unquantized."""
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        (found,) = torch.autograd.grad(swiglu(leaf), leaf, grad)
    return found


class AllGatherExperts(torch.autograd.Function):
    """Both layers of `all_gather_experts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weights: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate_up_main: Tensor | None,
        down_main: Tensor | None,
        routing: Routing,
        operands: Any,
        plan: AllGatherExpertsPlan,
    ) -> Tensor:
        weights: Weights = gate_up_weight, down_weight
        biases = gate_up_bias, down_bias
        y, saved = plan.forward(matrix(x), gate_weights, routing, LowCall(weights, biases, plan.recipe, operands))
        if any(ctx.needs_input_grad):
            saved._replace(y=saved.y if ctx.needs_input_grad[1] else None).save(ctx)
        # not saved: other backward passes may accumulate into them before this one
        ctx.main_grads = gate_up_main, down_main
        ctx.plan, ctx.dtype, ctx.shape = plan, x.dtype, x.shape
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.set_materialize_grads(False)
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])  # no view, so it may be changed in place

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 11
        mains = (
            each if each is None or accumulates_grad(ctx, place) else None
            for place, each in enumerate(ctx.main_grads, 2)
        )
        dx, dgates, dw, other_dw, *totals = ctx.plan.backward(
            matrix(grad), MLPSaved.restore(ctx), tuple(mains), ctx.dtype
        )
        db, other_db = (
            None if total is None else total.to(dtype) for total, dtype in zip(totals, ctx.bias_dtypes, strict=True)
        )
        dx = None if dx is None else dx.view(ctx.shape)
        return dx, dgates, dw, other_dw, db, other_db, *(None,) * 5
