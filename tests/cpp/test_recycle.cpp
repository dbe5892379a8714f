// The recycling table against maps without a bound, its bounds, and its chances.

#include "recycle.h"

#include <climits>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "check.h"
#include "error.h"

using pyssd::recycle_draft;
using pyssd::recycle_table;

using tokens_t = std::vector<int32_t>;

// what a table with room for everything holds
struct reference {
    std::map<int32_t, int32_t> singles;
    std::map<std::pair<int32_t, int32_t>, int32_t> pairs;

    void learn(int32_t before, const tokens_t & tokens, const tokens_t & tops) {
        for (size_t i = 0; i < tokens.size(); i++) {
            singles[tokens[i]] = tops[i];
            if (before >= 0) {
                pairs[{before, tokens[i]}] = tops[i];
            }
            before = tokens[i];
        }
    }

    tokens_t draft(int32_t before, int32_t token, int32_t max_len) const {
        tokens_t drafted;
        for (int32_t i = 0; i < max_len; i++) {
            const auto pair = pairs.find({before, token});
            const auto single = singles.find(token);
            if (pair == pairs.end() && single == singles.end()) {
                break;
            }
            before = token;
            token = pair != pairs.end() ? pair->second : single->second;
            drafted.push_back(token);
        }
        return drafted;
    }
};

static tokens_t random_tokens(std::mt19937 & rng, int32_t n, int32_t n_ids) {
    tokens_t tokens(n);
    for (int32_t & id : tokens) {
        id = (int32_t) (rng() % n_ids);
    }
    return tokens;
}

static void learn(recycle_table & table, int32_t before, const tokens_t & tokens, const tokens_t & tops) {
    const auto n = (int32_t) tokens.size();
    table.learn(before, tokens.data(), tops.data(), n, n);
}

static void begin(recycle_table & table, const tokens_t & tokens) {
    table.begin(tokens.data(), (int32_t) tokens.size());
}

static void extend(recycle_table & table, const tokens_t & tokens) {
    table.extend(tokens.data(), (int32_t) tokens.size());
}

static void test_against_maps() {
    for (const int32_t n_ids : {2, 12, 60}) {
        std::mt19937 rng(n_ids);
        recycle_table table(n_ids);
        reference expected;
        for (int32_t step = 0; step < 3000; step++) {
            const auto before = (int32_t) (rng() % (n_ids + 1)) - 1;
            if (rng() % 20 == 0) {
                const tokens_t text = random_tokens(rng, 1 + (int32_t) (rng() % 30), n_ids);
                begin(table, text);
                expected.learn(-1, {text.begin(), text.end() - 1}, {text.begin() + 1, text.end()});
            } else {
                const auto n = (int32_t) (rng() % 6);
                const tokens_t tokens = random_tokens(rng, n, n_ids);
                const tokens_t tops = random_tokens(rng, n, n_ids);
                learn(table, before, tokens, tops);
                expected.learn(before, tokens, tops);
            }
            const auto token = (int32_t) (rng() % n_ids);
            const auto max_len = (int32_t) (rng() % 20);
            const recycle_draft & drafted = table.draft(before, token, max_len);
            CHECK(drafted.tokens == expected.draft(before, token, max_len));
            CHECK(drafted.chances.size() == drafted.tokens.size());
            for (const float chance : drafted.chances) {
                CHECK(chance > 0.0f && chance < 1.0f);
            }
            extend(table, random_tokens(rng, (int32_t) (rng() % 5), n_ids));
        }
    }
}

// the top of a pair
static int32_t top_of(int32_t before, int32_t token) {
    return (int32_t) (((uint32_t) before * 31u + (uint32_t) token * 17u) % 50000u);
}

static void test_bounded() {
    constexpr int32_t N_IDS = 50000;
    recycle_table table(N_IDS);
    const size_t nbytes = table.nbytes();
    CHECK(nbytes < 2u << 20);
    std::mt19937 rng(3);
    std::vector<std::pair<int32_t, int32_t>> learnt;
    const auto learn_pair = [&](int32_t before, int32_t token) {
        learn(table, before, {token}, {top_of(before, token)});
        learn(table, -1, {token}, {(top_of(before, token) + 1) % N_IDS}); // a pair that is gone must not be found there
    };
    const auto is_known = [&](int32_t before, int32_t token) {
        return table.draft(before, token, 1).tokens == tokens_t{top_of(before, token)};
    };
    for (int32_t i = 0; i < 400000; i++) {
        learnt.emplace_back((int32_t) (rng() % N_IDS), (int32_t) (rng() % N_IDS));
        learn_pair(learnt.back().first, learnt.back().second);
        if (i % 1000 == 0) {
            learn_pair(1, 2); // often used: outlives the rest
        }
    }
    CHECK(table.nbytes() == nbytes);
    CHECK(is_known(1, 2));
    const auto share_known = [&](int32_t age, int32_t n) {
        int32_t n_known = 0;
        for (int32_t i = 0; i < n; i++) {
            const auto & pair = learnt[learnt.size() - 1 - age - i];
            n_known += is_known(pair.first, pair.second) ? 1 : 0;
        }
        return (double) n_known / n;
    };
    // arrivals in a bucket of four are Poisson: P(< 4) is 0.97 after a quarter of the table, 0.43 after the whole of it
    CHECK(share_known(0, 8000) > 0.99);
    CHECK(share_known(recycle_table::N_PAIRS / 4, 8000) > 0.95);
    CHECK(std::abs(share_known(recycle_table::N_PAIRS - 4000, 8000) - 0.43) < 0.05);
    CHECK(share_known(recycle_table::N_PAIRS * 4, 8000) < 0.02);

    // a text of any length drives out no more than a part
    begin(table, random_tokens(rng, 300000, N_IDS));
    CHECK(share_known(0, 4000) > 0.9);
}

static void test_latest_word_counts() {
    recycle_table table(100);
    learn(table, 1, {2}, {3});
    CHECK(table.draft(1, 2, 1).tokens == tokens_t{3});
    learn(table, 1, {2}, {4});
    CHECK(table.draft(1, 2, 1).tokens == tokens_t{4});
    CHECK(table.draft(9, 2, 1).tokens == tokens_t{4}); // nothing known of the pair
    learn(table, 9, {2}, {5});
    CHECK(table.draft(1, 2, 1).tokens == tokens_t{4}); // the pair comes first
    CHECK(table.draft(-1, 2, 1).tokens == tokens_t{5});
    begin(table, {1, 2, 6});
    CHECK(table.draft(1, 2, 1).tokens == tokens_t{6});
    CHECK(table.draft(1, 7, 4).tokens.empty());
    CHECK(table.draft(1, 2, 0).tokens.empty() && table.draft(1, 2, -3).tokens.empty());
}

static void test_rejected_tokens_tell_of_single_tokens_only() {
    recycle_table table(100);
    learn(table, 1, {2, 3}, {3, 7});
    const tokens_t tokens = {2, 3, 4};
    const tokens_t tops = {5, 8, 9}; // 3 was rejected
    table.learn(1, tokens.data(), tops.data(), 3, 1);
    CHECK(table.draft(1, 2, 1).tokens == tokens_t{5});
    CHECK(table.draft(2, 3, 1).tokens == tokens_t{7}); // as it was
    CHECK(table.draft(-1, 3, 1).tokens == tokens_t{8});
    learn(table, -1, {4}, {6});
    CHECK(table.draft(3, 4, 1).tokens == tokens_t{6}); // by the single token
}

static void test_clear_and_copy() {
    recycle_table table(100);
    learn(table, 1, {2, 3}, {3, 4});
    for (int32_t i = 0; i < 30; i++) {
        table.draft(1, 2, 2);
        extend(table, {9});
    }
    recycle_table copy(table);
    const recycle_draft before = table.draft(1, 2, 2);
    CHECK(copy.draft(1, 2, 2).tokens == before.tokens && copy.draft(1, 2, 2).chances == before.chances);
    learn(copy, 1, {2}, {8});
    CHECK(table.draft(1, 2, 1).tokens == tokens_t{3});
    table.clear();
    CHECK(table.draft(1, 2, 2).tokens.empty());
    CHECK(copy.draft(1, 2, 1).tokens == tokens_t{8});
    learn(table, 1, {2, 3}, {3, 4});
    CHECK(table.draft(1, 2, 2).chances == before.chances); // how often drafts were right is kept
    recycle_table fresh(100);
    learn(fresh, 1, {2, 3}, {3, 4});
    CHECK(fresh.draft(1, 2, 1).chances[0] > before.chances[0]);
}

// signs that a draft is good raise its chance before anything is known
static void test_first_chances() {
    const auto chance = [](int32_t n_found_again, bool is_pair, bool is_fresh) {
        recycle_table table(100);
        for (int32_t i = 0; i <= n_found_again; i++) {
            learn(table, is_pair ? 1 : -1, {2}, {3});
        }
        if (!is_fresh) {
            begin(table, {50, 51});
        }
        return table.draft(1, 2, 1).chances[0];
    };
    CHECK(chance(0, true, true) > chance(0, false, true));
    CHECK(chance(1, true, true) > chance(0, true, true));
    CHECK(chance(2, true, true) > chance(1, true, true));
    CHECK(chance(9, true, true) == chance(2, true, true));
    CHECK(chance(0, true, true) > chance(0, true, false));
    CHECK(chance(0, false, true) > chance(0, false, false));
}

// behind tokens that the table had right the next one is right more often, in a draft and from round to round
static void test_right_tokens_raise_the_next_chance() {
    recycle_table table(100);
    learn(table, 1, {2, 3, 4, 5, 6}, {3, 4, 5, 6, 7});
    const std::vector<float> first = table.draft(1, 2, 5).chances;
    CHECK(first[0] < first[1] && first[1] < first[2] && first[2] == first[3]);
    const auto next = [&](const tokens_t & drafted_at, int32_t n_drafted, const tokens_t & emitted) {
        recycle_table copy(table);
        copy.draft(drafted_at[0], drafted_at[1], n_drafted);
        extend(copy, emitted);
        // against the one behind it: the text's bias and the kind's trials move both
        return copy.draft(3, 4, 2).chances[0] / copy.draft(3, 4, 2).chances[1];
    };
    const float after_hits = next({1, 2}, 2, {3, 4});
    const float after_miss = next({1, 2}, 1, {9});
    const float beyond = next({1, 2}, 1, {3, 4}); // the second one was not drafted
    CHECK(after_hits > after_miss && after_hits > beyond);
}

// the mean of the chances is the rate at which drafts of a kind come true, proposed or not
static void test_chances_converge() {
    for (const double rate : {0.1, 0.5, 0.9}) {
        recycle_table table(100);
        std::mt19937 rng(5);
        std::uniform_real_distribution<double> uniform(0.0, 1.0);
        learn(table, 1, {2}, {3});
        double sum = 0.0;
        int32_t n = 0;
        for (int32_t i = 0; i < 4000; i++) {
            const float chance = table.draft(1, 2, 1).chances[0];
            if (i >= 100) {
                sum += chance;
                n++;
            }
            extend(table, {uniform(rng) < rate ? 3 : 4});
        }
        // an easy text raises likely chances by less than a hard one lowers them
        CHECK(std::abs(sum / n - rate) < 0.05);
    }
}

static void test_only_what_was_drafted_counts() {
    recycle_table table(100);
    learn(table, 1, {2}, {3}); // a pair, and behind it a single token of another kind
    learn(table, -1, {3}, {4});
    const std::vector<float> before = table.draft(1, 2, 2).chances;
    CHECK(before.size() == 2);
    extend(table, {9, 4}); // what follows the first wrong token is no evidence
    const std::vector<float> after = table.draft(1, 2, 2).chances;
    // the second kind falls with the text only, as one that is hard to guess, the first one with its own miss as well
    CHECK(after[0] / before[0] < 0.97f * after[1] / before[1] && after[1] <= before[1]);
    extend(table, {3});
    recycle_table copy(table);
    extend(table, {3}); // judged once: what was not drafted is no evidence
    extend(copy, {9});
    const std::vector<float> later = table.draft(1, 2, 2).chances;
    CHECK(later == copy.draft(1, 2, 2).chances);
    CHECK(later[0] / after[0] > 1.01f * later[1] / after[1]);
    begin(table, {50, 51}); // a new text: the draft was for the old one
    extend(table, {9});
    table.draft(1, 2, 2);
    extend(table, {});
    CHECK(table.draft(1, 2, 2).tokens == (tokens_t{3, 4}));
}

static void test_ids_that_are_no_tokens() {
    constexpr int32_t N_IDS = 10;
    for (const int32_t bad : {-1, -7, N_IDS, INT_MAX, INT_MIN}) {
        recycle_table table(N_IDS);
        CHECK(table.draft(1, bad, 3).tokens.empty());
        CHECK(table.draft(bad, bad, 3).tokens.empty());
        learn(table, bad, {2}, {3});
        CHECK(table.draft(bad, 2, 1).tokens == tokens_t{3}); // by the single token
        learn(table, 1, {bad, 4}, {5, bad});
        CHECK(table.draft(1, 4, 1).tokens.empty());
        learn(table, 1, {2}, {bad});
        CHECK(table.draft(1, 2, 1).tokens == tokens_t{3});
        begin(table, {bad, 6, bad, 7, 8});
        CHECK(table.draft(-1, 6, 1).tokens.empty());
        CHECK(table.draft(bad, 7, 1).tokens == tokens_t{8});
        table.draft(1, 2, 1);
        extend(table, {bad});
    }
    recycle_table table(N_IDS);
    begin(table, {});
    begin(table, {1});
    CHECK(table.draft(-1, 1, 1).tokens.empty());
}

static bool is_refused(int32_t n_vocab) {
    try {
        recycle_table table(n_vocab);
    } catch (const pyssd::error & e) {
        return e.kind == pyssd::error_kind::ARGUMENT;
    }
    return false;
}

int main() {
    test_against_maps();
    test_bounded();
    test_latest_word_counts();
    test_rejected_tokens_tell_of_single_tokens_only();
    test_clear_and_copy();
    test_first_chances();
    test_right_tokens_raise_the_next_chance();
    test_chances_converge();
    test_only_what_was_drafted_counts();
    test_ids_that_are_no_tokens();
    CHECK(is_refused(0) && is_refused(-1));
    return failures();
}
