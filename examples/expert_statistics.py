"""Give a model's experts less room than they need, and see how often they were found there."""

from vkmoe import LLM

# `expert_slots` is how many experts of each layer lie in device memory at once; without it vkmoe
# takes as many as fit. Shaders run on the CPU where there is no GPU.
with LLM(expert_slots=8, expert_policy="lru", device="vulkan") as llm:
    llm.generate("def main():", max_tokens=16, seed=1)
    for place, n_bytes in llm.memory.items():
        print(f"planned in {place} memory: {n_bytes / 2**20:.1f} MiB")
    report = llm.expert_statistics
    uses = report.served.total
    print(f"{report.coverage:.0%} of the experts have a place")
    print(f"{uses.n_uses} uses, {uses.n_hits} of them found there")
