"""The paper's two theorems as numbers, on real modules, with what their proofs need written beside them.

**Theorem 1** (section 3.2): SMA covers the function space span{f_1, ..., f_M}. The paper states it for any subset
L' of that space. Its proof picks a and c from the coefficients of one g in L', and so shows this: for every set
I of functions there are decisions and confidences with L_SMA(a, c) = span{f_i : i in I}, and every g of the whole
space lies in such a space. It does not hold for other subspaces: the line through f_1 + f_2 is none of the 2^M
spaces that SMA can form. Both are tested.

**Transfer Theorem** (appendix C). With f = g(m), m(x) = r(x) d(x), J the derivative of g at m, and
M = d (grad_x r) + r (grad_x d) the derivative of m, the chain rule gives

    grad_x f = J M,        grad_w f = (J d) (grad_w r),  of rank one.

So the printed inequality |grad_w r|^2 |d|^2 |grad_x f|^2 / |M|^2 <= |grad_w f|^2 says nothing but

    |J M| / |M|  <=  |J d| / |d|.

The proof takes for granted that a change u of the weights can imitate any change of the input. But changing w_i only
rescales m, that is, moves it along d, while a change of the input moves m along all columns of M. Solving
d (grad_w r . u) = M delta with the pseudo-inverse (the paper's formula for u) solves it only where M delta is a
multiple of d. Assumptions that are enough, with P = d d^T / |d|^2 the projection on d:

    (A)  J (I - P) M = 0: what the input does to m beside d does not reach the output. Holds if |h_i| = 1, if q_i
         writes along one fixed direction (then M has rank one and the inequality is an equality), or if the rest of
         the network reads m along d alone.

Without any assumption, the part of the input's influence that passes through d obeys the inequality:

    |grad_w r|^2 |d|^2 |J P M|^2 / |M|^2  <=  |grad_w f|^2.

Further: w_i has one row for "skip" and one for "activate" with a scalar result r_i. Taking one of them or both as
w_i changes both sides by the same factor. The number k of outputs does not matter; even for k = 1, where some u
always imitates the change as long as J d is not zero, the printed form fails. All norms of matrices are operator
norms.

The remark below the theorem replaces |M|^2 by |d|^2 |grad r|^2 + r^2 |grad d|^2, which leaves out the cross term;
with a factor of two in front it is an upper bound.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from seqboat.core.mixer import Routing
from seqboat.layers.gau import GAU, GAUConfig
from seqboat.layers.routers import AlwaysActive, Router, TemperedSoftmax
from seqboat.layers.sma import SparseModularActivation

WIDTH = 6
SUBSETS = [subset for size in range(4) for subset in itertools.combinations(range(3), size)]
subsets = pytest.mark.parametrize("chosen", SUBSETS, ids=str)


# Theorem 1


class Forced(Router):
    """Takes the same decisions, with the same confidences, for every token."""

    def __init__(self, chosen: tuple[int, ...], confidence: Tensor) -> None:
        super().__init__(WIDTH, modules=len(confidence))
        self.decisions = torch.tensor([i in chosen for i in range(len(confidence))])
        self.confidence = confidence

    def route(self, x: Tensor) -> Routing:
        shape = (*x.shape[:-1], self.modules_count)
        return Routing(self.decisions.expand(shape), self.confidence.to(x.dtype).expand(shape))


def functions() -> dict[str, nn.Module]:
    """Three modules that have little in common: two token-wise networks and an attention unit."""
    torch.manual_seed(0)
    gau = GAU(WIDTH, GAUConfig(d_z=4, window=4), causal=False)
    modules: dict[str, nn.Module] = {
        "tanh": nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
        "gelu": nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)),
        "gau": gau,
    }
    with torch.no_grad():
        for parameter in gau.parameters():
            parameter.normal_()
    return {name: module.double() for name, module in modules.items()}


def scale(module: nn.Module, factor: float) -> None:
    """Multiply what a module computes: each of them ends in a Linear."""
    last = module.out if isinstance(module, GAU) else module[-1]  # type: ignore[index]
    with torch.no_grad():
        last.weight.mul_(factor)
        last.bias.mul_(factor)


def outputs(x: Tensor) -> Tensor:
    """(functions, numbers): f_1(x), f_2(x), f_3(x), each run alone on every token."""
    return torch.stack(
        [
            SparseModularActivation(module, WIDTH, AlwaysActive(WIDTH))(x).y.flatten()
            for module in functions().values()
        ]
    ).detach()


def activated(x: Tensor, chosen: tuple[int, ...], confidence: Tensor, zeta: Tensor) -> Tensor:
    """The output of SMA with these decisions, the modules' outputs multiplied by zeta."""
    modules = functions()
    for module, factor in zip(modules.values(), zeta.tolist(), strict=True):
        scale(module, factor)
    return SparseModularActivation(modules, WIDTH, Forced(chosen, confidence))(x).y.flatten().detach()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@subsets
def test_every_combination_of_the_chosen_functions_is_reached(x: Tensor, chosen: tuple[int, ...]) -> None:
    """g = sum of beta_i f_i, a_i = 1 where beta_i is not 0, zeta_i = beta_i / c_i; c = 1 as in the proof, or not."""
    generator = torch.Generator().manual_seed(1)
    for confidence in (torch.ones(3), torch.tensor([0.9, 0.55, 0.7])):
        beta = torch.zeros(3, dtype=torch.float64)
        beta[list(chosen)] = torch.randn(len(chosen), generator=generator, dtype=torch.float64)
        want = (beta[:, None] * outputs(x)).sum(dim=0)
        got = activated(x, chosen, confidence, beta / confidence)
        torch.testing.assert_close(got, want)


@subsets
def test_the_space_has_one_dimension_per_chosen_function(x: Tensor, chosen: tuple[int, ...]) -> None:
    """And it lies inside the span of the chosen functions, whatever zeta is."""
    alone = outputs(x)
    assert torch.linalg.matrix_rank(alone) == 3, "the functions have to be independent"
    generator = torch.Generator().manual_seed(2)
    zetas = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    reached = torch.stack([activated(x, chosen, torch.full((3,), 0.8), zeta) for zeta in zetas])
    assert torch.linalg.matrix_rank(reached) == len(chosen)
    both = torch.cat([alone[list(chosen)], reached])
    assert torch.linalg.matrix_rank(both) == len(chosen)


@subsets
def test_functions_that_are_not_chosen_have_no_part(x: Tensor, chosen: tuple[int, ...]) -> None:
    modules = functions()
    sma = SparseModularActivation(modules, WIDTH, Forced(chosen, torch.ones(3)))
    before = sma(x).y
    if before.requires_grad:
        before.sum().backward()
    for i, module in enumerate(modules.values()):
        if i not in chosen:
            for parameter in module.parameters():
                assert parameter.grad is None or not parameter.grad.any()
            scale(module, 1e6)
    assert torch.equal(sma(x).y, before)


def test_other_subspaces_are_not_reached(x: Tensor) -> None:
    """The line through f_1 + f_2 lies inside one of SMA's spaces, but is none of them."""
    alone = outputs(x)
    line = (alone[0] + alone[1])[None]
    equal, containing = [], []
    for chosen in SUBSETS:
        space = alone[list(chosen)]
        together = torch.linalg.matrix_rank(torch.cat([space, line]))
        if together == len(chosen):
            containing.append(chosen)
            if len(chosen) == 1:
                equal.append(chosen)
    assert containing == [(0, 1), (0, 1, 2)]
    assert not equal


# Transfer Theorem


class Layer(nn.Module):
    """h -> a(p(h) q(h)): a real SMA of one module with the paper's router, without its bias."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.sma = SparseModularActivation({"q": module}, width, TemperedSoftmax(width))

    @property
    def router(self) -> TemperedSoftmax:
        assert isinstance(self.sma.router, TemperedSoftmax)
        return self.sma.router

    def probability(self, h: Tensor) -> Tensor:
        return self.router(h).probs[0]

    def module_output(self, h: Tensor) -> Tensor:
        return self.sma.units["q"](h[None])[0]

    def product(self, h: Tensor) -> Tensor:
        """p(h) q(h), as SMA computes it for an active token."""
        return self.sma(h[None, None]).y[0, 0]

    def forward(self, h: Tensor) -> Tensor:
        return F.silu(self.product(h))


class Network(nn.Module):
    """Layers one after the other on one token (width,); `head` is the activation of the last one's output."""

    def __init__(self, layers: list[Layer], head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.width = nn.ModuleList(layers), layers[0].sma.d_model
        self.head = head or nn.Identity()

    def before(self, i: int, x: Tensor) -> Tensor:
        for layer in itertools.islice(self.layers, i):
            x = layer(x)
        return x

    def after(self, i: int, m: Tensor) -> Tensor:
        """g_i: the activation of layer i and everything behind it."""
        h = F.silu(m)
        for layer in itertools.islice(self.layers, i + 1, None):
            h = layer(h)
        return self.head(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.before(len(self.layers), x))

    def activate(self, x: Tensor) -> None:
        """Swap the router's options where layer i would skip its token."""
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if layer.probability(self.before(i, x)) <= 0.5:
                with torch.no_grad():
                    layer.router.logits.weight.copy_(layer.router.logits.weight.flip(0))


class Pieces(NamedTuple):
    """What the theorem speaks of, at layer i and input x."""

    f_x: Tensor
    """(k, width): derivative of the network by its input"""
    f_w: Tensor
    """(k, 2 width): by the router's weights"""
    r_w: Tensor
    """(2 width,): of the probability by the router's weights"""
    d: Tensor
    """(width,): the module's output"""
    m_x: Tensor
    """(width, width): M, of the product by the input"""
    g_m: Tensor
    """(k, width): J, of the rest of the network by the product"""

    @property
    def left(self) -> Tensor:
        """The printed left side."""
        return self.with_influence(self.f_x)

    @property
    def reproduced(self) -> Tensor:
        """The left side with that part of the influence that a change of the router's weights can imitate."""
        along = torch.outer(self.d, self.d) / self.d.dot(self.d)
        return self.with_influence(self.g_m @ along @ self.m_x)

    @property
    def right(self) -> Tensor:
        return norm(self.f_w) ** 2

    def with_influence(self, influence: Tensor) -> Tensor:
        return self.r_w.norm() ** 2 * self.d.norm() ** 2 * norm(influence) ** 2 / norm(self.m_x) ** 2

    def beside(self) -> Tensor:
        """J (I - P) M, which assumption (A) wants to be zero."""
        along = torch.outer(self.d, self.d) / self.d.dot(self.d)
        return self.g_m @ (self.m_x - along @ self.m_x)


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, ord=2)


def by_weight(value: Tensor, weight: Tensor) -> Tensor:
    """Derivatives of a vector by all entries of a weight."""
    rows = [torch.autograd.grad(part, weight, retain_graph=True)[0].flatten() for part in value.flatten()]
    return torch.stack(rows)


def take_apart(network: Network, i: int, x: Tensor) -> Pieces:
    layer = network.layers[i]
    assert isinstance(layer, Layer)
    weight = layer.router.logits.weight
    m = layer.product(network.before(i, x))
    return Pieces(
        f_x=jacobian(network, x),
        f_w=by_weight(network(x), weight),
        r_w=by_weight(layer.probability(network.before(i, x)), weight)[0],
        d=layer.module_output(network.before(i, x)).detach(),
        m_x=jacobian(lambda z: layer.product(network.before(i, z)), x),
        g_m=jacobian(lambda z: network.after(i, z), m.detach()),
    )


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def one_direction(width: int) -> nn.Module:
    """A module that writes along one fixed direction."""
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1), nn.Linear(1, width, bias=False)
    )


def randomize(network: Network, seed: int) -> Tensor:
    """Random weights of ordinary size, routers without bias, and an input that activates every layer."""
    torch.manual_seed(seed)
    network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.8)
        for layer in network.layers:
            assert isinstance(layer, Layer)
            layer.router.logits.bias.zero_()
    x = torch.randn(network.width, dtype=torch.float64)
    network.activate(x)
    return x


def random_network(
    seed: int, module: str = "perceptron", width: int = 4, depth: int = 3
) -> tuple[Network, Tensor]:
    make = perceptron if module == "perceptron" else one_direction
    network = Network([Layer(make(width), width) for _ in range(depth)])
    return network, randomize(network, seed)


seeds = pytest.mark.parametrize("seed", range(8))


@seeds
def test_the_chain_rule_behind_the_theorem(seed: int) -> None:
    """grad_x f = J M and grad_w f = (J d)(grad_w r), for the layers as they are implemented."""
    network, x = random_network(seed)
    for i, layer in enumerate(network.layers):
        h = network.before(i, x)
        p, product = layer.probability(h), layer.product(h)  # type: ignore[operator]
        torch.testing.assert_close(product, p * layer.module_output(h))  # type: ignore[operator]
        pieces = take_apart(network, i, x)
        torch.testing.assert_close(pieces.f_x, pieces.g_m @ pieces.m_x)
        torch.testing.assert_close(pieces.f_w, torch.outer(pieces.g_m @ pieces.d, pieces.r_w))
        assert pieces.right > 0


@seeds
def test_the_inequality_for_what_the_router_can_imitate(seed: int) -> None:
    """The form that needs no assumption, in every layer."""
    network, x = random_network(seed)
    for i in range(3):
        pieces = take_apart(network, i, x)
        assert pieces.reproduced <= pieces.right * (1 + 1e-9)


@seeds
def test_equality_for_modules_that_write_along_one_direction(seed: int) -> None:
    """Assumption (A) with M of rank one: both sides of the printed form are the same number."""
    network, x = random_network(seed, "one direction")
    for i in range(3):
        pieces = take_apart(network, i, x)
        assert norm(pieces.beside()) <= 1e-9 * norm(pieces.f_x)
        torch.testing.assert_close(pieces.left, pieces.right)


class ReadAlong(nn.Module):
    """Reads a vector along one direction, then spreads it over k outputs."""

    def __init__(self, width: int, k: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(width))
        self.spread = nn.Parameter(torch.empty(k))

    def forward(self, h: Tensor) -> Tensor:
        return self.spread * torch.asinh(h @ self.direction)


@seeds
@pytest.mark.parametrize("k", [1, 5])
def test_inequality_where_the_rest_reads_along_the_module_output(seed: int, k: int) -> None:
    """Assumption (A) through J: the printed form holds although M has full rank."""
    width = 4
    network = Network([Layer(perceptron(width), width)], ReadAlong(width, k))
    x = randomize(network, seed)
    layer, head = network.layers[0], network.head
    assert isinstance(layer, Layer)
    assert isinstance(head, ReadAlong)
    with torch.no_grad():
        d, m = layer.module_output(x), layer.product(x)
        # the derivative of the SiLU in between is undone: the gradient of what is read, by m, is d
        slope = torch.sigmoid(m) * (1 + m * (1 - torch.sigmoid(m)))
        head.direction.copy_(d / slope)
    pieces = take_apart(network, 0, x)
    assert torch.linalg.matrix_rank(pieces.m_x) == width
    assert norm(pieces.beside()) <= 1e-9 * norm(pieces.f_x)
    assert 0 < pieces.left <= pieces.right * (1 + 1e-9)


def test_the_printed_form_fails_in_random_networks() -> None:
    """Without assumption (A) the printed inequality is often wrong, so it is not claimed anywhere here."""
    verdicts = []
    for seed in range(8):
        network, x = random_network(seed)
        for i in range(3):
            pieces = take_apart(network, i, x)
            verdicts.append(bool(pieces.left > pieces.right * (1 + 1e-6)))
    assert 0.1 < sum(verdicts) / len(verdicts) < 1


def worked_example(target: float) -> tuple[Network, Tensor]:
    """One layer on two channels with q(x) = x + b, such that p q = (target, 0) at x = (1, 2)."""
    module = nn.Linear(2, 2)
    network = Network([Layer(module, 2)]).double()
    layer, x = network.layers[0], torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert isinstance(layer, Layer)
    with torch.no_grad():
        layer.router.logits.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.5]]))
        layer.router.logits.bias.zero_()
        p = layer.probability(x)
        module.weight.copy_(torch.eye(2))
        module.bias.copy_(torch.stack([target / p, p.new_zeros(())]) - x)
    assert p > 0.5
    return network, x


# the minimum of SiLU, where its derivative is zero
SILU_MINIMUM = -1.2784645427610738


def test_a_counterexample_by_hand() -> None:
    """d points where SiLU is flat: weights of the router change nothing, the input still does."""
    network, x = worked_example(SILU_MINIMUM)
    pieces = take_apart(network, 0, x)
    assert pieces.right < 1e-20
    assert norm(pieces.f_x) > 0.1
    assert pieces.left > 1e-3
    assert pieces.reproduced <= pieces.right * (1 + 1e-9)


class Total(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.sum(dim=0, keepdim=True)


def test_a_counterexample_with_one_output() -> None:
    """k = 1 and J d not zero: u imitates every change of the input, and still the printed form fails."""
    network, x = worked_example(SILU_MINIMUM + 0.1)
    network.head = Total()
    pieces = take_apart(network, 0, x)
    gain = (pieces.g_m @ pieces.d).item()
    assert abs(gain) > 1e-3
    delta = torch.tensor([0.3, -0.2], dtype=torch.float64)
    u = pieces.r_w / pieces.r_w.norm() ** 2 * (pieces.f_x @ delta).item() / gain
    torch.testing.assert_close(pieces.f_w @ u, pieces.f_x @ delta)
    assert pieces.left > 10 * pieces.right


@seeds
def test_the_choice_of_the_weights_does_not_matter(seed: int) -> None:
    """With w_i one row of the router or both, the two sides keep their ratio."""
    network, x = random_network(seed)
    for i in range(3):
        whole = take_apart(network, i, x)
        for rows in (slice(0, 4), slice(4, 8)):
            part = whole._replace(r_w=whole.r_w[rows], f_w=whole.f_w[:, rows])
            torch.testing.assert_close(part.left / part.right, whole.left / whole.right)


@seeds
def test_closed_forms_of_the_remark(seed: int) -> None:
    """|grad_w0 p| = |grad_w1 p| = p (1 - p) |z| / tau and |grad_z p| = p (1 - p) |w0 - w1| / tau."""
    torch.manual_seed(seed)
    router = TemperedSoftmax(5).double()
    with torch.no_grad():
        router.logits.weight.normal_()
        router.log_temperature.normal_()
    z = torch.randn(5, dtype=torch.float64, requires_grad=True)
    p = router(z).probs[0]
    grad_w, grad_z = torch.autograd.grad(p, [router.logits.weight, z])
    slope = p * (1 - p) / router.temperature[0]
    torch.testing.assert_close(grad_w[0].norm(), slope * z.norm())
    torch.testing.assert_close(grad_w[1].norm(), slope * z.norm())
    difference = router.logits.weight[0] - router.logits.weight[1]
    torch.testing.assert_close(grad_z.norm(), slope * difference.norm())


def remark(network: Network, x: Tensor, cross_term: float) -> tuple[Tensor, Tensor]:
    """Both sides of the remark for the first layer, w_i its "activate" row; the printed form has cross_term 1."""
    pieces = take_apart(network, 0, x)
    layer, width = network.layers[0], len(x)
    assert isinstance(layer, Layer)
    p, tau = layer.probability(x), layer.router.temperature[0]
    w = layer.router.logits.weight
    d_x = jacobian(layer.module_output, x)
    bound = pieces.d.norm() ** 2 * (w[0] - w[1]).norm() ** 2 + norm(d_x) ** 2 * tau**2 / (1 - p) ** 2
    left = x.norm() ** 2 * pieces.d.norm() ** 2 * norm(pieces.f_x) ** 2 / (cross_term * bound)
    return left.detach(), norm(pieces.f_w[:, width:]) ** 2


@seeds
def test_the_remark_with_its_cross_term(seed: int) -> None:
    network, x = random_network(seed, "one direction", depth=1)
    left, right = remark(network, x, cross_term=2)
    assert 0 < left <= right * (1 + 1e-9)


def test_the_remark_as_printed_fails() -> None:
    """Where router and module grow in the same direction, the left-out cross term matters."""
    width = 3
    first = nn.Linear(width, 1, bias=False)
    module = nn.Sequential(first, nn.Linear(1, width, bias=False))
    network = Network([Layer(module, width)])
    x = randomize(network, seed=0)
    layer = network.layers[0]
    assert isinstance(layer, Layer)
    with torch.no_grad():
        toward = layer.router.logits.weight[1] - layer.router.logits.weight[0]
        first.weight.copy_(toward[None])
        x = toward / toward.norm()
    left, right = remark(network, x, cross_term=1)
    assert left > 1.2 * right
