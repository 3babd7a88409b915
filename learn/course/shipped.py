"""`kpt learn 3 --cuda`: the shipped kernel on the GPU, for the problem of a CPU step."""

from __future__ import annotations

from .lines import Row


def on_gpu(number: int, quick: bool) -> list[Row]:
    # Imported late: the C++ steps need neither torch nor the package.
    import torch

    from kernel_pytorch import functional as kp

    from . import gpu

    if number <= 4:
        rows, columns = (64 if quick else 2048), 4096
        x, weight = torch.randn(rows, columns, device="cuda"), torch.randn(columns, device="cuda")
        bytes_, flops = 8.0 * x.numel(), 4.0 * x.numel()

        def call() -> torch.Tensor:
            return kp.rms_norm(x, weight)

        expected = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    elif number == 5:
        n = 192 if quick else 768
        a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
        bytes_, flops = 12.0 * n * n, 2.0 * n**3

        def call() -> torch.Tensor:
            return kp.matmul(a, b)

        expected = a.double() @ b.double()
    else:
        heads, length = (2, 384) if quick else (16, 1536)
        q, k, v = (torch.randn(1, heads, length, 64, device="cuda") for _ in range(3))
        bytes_, flops = 16.0 * q.numel(), 4.0 * heads * length * length * 64

        def call() -> torch.Tensor:
            return kp.attention(q, k, v)

        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return [Row("the shipped kernel on the GPU", gpu.seconds_of(call), bytes_, flops, gpu.error_of(call(), expected))]
