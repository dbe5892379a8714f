// The target alone: prefill, rewind, logits, one sample.

#include <algorithm>
#include <cstring>

#include "api.h"
#include "sampling.h"
#include "session.h"

namespace pyssd {

// a verify that was begun and never ended leaves its cells: drop them
void session::close_round() {
    if (round_size > 0) {
        round_size = 0;
        chain_copy.invalidate();
        make_current(target);
        remove_from(0, past);
    }
}

// chunks of one micro-batch: a cancel is seen between them on devices that know no abort callback
void session::prefill(const llama_token * tokens, int32_t n, float * rows) {
    call guard(*this);
    close_round();
    check_tokens(tokens, n);
    check_room(n);
    check_memory();
    chain_copy.invalidate();
    compute_rows_singly(false);
    int32_t chunk = std::min<int32_t>(api().llama_n_ubatch(target), target_batch.capacity());
    if (rows != nullptr) {
        chunk = std::min<int32_t>(chunk, api().pyssd_outputs_max(target));
    }
    for (int32_t first = 0; first < n; first += chunk) {
        const int32_t end = std::min(n, first + chunk);
        target_batch.clear();
        for (int32_t i = first; i < end; i++) {
            target_batch.add(tokens[i], past + i - first, 0, rows != nullptr || i == n - 1);
        }
        try {
            decode(target, target_batch);
        } catch (...) {
            // micro-batches before the failed one stay in memory
            target_batch.clear();
            past = memory == nullptr ? (int32_t) past : api().llama_memory_seq_pos_max(memory, 0) + 1;
            throw;
        }
        past += end - first;
        for (int32_t i = first; rows != nullptr && i < end; i++) {
            const float * row = logits_row(i - first);
            std::memcpy(rows + (size_t) i * vocab_size, row, sizeof(float) * vocab_size);
        }
    }
    take_as_clean(); // a prompt is evaluated alike with and without drafts
}

// sliding windows forget: the cells that position n_past attends to have to be there still
bool session::reaches(int32_t n_past) const {
    if (swa_window <= 0 || n_past == 0) {
        return true;
    }
    const int32_t first = api().llama_memory_seq_pos_min(memory, 0);
    const int32_t needed = swa_chunked ? n_past / swa_window * swa_window : std::max(0, n_past - swa_window);
    return first <= needed;
}

bool session::rewindable(int32_t n_past) {
    call guard(*this);
    if (n_past < 0 || n_past > past) {
        return false;
    }
    find_refusal(); // asks once whether the memory can drop its last cells
    return n_past == past || n_past == 0 || (can_rewind && reaches(n_past));
}

void session::rewind(int32_t n_past) {
    call guard(*this);
    close_round();
    if (n_past < 0 || n_past > past) {
        throw error(error_kind::ARGUMENT,
                    "cannot rewind to " + std::to_string(n_past) + ": the session is at " + std::to_string(past));
    }
    if (n_past == past) {
        return;
    }
    if (!reaches(n_past)) {
        throw error(error_kind::DECODE, "the sliding window no longer reaches back to position " +
                                            std::to_string(n_past) + "; rewind to 0 and evaluate again");
    }
    make_current(target);
    api().llama_synchronize(target);
    remove_from(0, n_past);
    dirty.resize(std::max(0, n_past - clean_cells()));
    past = n_past;
    clean = std::min(clean, n_past);
    target_batch.clear();
    settled_rows.clear();
    chain_copy.invalidate();
}

// unchecked calls of llama_get_logits_ith write to the log and return null
float * session::logits_row(int32_t row) {
    const auto n_settled = (int32_t) (settled_rows.size() / (size_t) vocab_size);
    if (row < n_settled && row >= -n_settled) {
        return settled_rows.data() + (size_t) (row < 0 ? row + n_settled : row) * vocab_size;
    }
    const int32_t n = target_batch.size();
    int32_t n_outputs = 0;
    for (int32_t i = 0; i < n; i++) {
        n_outputs += target_batch.has_output(i) ? 1 : 0;
    }
    const bool is_known =
        row >= 0 ? row < n && target_batch.has_output(row) : -row <= n_outputs || (n == 0 && row == -1);
    float * logits = is_known ? api().llama_get_logits_ith(target, row) : nullptr;
    if (logits == nullptr) {
        throw error(error_kind::DECODE, "row " + std::to_string(row) + " has no logits; evaluate tokens first");
    }
    return logits;
}

float * session::logits(int32_t row) {
    call guard(*this);
    return logits_row(row);
}

llama_token session::sample(llama_sampler * chain, int32_t row, int64_t pos) {
    call guard(*this);
    if (pos < 0) {
        // row i of a verify holds the logits after draft token i - 1
        pos = round_size > 0 && row >= 0 ? past + 1 + (int64_t) row : (int64_t) past;
    }
    if (round_size == 0) {
        chain_copy.invalidate(); // outside of a round the chain may be another one at the same address
    }
    const llama_token id = chain_sample(chain, logits_row(row), vocab_size, pos, cand);
    chain_copy.emitted(id);
    return id;
}

void session::synchronize() {
    call guard(*this);
    api().llama_synchronize(current);
}

} // namespace pyssd
