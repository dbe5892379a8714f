// Measuring: seconds of target passes and of draft steps on scratch cells behind the user's, which stay as they are. The
// logits of the last decode are gone afterwards.

#include <algorithm>
#include <chrono>

#include "api.h"
#include "session.h"

namespace pyssd {

using clock = std::chrono::steady_clock;

static double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

// one token after another differs, as in a text: rows of one token would all choose the same experts
static llama_token token_of(int32_t i, int32_t n_vocab) {
    return (llama_token) ((uint32_t) (i + 1) * 2654435761u % (uint32_t) n_vocab);
}

// drops the scratch cells and restores the plans, also when a pass fails
struct session::scratch {
    explicit scratch(session & s) : owner(s) {}

    scratch(const scratch &) = delete;
    scratch & operator=(const scratch &) = delete;

    ~scratch() {
        if (drafts) {
            owner.apply_skip();
            owner.chain_copy.invalidate();
        }
        owner.target_batch.clear();
        owner.draft_batch.clear();
        api().llama_synchronize(owner.current);
        api().llama_memory_seq_rm(owner.memory, 0, owner.past, -1);
    }

    session & owner;
    bool drafts = false;
};

void session::begin_measuring() {
    require_speculation();
    close_round();
    check_memory();
}

// cells cost little when nearly all blocks are left out; what they hold does not matter to the time of reading them
void session::fill_cells(int32_t n) {
    std::vector<uint8_t> skip(block_list.size(), 1);
    for (size_t i = 0; i < skip.size(); i++) {
        if (block_list[i].kind == PYSSD_BLOCK_KIND_ATTN) {
            skip[i] = 0;
            break;
        }
    }
    const pyssd_plan plan = plan_of(skip.data(), (int32_t) skip.size(), 0);
    const bool had_scout = scout_ctx != nullptr;
    ensure_scout(n);
    make_current(scout_ctx);
    api().pyssd_borrower_sync(scout_ctx);
    if (api().pyssd_plan_set(scout_ctx, &plan) != 0) {
        throw error(error_kind::DECODE, std::string("no cells to measure behind: ") + api().pyssd_error(scout_ctx));
    }
    const int32_t chunk = scout_batch->capacity();
    for (int32_t first = 0; first < n; first += chunk) {
        scout_batch->clear();
        for (int32_t i = first; i < std::min(n, first + chunk); i++) {
            scout_batch->add(token_of(i, vocab_size), past + i, 0, false);
        }
        decode(scout_ctx, *scout_batch);
    }
    if (!had_scout) {
        release_scout();
    }
}

std::vector<double> session::time_verify(const int32_t * widths, int32_t n, int32_t n_cells, double max_seconds) {
    call guard(*this);
    begin_measuring();
    const int32_t widest = n > 0 ? *std::max_element(widths, widths + n) : 1;
    if (n_cells < 0 || (n > 0 && *std::min_element(widths, widths + n) < 1)) {
        throw error(error_kind::ARGUMENT, "widths must be positive, and n_cells not negative");
    }
    check_room(n_cells + widest);
    const bool reaches_user = swa_window > 0 && past > 0 && (int64_t) n_cells + widest > swa_reach;
    if (widest - 1 > draft_limit(INT32_MAX) || reaches_user) {
        throw error(error_kind::CONTEXT_OVERFLOW, "a pass of width " + std::to_string(widest) + " behind " +
                                                      std::to_string(n_cells) +
                                                      " cells is not possible here; ask max_draft for the width");
    }
    std::vector<double> seconds;
    scratch cells(*this);
    compute_rows_singly(true);
    const auto start = clock::now();
    if (n_cells > 0) {
        fill_cells(n_cells);
    }
    for (int32_t k = 0; k < n && seconds_since(start) < max_seconds; k++) {
        target_batch.clear();
        for (int32_t i = 0; i < widths[k]; i++) {
            target_batch.add(token_of(i, vocab_size), past + n_cells + i, 0, true);
        }
        const auto pass_start = clock::now();
        decode(target, target_batch);
        logits_row(widths[k] - 1); // waits for the device
        seconds.push_back(seconds_since(pass_start));
        remove_from(0, past + n_cells);
    }
    return seconds;
}

std::vector<double> session::time_draft(const uint8_t * skip, int32_t n_blocks, int32_t head_rows, int32_t n_steps,
                                        double max_seconds) {
    call guard(*this);
    begin_measuring();
    const pyssd_plan plan = plan_of(skip, n_blocks, head_rows);
    check_room(1);
    ensure_draft();
    std::vector<double> seconds;
    scratch cells(*this);
    cells.drafts = true;
    const bool is_stock =
        head_rows == 0 && std::all_of(skip, skip + plan.n_blocks, [](uint8_t bit) { return bit == 0; });
    if (api().pyssd_plan_set(draft_ctx, is_stock ? nullptr : &plan) != 0) {
        throw error(error_kind::SKIP_SET, api().pyssd_error(draft_ctx));
    }
    make_current(draft_ctx);
    api().pyssd_borrower_sync(draft_ctx);
    chain_copy.sync(nullptr);
    const auto start = clock::now();
    for (int32_t i = 0; i < n_steps && seconds_since(start) < max_seconds; i++) {
        const auto step_start = clock::now();
        draft_batch.clear();
        draft_batch.add(token_of(i, vocab_size), past, 0, true);
        decode(draft_ctx, draft_batch);
        const float * logits = api().pyssd_logits_ith(draft_ctx, 0);
        if (logits == nullptr) {
            throw error(error_kind::DECODE, "the draft context returned no logits");
        }
        chain_copy.pick(logits, vocab_size, (int64_t) past + 1, cand);
        seconds.push_back(seconds_since(step_start));
        remove_from(0, past);
    }
    return seconds;
}

} // namespace pyssd
