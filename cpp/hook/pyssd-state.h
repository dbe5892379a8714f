#pragma once

// What the hook keeps inside a llama_context. Included by llama-graph.h and llama-context.h through our edits: keep it small.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct ggml_tensor;
struct llama_context;
struct pyssd_slots;

// a resolved graph plan; id 0 = stock graph
struct pyssd_graph_plan {
    uint64_t             id = 0;
    std::vector<uint8_t> skip; // [n_blocks] or empty
    int32_t              head_rows = 0;
    bool                 argmax    = false;
    std::vector<int32_t> taps;
};

// tensors that a plan's graph leaves behind for reading; they live as long as the graph they belong to
struct pyssd_outputs {
    ggml_tensor *              logits = nullptr; // trimmed logits [head_rows, n_outputs]
    ggml_tensor *              argmax = nullptr; // I32 [n_outputs]
    std::vector<ggml_tensor *> taps;             // F32 [n_embd, n_tokens]
};

struct pyssd_state {
    llama_context * owner = nullptr; // set in borrowers

    uint64_t adapters      = 0; // owner: changes of LoRA or control vectors so far
    uint64_t adapters_seen = 0; // borrower: the owner's count at the last hand-over
    bool     reference     = false;
    bool     invariant     = false;
    bool     single_rows   = false;

    pyssd_graph_plan plan;
    std::array<pyssd_outputs, 2>
        outputs;                        // of the last graphs without and with output rows, as llama_context keeps them
    std::shared_ptr<pyssd_slots> slots; // graphs of narrow passes, or none: see pyssd-slots.cpp

    uint64_t n_built = 0;
    int32_t  n_nodes = 0;

    std::vector<float> logits; // host copy of trimmed logits, padded to the vocabulary with -inf
    bool               logits_read = false;

    mutable std::string error;
};

// in graph reuse: may a graph built under plan a run under plan b
bool pyssd_plan_same(uint64_t a, uint64_t b);
