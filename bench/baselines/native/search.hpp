// Algorithms 1-3 of Tetris: which chunks on which groups give the lowest time to first token.
#pragma once

#include <cstdint>
#include <vector>

#include "cost.hpp"
#include "pool.hpp"

namespace cdsp {

struct Candidate {
    std::int32_t size;
    Cost cost;
};

struct Request {
    Tokens new_tokens = 0, cached_tokens = 0;
    double improvement_rate = 0;
    double waited_s = 0;  // since the arrival
};

struct Chunk {
    std::int32_t group;
    Tokens cached_tokens, tokens;
    double start_s, compute_s;
};

struct Plan {
    Pool *pool = nullptr;
    double ttft_s = kInfinity;
    std::vector<Chunk> chunks;
};

enum class Outcome { kPlanned, kTooFewInstances, kTooLittleKv, kCostUnknown };

// Times are absolute, from the moment of the snapshot. Eq. 2 sets q to max(0, q - elapsed), so a group that waits for
// the largest q of Eq. 2 after `elapsed` is ready at max(elapsed, largest q of the snapshot): no delay need be updated,
// and a group depends only on the sizes before it.
class Search {
  public:
    Search(std::vector<Candidate> candidates, Tokens min_chunk_tokens, Tokens page_tokens, bool is_chunking)
        : candidates_(std::move(candidates)),
          min_chunk_tokens_(min_chunk_tokens),
          page_tokens_(page_tokens),
          is_chunking_(is_chunking),
          pools_(candidates_.size()),
          pool_of_(candidates_.size()),
          share_tokens_(candidates_.size()),
          bounds_(candidates_.size()) {}

    Outcome run(const Snapshot &snapshot, const Request &request) {
        snapshot_ = &snapshot;
        improvement_rate_ = request.improvement_rate;
        best_.pool = nullptr;
        best_.ttft_s = kInfinity;
        best_.chunks.clear();
        path_.clear();
        assign_pools(request.cached_tokens + request.new_tokens);

        const State state{0.0, request.waited_s, request.cached_tokens, request.new_tokens, 0, nullptr};
        const std::size_t none = candidates_.size();
        const std::size_t largest = single_chunk(state, 0, candidates_.size());
        if (largest == none) return why_not(state);
        if (is_chunking_ && largest > 0) {
            for (std::size_t i = largest + 1; i-- > 0;) {
                bounds_[i] = candidates_[i].cost.lower_bound();
                if (i < largest) bounds_[i].include(bounds_[i + 1]);
            }
            split(state, 0, largest);
        }
        return Outcome::kPlanned;
    }

    const Plan &best() const { return best_; }

  private:
    // What is left of the request when the chunks on the path are done.
    struct State {
        double elapsed_s;
        double waited_s;  // counts as time to first token where sizes are compared; 0 after the first chunk
        Tokens cached_tokens, tokens;
        std::int32_t group;
        Pool *pool;  // of the chunks before; null at the start, when each size looks at its own
    };

    // Tokens rounded up to whole pages on each of `size` instances that hold them evenly.
    Tokens share(Tokens tokens, std::int32_t size) const {
        const Tokens each = (tokens + size - 1) / size;
        return (each + page_tokens_ - 1) / page_tokens_ * page_tokens_;
    }

    // Sizes that leave out the same instances look at one pool; it is built when the first of them is looked at.
    void assign_pools(Tokens total_tokens) {
        Tokens least = snapshot_->free_tokens.front();
        for (const Tokens free : snapshot_->free_tokens) least = std::min(least, free);
        std::size_t previous = 0;
        for (std::size_t i = 0; i < candidates_.size(); ++i) {
            share_tokens_[i] = share(total_tokens, candidates_[i].size);
            is_built(i) = false;
            if (i == 0) {
                pool_of_[i] = 0;
            } else {
                const bool is_same = share_tokens_[i - 1] <= least || count_with(share_tokens_[i]) == count_with(share_tokens_[i - 1]);
                pool_of_[i] = is_same ? previous : i;
            }
            previous = pool_of_[i];
        }
    }

    std::size_t count_with(Tokens tokens) const {
        std::size_t count = 0;
        for (const Tokens free : snapshot_->free_tokens) count += free >= tokens;
        return count;
    }

    bool &is_built(std::size_t which) { return pools_[which].is_built; }

    Pool &pool_for(const State &state, std::size_t which) {
        if (state.pool != nullptr) return *state.pool;
        BuiltPool &entry = pools_[pool_of_[which]];
        if (!entry.is_built) {
            entry.pool.build(*snapshot_, share_tokens_[pool_of_[which]], candidates_.size());
            entry.is_built = true;
        }
        return entry.pool;
    }

    // Algorithm 2: all that is left as one chunk, on sizes [low, high). The size taken, `candidates_.size()` for none.
    std::size_t single_chunk(const State &state, std::size_t low, std::size_t high) {
        std::size_t taken = candidates_.size();
        Chunk best{};
        Pool *best_pool = nullptr;
        double limit_s = kInfinity;  // of the time from now on, to be undercut
        for (std::size_t i = low; i < high; ++i) {
            const double compute_s = candidates_[i].cost.seconds(state.cached_tokens, state.tokens);
            // No group can begin before now: a size that is too slow without a wait needs no group.
            if (!(state.elapsed_s + compute_s - state.elapsed_s + state.waited_s < limit_s)) continue;
            Pool &pool = pool_for(state, i);
            const std::int32_t group = pool.extend(state.group, i, candidates_[i].size);
            if (group == kImpossible) continue;
            const double start_s = std::max(state.elapsed_s, pool.group(group).ready_s);
            const double rest_s = start_s + compute_s - state.elapsed_s + state.waited_s;
            if (!(rest_s < limit_s)) continue;
            taken = i;
            limit_s = rest_s * (1.0 - improvement_rate_);
            best = {group, state.cached_tokens, state.tokens, start_s, compute_s};
            best_pool = &pool;
        }
        if (taken < candidates_.size() && best.start_s + best.compute_s < best_.ttft_s) {
            best_.ttft_s = best.start_s + best.compute_s;
            best_.pool = best_pool;
            best_.chunks = path_;
            best_.chunks.push_back(best);
        }
        return taken;
    }

    // Algorithm 1 from line 5 on: every pair of a size for the next chunk and a larger one for what follows it.
    void split(const State &state, std::size_t low, std::size_t high) {
        for (std::size_t current = low; current < high; ++current) {
            for (std::size_t next = current + 1; next <= high; ++next) {
                Pool &pool = pool_for(state, next);
                const std::int32_t group = pool.extend(state.group, current, candidates_[current].size);
                if (group == kImpossible) continue;
                const double start_s = std::max(state.elapsed_s, pool.group(group).ready_s);
                if (start_s + bounds_[current].seconds(state.cached_tokens, state.tokens) >= best_.ttft_s) continue;
                const std::int32_t extended = pool.extend(group, next, candidates_[next].size);
                if (extended == kImpossible) continue;
                const double budget_s = std::max(state.elapsed_s, pool.group(extended).ready_s) - start_s;
                if (budget_s <= 0) continue;

                const Tokens tokens = chunk_tokens(state, current, pool.group(group), budget_s);
                const Tokens left = state.tokens - tokens;
                if (tokens < min_chunk_tokens_ || left < min_chunk_tokens_) continue;
                const double compute_s = candidates_[current].cost.seconds(state.cached_tokens, tokens);
                const State rest{start_s + compute_s, 0.0, state.cached_tokens + tokens, left, group, &pool};
                if (rest.elapsed_s + bounds_[next].seconds(rest.cached_tokens, left) >= best_.ttft_s) continue;

                path_.push_back({group, state.cached_tokens, tokens, start_s, compute_s});
                const std::size_t largest = single_chunk(rest, next, high + 1);
                if (largest < candidates_.size() && largest > next) split(rest, next, largest);
                path_.pop_back();
            }
        }
    }

    // Algorithm 3, and no more than the group has room for once earlier chunks' KV is spread evenly over it.
    Tokens chunk_tokens(const State &state, std::size_t current, const Group &group, double budget_s) const {
        const Tokens room_each = group.least_free_tokens / page_tokens_ * page_tokens_;
        Tokens limit = state.tokens;
        if (room_each < share_tokens_[current]) limit = std::min(limit, room_each * group.size - state.cached_tokens);
        return candidates_[current].cost.tokens_within(state.cached_tokens, budget_s, limit);
    }

    Outcome why_not(const State &state) const {
        bool has_cost = false, has_instances = false;
        for (const Candidate &candidate : candidates_) {
            const bool is_known = candidate.cost.seconds(state.cached_tokens, state.tokens) < kInfinity;
            const bool is_there = std::size_t(candidate.size) <= snapshot_->size() && std::size_t(candidate.size) >= snapshot_->initial.size();
            has_cost |= is_known;
            has_instances |= is_known && is_there;
        }
        if (!has_cost) return Outcome::kCostUnknown;
        return has_instances ? Outcome::kTooLittleKv : Outcome::kTooFewInstances;
    }

    struct BuiltPool {
        Pool pool;
        bool is_built = false;
    };

    std::vector<Candidate> candidates_;
    Tokens min_chunk_tokens_, page_tokens_;
    bool is_chunking_;
    double improvement_rate_ = 0;
    const Snapshot *snapshot_ = nullptr;
    std::vector<BuiltPool> pools_;        // by size; shared ones are built once
    std::vector<std::size_t> pool_of_;    // by size: the first size that looks at the same instances
    std::vector<Tokens> share_tokens_;    // by size: KV that each instance holds when the request is done
    std::vector<LowerBound> bounds_;      // by size: of that and all larger sizes in question
    std::vector<Chunk> path_;
    Plan best_;
};

}  // namespace cdsp
