#pragma once

// Applying a graph plan: the functions that our edits call from llama-context.cpp.

#include "ggml-backend.h"
#include "pyssd-state.h"

#include <cstdint>
#include <string>
#include <vector>

struct llama_context;
class llm_graph_result;

// called by the constructor of a context instead of making a KV memory; false if this context is no borrower
bool pyssd_memory_borrow(llama_context & ctx);

// called for every graph that process_ubatch builds, before it is allocated; false: the context's error says why
bool pyssd_graph_apply(llama_context & ctx, llm_graph_result & res);

// called before each pass: put graphs of this width in place, if any are kept; and wherever upstream drops its graphs
void pyssd_slots_choose(llama_context & ctx, uint32_t n_tokens);
void pyssd_slots_drop(llama_context & ctx);

// bytes of compute buffer that graphs hold which are not in place
size_t pyssd_slots_nbytes(const llama_context & ctx, ggml_backend_t backend);

// the first rows of this matrix are a prefix of its buffer (plain or packed in groups of rows), so that a view trims it
bool pyssd_has_prefix_rows(const ggml_tensor * w);

// remember why a call on this context failed; returns -1
int32_t pyssd_fail(const llama_context & ctx, const std::string & text);

// tensors of the context's memory that hold recurrent state
std::vector<ggml_tensor *> pyssd_recurrent_state(const llama_context & ctx);

// room for the nodes that a plan may add
uint32_t pyssd_extra_nodes(const llama_context & ctx);

// true while pyssd_blocks_find builds its graph: splitting it over devices would cut the edges that the walk follows
bool pyssd_graph_is_walked(void);
