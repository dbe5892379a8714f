#pragma once

// Attention and FFN blocks of a graph, found by walking back along the residual stream.

#include "ggml.h"

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// one ADD tree on the residual stream: stream + branches
struct pyssd_join {
    ggml_tensor * root   = nullptr; // the outermost ADD
    ggml_tensor * stream = nullptr; // the leaf that carries the stream, row gather included
};

struct pyssd_found {
    int32_t                    join       = 0;
    int32_t                    layer      = -1;
    int32_t                    kind       = 0; // enum pyssd_block_kind
    int64_t                    nbytes     = 0;
    int32_t                    n_matrices = 0;
    std::string                device;
    std::vector<ggml_tensor *> leaves; // its operands in the ADD tree
    std::vector<ggml_tensor *> writes; // nodes that store its KV cells
};

// an indexed graph
struct pyssd_graph {
    std::vector<ggml_tensor *>                   nodes;
    std::unordered_map<const ggml_tensor *, int> index;
    std::vector<int32_t>                         n_uses;     // per node
    std::vector<uint8_t>                         from_input; // per node: depends on the token embeddings
    std::vector<int32_t>                         stage;      // per node: joins passed on the way from the input
    std::unordered_set<const ggml_tensor *>
        state; // tensors outside the graph that it writes: KV cells, recurrent state

    std::unordered_set<const ggml_tensor *> recurrent; // those of them that are recurrent state

    pyssd_graph(ggml_cgraph * gf, const ggml_tensor * input, const std::vector<ggml_tensor *> & recurrent_state);

    int  find(const ggml_tensor * t) const;              // index of a node, -1 if it is none
    bool depends(const ggml_tensor * t) const;           // on the token embeddings
    bool is_add(const ggml_tensor * t, bool root) const; // an ADD to flatten
};

struct pyssd_blocks {
    std::vector<pyssd_join>  joins;   // in stream order
    std::vector<pyssd_found> blocks;  // in stream order
    std::string              refusal; // why the structure is not understood, empty if it is
};

// a side effect: the node writes into a tensor that outlives the graph
bool pyssd_is_write(const ggml_tensor * t);

// the tensor behind a view
const ggml_tensor * pyssd_root(const ggml_tensor * t);

// without row gathers and views that keep the values of a row
ggml_tensor * pyssd_strip(ggml_tensor * t);

pyssd_blocks pyssd_blocks_walk(pyssd_graph & g, ggml_tensor * logits, const ggml_tensor * input);
