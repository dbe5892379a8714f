#include "recycle.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "pyssd-fault.h"

namespace pyssd {

static constexpr double DECAY = 0.98; // about fifty trials of a kind count
static constexpr double PRIOR_TRIALS = 8.0;

// odds before anything is known, found in a replay of 42 prompts on a 1.5B: of an entry that was never found again, by
// [pair or single][row or copy][another text or this one]; then what each streak, tokens in a row that the table had, and an
// agreement of pair and single make of them
static constexpr double PRIOR_ODDS[] = {0.32, 0.40, 0.09, 1.40, 0.11, 0.26, 0.03, 0.30};
static constexpr double PRIOR_STREAK[] = {1.0, 1.9, 7.5};
static constexpr double PRIOR_RUN[] = {1.0, 1.4, 2.1};
static constexpr double PRIOR_AGREES = 1.5;

recycle_table::recycle_table(int32_t n_vocab) : n_vocab(n_vocab) {
    if (n_vocab < 1) {
        throw error(error_kind::ARGUMENT,
                    "a recycling table for " + std::to_string(n_vocab) + " tokens; pass the size of the vocabulary");
    }
    outcomes.assign(N_CELLS, {});
    clear();
}

void recycle_table::clear() {
    n_texts = 0;
    singles.assign(n_vocab, {});
    pairs.assign(N_PAIRS, {});
    drop_draft();
}

size_t recycle_table::nbytes() const {
    return singles.size() * sizeof(entry) + pairs.size() * sizeof(pair_entry) + outcomes.size() * sizeof(outcome);
}

size_t recycle_table::bucket_of(int32_t before, int32_t token) const {
    const uint64_t key = ((uint64_t) (uint32_t) before << 32) | (uint32_t) token;
    const uint64_t hash = (key ^ (key >> 31)) * 0x9E3779B97F4A7C15ull;
    return (size_t) (hash >> 40) % (N_PAIRS / N_WAYS) * N_WAYS;
}

const recycle_table::entry * recycle_table::find_pair(int32_t before, int32_t token) const {
    if (!is_token(before)) {
        return nullptr;
    }
    const pair_entry * bucket = &pairs[bucket_of(before, token)];
    for (int32_t way = 0; way < N_WAYS; way++) {
        if (bucket[way].before == before && bucket[way].token == token) {
            return &bucket[way].top;
        }
    }
    return nullptr;
}

void recycle_table::renew(entry & e, int32_t top, bool is_copied) const {
    if (pyssd_fault("recycle-stale") && e.id >= 0) {
        return;
    }
    e.streak = e.id == top ? (uint8_t) std::min(e.streak + 1, N_STREAKS - 1) : 0;
    e.id = top;
    e.text = n_texts;
    e.is_copied = is_copied;
}

void recycle_table::learn_one(int32_t before, int32_t token, int32_t top, bool is_copied) {
    if (!is_token(token) || !is_token(top)) {
        return;
    }
    renew(singles[token], top, is_copied);
    if (!is_token(before)) {
        return;
    }
    pair_entry * bucket = &pairs[bucket_of(before, token)];
    int32_t way = 0;
    while (way < N_WAYS - 1 && (bucket[way].before != before || bucket[way].token != token)) {
        way++;
    }
    pair_entry found = bucket[way];
    if (found.before != before || found.token != token) {
        found = {before, token, {}};
    }
    renew(found.top, top, is_copied);
    std::move_backward(bucket, bucket + way, bucket + way + 1);
    bucket[0] = found;
}

void recycle_table::begin(const int32_t * tokens, int32_t n) {
    drop_draft();
    run = 0;
    bias.fade();
    n_texts++;
    // a long text must neither take time nor drive out all that rows have told
    for (int32_t i = std::max(0, n - 1 - N_PAIRS / N_WAYS); i + 1 < n; i++) {
        learn_one(i > 0 ? tokens[i - 1] : -1, tokens[i], tokens[i + 1], true);
    }
}

void recycle_table::learn(int32_t before, const int32_t * tokens, const int32_t * tops, int32_t n, int32_t n_right) {
    for (int32_t i = 0; i < n; i++) {
        learn_one(i < n_right ? before : -1, tokens[i], tops[i], false);
        before = tokens[i];
    }
}

int32_t recycle_table::cell_of(const entry & single, const entry * pair, int32_t run) const {
    const entry & e = pair != nullptr ? *pair : single;
    const bool agrees = pair != nullptr && single.id == pair->id;
    const bool is_fresh = e.text == n_texts;
    const int32_t kind = (pair != nullptr ? 0 : 4) + (e.is_copied ? 2 : 0) + (is_fresh ? 1 : 0);
    return ((kind * 2 + (agrees ? 1 : 0)) * N_STREAKS + e.streak) * N_RUNS + std::min(run, N_RUNS - 1);
}

float recycle_table::chance_of(int32_t cell) const {
    const outcome & o = outcomes[cell];
    const int32_t run = cell % N_RUNS;
    const int32_t streak = cell / N_RUNS % N_STREAKS;
    const bool agrees = cell / (N_RUNS * N_STREAKS) % 2 != 0;
    const int32_t kind = cell / (N_RUNS * N_STREAKS * 2);
    const double odds = PRIOR_ODDS[kind] * PRIOR_STREAK[streak] * PRIOR_RUN[run] * (agrees ? PRIOR_AGREES : 1.0);
    return (float) ((o.hits + PRIOR_TRIALS * odds / (1.0 + odds)) / (o.trials + PRIOR_TRIALS));
}

void recycle_table::drop_draft() {
    last.tokens.clear();
    last.chances.clear();
    last_cells.clear();
}

const recycle_draft & recycle_table::draft(int32_t before, int32_t token, int32_t max_len) {
    drop_draft();
    for (int32_t i = 0; i < max_len && is_token(token); i++) {
        const entry & single = singles[token];
        const entry * pair = find_pair(before, token);
        const int32_t id = pair != nullptr ? pair->id : single.id;
        if (id < 0) {
            break;
        }
        const int32_t cell = cell_of(single, pair, run + i);
        last.tokens.push_back(id);
        last.chances.push_back(bias.corrected(chance_of(cell)));
        last_cells.push_back(cell);
        before = token;
        token = id;
    }
    return last;
}

void recycle_table::extend(const int32_t * ids, int32_t n) {
    const int32_t n_known = std::min(n, (int32_t) last.tokens.size());
    for (int32_t i = 0; i < n_known; i++) {
        const bool is_hit = ids[i] == last.tokens[i];
        bias.add(chance_of(last_cells[i]), is_hit);
        outcome & o = outcomes[last_cells[i]];
        o.hits = o.hits * DECAY + (is_hit ? 1.0 : 0.0);
        o.trials = o.trials * DECAY + 1.0;
        if (!is_hit) {
            run = 0;
            break;
        }
        run++;
    }
    if (n_known < n) {
        run = 0; // what came behind was not drafted
    }
    drop_draft();
}

} // namespace pyssd
