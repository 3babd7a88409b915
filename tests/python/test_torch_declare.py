"""What support/declare.py makes of a schema, on ops of these tests: routes, refusals, writes, wrong declarations."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._ops.support import declare  # noqa: E402
from kernel_pytorch._ops.support.declared import declared  # noqa: E402

library = torch.library.Library("kernel_pytorch", "FRAGMENT")


LISTS: dict = {}  # of these ops, which the core does not declare


def define(schema, function, **shapes):
    """An op of Python, with the list of fields that the core would have for it: shapes of its tensors, by name."""
    name = schema.split("(")[0]
    library.define(schema)
    library.impl(name, function, "CPU")
    if "." in name:
        return
    written = getattr(torch.ops.kernel_pytorch, name).default._schema
    kinds = {"Tensor": "tensor", "Optional[Tensor]": "tensor", "List[Tensor]": "tensors", "float": "number"}
    entries = [{"name": one.name, "kind": kinds[str(one.type)]} for one in written.arguments]
    outputs = [{"name": one.name or "output", "dtype_of": entries[0]["name"]} for one in written.returns]
    for entry in [*entries, *outputs]:
        entry |= {"shapes": [shapes[entry["name"]].split()]} if entry["name"] in shapes else {}
    declared()[name] = LISTS[name] = {"name": name, "arguments": entries, "outputs": outputs}


def define_forward(schema, function, **shapes):
    name, arguments = schema.split("(", 1)
    define(schema, function, **shapes)
    define(f"{name}.plain({arguments}", function)


# y = scale * a * b, z = a + offset; the op has a tensor after a number, two results and one saved output.
def product(a, scale, b, offset):
    return scale * a * b, a + offset


def product_forward(a, scale, b, offset):
    return *product(a, scale, b, offset), scale * b


ARGUMENTS = "(Tensor a, float scale, Tensor? b, Tensor offset)"
ROWS = "... columns"
SHAPES = dict(a=ROWS, b=ROWS, offset="columns", y=ROWS, z=ROWS)
define(f"declare_product{ARGUMENTS} -> (Tensor y, Tensor z)", product, **SHAPES)
define_forward(
    f"declare_product_forward{ARGUMENTS} -> (Tensor y, Tensor z, Tensor kept)", product_forward, **SHAPES, kept=ROWS
)
define(
    "declare_product_backward(Tensor grad, Tensor kept) -> Tensor",
    lambda grad, kept: grad * kept,
    grad=ROWS,
    kept=ROWS,
    output=ROWS,
)
define("declare_negate(Tensor x) -> Tensor", lambda x: -x, x="...", output="...")
define_forward("declare_negate_forward(Tensor x) -> Tensor", lambda x: -x, x="...", output="...")
define("declare_sign(Tensor x) -> Tensor", lambda x: x.sign(), x="...", output="...")
define("declare_fill(Tensor(a!)? x, Tensor(b!)[] more, float value) -> ()", lambda x, more, value: fill(x, more, value))


def fill(x, more, value):
    for tensor in ([] if x is None else [x]) + more:
        tensor.data.fill_(value)


def product_gradient(grads, saved, wanted):
    grad_y, grad_z = grads
    kept, a, scale = saved
    seen.append((tuple(g is None for g in grads), wanted))
    grad_a = backward(grad_y, kept) if grad_y is not None else None
    grad_a = grad_z if grad_a is None else grad_a if grad_z is None else grad_a + grad_z
    grad_b = scale * grad_y * a if grad_y is not None else None
    return grad_a, grad_b, grad_z


seen: list = []
backward = declare.backward("declare_product", instead="torch.mul")
ours = declare.differentiable("declare_product", saves=["a", "scale"], gradient=product_gradient, name="product")
negate = declare.differentiable("declare_negate", gradient=lambda grads, *_: (negate(grads[0]),))
sign = declare.without_gradient("declare_sign")
fill_in_place = declare.without_gradient("declare_fill", name="fill")
for op in LISTS:
    del declared()[op]


@pytest.fixture(autouse=True)
def lists():
    """Other tests ask what the core declares."""
    declared().update(LISTS)
    yield
    for op in LISTS:
        del declared()[op]


def leaves():
    return [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def test_values_and_gradients_by_every_route():
    (a, b), offset = leaves(), torch.randn(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: ours(a, 0.5, b, offset), (a, b))
    expected = product(a, 0.5, b, offset)
    plain = ours(a.detach(), 0.5, b.detach(), offset)
    compiled = torch.compile(lambda a, b: ours(a, 0.5, b, offset), fullgraph=True, backend="aot_eager")(a, b)
    for actual in (plain, ours(a, 0.5, b, offset), compiled):
        assert len(actual) == 2
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(sum(t.sum() for t in compiled), (a, b)),
        torch.autograd.grad(sum(t.sum() for t in expected), (a, b)),
    )
    batched = torch.func.vmap(lambda a, b: ours(a, 0.5, b, offset))(a, b)
    torch.testing.assert_close(batched, torch.func.vmap(lambda a, b: product(a, 0.5, b, offset))(a, b))


def test_the_formula_hears_what_was_used_and_what_is_wanted():
    (a, b), offset = leaves(), torch.randn(4, dtype=torch.float64)
    seen.clear()
    ours(a, 2.0, b.detach(), offset)[1].sum().backward()
    assert seen == [((True, False), (True, False, False))]
    assert torch.equal(a.grad, torch.ones_like(a)) and b.grad is None


def test_derivatives_that_do_not_exist():
    (a, b), offset = leaves(), torch.randn(4, dtype=torch.float64)
    (first,) = torch.autograd.grad(ours(a, 1.0, b, offset)[0].sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match=r"declare_product: .*second derivative.*use torch.mul"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=r"product: forward-mode.*torch's own operations"):
        torch.func.jvp(lambda a: ours(a, 1.0, b, offset), (a,), (a,))


def test_a_formula_that_calls_its_own_op_can_be_differentiated_again():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: negate(x) ** 3, (x,))


def test_without_gradient():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="declare_sign: it has no gradient; detach"):
        sign(x)
    with torch.no_grad():
        assert torch.equal(sign(x), x.sign())
    torch.testing.assert_close(torch.func.vmap(sign)(x.detach()), x.sign().detach())
    with pytest.raises(RuntimeError, match="declare_sign: it has no gradient"):
        torch.func.grad(lambda x: sign(x).sum())(x.detach())


def test_writing_into_arguments():
    x, more = torch.zeros(3), torch.zeros(2)
    fill_in_place(x, [more], 2.0)
    assert x.tolist() == [2, 2, 2] and more.tolist() == [2, 2] and x._version == more._version == 1
    fill_in_place(None, [more], 3.0)
    assert more.tolist() == [3, 3]
    torch.compile(lambda x: fill_in_place(x * 1, [x], 4.0), fullgraph=True, backend="aot_eager")(x)
    assert x.tolist() == [4, 4, 4]
    with pytest.raises(RuntimeError, match="fill: it writes into its arguments; detach"):
        fill_in_place(x, [more.clone().requires_grad_()], 1.0)
    weight = torch.ones(3, requires_grad=True)
    output = (weight * x).sum()
    fill_in_place(x, [], 0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_what_is_saved_must_exist():
    with pytest.raises(ValueError, match="no 'nothing', only"):
        declare.differentiable("declare_product", saves=["a", "nothing"], gradient=product_gradient)
