// The n-gram index against a search that compares everything, over random sequences of few tokens.

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "error.h"
#include "ngram.h"

using pyssd::ngram_draft;
using pyssd::ngram_index;

// what ngram.h says, in the slowest way
struct reference {
    std::vector<int32_t> tokens;
    int32_t capacity;
    int32_t oldest = 0;

    void grow(const std::vector<int32_t> & more) {
        tokens.insert(tokens.end(), more.begin(), more.end());
        oldest = std::max(oldest, (int32_t) tokens.size() - capacity);
    }

    void cut(int32_t n) {
        if (n <= oldest && n < (int32_t) tokens.size()) {
            oldest = std::max(0, n - capacity);
        }
        tokens.resize(n);
    }

    int32_t match_len(int32_t pos) const {
        const auto end = (int32_t) tokens.size();
        int32_t n = 0;
        while (n < std::min(pos, ngram_index::MATCH_MAX) && tokens[pos - 1 - n] == tokens[end - 1 - n]) {
            n++;
        }
        return n;
    }

    ngram_draft draft(int32_t max_len) const {
        ngram_draft result;
        std::vector<int32_t> places;
        for (int32_t n = ngram_index::N_MAX; n >= ngram_index::N_MIN && places.empty(); n--) {
            for (int32_t pos = (int32_t) tokens.size() - 1; pos > oldest; pos--) {
                if (match_len(pos) >= n && (int32_t) places.size() < ngram_index::OCCURRENCES) {
                    places.push_back(pos);
                }
            }
        }
        for (const int32_t pos : places) {
            result.match_len = std::max(result.match_len, match_len(pos));
        }
        // what follows each occurrence; at the end of the sequence it goes on with the draft
        std::vector<std::pair<int32_t, std::vector<int32_t>>> texts;
        for (const int32_t pos : places) {
            if (match_len(pos) == result.match_len) {
                texts.emplace_back(pos, std::vector<int32_t>(tokens.begin() + pos, tokens.end()));
            }
        }
        for (int32_t i = 0; i < max_len && !texts.empty(); i++) {
            for (auto & [pos, text] : texts) {
                if (i == (int32_t) text.size()) {
                    text.push_back(result.tokens[pos + i - (int32_t) tokens.size()]);
                }
            }
            int32_t best = -1;
            int32_t best_votes = 0;
            for (const auto & voter : texts) {
                int32_t votes = 0;
                for (const auto & other : texts) {
                    votes += other.second[i] == voter.second[i] ? 1 : 0;
                }
                if (votes > best_votes) {
                    best_votes = votes;
                    best = voter.second[i];
                }
            }
            if (best < 0) {
                break;
            }
            result.tokens.push_back(best);
            texts.erase(
                std::remove_if(texts.begin(), texts.end(), [&](const auto & voter) { return voter.second[i] != best; }),
                texts.end());
        }
        return result;
    }
};

static std::vector<int32_t> random_tokens(std::mt19937 & rng, int32_t n, int32_t n_ids) {
    std::vector<int32_t> result(n);
    for (int32_t & id : result) {
        id = (int32_t) (rng() % n_ids);
    }
    return result;
}

static void check_draft(ngram_index & index, const reference & expected, int32_t max_len) {
    const ngram_draft & drafted = index.draft(max_len);
    const ngram_draft slow = expected.draft(max_len);
    CHECK(drafted.match_len == slow.match_len);
    CHECK(drafted.tokens == slow.tokens);
    CHECK(drafted.chances.size() == drafted.tokens.size());
    for (const float chance : drafted.chances) {
        CHECK(chance > 0.0f && chance < 1.0f);
    }
}

// grow, cut back and replace in random order; small capacities lose old positions
static void test_against_search() {
    for (const int32_t capacity : {1, 7, 40, 1000}) {
        for (const int32_t n_ids : {1, 2, 3, 8, 30}) {
            std::mt19937 rng(capacity * 100 + n_ids);
            ngram_index index(capacity);
            reference expected;
            expected.capacity = capacity;
            for (int step = 0; step < 300; step++) {
                const uint32_t what = rng() % 10;
                if (what < 7) {
                    const auto more = random_tokens(rng, (int32_t) (rng() % 6), n_ids);
                    index.extend(more.data(), (int32_t) more.size());
                    expected.grow(more);
                } else if (what < 9) {
                    const auto n = (int32_t) (rng() % (expected.tokens.size() + 1));
                    const int32_t kept = what == 7 ? n : std::max(n, (int32_t) expected.tokens.size() - 4);
                    index.rewind(kept);
                    expected.cut(kept);
                } else {
                    const auto n = (int32_t) (rng() % (expected.tokens.size() + 1));
                    auto whole = expected.tokens;
                    whole.resize(n);
                    const auto more = random_tokens(rng, 20, n_ids);
                    whole.insert(whole.end(), more.begin(), more.end());
                    int32_t shared = 0;
                    while (shared < (int32_t) std::min(whole.size(), expected.tokens.size()) &&
                           whole[shared] == expected.tokens[shared]) {
                        shared++;
                    }
                    CHECK(index.sync(whole.data(), (int32_t) whole.size()) == shared);
                    expected.cut(shared);
                    expected.grow({whole.begin() + shared, whole.end()});
                }
                CHECK(index.size() == (int32_t) expected.tokens.size());
                check_draft(index, expected, 1 + (int32_t) (rng() % 20));
            }
        }
    }
}

static void test_copy_and_loop() {
    ngram_index index(64);
    const std::vector<int32_t> text = {1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3};
    index.extend(text.data(), (int32_t) text.size());
    const ngram_draft & copied = index.draft(4);
    CHECK(copied.match_len == 3);
    CHECK((copied.tokens == std::vector<int32_t>{4, 5, 6, 7}));
    CHECK(copied.chances[0] < copied.chances[3]); // longer matches are the surer ones
    const std::vector<int32_t> loop = {8, 9, 8, 9};
    index.sync(loop.data(), 4);
    CHECK((index.draft(5).tokens == std::vector<int32_t>{8, 9, 8, 9, 8})); // runs on into itself
    CHECK(index.draft(0).tokens.empty());
    const std::vector<int32_t> hole = {5, 6, -7, 1, 5, 6};
    index.sync(hole.data(), 6);
    CHECK(index.draft(3).tokens.empty()); // an image stood here
}

static void test_votes() {
    ngram_index index(64);
    const std::vector<int32_t> text = {1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2};
    index.sync(text.data(), (int32_t) text.size());
    CHECK(index.draft(1).tokens[0] == 7); // two of three, though 8 came last
    const float split = index.draft(1).chances[0];
    const std::vector<int32_t> agreed = {1, 2, 7, 3, 1, 2, 7, 4, 1, 2};
    index.sync(agreed.data(), (int32_t) agreed.size());
    CHECK(index.draft(1).chances[0] > split);
}

// the chance follows what came true, of drafts that nobody proposed too
static void test_chances_learn() {
    for (const bool comes_true : {false, true}) {
        ngram_index index(1000);
        std::mt19937 rng(1);
        const float before = [&] {
            const std::vector<int32_t> text = {1, 2, 3, 1, 2};
            index.sync(text.data(), 5);
            return index.draft(1).chances[0];
        }();
        for (int i = 0; i < 60; i++) {
            const std::vector<int32_t> text = {1, 2, 3, 1, 2};
            index.sync(text.data(), 5);
            index.draft(1);
            const int32_t emitted = comes_true ? 3 : 4;
            index.extend(&emitted, 1);
        }
        const std::vector<int32_t> text = {1, 2, 3, 1, 2};
        index.sync(text.data(), 5);
        const float after = index.draft(1).chances[0];
        CHECK(comes_true ? after > 0.85f && after > before : after < 0.1f && after < before);
    }
}

// a text that is hard to guess lowers the chances of all kinds of drafts, long before each kind has had its trials
static void test_hard_text_lowers_all_chances() {
    ngram_index index(1000);
    const std::vector<int32_t> once = {1, 2, 3, 1, 2};
    const std::vector<int32_t> often = {5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10};
    index.sync(often.data(), (int32_t) often.size());
    const float before = index.draft(1).chances[0];
    index.sync(once.data(), 5);
    for (int i = 0; i < 12; i++) {
        index.draft(1);
        const int32_t wrong = 4;
        index.extend(&wrong, 1);
        index.rewind(5);
    }
    index.sync(often.data(), (int32_t) often.size());
    CHECK(index.draft(1).chances[0] < 0.8f * before);
}

// a prompt is no evidence, and neither is what follows the first wrong token
static void test_only_what_was_drafted_counts() {
    ngram_index index(1000);
    const std::vector<int32_t> text = {1, 2, 3, 4, 5, 1, 2};
    index.sync(text.data(), 7);
    const std::vector<float> before = index.draft(3).chances;
    const std::vector<int32_t> longer = {1, 2, 3, 4, 5, 1, 2, 9, 1, 2};
    index.sync(longer.data(), 10);
    index.sync(text.data(), 7);
    CHECK(index.draft(3).chances == before);
    const std::vector<int32_t> emitted = {9, 4, 5};
    index.extend(emitted.data(), 3);
    index.sync(text.data(), 7);
    const std::vector<float> after = index.draft(3).chances;
    CHECK(after[0] < before[0]);
    // what was not reached is only rated as this text's drafts are as a whole: less than the one that was wrong
    CHECK(after[1] < before[1] && std::abs(after[1] / before[1] - after[2] / before[2]) < 1e-4f);
    CHECK(after[0] / before[0] < after[1] / before[1] - 1e-3f);
}

static bool is_refused(int32_t capacity, int32_t n_rewind) {
    try {
        ngram_index index(capacity);
        index.rewind(n_rewind);
    } catch (const pyssd::error & e) {
        return e.kind == pyssd::error_kind::ARGUMENT;
    }
    return false;
}

int main() {
    test_against_search();
    test_copy_and_loop();
    test_votes();
    test_chances_learn();
    test_hard_text_lowers_all_chances();
    test_only_what_was_drafted_counts();
    CHECK(is_refused(0, 0) && is_refused(-1, 0));
    CHECK(is_refused(4, 1) && is_refused(4, -1));
    return failures();
}
