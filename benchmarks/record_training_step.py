"""Record the allocations of a training step of GPT-2, for the replay of bench_memory.py.

    python benchmarks/record_training_step.py --out benchmarks/data/training_step.csv.gz [--micro-batches 40]

PyTorch takes its memory from kina, through a LoggingMemoryResource over a pool. The model is Transformers' GPT-2 with
random weights, trained on random tokens: the sizes of the allocations, their order and their lifetimes are those of
a real step, whatever the tokens. Sequences have different lengths, as batches of text have. The step accumulates
the gradients of all micro-batches and ends with AdamW; a short one before it makes the state of the optimizer, and is
in the log too.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--micro-batches", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    import torch

    import kina.memory
    from kina.memory.integrations import torch_allocator

    pool = kina.memory.PoolMemoryResource(kina.memory.CudaAsyncMemoryResource(0))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "log.csv"
        with kina.memory.LoggingMemoryResource(pool, text) as logged:
            kina.memory.set_default_resource(logged, 0)
            torch.cuda.memory.change_current_allocator(torch_allocator())
            step = TrainingStep(options)
            step.run(4)
            losses = step.run(options.micro_batches)
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
            del step
        print(pool.stats()._replace(streams=()))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with gzip.GzipFile(options.out, "wb", compresslevel=9, mtime=0) as packed:
            packed.write(text.read_bytes())
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")
    return 0


class TrainingStep:
    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(options.seed)
        self.batch = options.batch
        self.lengths = torch.Generator().manual_seed(options.seed)
        self.model = GPT2LMHeadModel(GPT2Config()).to("cuda").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def run(self, micro_batches: int) -> list[float]:
        import torch

        losses = []
        for _ in range(micro_batches):
            length = int(torch.randint(64, 1025, (), generator=self.lengths))
            tokens = torch.randint(0, 50257, (self.batch, length), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / micro_batches).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [float(loss) for loss in losses]


if __name__ == "__main__":
    sys.exit(main())
