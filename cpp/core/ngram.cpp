#include "ngram.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace pyssd {

static constexpr int32_t MAX_STEPS = 64; // along a chain of links: a crowded bucket must not cost time
static constexpr double DECAY = 0.98;    // about fifty trials of a kind count
static constexpr double PRIOR_TRIALS = 3.0;

// chances before anything is known, by class of length; several that agree are a better sign than one, a split vote is
// a worse one
static constexpr double PRIOR[] = {0.30, 0.45, 0.55, 0.65, 0.72, 0.80, 0.87, 0.92};
static constexpr double PRIOR_VOTE[] = {1.0, 1.05, 0.6};

static int32_t class_of_len(int32_t match_len) {
    if (match_len < 6) {
        return std::max(match_len - 2, 0);
    }
    return match_len < 8 ? 4 : match_len < 12 ? 5 : match_len < 20 ? 6 : 7;
}

ngram_index::ngram_index(int32_t capacity) : capacity(capacity), outcomes(N_CLASSES * N_VOTES) {
    if (capacity < 1) {
        throw error(error_kind::ARGUMENT,
                    "an n-gram index has the capacity " + std::to_string(capacity) + "; pass a positive number");
    }
    n_bits = 4;
    while (n_bits < 30 && ((int64_t) 1 << n_bits) < 2 * (int64_t) capacity) {
        n_bits++;
    }
    heads.assign((size_t) N_KINDS << n_bits, 0);
    links.assign((size_t) N_KINDS * capacity, 0);
}

void ngram_index::find_buckets(int32_t pos, size_t buckets[N_KINDS]) const {
    uint64_t hash = 0;
    for (int32_t n = 1; n <= std::min(N_MAX, pos); n++) {
        hash = (hash ^ ((uint32_t) tokens[pos - n] + 1ull)) * 0x9E3779B97F4A7C15ull;
        hash ^= hash >> 29;
        if (n >= N_MIN) {
            const auto kind = (size_t) (n - N_MIN);
            buckets[kind] = (kind << n_bits) + ((hash * 0x9E3779B97F4A7C15ull) >> (64 - n_bits));
        }
    }
}

void ngram_index::insert(int32_t pos) {
    size_t buckets[N_KINDS];
    find_buckets(pos, buckets);
    int32_t * link = &links[(size_t) N_KINDS * (pos % capacity)];
    for (int32_t n = N_MIN; n <= std::min(N_MAX, pos); n++) {
        int32_t & head = heads[buckets[n - N_MIN]];
        link[n - N_MIN] = head;
        head = pos;
    }
    oldest = std::max(oldest, pos - capacity);
}

void ngram_index::append(const int32_t * ids, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        tokens.push_back(ids[i]);
        insert(size());
    }
}

void ngram_index::drop_draft() {
    last.tokens.clear();
    last.chances.clear();
    last.match_len = 0;
    last_cells.clear();
}

void ngram_index::extend(const int32_t * ids, int32_t n) {
    const int32_t n_known = std::min(n, (int32_t) last.tokens.size());
    for (int32_t i = 0; i < n_known; i++) {
        const bool is_hit = ids[i] == last.tokens[i];
        bias.add(chance_of(last_cells[i]), is_hit);
        outcome & o = outcomes[last_cells[i]];
        o.hits = o.hits * DECAY + (is_hit ? 1.0 : 0.0);
        o.trials = o.trials * DECAY + 1.0;
        if (!is_hit) {
            break;
        }
    }
    drop_draft();
    append(ids, n);
}

void ngram_index::rewind(int32_t n) {
    if (n < 0 || n > size()) {
        throw error(error_kind::ARGUMENT,
                    "an n-gram index of " + std::to_string(size()) + " tokens cannot be cut to " + std::to_string(n));
    }
    drop_draft();
    if (n == size()) {
        return;
    }
    if (n > oldest) {
        for (int32_t pos = size(); pos > n; pos--) {
            size_t buckets[N_KINDS];
            find_buckets(pos, buckets);
            const int32_t * link = &links[(size_t) N_KINDS * (pos % capacity)];
            for (int32_t i = N_MIN; i <= std::min(N_MAX, pos); i++) {
                heads[buckets[i - N_MIN]] = link[i - N_MIN];
            }
        }
        tokens.resize(n);
        return;
    }
    // the links of what is left were overwritten by later positions
    tokens.resize(n);
    std::fill(heads.begin(), heads.end(), 0);
    oldest = std::max(0, n - capacity);
    for (int32_t pos = oldest + 1; pos <= n; pos++) {
        insert(pos);
    }
}

int32_t ngram_index::sync(const int32_t * ids, int32_t n) {
    const int32_t limit = std::min(n, size());
    const auto shared = (int32_t) (std::mismatch(ids, ids + limit, tokens.begin()).first - ids);
    if (shared < size()) {
        bias.fade();
    }
    rewind(shared);
    append(ids + shared, n - shared);
    return shared;
}

int32_t ngram_index::match_len(int32_t pos, int32_t limit) const {
    const int32_t end = size();
    int32_t n = 0;
    while (n < std::min(limit, pos) && tokens[pos - 1 - n] == tokens[end - 1 - n]) {
        n++;
    }
    return n;
}

int32_t ngram_index::find_occurrences() {
    const int32_t end = size();
    for (int32_t n = std::min(N_MAX, end); n >= N_MIN; n--) {
        found.clear();
        int32_t steps = 0;
        int32_t pos = links[(size_t) N_KINDS * (end % capacity) + n - N_MIN];
        while (pos > oldest && (int32_t) found.size() < OCCURRENCES && steps++ < MAX_STEPS) {
            if (match_len(pos, n) == n) {
                found.push_back(pos);
            }
            pos = links[(size_t) N_KINDS * (pos % capacity) + n - N_MIN];
        }
        if (found.empty()) {
            continue;
        }
        int32_t longest = 0;
        for (const int32_t place : found) {
            longest = std::max(longest, match_len(place, MATCH_MAX));
        }
        found.erase(std::remove_if(found.begin(), found.end(),
                                   [&](int32_t place) { return match_len(place, MATCH_MAX) < longest; }),
                    found.end());
        return longest;
    }
    return 0;
}

float ngram_index::chance_of(int32_t cell) const {
    const outcome & o = outcomes[cell];
    const double prior = std::min(0.95, PRIOR[cell / N_VOTES] * PRIOR_VOTE[cell % N_VOTES]);
    return (float) ((o.hits + PRIOR_TRIALS * prior) / (o.trials + PRIOR_TRIALS));
}

const ngram_draft & ngram_index::draft(int32_t max_len) {
    drop_draft();
    if (max_len <= 0) {
        return last;
    }
    last.match_len = find_occurrences();
    if (last.match_len == 0) {
        return last;
    }
    const int32_t end = size();
    for (int32_t i = 0; i < max_len; i++) {
        // what follows an occurrence near the end runs into the draft: a loop goes on as a loop
        const auto next = [&](int32_t pos) { return pos + i < end ? tokens[pos + i] : last.tokens[pos + i - end]; };
        int32_t id = -1;
        int32_t votes = 0;
        for (const int32_t pos : found) {
            const auto n = (int32_t) std::count_if(found.begin(), found.end(),
                                                   [&](int32_t other) { return next(other) == next(pos); });
            if (n > votes) {
                votes = n;
                id = next(pos);
            }
        }
        if (id < 0) {
            break; // a place that a multimodal handler filled: no token
        }
        const auto n_voters = (int32_t) found.size();
        // if the tokens so far are right, the match is longer by their number
        const int32_t cell = class_of_len(last.match_len + i) * N_VOTES + (n_voters == 1       ? 0
                                                                           : votes == n_voters ? 1
                                                                                               : 2);
        found.erase(std::remove_if(found.begin(), found.end(), [&](int32_t pos) { return next(pos) != id; }),
                    found.end());
        last.tokens.push_back(id);
        last.chances.push_back(bias.corrected(chance_of(cell)));
        last_cells.push_back(cell);
    }
    return last;
}

} // namespace pyssd
