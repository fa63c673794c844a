"""The SGLang wrapper around FlashMLA's paged entry on a real GPU: views, bits, and capture into a CUDA graph.

Not part of ``make compat``: needs a GPU. SGLang itself is not needed; the kernel behind the wrapper at 64 heads is the
same headfit backend, so that owned heads must agree to the bit.
"""

from __future__ import annotations

import sys

import torch

from headfit import cache, kernels
from headfit.capability import Call
from headfit.engines import hooks
from headfit.engines import sglang_calls as calls
from headfit.ops import flash_mla_with_kvcache
from headfit.width import Policy

DIM, PAGE, HEADS = 512, 256, 64


def arguments(rows: int, n_local: int) -> dict:
    """What SGLang passes for one decode call of one rank: padded queries, two caches, lists, lengths, padded sinks."""
    seed = torch.Generator(device="cuda").manual_seed(rows)
    pages, extra = (cache.empty_cache(4, page, device="cuda") for page in (PAGE, PAGE // 4))
    for view, slots in ((pages, 4 * PAGE), (extra, PAGE)):
        new = torch.randn(slots, DIM, generator=seed, device="cuda").bfloat16()
        cache.write_rows(view, torch.arange(slots, device="cuda"), new)
    q = torch.full((rows, 1, HEADS, DIM), torch.nan, device="cuda", dtype=torch.bfloat16)
    q[:, :, :n_local] = torch.randn(rows, 1, n_local, DIM, generator=seed, device="cuda").bfloat16()
    lists = torch.randint(-1, 4 * PAGE, (rows, 1, 128), generator=seed, device="cuda").int()
    more = torch.randint(-1, PAGE, (rows, 1, 512), generator=seed, device="cuda").int()
    return {
        "q": q, "k_cache": pages, "block_table": None, "cache_seqlens": None, "head_dim_v": DIM,
        "tile_scheduler_metadata": None, "softmax_scale": DIM**-0.5, "is_fp8_kvcache": True, "indices": lists,
        "topk_length": torch.full((rows,), 128, device="cuda", dtype=torch.int32),
        "attn_sink": torch.randn(HEADS, generator=seed, device="cuda"), "extra_k_cache": extra,
        "extra_indices_in_kvcache": more,
        "extra_topk_length": torch.full((rows,), 300, device="cuda", dtype=torch.int32),
    }  # fmt: skip


def main() -> None:
    """Every check, for 8, 16 and 32 owned heads; raises on the first that fails."""
    own = tuple(name for name in kernels.backends() if name in ("triton", "hopper"))
    state = calls.state
    state.active, state.explicit, state.policy = True, True, Policy.native(origin="check")

    def padded(**given: object) -> object:
        for name in ("block_table", "cache_seqlens", "tile_scheduler_metadata"):
            given.pop(name)
        return flash_mla_with_kvcache(**given, backend=own[0])  # type: ignore[arg-type]

    for n_local in (8, 16, 32):
        for rows in (1, 16, 65):
            given = arguments(rows, n_local)
            call = Call(rows, n_local, HEADS, "decode")
            token = calls._now.set(calls._Now(call=call))
            try:
                want = padded(**given)[0][:, :, :n_local].clone()  # type: ignore[index]
                got = calls.around_decode(padded, **given)[0]
                same(got[:, :, :n_local], want, f"{n_local} heads, {rows} rows, eager")
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = calls.around_decode(padded, **given)[0]
                for length in (5, 128):
                    given["topk_length"].fill_(length)
                    want = padded(**given)[0][:, :, :n_local].clone()  # type: ignore[index]
                    graph.replay()
                    same(out[:, :, :n_local], want, f"{n_local} heads, {rows} rows, replayed with length {length}")
            finally:
                calls._now.reset(token)
    print(torch.cuda.get_device_name(), own, "identical bits, eager and in a replayed graph:", dict(hooks.calls()))


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless equal to the bit and finite."""
    if not torch.equal(got, want) or not torch.isfinite(want.float()).all():
        sys.exit(f"differs: {what}")


if __name__ == "__main__":
    main()
