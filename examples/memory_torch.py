"""Train with PyTorch on memory of a kina pool, and look at what the pool did."""

import sys

import kina
from kina import memory
from kina.memory import integrations

try:
    import torch
except ImportError:
    sys.exit("memory_torch: this example needs PyTorch (pip install torch)")


def main() -> None:
    pool = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource("cuda:0"))
    memory.set_default_resource(pool, "cuda:0")  # in every thread, those of autograd too
    torch.cuda.memory.change_current_allocator(integrations.torch_allocator())  # before PyTorch's first tensor there

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(1024, 256, device="cuda")
    y = x[:, :1] * 2
    losses = []
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = x.double().sum()
    x.record_stream(side)  # x goes back to the pool once `side` is past it
    expected = x.double().sum()
    del x
    torch.cuda.synchronize()

    stats = pool.stats()
    print(f"loss {losses[0].item():.3f} -> {losses[-1].item():.3f}")
    print(f"{stats.total_allocations} allocations, {stats.grown} chunks from the driver, {stats.live_bytes} bytes live")
    assert losses[-1] < losses[0] / 10
    assert torch.allclose(total, expected)
    assert stats.live_bytes >= integrations.torch_statistics().live_bytes > 0
    assert stats.grown < stats.total_allocations / 50


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"memory_torch: {error}")
