// The Gumbel sampler: exact distribution, no dependence on candidate order, clones that agree, noise without structure.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "api.h"
#include "check.h"
#include "gumbel.h"

// Stand-ins for the few functions of libllama that a sampler touches; this executable links no libllama.
static llama_sampler * fake_init(llama_sampler_i * iface, llama_sampler_context_t ctx) {
    return new llama_sampler{iface, ctx};
}

static llama_sampler * fake_chain_get(llama_sampler *, int32_t) {
    return nullptr; // no chains here
}

static void sampler_free(llama_sampler * sampler) {
    sampler->iface->free(sampler);
    delete sampler;
}

static const std::vector<float> LOGITS = {2.0f, 1.5f,  1.0f,  0.5f,  0.0f,  -0.5f, -1.0f, -1.5f,
                                          2.0f, -2.0f, -2.5f, -3.0f, -3.5f, -4.0f, 0.7f,  0.3f};

static std::vector<llama_token_data> data_of(const std::vector<float> & logits) {
    std::vector<llama_token_data> data;
    for (size_t i = 0; i < logits.size(); i++) {
        data.push_back({(llama_token) i, logits[i], 0.0f});
    }
    return data;
}

static std::vector<double> softmax(const std::vector<float> & logits) {
    std::vector<double> probs;
    double sum = 0.0;
    for (const float logit : logits) {
        probs.push_back(std::exp((double) logit));
        sum += probs.back();
    }
    for (double & p : probs) {
        p /= sum;
    }
    return probs;
}

static double chi_square(const std::vector<int> & counts, const std::vector<double> & probs, int n) {
    double x = 0.0;
    for (size_t i = 0; i < counts.size(); i++) {
        const double expected = probs[i] * n;
        x += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    return x;
}

// 99.99% quantile of chi-square with 15 degrees of freedom
static const double CHI_15 = 44.26;
// and with 255
static const double CHI_255 = 346.0;

static void test_distribution(bool walk_seeds) {
    const auto data = data_of(LOGITS);
    const int n = 200000;
    std::vector<int> counts(LOGITS.size());
    for (int i = 0; i < n; i++) {
        const uint64_t seed = walk_seeds ? i : 42;
        const int64_t pos = walk_seeds ? 7 : i;
        counts[pyssd::gumbel_pick(data.data(), data.size(), seed, pos)]++;
    }
    CHECK(chi_square(counts, softmax(LOGITS), n) < CHI_15);
}

// picks at neighbouring positions, and of neighbouring seeds, are independent
static void test_pairs(bool walk_seeds) {
    const auto data = data_of(LOGITS);
    const auto probs = softmax(LOGITS);
    const int n = 400000;
    std::vector<int> counts(LOGITS.size() * LOGITS.size());
    std::vector<double> pair_probs;
    for (const double a : probs) {
        for (const double b : probs) {
            pair_probs.push_back(a * b);
        }
    }
    for (int i = 0; i < n; i++) {
        const uint64_t seed = walk_seeds ? 2 * i : 42;
        const int64_t pos = walk_seeds ? 7 : 2 * i;
        const auto a = pyssd::gumbel_pick(data.data(), data.size(), seed, pos);
        const auto b =
            pyssd::gumbel_pick(data.data(), data.size(), seed + (walk_seeds ? 1 : 0), pos + (walk_seeds ? 0 : 1));
        counts[a * LOGITS.size() + b]++;
    }
    CHECK(chi_square(counts, pair_probs, n) < CHI_255);
}

// the early exits of gumbel_pick change nothing
static int64_t pick_plainly(const std::vector<llama_token_data> & data, uint64_t seed, int64_t pos) {
    int64_t best = -1;
    double best_score = -INFINITY;
    for (size_t i = 0; i < data.size(); i++) {
        const double score = data[i].logit + pyssd::gumbel_noise(pyssd::gumbel_bits(seed, pos, data[i].id));
        if (score > best_score) {
            best = (int64_t) i;
            best_score = score;
        }
    }
    return best;
}

static void test_shortcuts() {
    std::mt19937 rng(1);
    for (const float scale : {0.01f, 1.0f, 6.0f, 30.0f}) {
        std::normal_distribution<float> normal(0.0f, scale);
        for (int64_t pos = 0; pos < 500; pos++) {
            std::vector<float> logits(300);
            for (float & logit : logits) {
                logit = normal(rng);
            }
            logits[pos % 300] = -INFINITY;
            const auto data = data_of(logits);
            CHECK(pyssd::gumbel_pick(data.data(), data.size(), 3, pos) == pick_plainly(data, 3, pos));
        }
    }
}

static void test_order() {
    std::mt19937 rng(2);
    auto data = data_of(LOGITS);
    for (int64_t pos = 0; pos < 500; pos++) {
        const llama_token id = data[pyssd::gumbel_pick(data.data(), data.size(), 5, pos)].id;
        std::shuffle(data.begin(), data.end(), rng);
        CHECK(data[pyssd::gumbel_pick(data.data(), data.size(), 5, pos)].id == id);
    }
}

// what is left out of the candidates does not change the order of the rest: a draft's prefilter is safe
static void test_subset() {
    const auto data = data_of(LOGITS);
    for (int64_t pos = 0; pos < 500; pos++) {
        const auto pick = pyssd::gumbel_pick(data.data(), data.size(), 5, pos);
        std::vector<llama_token_data> some;
        for (const auto & d : data) {
            if (d.logit >= 0.0f) {
                some.push_back(d);
            }
        }
        const llama_token id = some[pyssd::gumbel_pick(some.data(), some.size(), 5, pos)].id;
        CHECK(data[pick].logit < 0.0f || id == data[pick].id);
    }
}

static void test_edges() {
    CHECK(pyssd::gumbel_pick(nullptr, 0, 1, 1) == -1);
    const auto none = data_of({-INFINITY, -INFINITY});
    CHECK(pyssd::gumbel_pick(none.data(), 2, 1, 1) == -1);
    const auto one = data_of({-INFINITY, NAN, -3.0f});
    CHECK(pyssd::gumbel_pick(one.data(), 3, 1, 1) == 2);
    const auto infinite = data_of({1.0f, INFINITY, 2.0f});
    CHECK(pyssd::gumbel_pick(infinite.data(), 3, 1, 1) == 1);
    const uint64_t most = (1ull << 52) - 1;
    CHECK(pyssd::gumbel_noise(most) < 37.0 && pyssd::gumbel_noise(most) > 36.0);
    CHECK(pyssd::gumbel_noise(0) > -3.7 && pyssd::gumbel_noise(0) < -3.5);
}

// each bit of the uniform number is fair over each of the three words
static void test_bits() {
    for (int word = 0; word < 3; word++) {
        std::vector<int> ones(52);
        const int n = 100000;
        for (int i = 0; i < n; i++) {
            const uint64_t bits = pyssd::gumbel_bits(word == 0 ? i : 9, word == 1 ? i : 9, word == 2 ? i : 9);
            for (int k = 0; k < 52; k++) {
                ones[k] += (bits >> k) & 1;
            }
        }
        for (int k = 0; k < 52; k++) {
            CHECK(std::abs(ones[k] - n / 2) < 5 * std::sqrt(n) / 2); // 5 sigma
        }
    }
}

static llama_token apply(llama_sampler * sampler, std::vector<llama_token_data> data) {
    llama_token_data_array cur = {data.data(), data.size(), -1, false};
    sampler->iface->apply(sampler, &cur);
    return cur.data[cur.selected].id;
}

static void test_sampler() {
    pyssd::api_table table;
    table.llama_sampler_init = fake_init;
    table.llama_sampler_chain_get = fake_chain_get;
    pyssd::api_set(table);
    const auto data = data_of(LOGITS);
    llama_sampler * sampler = pyssd::gumbel_init(77);
    CHECK(pyssd::gumbel_is(sampler));
    int n_different = 0;
    llama_token last = -1;
    for (int64_t pos = 0; pos < 200; pos++) {
        pyssd::gumbel_set_pos(sampler, pos);
        llama_sampler * clone = sampler->iface->clone(sampler);
        const llama_token id = apply(sampler, data);
        CHECK(apply(clone, data) == id);
        CHECK(apply(sampler, data) == id); // no hidden state
        sampler_free(clone);
        n_different += id != last ? 1 : 0;
        last = id;
    }
    CHECK(n_different > 100); // the position matters
    sampler_free(sampler);
}

int main() {
    test_distribution(false);
    test_distribution(true);
    test_pairs(false);
    test_pairs(true);
    test_shortcuts();
    test_order();
    test_subset();
    test_edges();
    test_bits();
    test_sampler();
    return failures();
}
