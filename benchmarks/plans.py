"""Training plans from 1,024 to 1,048,576 ranks: how long a step takes to work out.

    python benchmarks/plans.py [NAME]

A GPT of 32 layers (d 4096, seq 2048), tp=8, a microbatch of 4 for each data-parallel rank, forward,
backward and gradient all-reduce. `built` is what depends on the model and not on the machine's
size: lowering and compiling its segments. Each case runs in a process of its own.
"""

import json
import resource
import subprocess
import sys
import time

CASES = {
    "1,024": ("dp=128,tp=8", 16, 0.0),
    "65,536 with jitter": ("dp=8192,tp=8", 1024, 0.05),
    "65,536": ("dp=8192,tp=8", 1024, 0.0),
    "1,048,576": ("dp=131072,tp=8", 16384, 0.0),
    "1,048,576 in 16 stages": ("pp=16,dp=8192,tp=8", 16384, 0.0),
}


def measure(name: str) -> dict[str, float]:
    """Seconds and megabytes of one case."""
    from trnsim.cluster.plans.clocks import Conditions
    from trnsim.cluster.plans.plan import Plan
    from trnsim.cluster.plans.result import price_plan

    axes, nodes, jitter = CASES[name]
    begin = time.perf_counter()
    plan = Plan.of(
        "gpt3-6.7b", instance="trn2.48xlarge", nodes=nodes, mesh=axes, seq=2048, microbatch=4,
        global_batch=4 * nodes * 8 * (4 if "pp" in axes else 1),
    )  # fmt: skip
    result = price_plan(plan, conditions=Conditions(jitter=jitter))
    spent = time.perf_counter() - begin
    built = sum(s for what, s in result.host_seconds.items() if what not in ("pricing", "memory"))
    return {
        "built": built,
        "priced": spent - built,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "step": result.seconds,
        "classes": result.classes,
    }


def main() -> None:
    """Prints a row for each case."""
    print(f"{'ranks':<24} {'built (s)':>9} {'priced (s)':>10} {'MB':>6} {'clocks':>7} {'step':>8}")
    for name in sys.argv[1:] or CASES:
        reply = subprocess.run(
            [sys.executable, __file__, "--measure", name], check=True, capture_output=True
        )
        row = json.loads(reply.stdout)
        print(
            f"{name:<24} {row['built']:>9.2f} {row['priced']:>10.2f} {row['megabytes']:>6.0f}"
            f" {row['classes']:>7} {row['step']:>6.3f} s"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main()
