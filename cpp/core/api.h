#pragma once

// The functions of the loaded libllama, resolved at run time: the core never links it, so it uses exactly the library
// that llama_cpp uses, whichever file that is.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "pyssd-hook.h"

// clang-format off
#define PYSSD_API_FUNCTIONS(X)     \
    X(llama_decode)                \
    X(llama_free)                  \
    X(llama_get_causal_attn)       \
    X(llama_get_logits_ith)        \
    X(llama_get_memory)            \
    X(llama_get_model)             \
    X(llama_memory_seq_pos_max)    \
    X(llama_memory_seq_pos_min)    \
    X(llama_memory_seq_rm)         \
    X(llama_model_get_vocab)       \
    X(llama_model_has_encoder)     \
    X(llama_model_is_diffusion)    \
    X(llama_model_n_embd)          \
    X(llama_n_batch)               \
    X(llama_n_ctx_seq)             \
    X(llama_n_ubatch)              \
    X(llama_pooling_type)          \
    X(llama_sampler_accept)        \
    X(llama_sampler_apply)         \
    X(llama_sampler_chain_get)     \
    X(llama_sampler_chain_n)       \
    X(llama_sampler_clone)         \
    X(llama_sampler_copy)          \
    X(llama_sampler_free)          \
    X(llama_sampler_init)          \
    X(llama_set_abort_callback)    \
    X(llama_synchronize)           \
    X(llama_vocab_is_eog)          \
    X(llama_vocab_n_tokens)        \
    X(pyssd_abi_version)           \
    X(pyssd_argmax_ith)            \
    X(pyssd_blocks_find)           \
    X(pyssd_borrower_init)         \
    X(pyssd_borrower_sync)         \
    X(pyssd_context_nbytes)        \
    X(pyssd_error)                 \
    X(pyssd_graph_nodes)           \
    X(pyssd_graphs_built)          \
    X(pyssd_logits_ith)            \
    X(pyssd_memory_can_rewind)     \
    X(pyssd_memory_swa)            \
    X(pyssd_outputs_max)           \
    X(pyssd_plan_set)              \
    X(pyssd_private_init)          \
    X(pyssd_reference_set)         \
    X(pyssd_invariant_set)         \
    X(pyssd_single_rows_set)       \
    X(pyssd_slots_set)             \
    X(pyssd_weights_list)          \
    X(pyssd_sizeof)                \
    X(pyssd_tap_get)
// clang-format on

namespace pyssd {

struct api_table {
#define PYSSD_API_MEMBER(name) decltype(&::name) name = nullptr;
    PYSSD_API_FUNCTIONS(PYSSD_API_MEMBER)
#undef PYSSD_API_MEMBER
};

// fill the table from a dlopen / LoadLibrary handle and check ABI version and struct sizes
// idempotent; throws LIBRARY_NOT_FOUND or LIBRARY_CONFLICT and leaves the table as it was
void api_attach(void * handle);

// the table; throws LIBRARY_NOT_FOUND before api_attach
const api_table & api();

// for tests of the samplers, which need no libllama
void api_set(const api_table & table);

std::map<std::string, size_t> api_struct_sizes();  // as compiled into the core
std::map<std::string, size_t> api_library_sizes(); // as compiled into libllama

} // namespace pyssd
