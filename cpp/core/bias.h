#pragma once

// How the chances that a proposer stated of late compare with what came true. A text that is harder to guess than others
// shows here within a few rounds, over all kinds of drafts together, long before each kind has had trials enough.

#include <algorithm>

namespace pyssd {

class chance_bias {
public:
    // a drafted token that was reached: its chance by kind, and whether it was right
    void add(double chance, bool is_hit) {
        hits = hits * DECAY + (is_hit ? 1.0 : 0.0);
        expected = expected * DECAY + chance;
    }

    // what to multiply chances by
    double factor() const {
        return std::clamp((hits + PRIOR) / (expected + PRIOR), MIN, MAX);
    }

    float corrected(double chance) const {
        return (float) std::min(CERTAIN, chance * factor());
    }

    // another text begins: what the one before was like counts half
    void fade() {
        hits *= 0.5;
        expected *= 0.5;
    }

private:
    static constexpr double DECAY = 0.97; // about thirty tokens count
    static constexpr double PRIOR = 2.0;  // tokens that came true as expected, before any is known
    static constexpr double MIN = 0.1, MAX = 1.5;
    static constexpr double CERTAIN = 0.98;

    double hits = 0.0;
    double expected = 0.0;
};

} // namespace pyssd
