#pragma once

// How the chances that a proposer stated of late compare with what came true. A text that is harder to guess than others
// shows here within a few rounds, over all kinds of drafts together, long before each kind has had trials enough. The first
// tokens of an answer are harder than the rest, so a text starts with what was seen at the start of others.

#include <algorithm>
#include <cstdint>

namespace pyssd {

class chance_bias {
public:
    // a drafted token that was reached: its chance by kind, and whether it was right
    void add(double chance, bool is_hit) {
        text.add(chance, is_hit, DECAY);
        if (n_added++ < N_START) {
            start.add(chance, is_hit, START_DECAY);
        }
    }

    // what to multiply chances by
    double factor() const {
        const double before = std::clamp(start.ratio(START_PRIOR, START_PRIOR * AT_FIRST), MIN, MAX);
        return std::clamp(text.ratio(PRIOR, PRIOR * before), MIN, MAX);
    }

    // more hits than stated are fewer misses too: what is likely does not become certain by a text that is easy
    float corrected(double chance) const {
        const double f = factor();
        const double raised = std::min(CERTAIN, chance * f);
        return (float) (f > 1.0 ? std::min(raised, 1.0 - (1.0 - chance) / f) : raised);
    }

    // another text begins: what the one before was like counts little
    void fade() {
        text.hits *= KEPT;
        text.expected *= KEPT;
        n_added = 0;
    }

private:
    struct counts {
        double hits = 0.0;
        double expected = 0.0;

        void add(double chance, bool is_hit, double decay) {
            hits = hits * decay + (is_hit ? 1.0 : 0.0);
            expected = expected * decay + chance;
        }

        double ratio(double more_expected, double more_hits) const {
            return (hits + more_hits) / (expected + more_expected);
        }
    };

    static constexpr double DECAY = 0.97;       // about thirty tokens of a text count
    static constexpr double START_DECAY = 0.99; // about a hundred first tokens
    static constexpr double PRIOR = 2.0;        // expected tokens that a text's start is worth
    static constexpr double START_PRIOR = 4.0;
    static constexpr double AT_FIRST = 0.7; // of the chances, before any start was seen
    static constexpr double KEPT = 0.25;
    static constexpr double MIN = 0.1, MAX = 2.2;
    static constexpr double CERTAIN = 0.98;
    static constexpr int32_t N_START = 16;

    counts text;
    counts start;
    int32_t n_added = 0;
};

} // namespace pyssd
