// The near-tie guard. Kernels that are not width-invariant give a row of a wide pass slightly other logits than plain
// decoding has, and leave slightly other cells behind. A row that is nearly tied is settled: its token is decoded alone.
// That is no help while the cells before it are those of wide passes, whose noise is as large as the row's own (measured,
// docs/guarantees.md); so the cells since the last ones that plain decoding would have written too are rewritten first.

#include "guard.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "api.h"
#include "gumbel.h"
#include "pyssd-fault.h"
#include "sampling.h"
#include "session.h"

namespace pyssd {

using clock = std::chrono::steady_clock;

namespace {

enum class role { CHANGES, FILTERS, SCALES, PICKS, IDLE, UNKNOWN };

role role_of(const std::string & name) {
    const auto is_one_of = [&](std::initializer_list<const char *> names) {
        return std::any_of(names.begin(), names.end(), [&](const char * other) { return name == other; });
    };
    if (name.empty()) {
        return role::UNKNOWN;
    }
    if (name[0] == '?') {
        return role::IDLE;
    }
    if (is_one_of({"penalties", "logit-bias", "dry", "grammar"})) {
        return role::CHANGES;
    }
    if (is_one_of({"top-k", "top-p", "min-p", "typical", "top-n-sigma"})) {
        return role::FILTERS;
    }
    if (is_one_of({"temp", "temp-ext"})) {
        return role::SCALES;
    }
    return is_one_of({"greedy", "gumbel"}) ? role::PICKS : role::UNKNOWN;
}

struct shape {
    bool is_known = false; // what changes logits, then what filters and scales, then one pick
    bool filters = false;
    bool has_grammar = false;
};

shape shape_of(llama_sampler * chain) {
    shape s;
    bool changes_over = false;
    const int32_t n = chain_size(chain);
    for (int32_t i = 0; i < n; i++) {
        const std::string name = sampler_name(chain_member(chain, i));
        const role r = role_of(name);
        if (r == role::UNKNOWN || (r == role::CHANGES && changes_over) || s.is_known) {
            return {};
        }
        changes_over = changes_over || (r != role::CHANGES && r != role::IDLE);
        s.filters = s.filters || r == role::FILTERS;
        s.has_grammar = s.has_grammar || name == "grammar";
        s.is_known = r == role::PICKS;
    }
    return s;
}

bool is_near_greedy(const float * logits, int32_t n_vocab, float margin) {
    const llama_token top = row_argmax(logits, n_vocab);
    if (top < 0) {
        return false;
    }
    const float bound = logits[top] - margin;
    for (int32_t id = 0; id < n_vocab; id++) {
        if (logits[id] > bound && id != top) {
            return true;
        }
    }
    return false;
}

// what a sampler multiplies differences of logits by; 0 if it leaves one candidate only
double scale_of(llama_sampler * member, llama_token_data_array * cur) {
    size_t high = 0;
    size_t low = 0;
    for (size_t i = 1; i < cur->size; i++) {
        high = cur->data[i].logit > cur->data[high].logit ? i : high;
        low = cur->data[i].logit < cur->data[low].logit ? i : low;
    }
    const llama_token_data top = cur->data[high];
    const llama_token_data bottom = cur->data[low];
    api().llama_sampler_apply(member, cur);
    float top_after = NAN;
    float bottom_after = NAN;
    for (size_t i = 0; i < cur->size; i++) {
        top_after = cur->data[i].id == top.id ? cur->data[i].logit : top_after;
        bottom_after = cur->data[i].id == bottom.id ? cur->data[i].logit : bottom_after;
    }
    if (!(top.logit > bottom.logit)) {
        return 1.0;
    }
    const double scale = ((double) top_after - bottom_after) / ((double) top.logit - bottom.logit);
    return std::isfinite(scale) ? scale : 0.0;
}

} // namespace

bool is_near_tie(llama_sampler * chain, const float * logits, int32_t n_vocab, int64_t pos, float margin,
                 candidates & cand) {
    if (chain_is_greedy(chain)) {
        return is_near_greedy(logits, n_vocab, margin);
    }
    const shape s = shape_of(chain);
    if (!s.is_known) {
        return false;
    }
    gumbel_set_pos(chain, pos);
    std::vector<llama_token_data> before; // the candidates as the first filter found them
    llama_sampler * pick = nullptr;
    double scale = 1.0;
    bool is_narrow = false;
    bool changes_over = false;
    llama_token_data_array cur = cand.all(logits);
    const int32_t n = chain_size(chain);
    for (int32_t i = 0; i < n; i++) {
        llama_sampler * member = chain_member(chain, i);
        const std::string name = sampler_name(member);
        const role r = role_of(name);
        if (!is_narrow && (name == "grammar" || (r == role::FILTERS && !s.has_grammar))) {
            cand.narrow(&cur); // a grammar asks about every id, and filters sort: the largest are enough to judge by
            is_narrow = true;
        }
        if (!changes_over && r != role::CHANGES && r != role::IDLE) {
            changes_over = true;
            candidates_compact(&cur);
            if (s.filters) {
                before.assign(cur.data, cur.data + cur.size);
            }
        }
        if (cur.size == 0) {
            return true; // nobody to judge by: let the row be settled
        }
        if (r == role::PICKS) {
            pick = member;
            break;
        }
        if (r == role::SCALES) {
            scale *= scale_of(member, &cur);
        } else {
            api().llama_sampler_apply(member, &cur);
        }
    }
    candidates_compact(&cur);
    if (cur.size == 0) {
        return true;
    }
    const bool is_noisy = gumbel_is(pick);
    const auto noise = [&](llama_token id) { return is_noisy ? gumbel_noise_at(pick, id) : 0.0; };

    // the pick, and the one that would be made without it
    const auto best_index = [&] {
        api().llama_sampler_apply(pick, &cur);
        return cur.selected;
    };
    const int64_t first = best_index();
    if (first < 0 || first >= (int64_t) cur.size) {
        return false;
    }
    const llama_token_data best = cur.data[first];
    const double best_score = best.logit + noise(best.id);
    const double bound = best_score - margin * (scale > 0.0 ? scale : 1.0);
    cur.data[first].logit = -INFINITY;
    const int64_t second = best_index();
    if (second >= 0 && cur.data[second].logit > -INFINITY &&
        cur.data[second].logit + noise(cur.data[second].id) > bound) {
        return true;
    }
    if (!s.filters || before.size() == cur.size || scale <= 0.0) {
        return false;
    }

    // who stands at the border may be on its other side: the weakest kept, the strongest left out, all within the margin
    std::vector<llama_token> kept;
    kept.reserve(cur.size);
    for (size_t i = 0; i < cur.size; i++) {
        kept.push_back(cur.data[i].id);
    }
    std::sort(kept.begin(), kept.end());
    const auto is_kept = [&](llama_token id) { return std::binary_search(kept.begin(), kept.end(), id); };
    float weakest = INFINITY;
    float strongest = -INFINITY;
    float best_before = 0.0f;
    for (const llama_token_data & d : before) {
        if (is_kept(d.id)) {
            weakest = std::min(weakest, d.logit);
            best_before = d.id == best.id ? d.logit : best_before;
        } else {
            strongest = std::max(strongest, d.logit);
        }
    }
    if (kept.size() > 1 && (best_before <= weakest || best_before < strongest + margin)) {
        return true;
    }
    return std::any_of(before.begin(), before.end(), [&](const llama_token_data & d) {
        const bool may_enter = !is_kept(d.id) && (d.logit >= strongest || d.logit > weakest - margin);
        return may_enter && d.logit * scale + noise(d.id) > bound;
    });
}

// cells [0, clean) are what plain decoding writes; dirty holds the tokens of those behind
int32_t session::clean_cells() {
    if (clean > past || clean + (int64_t) dirty.size() != past) {
        take_as_clean(); // others changed the cells: from here on, plain would start from the same ones
    }
    return clean;
}

void session::take_as_clean() {
    clean = past;
    dirty.clear();
}

// the row behind round token i, from passes of one token; rows before it stay readable, those behind are dropped
void session::settle(int32_t row, bool rewrite) {
    const auto start = clock::now();
    const int32_t pos = past + row;
    std::vector<float> rows((size_t) (row + 1) * vocab_size);
    for (int32_t r = 0; r < row; r++) {
        std::memcpy(rows.data() + (size_t) r * vocab_size, logits_row(r), sizeof(float) * vocab_size);
    }
    std::vector<llama_token> tokens(round_tokens.begin(), round_tokens.begin() + row + 1);
    int32_t from = pos;
    const int32_t first_dirty = clean_cells();
    const bool is_clean = rewrite && reaches(first_dirty) && !pyssd_fault("guard-cells");
    if (is_clean) {
        from = first_dirty;
        tokens.insert(tokens.begin(), dirty.begin(), dirty.end());
    }
    tokens.erase(tokens.begin(), tokens.end() - (pos + 1 - from));
    api().llama_synchronize(target);
    remove_from(0, from);
    try {
        for (int32_t p = from; p <= pos; p++) {
            target_batch.clear();
            target_batch.add(tokens[p - from], p, 0, p == pos);
            decode(target, target_batch);
            count.guard_passes++;
        }
        std::memcpy(rows.data() + (size_t) row * vocab_size, logits_row(0), sizeof(float) * vocab_size);
    } catch (...) {
        restore_cells(from, tokens);
        throw;
    }
    settled_rows = std::move(rows);
    round_size = row + 1;
    round_is_clean = is_clean || (row == 0 && first_dirty == past);
    if (is_clean) {
        take_as_clean();
    }
    count.guard_rows++;
    count.guard_seconds += std::chrono::duration<double>(clock::now() - start).count();
}

// a settling that was cut short has dropped cells below n_past: write them again, also while a cancel is under way
void session::restore_cells(int32_t from, const std::vector<llama_token> & tokens) {
    const bool was_cancelled = cancelled.exchange(false);
    try {
        remove_from(0, from);
        const int32_t chunk = std::min<int32_t>(api().llama_n_ubatch(target), target_batch.capacity());
        for (int32_t p = from; p < past; p += chunk) {
            target_batch.clear();
            for (int32_t q = p; q < std::min<int32_t>(past, p + chunk); q++) {
                target_batch.add(tokens[q - from], q, 0, false);
            }
            decode(target, target_batch);
        }
    } catch (...) {
        past = std::max(0, api().llama_memory_seq_pos_max(memory, 0) + 1);
    }
    target_batch.clear();
    cancelled = cancelled || was_cancelled;
}

} // namespace pyssd
