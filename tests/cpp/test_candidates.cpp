// Candidate arrays: complete for the target, small and faithful near the maximum for the draft.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "candidates.h"
#include "check.h"

static std::vector<float> random_logits(int n, float scale, int seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> logits(n);
    for (float & logit : logits) {
        logit = normal(rng);
    }
    return logits;
}

static double exact_probability(const std::vector<float> & logits, int id) {
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const float logit : logits) {
        sum += std::exp(logit - max);
    }
    return std::exp(logits[id] - max) / sum;
}

static void test_argmax() {
    for (const int n : {1, 15, 17, 4095, 4096, 4097, 50000}) {
        for (int seed = 0; seed < 20; seed++) {
            auto logits = random_logits(n, 3.0f, seed);
            for (float & logit : logits) {
                logit = seed % 2 ? std::round(logit) : logit; // many ties: the lowest id counts
            }
            const int top = (int) (std::max_element(logits.begin(), logits.end()) - logits.begin());
            CHECK(pyssd::row_argmax(logits.data(), n) == top);
            if (top > 0) {
                logits[0] = NAN;
                logits[top / 2] = -INFINITY;
            }
            CHECK(pyssd::row_argmax(logits.data(), n) == pyssd::row_stats_of(logits.data(), n).argmax);
        }
        const std::vector<float> none(n, -INFINITY);
        CHECK(pyssd::row_argmax(none.data(), n) == -1);
        const std::vector<float> broken(n, NAN);
        CHECK(pyssd::row_argmax(broken.data(), n) == -1);
    }
    const std::vector<float> infinite = {0.0f, INFINITY, INFINITY};
    CHECK(pyssd::row_argmax(infinite.data(), 3) == 1);
}

static void test_stats() {
    for (const int n : {1, 15, 16, 17, 1000, 50000}) {
        for (const float scale : {0.1f, 3.0f, 10.0f}) {
            const auto logits = random_logits(n, scale, n);
            const auto stats = pyssd::row_stats_of(logits.data(), n);
            const int top = (int) (std::max_element(logits.begin(), logits.end()) - logits.begin());
            CHECK(stats.argmax == top);
            const double exact = exact_probability(logits, top);
            CHECK(std::abs(pyssd::row_probability(stats, logits.data(), top) - exact) < 1e-2 * exact);
        }
    }
    const std::vector<float> ties = {0.0f, 5.0f, 1.0f, 5.0f};
    CHECK(pyssd::row_stats_of(ties.data(), 4).argmax == 1);
    const std::vector<float> none = {-INFINITY, NAN};
    CHECK(pyssd::row_stats_of(none.data(), 2).argmax == -1);
    const std::vector<float> infinite = {0.0f, INFINITY};
    CHECK(pyssd::row_stats_of(infinite.data(), 2).argmax == 1);
}

static void test_all() {
    const std::vector<float> logits = {1.0f, NAN, -INFINITY, 2.0f};
    pyssd::candidates cand(4);
    const auto cur = cand.all(logits.data());
    CHECK(cur.size == 4 && cur.selected == -1 && !cur.sorted);
    for (int id = 0; id < 4; id++) {
        CHECK(cur.data[id].id == id);
    }
    CHECK(cur.data[1].logit == -INFINITY && cur.data[3].logit == 2.0f);
}

static void test_near_max() {
    const int limit = pyssd::candidates::DRAFT_MAX;
    for (const float scale : {0.5f, 5.0f}) {
        const int n = 20000;
        const auto logits = random_logits(n, scale, 7);
        pyssd::candidates cand(n);
        const auto stats = pyssd::row_stats_of(logits.data(), n);
        const auto cur = cand.near_max(logits.data(), stats);
        CHECK(cur.size > 0 && cur.size <= (size_t) limit);
        float lowest = INFINITY;
        for (size_t i = 0; i < cur.size; i++) {
            CHECK(i == 0 || cur.data[i - 1].id < cur.data[i].id);
            CHECK(cur.data[i].logit == logits[cur.data[i].id]);
            lowest = std::min(lowest, cur.data[i].logit);
        }
        // nothing that was left out is above what was kept
        const auto above = std::count_if(logits.begin(), logits.end(), [&](float logit) { return logit >= lowest; });
        CHECK((size_t) above == cur.size);
    }
    // a flat row: the cap holds, the first ids stay
    const std::vector<float> flat(5000, 1.0f);
    pyssd::candidates cand(5000);
    const auto cur = cand.near_max(flat.data(), pyssd::row_stats_of(flat.data(), 5000));
    CHECK(cur.size == (size_t) limit && cur.data[0].id == 0);
    // a trimmed head: ids beyond its rows are -inf and never drafted
    std::vector<float> trimmed(5000, -INFINITY);
    trimmed[3] = -2.0f;
    const auto few = cand.near_max(trimmed.data(), pyssd::row_stats_of(trimmed.data(), 5000));
    CHECK(few.size == 1 && few.data[0].id == 3);
    const std::vector<float> none(5000, -INFINITY);
    CHECK(cand.near_max(none.data(), pyssd::row_stats_of(none.data(), 5000)).size == 0);
}

static void test_narrow() {
    for (const float scale : {0.5f, 5.0f}) {
        const int n = 20000;
        const auto logits = random_logits(n, scale, 8);
        pyssd::candidates cand(n);
        auto cur = cand.near_max(logits.data(), pyssd::row_stats_of(logits.data(), n));
        const std::vector<llama_token_data> expected(cur.data, cur.data + cur.size);
        cur = cand.all(logits.data());
        cand.narrow(&cur);
        CHECK(cur.size == expected.size());
        for (size_t i = 0; i < cur.size; i++) {
            CHECK(cur.data[i].id == expected[i].id && cur.data[i].logit == expected[i].logit);
        }
    }
    pyssd::candidates cand(100);
    CHECK(cand.flat(40).size == 40 && cand.flat(1024).size == 100 && cand.flat(40).sorted);
}

static void test_compact() {
    std::vector<llama_token_data> data = {{0, -INFINITY, 0}, {1, 1.0f, 0}, {2, -INFINITY, 0}, {3, 0.5f, 0}};
    llama_token_data_array cur = {data.data(), data.size(), -1, false};
    pyssd::candidates_compact(&cur);
    CHECK(cur.size == 2 && cur.data[0].id == 1 && cur.data[1].id == 3);
}

int main() {
    test_stats();
    test_argmax();
    test_all();
    test_near_max();
    test_narrow();
    test_compact();
    return failures();
}
