// How long one chunk takes on one SP size, and how many tokens fit in a time budget.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace cdsp {

using Tokens = std::int64_t;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The part of T_s that no split of a prompt can undercut: overhead + per_token * L + slope * (C L + L^2 / 2).
struct LowerBound {
    double overhead_s = kInfinity;
    double per_token_s = kInfinity;
    double slope_s = kInfinity;

    void include(const LowerBound &other) {
        overhead_s = std::min(overhead_s, other.overhead_s);
        per_token_s = std::min(per_token_s, other.per_token_s);
        slope_s = std::min(slope_s, other.slope_s);
    }

    // Rounded down by more than the rounding errors of a sum of chunks, so that pruning by it never loses a plan.
    double seconds(Tokens cached, Tokens tokens) const {
        const double c = double(cached), l = double(tokens);
        return (overhead_s + l * (per_token_s + slope_s * (c + 0.5 * l))) * (1.0 - 1e-11);
    }
};

// T_s(C, L), either Eq. 1 of Tetris or a table of prompt lengths measured without a cached prefix.
class Cost {
  public:
    Cost(double a, double b, double c, double d) : a_(a), b_(b), c_(c), d_(d) {}

    Cost(std::vector<double> prompt_tokens, std::vector<double> duration_s)
        : knots_(std::move(prompt_tokens)), values_(std::move(duration_s)) {
        at_zero_s_ = prompt_s(0.0);
    }

    // Infinity beyond the last entry of a table.
    double seconds(Tokens cached, Tokens tokens) const {
        const double c = double(cached), l = double(tokens);
        if (knots_.empty()) return a_ + l * (b_ + c_ * c + d_ * l);
        if (cached == 0) return prompt_s(l);
        return prompt_s(c + l) - prompt_s(c) + at_zero_s_;
    }

    // The largest L in [0, limit] with T_s(C, L) <= budget_s; 0 also where nothing fits (Algorithm 3).
    Tokens tokens_within(Tokens cached, double budget_s, Tokens limit) const {
        if (limit <= 0 || seconds(cached, 1) > budget_s) return 0;
        if (seconds(cached, limit) <= budget_s) return limit;
        Tokens low = 1, high = limit;  // T(low) <= budget_s < T(high)
        if (knots_.empty()) {
            // The root in the form that neither cancels nor divides by a vanishing d; then exact in whole tokens.
            const double linear = b_ + c_ * double(cached), rest_s = budget_s - a_;
            const double root = 2.0 * rest_s / (linear + std::sqrt(linear * linear + 4.0 * d_ * rest_s));
            const Tokens guess = std::isfinite(root) ? Tokens(std::clamp(root, double(low), double(high))) : low;
            narrow(cached, budget_s, guess, low, high);
            narrow(cached, budget_s, std::min(guess + 1, limit), low, high);
            narrow(cached, budget_s, std::max<Tokens>(guess - 1, 1), low, high);
        }
        while (high - low > 1) narrow(cached, budget_s, low + (high - low) / 2, low, high);
        return low;
    }

    LowerBound lower_bound() const {
        // A chunk's cost per token at position x is at least b + min(c, 2d) x, wherever the prompt is cut.
        if (knots_.empty()) return {a_, b_, std::min(c_, 2.0 * d_)};
        double least = kInfinity;
        for (std::size_t i = 1; i < knots_.size(); ++i) least = std::min(least, slope(i));
        return {at_zero_s_, least, 0.0};
    }

  private:
    void narrow(Tokens cached, double budget_s, Tokens tokens, Tokens &low, Tokens &high) const {
        if (tokens <= low || tokens >= high) return;
        (seconds(cached, tokens) <= budget_s ? low : high) = tokens;
    }

    double slope(std::size_t i) const { return (values_[i] - values_[i - 1]) / (knots_[i] - knots_[i - 1]); }

    // T_s(0, n): straight between entries; below the first the first two are continued, but not below zero.
    double prompt_s(double tokens) const {
        if (tokens > knots_.back()) return kInfinity;
        const auto above = std::lower_bound(knots_.begin() + 1, knots_.end(), tokens);
        const std::size_t i = std::size_t(above - knots_.begin());
        if (tokens == knots_[i]) return values_[i];
        return std::max(0.0, values_[i - 1] + (tokens - knots_[i - 1]) * slope(i));
    }

    double a_ = 0, b_ = 0, c_ = 0, d_ = 0;
    std::vector<double> knots_, values_;
    double at_zero_s_ = 0;
};

}  // namespace cdsp
