"""Our edits to upstream's sources, each tied to an anchor that must occur exactly once.

An anchor is the shortest text that names its place; no passage of upstream is kept here. `fetch.py` applies the edits and
fails loudly when an anchor is missing or ambiguous, so a version bump shows at once what has to be looked at again.
Everything of substance lives in cpp/hook; an edit only calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Edit:
    """One change: `text` goes before or after `anchor`, or in its place."""

    path: str  # relative to vendor/llama.cpp
    anchor: str
    text: str
    where: Literal["before", "after", "replace"] = "after"


CONTEXT_H = "src/llama-context.h"
CONTEXT_CPP = "src/llama-context.cpp"
CPU_CPP = "ggml/src/ggml-cpu/ggml-cpu.cpp"
REPACK_CPP = "ggml/src/ggml-cpu/repack.cpp"

EDITS: tuple[Edit, ...] = (
    # The id of the graph plan takes part in graph reuse: a draft graph reused for verification would be silently lossy.
    Edit(
        "src/llama-cparams.h",
        "int32_t  nextn_layer_offset = 0;",
        "\n    uint64_t pyssd_plan = 0; // pyssd: id of the graph plan, 0 = stock graph",
    ),
    Edit(
        "src/llama-graph.h",
        "if (cparams.nextn_layer_offset != other.cparams.nextn_layer_offset) {",
        "if (!pyssd_plan_same(cparams.pyssd_plan, other.cparams.pyssd_plan)) { // pyssd:\n"
        "            return false;\n"
        "        }\n\n        ",
        "before",
    ),
    Edit(
        "src/llama-graph.h",
        '#include "llama-adapter.h"',
        '\n#include "pyssd-state.h" // pyssd:',
    ),
    # State of the hook, and a KV memory that several contexts may hold.
    Edit(
        CONTEXT_H,
        "llama_memory_ptr memory;",
        "std::shared_ptr<llama_memory_i> memory; // pyssd: borrowers hold it too",
        "replace",
    ),
    Edit(
        CONTEXT_H,
        "bool has_evaluated_once = false;",
        "\n\n    pyssd_state pyssd; // pyssd:\n    friend struct pyssd_access;",
    ),
    Edit(
        CONTEXT_CPP,
        '#include "llama-context.h"',
        '\n#include "pyssd-plan.h" // pyssd:',
    ),
    # A borrower takes over the owner's resolved parameters and its memory instead of making one.
    Edit(
        CONTEXT_CPP,
        "memory.reset(model.create_memory(params_mem, cparams));",
        "if (!pyssd_memory_borrow(*this)) // pyssd:\n        ",
        "before",
    ),
    Edit(
        CONTEXT_CPP,
        "cparams.pipeline_parallel = pipeline_parallel;",
        "cparams.pipeline_parallel = pipeline_parallel && !pyssd.owner; // pyssd:",
        "replace",
    ),
    # Adapters live on the owner.
    Edit(
        CONTEXT_CPP,
        "/*.cvec        =*/ cvec.get(),",
        "/*.cvec        =*/ pyssd.owner ? pyssd.owner->cvec.get() : cvec.get(), // pyssd:",
        "replace",
    ),
    Edit(
        CONTEXT_CPP,
        "/*.loras       =*/ loras.get(),",
        "/*.loras       =*/ pyssd.owner ? pyssd.owner->loras.get() : loras.get(), // pyssd:",
        "replace",
    ),
    Edit(
        CONTEXT_CPP,
        "loras.reset(new llama_adapter_loras());",
        "\n    pyssd.adapters++; // pyssd:",
    ),
    Edit(
        CONTEXT_CPP,
        "bool res = cvec->apply(model, data, len, n_embd, il_start, il_end);",
        "\n    pyssd.adapters++; // pyssd:",
    ),
    # The plan rewrites the graph between its construction and its allocation.
    Edit(
        CONTEXT_CPP,
        "if (!ggml_backend_sched_alloc_graph(sched.get(), gf)) {",
        "if (!pyssd_graph_apply(*this, *res)) { // pyssd:\n"
        "            ret = GGML_STATUS_FAILED;\n"
        "            return nullptr;\n"
        "        }\n\n        ",
        "before",
    ),
    # Graphs are kept for several widths; they go where upstream's own go.
    Edit(
        CONTEXT_CPP,
        "if (mctx && !mctx->apply()) {",
        "pyssd_slots_choose(*this, ubatch.n_tokens); // pyssd:\n\n    ",
        "before",
    ),
    Edit(
        CONTEXT_CPP,
        "sched_need_reserve = false;",
        "\n\n    pyssd_slots_drop(*this); // pyssd:",
    ),
    Edit(
        CONTEXT_CPP,
        "GGML_ASSERT(n_outputs >= 1);",
        "\n\n    pyssd_slots_drop(*this); // pyssd:",
    ),
    # The walk over the blocks needs the graph as it was built, before the scheduler puts copies between devices into it.
    Edit(
        CONTEXT_CPP,
        "ggml_backend_sched_split_graph(sched.get(), gf);",
        "if (!pyssd_graph_is_walked()) // pyssd:\n            ",
        "before",
    ),
    Edit(
        CONTEXT_CPP,
        "res += n_sampling_nodes;",
        "\n    res += pyssd_extra_nodes(*this); // pyssd:",
    ),
    # A plan or a kept graph may outgrow or undercut the reserve on purpose: no warning about it at close.
    Edit(
        CONTEXT_CPP,
        "if (!model.hparams.no_alloc && !opt_ctx) {",
        "if (!model.hparams.no_alloc && !opt_ctx && !pyssd.owner && !pyssd.slots) { // pyssd:",
        "replace",
    ),
    # Our packed buffer type comes before upstream's: the first one that supports a weight gets it.
    Edit(
        CPU_CPP, "// ggml-backend interface", '#include "pyssd-kernels.h" // pyssd:\n\n', "before"
    ),
    Edit(
        CPU_CPP,
        "#ifdef GGML_USE_CPU_REPACK\n        if (ggml_backend_cpu_repack_buffer_type()) {",
        "bufts.push_back(pyssd_kernels_buffer_type()); // pyssd:\n\n",
        "before",
    ),
    # Rows of a verify pass are computed as single rows where the graph asks for it (cpp/hook/pyssd-rows.h): no tiles, no
    # sgemm, and of repacked weights no product of four columns at a time.
    Edit(
        "ggml/src/ggml-cpu/ggml-cpu.c",
        '#include "tiled/tiled.h"',
        '\n#include "pyssd-rows.h" // pyssd:',
    ),
    Edit(
        "ggml/src/ggml-cpu/ggml-cpu.c",
        "// If tiled is supported, it will execute the full op here and we return",
        "struct ggml_compute_params pyssd_params = *params; // pyssd:\n"
        "    if (pyssd_rows_reference(dst)) {\n"
        "        pyssd_params.use_ref = true;\n"
        "        params = &pyssd_params;\n"
        "    }\n\n    ",
        "before",
    ),
    Edit(
        "ggml/src/ggml-cpu/ggml-cpu.c",
        "// Tiled matmul (see tiled.h); per-thread work buffers",
        "struct ggml_compute_params pyssd_params = *params; // pyssd:\n"
        "    if (pyssd_rows_reference(dst)) {\n"
        "        pyssd_params.use_ref = true;\n"
        "        params = &pyssd_params;\n"
        "    }\n\n    ",
        "before",
    ),
    Edit(REPACK_CPP, '#include "repack.h"', '\n#include "pyssd-rows.h" // pyssd:'),
    Edit(
        REPACK_CPP,
        "if (nrows > 3) {",
        "const int64_t pyssd_tail = pyssd_rows_single(op) ? 0 : nrows - (nrows % 4); // pyssd:\n"
        "        if (pyssd_tail > 0) {",
        "replace",
    ),
    Edit(
        REPACK_CPP,
        "for (int iter = nrows - (nrows % 4); iter < nrows;",
        "for (int64_t iter = pyssd_tail; iter < nrows; // pyssd:\n            ",
        "replace",
    ),
    Edit(
        REPACK_CPP,
        "i11 = ith * 4; i11 < ne11 - ne11 % 4;",
        "i11 = ith * 4; !pyssd_rows_single(op) && i11 < ne11 - ne11 % 4; // pyssd:\n                ",
        "replace",
    ),
    Edit(
        REPACK_CPP,
        "i11_processed = ne11 - ne11 % 4;",
        "i11_processed = pyssd_rows_single(op) ? 0 : ne11 - ne11 % 4; // pyssd:",
        "replace",
    ),
    # In reference mode a product must not depend on the number of columns; sgemm is taken from two columns on.
    Edit(
        "ggml/src/ggml-cpu/llamafile/sgemm.cpp",
        "// only enable sgemm for prompt processing",
        "if (params->use_ref) { // pyssd:\n        return false;\n    }\n\n    ",
        "before",
    ),
)
