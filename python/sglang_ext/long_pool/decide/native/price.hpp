// What an instance-second costs the others decides the SP size: group, size and start of waiting prompts, in an order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cost.hpp"

namespace cdsp {

struct SizeCost {
    std::int32_t size;
    Cost cost;
};

struct PriceRules {
    Tokens min_chunk_tokens;
    Tokens page_tokens;
    double cross_node_factor;  // at least 1: a group takes this many times as long where one node could hold it but does not
    double tardiness_weight;    // per second after the deadline
    double least_price;
    std::int32_t most_considered;
};

// The instances: parallel arrays, an instance is its position.
struct Instances {
    std::vector<std::int32_t> node;
    std::vector<double> busy_s;  // until it has done what it is committed to
    std::vector<Tokens> free_tokens;
    std::int32_t node_limit = 0;

    std::size_t size() const { return busy_s.size(); }
};

struct Holder {
    std::int32_t instance;
    Tokens tokens;
};

struct Prompt {
    Tokens new_tokens = 0, cached_tokens = 0;
    double due_s = kInfinity;     // of the first token, from now; may be negative
    std::int32_t owner = -1;      // of equal instances this one first: it will have all KV
    std::vector<Holder> holders;  // of KV of the prompt: every group contains them, in this order
};

// The first chunk of a prompt and the reservation behind it; without a group where none can hold it. Times count from now.
struct Placement {
    std::int32_t prompt = 0;
    Tokens tokens = 0;                // of the first chunk
    double start_s = 0, compute_s = 0;  // of the first chunk
    double end_s = 0;                 // of the prompt
    std::vector<std::int32_t> group;  // of the first chunk
};

// Goes through the prompts in their order and gives each the group with the lowest
//
//     end + price * instance-seconds + tardiness_weight * max(0, end - due)
//
// among: a group of any size that waits until its members are free; one of idle members that ends before the members that
// wait for them begin (a gap); and a chunk on a smaller idle group until the larger one is free. Who waits for a group
// reserves it. Equal ones: the earlier one in this text, the smaller size, the smaller node, the smaller position.
class PriceSearch {
  public:
    PriceSearch(std::vector<SizeCost> sizes, const PriceRules &rules) : sizes_(std::move(sizes)), rules_(rules) {}

    // `others_price`: seconds of delay that an instance-second costs prompts that have not arrived, before the division
    // by the number of instances; each waiting prompt behind adds 1.
    void run(const Instances &instances, const std::vector<Prompt> &prompts, double others_price, std::vector<Placement> &out) {
        begin(instances);
        const std::size_t most = std::min(prompts.size(), std::size_t(rules_.most_considered));
        for (std::size_t at = 0; at < most && idle_ > 0; ++at) {
            const double waiting_behind = double(prompts.size() - at - 1);
            price_ = std::max(rules_.least_price, (waiting_behind + others_price) / double(instances.size()));
            // Otherwise those behind fill what is idle until then, and lose nothing that it would gain.
            may_grow_ = at + 1 == prompts.size();
            find(prompts[at]);
            out.push_back(best_.score < kInfinity ? place(prompts[at]) : Placement{});
            out.back().prompt = std::int32_t(at);
        }
    }

  private:
    enum class Kind { kWait, kGap, kGrow };

    struct Choice {
        double score = kInfinity;
        Kind kind = Kind::kWait;
        std::int32_t size = 0, first_size = 0;
        std::int32_t place = 0;  // a node, or kAnywhere
        Tokens share = 0;        // of each member at the end
        Tokens first_tokens = 0;
        double start_s = 0, first_s = 0, end_s = 0;  // start: of the group of `size`; first: of the first chunk
    };

    static constexpr std::int32_t kAnywhere = -1;
    static constexpr double kSoon = 1e-11;  // sums of times differ from the ends that they stand for in the last digits

    void begin(const Instances &instances) {
        all_ = &instances;
        free_s_ = instances.busy_s;
        free_tokens_ = instances.free_tokens;
        gap_s_.assign(instances.size(), kInfinity);
        is_idle_.assign(instances.size(), 0);
        idle_ = 0;
        members_.assign(std::size_t(instances.node_limit), {});
        for (std::size_t i = 0; i < instances.size(); ++i) {
            if (free_s_[i] <= kSoon) free_s_[i] = 0.0, is_idle_[i] = 1, ++idle_;
            members_[std::size_t(instances.node[i])].push_back(std::int32_t(i));
        }
        nodes_.clear();
        largest_node_ = 0;
        for (std::size_t node = 0; node < members_.size(); ++node)
            if (!members_[node].empty()) {
                nodes_.push_back(std::int32_t(node));
                largest_node_ = std::max(largest_node_, std::int32_t(members_[node].size()));
            }
        everyone_.resize(instances.size());
        for (std::size_t i = 0; i < instances.size(); ++i) everyone_[i] = std::int32_t(i);
        own_.assign(instances.size(), 0);
        is_holder_.assign(instances.size(), 0);
    }

    const std::vector<std::int32_t> &in(std::int32_t place) const {
        return place == kAnywhere ? everyone_ : members_[std::size_t(place)];
    }

    Tokens share_of(Tokens tokens, std::int32_t size) const {
        const Tokens each = (tokens + size - 1) / size;
        return (each + rules_.page_tokens - 1) / rules_.page_tokens * rules_.page_tokens;
    }

    bool has_room(std::int32_t i, Tokens share) const { return free_tokens_[std::size_t(i)] + own_[std::size_t(i)] >= share; }

    // ---- what is best for one prompt ----

    void find(const Prompt &prompt) {
        best_ = {};
        for (const Holder &holder : prompt.holders) {
            own_[std::size_t(holder.instance)] = holder.tokens;
            is_holder_[std::size_t(holder.instance)] = 1;
        }
        std::int32_t home = kAnywhere;  // the node of all holders
        bool is_at_home = true;
        for (const Holder &holder : prompt.holders) {
            const std::int32_t node = all_->node[std::size_t(holder.instance)];
            is_at_home &= home == kAnywhere || home == node;
            home = node;
        }
        for (const SizeCost &one : sizes_) {
            if (std::size_t(one.size) < prompt.holders.size() || std::size_t(one.size) > all_->size()) continue;
            if (is_at_home && one.size <= largest_node_) {
                if (home != kAnywhere) look_at(prompt, one, home, 1.0);
                else look_at_nodes(prompt, one);
            }
            if (one.size > largest_node_) look_at(prompt, one, kAnywhere, 1.0);
            else if (nodes_.size() > 1 && rules_.cross_node_factor < kInfinity) look_at(prompt, one, kAnywhere, rules_.cross_node_factor);
        }
        for (const Holder &holder : prompt.holders) own_[std::size_t(holder.instance)] = 0, is_holder_[std::size_t(holder.instance)] = 0;
    }

    void look_at_nodes(const Prompt &prompt, const SizeCost &one) {
        const std::int32_t first = prompt.owner < 0 ? kAnywhere : all_->node[std::size_t(prompt.owner)];
        if (first != kAnywhere) look_at(prompt, one, first, 1.0);
        for (const std::int32_t node : nodes_)
            if (node != first) look_at(prompt, one, node, 1.0);
    }

    void look_at(const Prompt &prompt, const SizeCost &one, std::int32_t place, double factor) {
        const double compute_s = one.cost.seconds(prompt.cached_tokens, prompt.new_tokens) * factor;
        const double work_s = one.size * compute_s;
        if (!(compute_s < kInfinity)) return;
        // No group of this size is better than an idle group; growing may be.
        if (!may_grow_ && score_of(prompt, compute_s, work_s) >= best_.score) return;
        const Tokens share = share_of(prompt.cached_tokens + prompt.new_tokens, one.size);
        double start_s = 0.0;
        std::int32_t wanted = one.size, fitting = 0;
        bool fills = true;
        for (const Holder &holder : prompt.holders) {
            if (!has_room(holder.instance, share)) return;
            const std::size_t i = std::size_t(holder.instance);
            start_s = std::max(start_s, free_s_[i]);
            fills &= is_idle_[i] && gap_s_[i] >= compute_s;
            --wanted;
        }
        delays_.clear();
        for (const std::int32_t i : in(place)) {
            if (is_holder_[std::size_t(i)] || !has_room(i, share)) continue;
            delays_.push_back(free_s_[std::size_t(i)]);
            fitting += is_idle_[std::size_t(i)] && gap_s_[std::size_t(i)] >= compute_s;
        }
        if (delays_.size() < std::size_t(wanted)) return;
        if (wanted > 0) {
            std::nth_element(delays_.begin(), delays_.begin() + (wanted - 1), delays_.end());
            start_s = std::max(start_s, delays_[std::size_t(wanted - 1)]);
        }
        if (start_s > kSoon && fills && fitting >= wanted) {
            take(prompt, {kInfinity, Kind::kGap, one.size, one.size, place, share, prompt.new_tokens, 0.0, compute_s, compute_s}, work_s);
            return;
        }
        take(prompt, {kInfinity, Kind::kWait, one.size, one.size, place, share, prompt.new_tokens, start_s, compute_s, start_s + compute_s}, work_s);
        if (start_s > kSoon && may_grow_) look_at_growth(prompt, one, place, factor, share, start_s);
    }

    void look_at_growth(const Prompt &prompt, const SizeCost &one, std::int32_t place, double factor, Tokens share, double start_s) {
        std::int32_t idle = 0;
        for (const Holder &holder : prompt.holders)
            if (!is_free_until(holder.instance, start_s)) return;
        for (const std::int32_t i : in(place))
            idle += !is_holder_[std::size_t(i)] && has_room(i, share) && is_free_until(i, start_s);
        const std::int32_t held = std::int32_t(prompt.holders.size());
        for (const SizeCost &first : sizes_) {
            if (first.size >= one.size || first.size < held || first.size - held > idle) continue;
            const Tokens room = room_of(prompt, place, share, start_s);
            const Tokens limit = std::min(prompt.new_tokens - rules_.min_chunk_tokens, room * first.size - prompt.cached_tokens);
            const double first_factor = place == kAnywhere && first.size <= largest_node_ ? rules_.cross_node_factor : factor;
            const Tokens tokens = first.cost.tokens_within(prompt.cached_tokens, start_s / first_factor, limit);
            if (tokens < rules_.min_chunk_tokens) continue;
            const double first_s = first.cost.seconds(prompt.cached_tokens, tokens) * first_factor;
            const double rest_s = one.cost.seconds(prompt.cached_tokens + tokens, prompt.new_tokens - tokens) * factor;
            take(prompt, {kInfinity, Kind::kGrow, one.size, first.size, place, share, tokens, start_s, first_s, start_s + rest_s},
                 first.size * first_s + one.size * rest_s);
        }
    }

    bool is_free_until(std::int32_t i, double until_s) const {
        return is_idle_[std::size_t(i)] && gap_s_[std::size_t(i)] >= until_s;
    }

    // The least room, in whole pages, of the holders and all idle ones that may be taken.
    Tokens room_of(const Prompt &prompt, std::int32_t place, Tokens share, double until_s) const {
        Tokens least = Tokens(1) << 40;
        for (const Holder &holder : prompt.holders) least = std::min(least, free_tokens_[std::size_t(holder.instance)] + holder.tokens);
        for (const std::int32_t i : in(place))
            if (!is_holder_[std::size_t(i)] && has_room(i, share) && is_free_until(i, until_s)) least = std::min(least, free_tokens_[std::size_t(i)]);
        return least / rules_.page_tokens * rules_.page_tokens;
    }

    double score_of(const Prompt &prompt, double end_s, double work_s) const {
        const double late_s = end_s - prompt.due_s;
        return end_s + price_ * work_s + (late_s > 0.0 ? rules_.tardiness_weight * late_s : 0.0);
    }

    void take(const Prompt &prompt, Choice choice, double work_s) {
        choice.score = score_of(prompt, choice.end_s, work_s);
        if (choice.score < best_.score) best_ = choice;
    }

    // ---- and what it takes ----

    Placement place(const Prompt &prompt) {
        owner_ = prompt.owner;
        for (const Holder &holder : prompt.holders) {
            own_[std::size_t(holder.instance)] = holder.tokens;
            is_holder_[std::size_t(holder.instance)] = 1;
        }
        Placement made;
        made.tokens = best_.first_tokens;
        made.start_s = best_.kind == Kind::kWait ? best_.start_s : 0.0;
        made.compute_s = best_.first_s;
        made.end_s = best_.end_s;
        for (const Holder &holder : prompt.holders) made.group.push_back(holder.instance);
        const std::int32_t held = std::int32_t(prompt.holders.size());
        if (best_.kind == Kind::kGrow) add_idle(made.group, best_.first_size - held);
        else if (best_.kind == Kind::kGap) add_gaps(made.group, best_.size - held);
        else add_waiting(made.group, best_.size - held);
        if (made.start_s <= kSoon) made.start_s = 0.0;
        const bool starts = made.start_s == 0.0;
        for (const std::int32_t member : made.group) {
            const std::size_t i = std::size_t(member);
            if (starts) idle_ -= is_idle_[i], is_idle_[i] = 0;
            else if (gap_s_[i] == kInfinity) gap_s_[i] = made.start_s;
            if (best_.kind != Kind::kGap || gap_s_[i] == kInfinity) free_s_[i] = best_.end_s;
        }
        if (best_.kind == Kind::kGrow) {
            std::vector<std::int32_t> added;
            for (const std::int32_t member : made.group) is_holder_[std::size_t(member)] = 1;
            add_waiting(added, best_.size - best_.first_size);
            for (const std::int32_t member : added) {
                const std::size_t i = std::size_t(member);
                if (gap_s_[i] == kInfinity) gap_s_[i] = best_.start_s;
                free_s_[i] = best_.end_s;
            }
            for (const std::int32_t member : made.group) is_holder_[std::size_t(member)] = 0;
        }
        // Until a reserved group begins, others will have ended: only what starts takes room.
        if (starts)
            for (const std::int32_t member : made.group) free_tokens_[std::size_t(member)] -= best_.share - own_[std::size_t(member)];
        for (const Holder &holder : prompt.holders) own_[std::size_t(holder.instance)] = 0, is_holder_[std::size_t(holder.instance)] = 0;
        return made;
    }

    // Instances that become free last and still in time: others may be needed before.
    void add_waiting(std::vector<std::int32_t> &group, std::int32_t count) {
        candidates_.clear();
        for (const std::int32_t i : in(best_.place))
            if (!is_holder_[std::size_t(i)] && has_room(i, best_.share) && free_s_[std::size_t(i)] <= best_.start_s) candidates_.push_back(i);
        add(group, count, [this](std::int32_t i) { return -free_s_[std::size_t(i)]; });
    }

    // Those whose gap is shortest.
    void add_gaps(std::vector<std::int32_t> &group, std::int32_t count) {
        candidates_.clear();
        for (const std::int32_t i : in(best_.place))
            if (!is_holder_[std::size_t(i)] && has_room(i, best_.share) && is_free_until(i, best_.first_s)) candidates_.push_back(i);
        add(group, count, [this](std::int32_t i) { return gap_s_[std::size_t(i)]; });
    }

    // Instances that no prompt waits for before the larger group is free.
    void add_idle(std::vector<std::int32_t> &group, std::int32_t count) {
        candidates_.clear();
        for (const std::int32_t i : in(best_.place))
            if (!is_holder_[std::size_t(i)] && has_room(i, best_.share) && is_free_until(i, best_.start_s)) candidates_.push_back(i);
        add(group, count, [](std::int32_t) { return 0.0; });
    }

    template <typename Key> void add(std::vector<std::int32_t> &group, std::int32_t count, Key key) {
        std::stable_sort(candidates_.begin(), candidates_.end(), [&](std::int32_t x, std::int32_t y) {
            return key(x) != key(y) ? key(x) < key(y) : x == owner_ && y != owner_;
        });
        for (std::int32_t at = 0; at < count; ++at) group.push_back(candidates_[std::size_t(at)]);
    }

    std::vector<SizeCost> sizes_;
    PriceRules rules_;
    const Instances *all_ = nullptr;
    std::vector<double> free_s_;        // with what has been placed
    std::vector<double> gap_s_;         // of an idle instance: until it is waited for
    std::vector<Tokens> free_tokens_;
    std::vector<Tokens> own_;           // of the prompt that is looked at
    std::vector<std::uint8_t> is_idle_, is_holder_;
    std::int32_t idle_ = 0, largest_node_ = 0;
    std::vector<std::int32_t> nodes_, everyone_, candidates_;
    std::vector<std::vector<std::int32_t>> members_;  // by node
    std::vector<double> delays_;
    double price_ = 0;
    std::int32_t owner_ = -1;  // of the prompt that is placed
    bool may_grow_ = false;
    Choice best_;
};

}  // namespace cdsp
