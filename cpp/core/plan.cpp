// What the draft leaves out: a plan checked against the model's blocks, and the context that runs it.

#include <algorithm>

#include "api.h"
#include "session.h"

namespace pyssd {

pyssd_plan session::plan_of(const uint8_t * skip, int32_t n_blocks, int32_t head_rows) {
    find_refusal();
    if (block_list.empty()) {
        throw error(error_kind::UNSUPPORTED_MODEL, "no block can be skipped: " + refusal_text + "; decode plainly");
    }
    if (skip != nullptr && n_blocks != (int32_t) block_list.size()) {
        throw error(error_kind::SKIP_SET, "the skip set has " + std::to_string(n_blocks) + " blocks, the model has " +
                                              std::to_string(block_list.size()) + "; use a set made for this model");
    }
    for (int32_t i = 0; skip != nullptr && i < n_blocks; i++) {
        if (skip[i] != 0 && block_list[i].kind == PYSSD_BLOCK_KIND_MIXER) {
            throw error(error_kind::SKIP_SET,
                        "block " + std::to_string(i) + " keeps recurrent state and cannot be skipped; leave it out");
        }
    }
    if (head_rows < 0 || head_rows > vocab_size) {
        throw error(error_kind::ARGUMENT, "head_rows = " + std::to_string(head_rows) + " is not in 0 .. " +
                                              std::to_string(vocab_size) + " (the vocabulary)");
    }
    pyssd_plan plan{};
    plan.skip = skip;
    plan.n_blocks = skip == nullptr ? 0 : n_blocks;
    plan.head_rows = head_rows;
    return plan;
}

// the draft context is made here or at the first draft, whichever comes first: bad plans fail at once
void session::set_skip(const uint8_t * skip, int32_t n_blocks, int32_t head_rows) {
    call guard(*this);
    require_speculation();
    const pyssd_plan plan = plan_of(skip, n_blocks, head_rows);
    std::vector<uint8_t> bits;
    if (skip != nullptr && std::any_of(skip, skip + n_blocks, [](uint8_t bit) { return bit != 0; })) {
        bits.assign(skip, skip + n_blocks);
    }
    if (draft_ctx != nullptr && bits == skip_bits && head_rows == skip_head_rows) {
        return; // the same plan keeps its graph
    }
    ensure_draft();
    skip_bits = bits;
    skip_head_rows = plan.head_rows;
    if (apply_skip() != 0) {
        const std::string text = api().pyssd_error(draft_ctx);
        skip_bits.clear();
        skip_head_rows = 0;
        apply_skip();
        throw error(error_kind::SKIP_SET, text);
    }
}

// nothing to change = the stock graph, so that an empty set is exactly the target
int32_t session::apply_skip() {
    pyssd_plan plan{};
    plan.skip = skip_bits.empty() ? nullptr : skip_bits.data();
    plan.n_blocks = (int32_t) skip_bits.size();
    plan.head_rows = skip_head_rows;
    const bool is_stock = skip_bits.empty() && skip_head_rows == 0;
    return api().pyssd_plan_set(draft_ctx, is_stock ? nullptr : &plan);
}

void session::ensure_draft() {
    if (draft_ctx != nullptr) {
        return;
    }
    draft_ctx = api().pyssd_borrower_init(target, 1, DRAFT_BATCH, 1);
    if (draft_ctx == nullptr) {
        throw error(error_kind::UNSUPPORTED_MODEL, std::string("no draft context: ") + api().pyssd_error(target));
    }
}

} // namespace pyssd
