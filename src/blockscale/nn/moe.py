"""`MoE`: a router, routed experts and an optional shared expert. Forward and backward have no host sync.

Scores are computed in fp32. A token goes to the k experts with the highest scores. With `balance` a bias per expert is
added to the scores for the selection only, and moved after every step against the expert's load: load balancing without
an auxiliary loss (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..autograd.dtensor import DTensor, refuse_experts
from ..autograd.recipe import Recipe, get_recipe
from ..autograd.routing import route
from ..errors import DtypeError, ShapeError, check_name, refuse
from ..formats.checks import check_flag, check_int, check_number, check_place, check_sizes, check_tensor, check_text
from ..formats.stochastic import rng_state
from ..grouped import Routing
from .experts import GroupedExperts
from .mlp import SwiGLU
from .recipe_module import DEFAULT_SEED

SCORING = ("softmax", "sigmoid")


class Router(torch.nn.Linear):
    """Scores of experts [T, E] in fp32, whatever the dtype of tokens and weight: rounding changes the selection."""

    def __init__(
        self,
        dim: int,
        experts: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scoring: str = "softmax",
    ) -> None:
        super().__init__(dim, experts, False, device, dtype)
        check_name(scoring, SCORING, "scoring")
        self.scoring = scoring

    def forward(self, input: Tensor) -> Tensor:
        """[T, dim] -> [T, E]."""
        kind = "cpu" if input.is_meta else input.device.type  # the meta device is unknown to autocast
        with torch.autocast(kind, enabled=False):
            logits = functional.linear(input.float(), self.weight.float())
        return logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()


class MoE(torch.nn.Module):
    """A mixture of `experts` MLPs with `hidden` units each, `top_k` of them for each token.

    shared: hidden units of the shared expert, 0 for none.  scoring: of the router, "softmax" or "sigmoid".
    normalize: the gate weights of a token add up to one.  scale: factor of the gate weights.  balance: keep a selection
    bias, see `update_balance_`.  recipe, name, rng: as for `Linear`; of all experts. The router stays in fp32.

    >>> moe = MoE(dim=128, hidden=64, experts=8, top_k=2, shared=64, recipe="mxfp8")
    >>> moe(torch.randn(2, 3, 128)).shape
    torch.Size([2, 3, 128])
    >>> sorted(moe.state_dict())
    ['experts.down.weight', 'experts.gate_up.weight', 'router.weight', 'shared.down.weight', 'shared.gate_up.weight']
    """

    # int64 [E]: tokens sent to each expert since the balance was last updated
    load: Tensor | None
    balance: Tensor | None
    shared: SwiGLU | None

    def __init__(
        self,
        *,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        shared: int = 0,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        balance: bool = False,
        recipe: str | Recipe = "fp8_blockwise",
        name: str = "",
        rng: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, hidden=hidden, shared=shared, top_k=top_k)
        check_int(experts, "experts", "experts is their number", least=1)
        for flag, value in (("normalize", normalize), ("balance", balance)):
            check_flag(value, flag)
        check_number(scale, "scale", "it is a factor of the gate weights", "pass scale=1.0")
        check_place(device, dtype)
        check_text(name, "name", "layers.0.mlp")
        if not 1 <= top_k <= experts:
            rule = "a token goes to at least one expert, and to each no more than once"
            refuse(f"top_k={top_k} of {experts} experts", rule, "pass top_k between the two")
        self.top_k, self.normalize, self.scale = top_k, normalize, scale
        if rng is None and get_recipe(recipe).stochastic:
            rng = rng_state(DEFAULT_SEED, device=device or torch.get_default_device())

        def called(part: str) -> str:
            return f"{name}.{part}" if name else ""

        self.router = Router(dim, experts, device, dtype, scoring=scoring)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, "recipe": recipe, "rng": rng}
        self.experts = GroupedExperts(experts=experts, dim=dim, hidden=hidden, name=called("experts"), **options)
        self.shared = SwiGLU(dim, shared, name=called("shared"), **options) if shared else None
        for buffer, kind in (("balance", torch.float32), ("load", torch.int64)):
            zeros = torch.zeros(experts, device=device, dtype=kind) if balance else None
            self.register_buffer(buffer, zeros, persistent=buffer == "balance")

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if type(x) is DTensor:
            refuse_experts("MoE", x)
        self._check_input(x)
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        routing, gate_weights = self.route(tokens)
        y = self.experts(tokens, routing, gate_weights)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y if x.dim() == 2 else y.view(x.shape)

    def _check_input(self, x: Tensor) -> None:
        check_tensor(x, "x", "layers")
        if not x.is_floating_point():
            rule = "layers take floating-point tensors"
            refuse(f"x is {x.dtype}", rule, fix="convert it, for example with .float()", error=DtypeError)
        features = self.router.in_features
        if not x.dim() or x.shape[-1] != features:
            rule = f"the last axis of x is the {features} features of a token"
            refuse(f"x {tuple(x.shape)}", rule, fix=f"pass x with {features} features", error=ShapeError)

    def route(self, tokens: Tensor) -> tuple[Routing, Tensor]:
        """Routing of tokens [T, dim] and their gate weights [T, k]; counts the load while training."""
        scores = self.router(tokens)
        routing, gate_weights = route(scores, self.top_k, bias=self.balance, normalize=self.normalize, scale=self.scale)
        if self.load is not None and self.training and torch.is_grad_enabled():
            # in place: compiled recomputation allows no new attributes
            self.load.add_(routing.load())
        return routing, gate_weights

    @torch.no_grad()
    def update_balance_(self, rate: float = 1e-3) -> None:
        """Lower the selection bias of experts above the mean load, and raise the others': once after a step.

        Each bias moves by `rate`. `load` is reset to zero. Ranks that see different tokens add up `load` first:
        `torch.distributed.all_reduce(moe.load)`.
        """
        if self.balance is None or self.load is None:
            refuse(
                "update_balance_ of a layer without a balance",
                "only layers constructed with balance=True have a selection bias",
                "pass balance=True to MoE",
            )
        check_number(rate, "rate", "each bias moves by it", "pass rate=1e-3")
        load = self.load.float()
        self.balance += float(rate) * torch.sign(load.mean() - load)
        self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.balance
        result = super()._apply(fn, recurse)
        if before is not None and self.balance is not None and self.balance.dtype != before.dtype:
            self.balance = before.to(self.balance.device)  # steps of 0.001 would be lost in bf16
        return result

    def extra_repr(self) -> str:
        words = [f"top_k={self.top_k}", f"normalize={self.normalize}"]
        words += [f"scale={self.scale}"] if self.scale != 1.0 else []
        return ", ".join([*words, *(["balance=True"] if self.balance is not None else [])])
